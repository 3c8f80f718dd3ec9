"""The batches of a run whose batch size changes, and the end of a run."""

import dataclasses
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maelm_jax import config, gin_files, setting_changes, train
from maelm_jax.encoders import source
from maelm_jax.pretraining import run, start, summary
from maelm_jax.training import checkpoint, coordination, metrics, phases, sharding, step


class Table:
    """Rows in memory: row r is [r, r]."""

    length = 2
    fetches = False

    def __len__(self):
        return 37

    def __getitem__(self, numbers):
        return np.stack([numbers, numbers], 1).astype(np.int32)


def rows_of_steps(*bindings: str) -> list[np.ndarray]:
    """The row numbers of each step, on two devices."""
    experiment = gin_files.load(["tiny.gin"], ["TRAIN_STEPS=20", *bindings])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(2, 1, 1), ("data", "fsdp", "tensor"))
    setup = types.SimpleNamespace(split=lambda name: {"a": Table()}, rows=types.SimpleNamespace(rates={"a": 1.0}), mesh=mesh)
    parts = phases.of_run(experiment)
    return [np.asarray(run._batches(setup, phases.of_step(parts, number))(number))[:, 0] for number in range(20)]


@pytest.mark.parametrize("ramp", ["((2, 5), (4, 6))", "((6, 1),)", "((2, 30),)"])
def test_a_ramp_reads_the_rows_of_a_run_without_one_in_the_same_order(ramp):
    steps = rows_of_steps("BATCH_SIZE=8", f"Run.batch_size_ramp={ramp}", "Masking.rate_plateaus=((0, 0.3), (0.4, 0.15))")
    rows, constant = np.concatenate(steps), np.concatenate(rows_of_steps("BATCH_SIZE=8"))
    np.testing.assert_array_equal(rows, constant[: len(rows)])
    assert len(rows) < len(constant)
    if ramp == "((2, 5), (4, 6))":
        assert [len(rows) for rows in steps] == [2] * 5 + [4] * 6 + [8] * 9


@pytest.mark.parametrize("of_process_zero", [False, True])
def test_every_process_of_a_finished_run_evaluates_or_none(tmp_path, monkeypatch, of_process_zero):
    """Of a workdir in a bucket, only process 0 has metrics.jsonl: it decides."""
    evaluations = []

    def evaluate(state):
        evaluations.append(state)
        return types.SimpleNamespace(values={"eval_loss": 1.0})

    monkeypatch.setattr(coordination, "broadcast_flag", lambda what, flag: of_process_zero)
    monkeypatch.setattr(run.loop, "run", lambda job, state, *rest: (state, 0))
    job = types.SimpleNamespace(run=types.SimpleNamespace(train_steps=5), evaluate=evaluate)
    nothing = types.SimpleNamespace(close=lambda: None)
    assert run.train(str(tmp_path), job, start.StartingState("state", 5), nothing) == 0
    assert len(evaluations) == (not of_process_zero) == len(metrics.read(str(tmp_path)))


def test_a_run_that_began_from_another_source_is_refused(tmp_path, monkeypatch):
    for name in ("enc", "other"):
        (tmp_path / name).mkdir()
    found = source.EncoderSource("other", "a folder", {}, str(tmp_path / "other"), 64, 0.0, dict)
    monkeypatch.setattr(source, "find_encoder", lambda path: found)
    monkeypatch.setattr(start, "_has_checkpoint", lambda workdir: True)
    recorded, other = (gin_files.load(["continue.gin"], [f"Run.init_from='{tmp_path}/{name}'", "TEXT_FILES='*.txt'"]) for name in ("enc", "other"))
    (tmp_path / "config.gin").write_text(gin_files.render(recorded))
    with pytest.raises(config.ConfigError, match="holds a run that began from .*/enc, not from .*/other: give another --workdir"):
        start.resolve_source(other, str(tmp_path))
    (tmp_path / "enc").rmdir()  # moved to `other`
    assert start.resolve_source(other, str(tmp_path)).encoder_source is None


def test_a_run_without_checkpoint_and_source_does_not_train_fresh_weights(tmp_path):
    experiment = gin_files.load(["continue.gin"], ["Run.init_from='gone'", "TEXT_FILES='*.txt'"])
    with pytest.raises(config.ConfigError, match="holds no complete checkpoint any more: give another --workdir to begin again from gone"):
        start.begun("fresh", experiment, 64, None, str(tmp_path))


