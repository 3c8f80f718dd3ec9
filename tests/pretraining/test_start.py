"""What a run starts from, in the order of precedence, and what is refused before any text is read."""

import dataclasses
import functools

import checkpoint_folders
import numpy as np
import pytest
from testing import english

from maelm_jax import config, gin_files, train
from maelm_jax.data import prepare, vocabulary_training
from maelm_jax.encoders import opened
from maelm_jax.pretraining import run, start
from maelm_jax.training.workdir import Workdir


def settings(init_from, *more: str) -> config.Experiment:
    return gin_files.load(["continue.gin"], [f"Run.init_from='{init_from}'", "TEXT_FILES='*.txt'", *more])


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Writes the record of a run that has a checkpoint."""
    monkeypatch.setattr(start.checkpoint, "complete_steps", lambda workdir: [5])

    def write(experiment: config.Experiment) -> config.Experiment:
        (tmp_path / "config.gin").write_text(gin_files.render(experiment))
        return experiment

    return write


def test_a_run_that_began_from_another_source_is_refused(tmp_path, begun):
    begun(settings("enc"))
    with pytest.raises(config.ConfigError, match="Run.init_from=enc.*other"):
        start.find_starting_point(settings("other"), Workdir(tmp_path))


def test_a_run_goes_on_when_its_source_is_gone(tmp_path, begun):
    """The vocabulary is the recorded one, unless the user names another."""
    recorded = begun(settings("enc", "Vocabulary.file='enc'"))
    now = settings("enc")
    resumed = start.find_starting_point(now, Workdir(tmp_path))
    assert resumed.experiment.vocabulary == recorded.vocabulary and resumed.encoder is None
    other = dataclasses.replace(now, vocabulary=dataclasses.replace(now.vocabulary, file="other"))
    assert start.find_starting_point(other, Workdir(tmp_path)).experiment.vocabulary.file == "other"


def test_a_resumed_run_keeps_its_own_decoder_settings(tmp_path, begun):
    """What the source determined comes from the record, what the user set is compared with it."""
    begun(settings("enc", "Encoder.layers=6"))
    resolved = start.find_starting_point(settings("enc", "Decoder.layers=4"), Workdir(tmp_path)).experiment
    assert (resolved.model.encoder.layers, resolved.model.decoder.layers) == (6, 4)


@pytest.mark.parametrize("has_decoder,layers", [(True, 2), (False, 4)])
def test_whether_the_decoder_came_with_the_source_is_what_the_run_recorded(tmp_path, begun, has_decoder, layers):
    """The source may be another one by now."""
    begun(settings("gone"))
    encoder = opened.OpenedModel(config.Model(decoder=config.Decoder() if has_decoder else None), 64, path="gone", kind="a folder")
    encoder.write_origin(Workdir(tmp_path))
    now = settings("gone", "Decoder.layers=4")
    assert start.find_starting_point(now, Workdir(tmp_path)).experiment.model.decoder.layers == layers


def test_a_source_without_vocabulary_is_refused_unless_one_is_named(tmp_path, monkeypatch):
    """Otherwise the run would train a vocabulary, with other ids than those of the weights."""
    found = dataclasses.asdict(gin_files.load(["base.gin"]).encoder)
    weights = opened.OpenedModel(config.Model(decoder=config.Decoder()), 512, path="weights.pt", kind="checkpoint", settings=found)
    monkeypatch.setattr(opened, "find_model", lambda path: weights)
    bindings = ["Run.init_from='weights.pt'", "TEXT_FILES='*.txt'", "SEQUENCE_LENGTH=64"]
    with pytest.raises(config.ConfigError, match="--gin.Vocabulary.file"):
        start.find_starting_point(gin_files.load(["base.gin"], bindings), Workdir(tmp_path))
    named = gin_files.load(["base.gin"], [*bindings, "Vocabulary.file='my_encoder'"])
    assert start.find_starting_point(named, Workdir(tmp_path)).encoder is weights


def test_a_resumed_run_draws_no_fresh_state(tmp_path):
    """At most one state is on the devices, so that a run that fits also resumes."""
    checkpoint_folders.write(tmp_path, 3)
    found = start.StartingPoint(gin_files.load(["tiny.gin"]))
    load = functools.partial(start.load_state, workdir=Workdir(tmp_path), shapes=checkpoint_folders.state_of(0), create_fresh=None, vocabulary_size=9)
    starting = load(found)
    assert starting.step == 3 and checkpoint_folders.equal(starting.state, checkpoint_folders.state_of(3)) and starting.has_head
    with pytest.raises(config.ConfigError, match="Run.train_steps=2"):
        load(start.StartingPoint(gin_files.load(["tiny.gin"], ["TRAIN_STEPS=2"])))


@pytest.fixture(scope="module")
def vocabulary():
    return vocabulary_training.train(english(), config.Vocabulary(size=400))


@pytest.mark.parametrize(
    "binding,message",
    [
        ("Mesh.tensor=3", "Encoder.heads=4.*Mesh.tensor=3"),
        ("Mesh.data=5", "Mesh"),
        ("BATCH_SIZE=8", "Run.batch_size=8"),
        ("Compute.attention_backend='cudnn'", "Compute.attention_backend='cudnn'"),
        ("Run.init_from='nowhere'", "nowhere"),
        ("Run.continue_from='nowhere@4'", "nowhere"),
    ],
)
def test_what_cannot_run_is_refused_before_text_is_read_and_leaves_nothing(tmp_path, monkeypatch, vocabulary, binding, message):
    """On three devices."""
    from testing import only_devices

    only_devices(monkeypatch, 3)
    monkeypatch.setattr(start.vocabulary_training, "vocabulary_for", lambda *_: vocabulary)
    monkeypatch.setattr(run.run_rows, "choose_rows", lambda *_: pytest.fail("text is read"))
    with pytest.raises(config.ConfigError, match=message):
        train.main(["--gin_file=tiny.gin", "--gin.BATCH_SIZE=12", f"--gin.{binding}", f"--workdir={tmp_path / 'run'}"])
    assert list(tmp_path.iterdir()) == []


def test_batches_begin_behind_the_rows_that_are_read():
    class Table:
        """Rows in memory: row r is [r, r]."""

        length = 2

        def __len__(self):
            return 37

        def request(self, numbers):
            return lambda: np.stack([numbers, numbers], 1).astype(np.int32)

    experiment = gin_files.load(["tiny.gin"], ["BATCH_SIZE=4"])
    mesh = run.sharding.make_mesh(config.Mesh(data=1, fsdp=1, tensor=8))
    rows = prepare.Prepared({"a": {"train": Table()}}, {"sources": {"a": {"rate": 1.0}}})
    whole, rest = (run.make_batches(experiment, rows, mesh, first) for first in (0, 12))
    for number in range(5):
        np.testing.assert_array_equal(whole(number + 3), rest(number))
