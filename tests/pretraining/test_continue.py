"""A run that goes on from another one: what it takes along, what may differ, what is refused, and its chain of tokens."""

import json
import pathlib
import shutil

import checkpoint_folders
import jax
import numpy as np
import pytest
from testing import call, repeated, steps_of, training

from maelm_jax import cli, config, gin_files
from maelm_jax.encoders import adoption, opened
from maelm_jax.model import maelm
from maelm_jax.pretraining import start as starts
from maelm_jax.training import checkpoint, metrics, optimizers, run_rows, sharding, step
from maelm_jax.training.workdir import Parent, Workdir

pytestmark = pytest.mark.long

DECAY = ["--gin.Optimizer.schedule=decay", "--gin.TRAIN_STEPS=12", "--gin.Run.rank_every=0"]


def settings_of(workdir: pathlib.Path, *bindings: str) -> config.Experiment:
    return gin_files.load([str(workdir / "config.gin")], bindings)


def test_weights_and_optimiser_are_those_of_the_other_run_and_the_steps_begin_anew(uninterrupted, tmp_path):
    experiment = settings_of(uninterrupted, f"Run.continue_from='{uninterrupted}@20'")
    found = starts.find_starting_point(experiment, Workdir(tmp_path))
    mesh = sharding.make_mesh(config.Mesh())
    model = maelm.create(experiment.model, 400, config.SpecialIds.of_size(400))
    shapes = step.state_shapes(model.init, optimizers.create(experiment.optimizer), mesh)
    state = starts.load_state(found, Workdir(tmp_path), shapes, None, 400).state
    theirs = checkpoint.restore(Workdir(uninterrupted), 20, shapes)
    assert checkpoint_folders.equal((state.params, state.opt_state), (theirs.params, theirs.opt_state))
    assert int(state.step) == 0 and max(int(leaf) for leaf in jax.tree.leaves(state.opt_state) if leaf.dtype == np.int32) == 20


def test_a_decay_branch_that_is_resumed_is_the_branch_never_stopped(text, uninterrupted, tmp_path):
    """It begins at the learning rate and behind the rows of its parent, and evaluate and the loss curve count the tokens of both."""
    argv = [*DECAY, f"--gin.Run.continue_from={uninterrupted}@40"]
    assert call("train", *training(text, tmp_path / "whole", *argv)).status == 0
    stopped = shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    for step_number in (10, 12):
        shutil.rmtree(stopped / "checkpoints" / str(step_number))
    done = call("train", *training(text, stopped, *argv))
    assert "at step 5" in done.stdout and repeated(stopped) == repeated(tmp_path / "whole"), done

    parents, lines = steps_of(uninterrupted), steps_of(tmp_path / "whole")
    assert [line["step"] for line in lines] == list(range(1, 13))
    rates = parents[40]["learning_rate"] * (1 - np.sqrt(np.arange(12) / 12))
    np.testing.assert_allclose([line["learning_rate"] for line in lines], rates, rtol=1e-6)
    assert lines[0]["loss"] < parents[0]["loss"] - 0.2, "the weights are trained"
    parent = Workdir(tmp_path / "whole").read_parent()
    assert (parent.workdir, parent.step, parent.tokens, parent.rows_read) == (Workdir(uninterrupted), 40, 40 * 8 * 32, 40 * 8)
    assert "Optimizer.schedule: 'wsd' -> 'decay'" in parent.changes
    curves = metrics.read_curves(Workdir(tmp_path / "whole"))
    assert [curve.first_token for curve in curves] == [0, 40 * 256] and len([line for line in curves[0].lines if "loss" in line]) == 40
    done = call("train", *training(text, tmp_path / "whole", *DECAY, f"--gin.Run.continue_from={uninterrupted}@35"))
    assert done.status == 2 and "Run.continue_from" in done.stderr
    done = call("train", *training(text, tmp_path / "more", *DECAY, f"--gin.Run.continue_from={tmp_path / 'whole'}"))
    assert done.status == 2 and "its learning rate is 0 after step 12" in done.stderr