def test_a_mesh_that_does_not_divide_a_parameter_is_refused_before_rows_are_made(tmp_path, monkeypatch):
    experiment = gin_files.load(["tiny.gin"], [f"TEXT_FILES='{tmp_path}/*.txt'", "Vocabulary.size=400"])
    vocabulary = types.SimpleNamespace(size=400, special=config.SpecialIds.of_size(400))
    monkeypatch.setattr(run.vocabulary_training, "vocabulary_for", lambda *_: vocabulary)
    monkeypatch.setattr(run.run_rows, "choose_rows", None)
    mesh = jax.make_mesh((1, 1, 3), ("data", "fsdp", "tensor"), devices=jax.devices()[:3])
    with pytest.raises(config.ConfigError, match="Mesh.tensor=3 does not divide the 128 rows or columns of "):
        run.set_up(run.Options(str(tmp_path), False, False, 0.0), experiment, None, mesh)


def test_an_attention_that_cannot_be_computed_is_refused_before_rows_are_made(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "set_up", None)
    with pytest.raises(config.ConfigError, match="Model.attention_backend='cudnn' cannot compute this attention: the platform is cpu"):
        train.main(["--gin_file=tiny.gin", "--gin.Model.attention_backend=cudnn", f"--workdir={tmp_path}"])


def test_a_resumed_run_draws_no_fresh_state(tmp_path, monkeypatch):
    """At most one state is on the devices, so that a run that fits also resumes."""
    saved = step.State(jnp.asarray(3), {"w": jnp.full((4, 4), 3, jnp.float32)}, ())
    checkpoints = checkpoint.Checkpoints(str(tmp_path))
    checkpoints.save(3, saved)
    checkpoints.wait()
    monkeypatch.setattr(step, "create_state", None)
    setup = types.SimpleNamespace(experiment=gin_files.load(["tiny.gin"]), shapes=sharding.shapes_of(saved))
    starting = run.load_state(setup, None, None, checkpoints, None)
    checkpoints.close()
    assert starting.step == 3 and (np.asarray(starting.state.params["w"]) == 3).all() and starting.has_head


def test_a_run_goes_on_when_its_source_has_moved(tmp_path, monkeypatch):
    """The vocabulary is the recorded one, unless the user names another."""
    (tmp_path / "moved").mkdir()
    found = source.EncoderSource("moved", "a folder", {}, str(tmp_path / "moved"), 64, 0.0, dict)
    monkeypatch.setattr(source, "find_encoder", lambda path: found)
    monkeypatch.setattr(start, "_has_checkpoint", lambda workdir: True)
    recorded = gin_files.load(["continue.gin"], ["Run.init_from='enc'", "Vocabulary.file='enc'", "TEXT_FILES='*.txt'"])
    (tmp_path / "config.gin").write_text(gin_files.render(recorded))
    now = gin_files.load(["continue.gin"], [f"Run.init_from='{tmp_path}/moved'", "TEXT_FILES='*.txt'"])
    resumed = start.resolve_source(now, str(tmp_path))
    assert resumed.experiment.vocabulary == recorded.vocabulary and resumed.encoder_source is None
    other = dataclasses.replace(now, vocabulary=dataclasses.replace(now.vocabulary, file="other"))
    assert start.resolve_source(other, str(tmp_path)).experiment.vocabulary.file == "other"


def test_a_run_needs_its_source_s_checkpoints_no_more(tmp_path, monkeypatch):
    (tmp_path / "source").mkdir()
    recorded = gin_files.load(["tiny.gin"], [f"Run.init_from='{tmp_path}/source'", "TEXT_FILES='*.txt'"])
    for folder in (tmp_path, tmp_path / "source"):
        (folder / "config.gin").write_text(gin_files.render(recorded))
    with pytest.raises(config.ConfigError, match="source"):
        start.resolve_source(recorded, str(tmp_path))
    monkeypatch.setattr(start, "_has_checkpoint", lambda workdir: True)
    assert start.resolve_source(recorded, str(tmp_path)) == start.ResolvedSource(recorded, None)


def test_a_resumed_run_keeps_its_own_decoder_settings(tmp_path, monkeypatch):
    """What the source determined comes from the record, what the user set is compared with it."""
    found = source.EncoderSource("enc", "a folder", {"decoder_layers": 0}, str(tmp_path), 64, 0.0, dict)
    monkeypatch.setattr(source, "find_encoder", lambda path: found)
    monkeypatch.setattr(start, "_has_checkpoint", lambda workdir: True)
    recorded = gin_files.load(["continue.gin"], ["Run.init_from='enc'", "TEXT_FILES='*.txt'", "Model.layers=6"])
    (tmp_path / "config.gin").write_text(gin_files.render(recorded))
    now = gin_files.load(["continue.gin"], ["Run.init_from='enc'", "TEXT_FILES='*.txt'", "Model.decoder_layers=4"])
    resolved = start.resolve_source(now, str(tmp_path)).experiment
    assert (resolved.model.layers, resolved.model.decoder_layers) == (6, 4)
    with pytest.raises(config.ConfigError, match="Model.decoder_layers: 2 -> 4"):
        setting_changes.check_workdir(tmp_path, resolved)


