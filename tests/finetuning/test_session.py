"""Runs in this process: 32 examples learned by heart, the best evaluation kept, ranks, steps and learning rates."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from testing import input_format, objective_of, only_devices

from maelm_jax import config, finetune, gin_files
from maelm_jax.finetuning import batches, grid, initial_encoder, session
from maelm_jax.finetuning.batches import Features
from maelm_jax.finetuning.task import TaskData
from maelm_jax.training import checkpoint, flops
from maelm_jax.training.workdir import Workdir

pytestmark = pytest.mark.long

SETTINGS = ["BATCH_SIZE=32", "Finetune.evaluations=1", "Dropout.hidden=0.0", "Dropout.attention=0.0"]
FEW = ["Run.log_every=60", "Run.checkpoint_every=1000", "MAX_LENGTH=64"]


def run_of(pretrained, task, data_dir, folder, *more) -> session.Run:
    """A run of a new session with the seed 1."""
    encoder = initial_encoder.load(str(pretrained))
    experiment = grid.settings_of(task, encoder, [], [f"DATA_DIR={data_dir}", *SETTINGS, *FEW, *more])
    one = grid.create_task(task, experiment.finetune)
    current = session.Session(experiment, one, one.load(input_format(encoder.vocabulary, 64)), encoder.vocabulary)
    experiment = dataclasses.replace(experiment, run=dataclasses.replace(experiment.run, batch_size=32, seed=1))
    return session.Run(current, experiment, encoder, Workdir(folder))


@pytest.mark.parametrize(
    "task,best,epochs,devices",
    [
        ("rte", 1.0, 30, 2),
        pytest.param("stsb", 1.0, 400, 1, marks=pytest.mark.slow),
        pytest.param("squad2", 100.0, 120, 1, marks=pytest.mark.slow),
    ],
)
def test_32_examples_are_learned_by_heart(task, best, epochs, devices, pretrained, data_dir, tmp_path, monkeypatch):
    only_devices(monkeypatch, devices)
    run = run_of(pretrained, task, data_dir, tmp_path, f"EPOCHS={epochs}", "LEARNING_RATE=5e-3")
    results = run.train()
    assert results.score == pytest.approx(best, abs=1e-3 * best), results.best
    # What is kept is the best evaluation's model: loaded again, it gives the same score.
    current, params = run.session, checkpoint.restore_params(Workdir(tmp_path), run.session.model.shapes)
    assert current.score(current.outputs(params, run.lengths))[current.main_metric] == pytest.approx(results.score, abs=1e-6)
    assert json.loads((tmp_path / "results.json").read_text())["best"]["step"] == int(next((tmp_path / "checkpoints").iterdir()).name)
    assert not Workdir(tmp_path).unfinished.folder.exists()


@pytest.mark.parametrize("metric", ["accuracy", "mismatched_accuracy"])
def test_the_score_of_a_task_of_two_dev_sets_is_the_metric_that_is_named(metric, pretrained, data_dir, tmp_path):
    current = run_of(pretrained, "mnli", data_dir, tmp_path, f"Finetune.metric={metric}").session
    assert current.main_metric == {"accuracy": "matched_accuracy"}.get(metric, metric)


def test_what_is_kept_is_the_best_evaluation_not_the_last(one_device, pretrained, data_dir, tmp_path, monkeypatch):
    """Scores come from a script, so that the second of four evaluations is the best; the weights and predictions kept are its own."""
    run = run_of(pretrained, "rte", data_dir, tmp_path, "EPOCHS=4", "LEARNING_RATE=5e-3")
    seen, script, outputs = [], [0.5, 0.9, 0.1, 0.9], run.session.outputs

    def recorded(params, lengths):
        seen.append((jax.device_get(params), outputs(params, lengths)))
        return seen[-1][1]

    monkeypatch.setattr(run.session, "outputs", recorded)
    monkeypatch.setattr(run.session, "score", lambda outputs: {"accuracy": script[len(seen) - 1]})
    results = run.train()
    assert (results.best["epoch"], results.last["epoch"], results.score) == (2, 4, 0.9)
    kept = checkpoint.restore_params(Workdir(tmp_path), run.session.model.shapes)
    equal = [all(map(np.array_equal, jax.tree.leaves(kept), jax.tree.leaves(params))) for params, _ in seen]
    assert equal == [False, True, False, False], "and no fifth prediction for the file"
    for number, (_, outputs_then) in enumerate(seen):
        run.session.task.write(run.session.data.dev[""], outputs_then[""], tmp_path, str(number))
    written = [(tmp_path / f"{name}.tsv").read_text() for name in ("predictions", *range(4))]
    assert [written[0] == other for other in written[1:]] == [False, True, False, False]


def test_training_ends_when_evaluations_bring_no_gain(one_device, pretrained, data_dir, tmp_path, monkeypatch):
    """A run that is killed after the last of them, and before its results, trains no further."""
    more = ("EPOCHS=8", "Finetune.patience=2")
    run, script = run_of(pretrained, "rte", data_dir, tmp_path, *more), [0.5, 0.9, 0.1, 0.9, 1.0]
    scores = iter(script)
    monkeypatch.setattr(run.session, "score", lambda outputs: {"accuracy": next(scores)})
    finish = run._finish
    monkeypatch.setattr(run, "_finish", lambda state: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception, match="killed"):
        run.train()
    monkeypatch.setattr(run, "_finish", finish)
    results = run.train()
    assert (results.steps, results.planned_steps, results.best["step"], results.last["step"]) == (4, 8, 2, 4)
    assert "4 of 8 steps" in session.describe_results(Workdir(tmp_path))


def test_a_metric_can_be_named_as_the_score(one_device, pretrained, data_dir, tmp_path):
    assert run_of(pretrained, "stsb", data_dir, tmp_path).session.main_metric == "spearman"
    current = run_of(pretrained, "stsb", data_dir, tmp_path, "Finetune.metric=pearson").session
    assert current.main_metric == "pearson" and current.selection_score({"pearson": 0.5, "spearman": 0.9}) == 0.5
    with pytest.raises(config.ConfigError, match=r"Finetune\.metric.*spearman, pearson"):
        run_of(pretrained, "stsb", data_dir, tmp_path, "Finetune.metric=f2")


def test_the_control_draws_its_encoder_and_the_same_head(one_device, pretrained, data_dir, tmp_path):
    run, control = (run_of(start, "rte", data_dir, tmp_path, "EPOCHS=1") for start in (pretrained, f"random:{pretrained}"))
    saved = checkpoint.read_params(Workdir(pretrained), 3)["encoder"]["position_embedding"]
    loaded, drawn = (one.initial_state().params for one in (run, control))
    np.testing.assert_array_equal(loaded["encoder"]["position_embedding"], saved)
    assert not np.allclose(drawn["encoder"]["position_embedding"], saved)
    jax.tree.map(np.testing.assert_array_equal, loaded["classifier"], drawn["classifier"])


def test_the_best_evaluation_of_stsb_has_the_highest_mean_of_both_correlations(one_device, pretrained, data_dir, tmp_path):
    stsb = run_of(pretrained, "stsb", data_dir, tmp_path).session
    values = [{"spearman": 0.90, "pearson": 0.70}, {"spearman": 0.88, "pearson": 0.80}, {"spearman": 0.80, "pearson": 0.86}]
    assert max(values, key=stsb.selection_score) == values[1]


def test_a_run_logs_ranks_where_asked_before_its_first_step_at_intervals_and_after_its_last(one_device, data_dir, pretrained, tmp_path):
    header, *examples = (data_dir / "glue" / "RTE" / "dev.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "RTE").mkdir()
    for name, count in (("train", 32), ("dev", 64)):  # 32 examples have too few tokens for a rank at width 32
        (tmp_path / "RTE" / f"{name}.tsv").write_text("".join([header, *(examples * 2)[:count]]))
    workdir = tmp_path / "run"
    argv = ["--gin_file=finetune/rte.gin", f"--init_from={pretrained}", f"--workdir={workdir}", f"--gin.DATA_DIR={tmp_path}"]
    settings = ["EPOCHS=3", "BATCH_SIZE=16", "MAX_LENGTH=64", "LEARNING_RATE=5e-2", "Run.rank_every=4", "Run.log_every=100"]
    assert finetune.main([*argv, *(f"--gin.{setting}" for setting in settings)]) == 0
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line for line in lines if "rank_plain_last" in line}
    assert list(logged) == [0, 4, 6]
    names = {f"rank_{tokens}_{layer}" for tokens in ("plain", "real", "all") for layer in ("middle", "last")}
    assert all(names <= set(line) for line in logged.values()) and set(logged[0]) == names | {"step"}
    # Step 0 is the encoder that the run starts from, on the text of the dev set.
    run = run_of(pretrained, "rte", tmp_path, tmp_path)
    monitor = run.session.rank_monitor(run.experiment)
    assert monitor(checkpoint.read_params(Workdir(pretrained), 3)) == {name: logged[0][name] for name in names}
    assert any(logged[0][name] != logged[6][name] for name in names)
    masked = dataclasses.replace(run.experiment, objective=objective_of(rate=0.3))
    assert run.session.rank_monitor(run.experiment) is monitor and run.session.rank_monitor(masked) is not monitor


ROWS, LENGTH = 24, 64


@pytest.fixture
def planned(one_device, pretrained, data_dir, tmp_path) -> session.Run:
    """A run on 24 rows of 64 tokens, 5 steps of 5 rows an epoch."""
    rows = Features([np.full(LENGTH, 9, np.int32)] * ROWS, np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32))
    settings = config.Grid(batch_size=5, learning_rate=2e-3, epochs=3, warmup=0.25)
    experiment = gin_files.load(["tiny.gin", "mlm.gin", "finetune/base.gin"])
    experiment = dataclasses.replace(experiment, finetune=config.Finetune(grid=settings), run=dataclasses.replace(experiment.run, batch_size=5))
    current = run_of(pretrained, "rte", data_dir, tmp_path).session
    current.data = TaskData(rows, {})
    return session.Run(current, experiment, None, None)


def test_steps_are_epochs_times_batches_and_the_learning_rate_rises_and_falls(planned):
    job = planned._job()
    assert (job.run.train_steps, job.run.eval_every) == (15, 3)
    assert job.tokens == ROWS * LENGTH / 5
    rates = job.learning_rates
    assert rates.shape == (15,) and rates[0] == 0 and np.argmax(rates) == 4
    assert rates[4] == pytest.approx(2e-3) and rates[-1] == pytest.approx(2e-3 / 11)


def test_flops_are_those_of_pretraining_the_encoder_on_the_same_rows_without_attention_scores():
    experiment = gin_files.load(["tiny.gin", "mlm.gin"])
    run, corpus = dataclasses.replace(experiment.run, batch_size=1), dataclasses.replace(experiment.corpus, sequence_length=8)
    terms = flops.flops_terms(dataclasses.replace(experiment, run=run, corpus=corpus), 4096)
    encoder = sum(value for name, value in terms.items() if name.startswith("encoder"))
    assert 8 * flops.flops_per_token(experiment.encoder) == pytest.approx(encoder, rel=0.05)


def test_longer_runs_have_more_padded_lengths(planned):
    lengths = [np.full(length, 9, np.int32) for length in np.random.default_rng(0).integers(3, 64, 3000)]
    run = planned
    run.session.data = TaskData(Features(lengths, np.zeros(3000, np.int32), np.zeros(3000, np.int32)), {})
    counts = []
    for epochs in (1, 10, 1000):
        finetuning = dataclasses.replace(run.experiment.finetune, grid=dataclasses.replace(run.experiment.finetune.grid, epochs=epochs))
        counts.append(len(session.Run(run.session, dataclasses.replace(run.experiment, finetune=finetuning), None, None).lengths))
    assert counts[0] == 1 < counts[1] < counts[2] <= batches.MOST_LENGTHS