def test_a_causal_phase_goes_on_as_mlm_and_as_mae_lm(text, tmp_path):
    first, short = str(tmp_path / "first"), ["--gin.TRAIN_STEPS=4", "--gin.Run.rank_every=0"]
    done = call("train", *training(text, tmp_path / "first", "--gin_file=recipes/causal_phase.gin", *short))
    assert done.status == 0, done.stderr
    flags = training(text, tmp_path / "mlm", "--gin_file=mlm.gin", f"--gin.Run.continue_from={first}")
    found = starts.find_starting_point(cli.parse(cli.parser(""), flags).experiment, Workdir(tmp_path / "mlm"))
    assert found.parent.step == 4 and not found.experiment.model.causal and "Objective.name: 'causal' -> 'mlm'" in found.parent.changes
    assert not adoption.adopt_settings(gin_files.load(["tiny.gin"]), opened.find_model(first)).experiment.model.causal
    tuning = ["--gin_file=finetune/rte.gin", f"--init_from={first}", f"--workdir={tmp_path / 'out'}"]
    for command in (["export", f"--workdir={first}", f"--output={tmp_path / 'out'}"], ["finetune", *tuning]):
        done = call(*command)
        assert done.status == 2 and "causal" in done.stderr and not (tmp_path / "out").exists()
    done = call("evaluate", f"--models={first}")
    assert done.status == 0 and "loss of the encoder at next tokens" in done.stdout, done.stderr


def test_what_has_no_weights_may_differ(uninterrupted):
    theirs = settings_of(uninterrupted)
    free = ["BATCH_SIZE=16", "Masking.rate=0.3", "Dropout.hidden=0.2", "Compute.dtype='bfloat16'", "Optimizer.learning_rate=1e-4", "Mesh.fsdp=2"]
    ours = settings_of(uninterrupted, *(binding.replace("BATCH_SIZE", "Run.batch_size") for binding in free))
    assert len(starts._changes_from(theirs, ours, "parent")) == len(free)
    rotary = ["Encoder.positions='rotary'", "Encoder.relative_buckets='none'", "Decoder.relative_bias=False"]
    longer = ["Encoder.max_positions=256", "Corpus.sequence_length=256", "Encoder.rotary_theta=160000.0"]
    theirs, ours = settings_of(uninterrupted, *rotary), settings_of(uninterrupted, *rotary, *longer)
    assert len(starts._changes_from(theirs, ours, "parent")) == len(longer)


@pytest.mark.parametrize(
    "binding,message",
    [
        ("Encoder.layers=2", "Encoder.layers: 1 -> 2"),
        ("Encoder.feed_forward=32", "Encoder.feed_forward"),
        ("Encoder.normalization='pre'", "Encoder.normalization"),
        ("Encoder.max_positions=256", "Encoder.max_positions"),
        ("Encoder.family='bert'", "Encoder.family"),
        ("Decoder.attention='cross'", "Decoder.attention"),
        ("Optimizer.kind='adamw'", "Optimizer.kind"),
        ("Optimizer.decay_norms_and_biases=False", "Optimizer.decay_norms_and_biases"),
        ("Optimizer.learning_rate=5e-4", "Optimizer.muon_learning_rate / Optimizer.learning_rate"),
        ("Vocabulary.size=500", "Vocabulary.size"),
        ("Vocabulary.file='PARENT/../other.model'", "no vocabulary"),
        ("Run.continue_from='PARENT@7'", "no checkpoint of step 7"),
        ("Run.continue_from='PARENT-not'", "there is no run"),
    ],
)
def test_a_run_that_does_not_fit_is_refused_before_text_is_read(text, uninterrupted, tmp_path, binding, message):
    flags = [f"--gin.Run.continue_from={uninterrupted}@40", f"--gin.{binding.replace('PARENT', str(uninterrupted))}"]
    done = call("train", *training(text, tmp_path / "run", *DECAY, "--gin.TEXT_FILES=nowhere", *flags))
    assert done.status == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_still_running_is_continued_from_a_step_that_it_has_written(uninterrupted, tmp_path):
    parent = pathlib.Path(shutil.copytree(uninterrupted, tmp_path / "parent"))
    with Workdir(parent).locked():
        with pytest.raises(config.ConfigError, match=str(parent)):
            starts.find_starting_point(settings_of(uninterrupted, f"Run.continue_from='{parent}'"), Workdir(tmp_path / "run"))
        found = starts.find_starting_point(settings_of(uninterrupted, f"Run.continue_from='{parent}@20'"), Workdir(tmp_path / "run"))
    assert found.parent.step == 20
    found = starts.find_starting_point(settings_of(uninterrupted, f"Run.continue_from='{parent}'"), Workdir(tmp_path / "run"))
    assert found.parent.step == 60