def test_whether_the_decoder_came_with_the_source_is_what_the_run_recorded(tmp_path, monkeypatch):
    """The source may be another one by now."""
    monkeypatch.setattr(start, "_has_checkpoint", lambda workdir: True)
    recorded = gin_files.load(["continue.gin"], ["Run.init_from='gone'", "TEXT_FILES='*.txt'"])
    (tmp_path / "config.gin").write_text(gin_files.render(recorded))
    now = gin_files.load(["continue.gin"], ["Run.init_from='gone'", "TEXT_FILES='*.txt'", "Model.decoder_layers=4"])
    for has_decoder, layers in ((True, 2), (False, 4)):
        source.write_origin(tmp_path, source.Origin("gone", "a folder", None, 64, has_decoder))
        assert start.resolve_source(now, str(tmp_path)).experiment.model.decoder_layers == layers
    (tmp_path / source.ORIGIN).write_text('{"path": "gone"}')
    with pytest.raises(config.ConfigError, match="origin.json"):
        start.resolve_source(now, str(tmp_path))


def test_a_run_that_saved_nothing_says_so_when_its_settings_are_corrected(tmp_path):
    experiment = gin_files.load(["tiny.gin"], ["TEXT_FILES='*.txt'"])
    (tmp_path / "config.gin").write_text(gin_files.render(experiment))
    other = gin_files.load(["tiny.gin"], ["TEXT_FILES='*.txt'", "BATCH_SIZE=16"])
    with pytest.raises(config.ConfigError, match="Run.batch_size: 32 -> 16.*: it has no checkpoint yet: remove it, or give another --workdir"):
        setting_changes.check_workdir(tmp_path, other)
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    with pytest.raises(config.ConfigError, match=r"Run.batch_size: 32 -> 16\): give another --workdir"):
        setting_changes.check_workdir(tmp_path, other)


def test_a_dry_run_does_not_mind_a_run_with_other_settings(tmp_path, capsys):
    """It writes nothing."""
    experiment = gin_files.load(["tiny.gin"])
    (tmp_path / "config.gin").write_text(gin_files.render(experiment))
    assert train.main(["--gin_file=tiny.gin", f"--workdir={tmp_path}", "--gin.Model.layers=1", "--dry_run"]) == 0
    assert "encoder/blocks/attention/key" in capsys.readouterr().out and [path.name for path in tmp_path.iterdir()] == ["config.gin"]


def test_a_source_without_vocabulary_is_refused_unless_one_is_named(tmp_path):
    """Otherwise the run would train a vocabulary, with other ids than those of the weights."""
    weights = next(pathlib.Path(__file__).parents[1].glob("data/reference/*.npz"))
    settings = [f"Run.init_from='{weights}'", "TEXT_FILES='*.txt'"]
    settings += ["SEQUENCE_LENGTH=64"]
    with pytest.raises(config.ConfigError, match="has no vocabulary, and a new one would have other ids .* name its file with --gin.Vocabulary.file"):
        start.resolve_source(gin_files.load(["base.gin"], settings), str(tmp_path))
    named = gin_files.load(["base.gin"], [*settings, "Vocabulary.file='my_encoder'"])
    assert start.resolve_source(named, str(tmp_path)).encoder_source.path == str(weights)


@pytest.mark.parametrize(
    "settings,line",
    [
        (["Optimizer.warmup_steps=600"], "Optimizer.warmup_steps=600 is all of the 600 steps: the learning rate rises to the end and does not fall"),
        (["Optimizer.freeze_encoder_steps=700"], "Optimizer.freeze_encoder_steps=700 is all of the 600 steps: the encoder does not change"),
        (
            ["Optimizer.warmup_steps=6000"],
            "Optimizer.warmup_steps=6000 is shortened to the 600 steps of the run: the learning rate rises faster, and to the end",
        ),
        (
            ["Masking.rate_plateaus=((0, 0.3), (0.9999, 0.15))"],
            "Masking.rate_plateaus: the one at 0.9999 has no step, so mask rate 0.15 is not trained",
        ),
        (["Masking.rate_plateaus=((0, 0.3), (0.5, 0.15))"], None),
        (["Run.batch_size_ramp=((8, 1000),)"], "Run.batch_size=32 is not reached: the run ends at 8 rows a step"),
        (["Model.unigram_bias=True"], "Model.unigram_bias has no effect: the prediction head is trained already"),
        (["Run.batch_size_ramp=((8, 100),)"], None),
    ],
)
def test_settings_without_effect_are_named(settings, line):
    assert summary.without_effect(gin_files.load(["tiny.gin"], ["Model.unigram_bias=False", *settings]), True) == [line] * (line is not None)