def test_the_rate_is_that_of_the_parent_s_steps_where_its_length_was_changed_later(uninterrupted, tmp_path):
    parent = pathlib.Path(shutil.copytree(uninterrupted, tmp_path / "parent"))
    lines = [json.loads(line) for line in (parent / "metrics.jsonl").read_text().splitlines()]
    logged = [line | {"learning_rate": line["learning_rate"] / 8} if "learning_rate" in line else line for line in lines]
    (parent / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in logged))
    rates = {}
    for name in (uninterrupted, parent):
        found = starts.find_starting_point(settings_of(uninterrupted, f"Run.continue_from='{name}@40'"), Workdir(tmp_path / "run"))
        rates[name] = found.parent.learning_rate
    last = {line["step"]: line["learning_rate"] for line in steps_of(uninterrupted)}
    assert rates[uninterrupted] == pytest.approx(last[41]) and rates[parent] == pytest.approx(last[40] / 8)


def test_a_damaged_checkpoint_is_not_continued(uninterrupted, tmp_path):
    parent = pathlib.Path(shutil.copytree(uninterrupted, tmp_path / "parent"))
    checkpoint_folders.flip(checkpoint_folders.largest_file(parent / "checkpoints" / "20"), 999)
    with pytest.raises(checkpoint.Damaged, match="checkpoints/20"):
        starts.find_starting_point(settings_of(uninterrupted, f"Run.continue_from='{parent}@20'"), Workdir(tmp_path / "run"))


def test_rows_begin_anew_where_they_are_not_the_parent_s(uninterrupted):
    parent = Parent(Workdir(uninterrupted), step=40, tokens=0, learning_rate=0.1, rows_read=320, changes=[])
    experiment = settings_of(uninterrupted)
    chosen = run_rows.open_recorded(Workdir(uninterrupted), experiment.corpus, Workdir(uninterrupted).load_vocabulary())
    assert starts.count_rows_read(parent, experiment, chosen) == 320
    for other in ("Run.seed=3", "Corpus.shuffle_shards=1"):
        assert starts.count_rows_read(parent, settings_of(uninterrupted, other), chosen) == 0


def test_rows_are_prepared_with_the_vocabulary_of_the_parent(uninterrupted, tmp_path):
    (tmp_path / "other.txt").write_text("\n\n".join(f"Quite another text, number {number}." for number in range(400)))
    files = [f"--gin.TEXT_FILES={tmp_path / 'other.txt'}", f"--gin.Corpus.rows_dir={tmp_path / 'rows'}"]
    flags = [*training(tmp_path, tmp_path / "run"), *files]
    done = call("prepare", *flags, f"--gin.Run.continue_from={uninterrupted}@40")
    fingerprint = Workdir(uninterrupted).load_vocabulary().fingerprint
    assert done.status == 0 and f"sha256 {fingerprint[:12]}" in done.stdout, done.stderr
    done = call("prepare", *flags, f"--gin.Run.continue_from={uninterrupted}@7")
    assert done.status == 2 and "no checkpoint of step 7" in done.stderr
