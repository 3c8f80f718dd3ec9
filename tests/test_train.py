"""The command itself: invariants 5 (resume), 4 (another mesh), 7 (tiny.gin and its MLM), exit statuses, bad input."""

import json
import math
import shutil
import signal

import numpy as np
import pytest
from testing import STEPS, call, finish, metrics, repeated, send_when, start, steps_of, training

from maelm_jax import gin_files, load_encoder
from maelm_jax.data import vocabularies
from maelm_jax.pretraining import summary
from maelm_jax.training import flops, run_rows
from maelm_jax.training import metrics as metrics_of_run
from maelm_jax.training.metrics import Writer
from maelm_jax.training.workdir import Workdir

pytestmark = pytest.mark.long


def test_a_run_leaves_what_it_promises(uninterrupted):
    lines = steps_of(uninterrupted)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    names = """
        step loss accuracy learning_rate grad_norm tokens_per_second eval_loss eval_accuracy unigram
        rank_plain_middle rank_plain_last rank_real_middle rank_real_last rank_all_middle rank_all_last
    """
    assert set(lines[-1]) >= set(names.split())
    assert [line["step"] for line in lines if "rank_plain_last" in line] == [30, STEPS], "every 30 steps, and after the last"
    first, last = lines[0], lines[-1]
    assert 1 < last["rank_plain_last"] <= 32
    assert last["eval_loss"] < first["loss"] - 0.2 and math.isfinite(last["grad_norm"])
    for name in ("config.gin", "environment.txt", "loss_curve.png", "tensorboard"):
        assert (uninterrupted / name).exists(), name
    assert any((uninterrupted / "vocabulary").iterdir())
    assert gin_files.load([str(uninterrupted / "config.gin")]).run.train_steps == STEPS
    assert (uninterrupted / "checkpoints" / str(STEPS)).is_dir()


def test_tokens_per_second_counts_text_without_padding(uninterrupted):
    experiment, workdir = gin_files.load([str(uninterrupted / "config.gin")]), Workdir(uninterrupted)
    vocabulary = vocabularies.load(workdir.vocabulary_folder)
    (rows,) = run_rows.open_recorded(workdir, experiment.corpus, vocabulary).split("train").values()
    text_in_step = (rows[np.arange(len(rows))] != vocabulary.pad).sum() / len(rows) * experiment.run.batch_size
    assert text_in_step < experiment.tokens_per_step, "these rows have padding"
    flops_in_step = sum(flops.flops_terms(experiment, vocabulary.size).values())
    timed = [line for line in steps_of(uninterrupted) if line["tokens_per_second"]]
    for line in timed:
        assert line["tokens_per_second"] / text_in_step == pytest.approx(line["model_flops_per_second"] / flops_in_step)
    (curve,) = metrics_of_run.read_curves(workdir)
    seconds = sum(text_in_step / line["tokens_per_second"] for line in timed)
    first = text_in_step / timed[0]["tokens_per_second"]  # the first step is compiled, so not timed
    assert curve.hours_after()[STEPS] * 3600 == pytest.approx(seconds + first)


def test_killed_and_stopped_is_bit_for_bit_the_run_never_stopped(text, uninterrupted, tmp_path):
    """SIGKILL while a checkpoint is written, after lines that no checkpoint covers. SIGTERM saves, wherever the step lies between checkpoints."""
    argv = training(text, tmp_path, "--gin.Run.rank_every=0")

    def reached() -> int:
        return max((line["step"] for line in metrics(tmp_path)), default=0)

    def writing() -> bool:
        return any("tmp" in path.name for path in (tmp_path / "checkpoints").iterdir())

    killed = start("train", *argv)
    send_when(killed, signal.SIGKILL, lambda: reached() >= 13 and writing())
    assert finish(killed).status == -signal.SIGKILL
    killed_at = reached()
    stopped = start("train", *argv, "--gin.Run.checkpoint_every=1000")
    send_when(stopped, signal.SIGTERM, lambda: reached() > killed_at)
    done = finish(stopped)
    assert done.status == 143 and "resuming" in done.stdout and "stopped by SIGTERM at step" in done.stdout, done
    stopped_at = metrics(tmp_path)[-1]["step"]
    assert killed_at < stopped_at < STEPS and (tmp_path / "checkpoints" / str(stopped_at)).is_dir()
    done = finish(start("train", *argv))
    assert done.status == 0 and f"at step {stopped_at}" in done.stdout, done
    assert repeated(tmp_path) == repeated(uninterrupted)


def test_a_damaged_checkpoint_is_passed_over_and_another_mesh_goes_on(text, uninterrupted, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(uninterrupted, workdir)
    for path in (workdir / "checkpoints").iterdir():
        if int(path.name) > 50:
            shutil.rmtree(path)
    for path in (workdir / "checkpoints" / "50").rglob("*"):
        if path.is_file() and path.stat().st_size > 500 and "metadata" not in path.name.lower():
            path.write_bytes(path.read_bytes()[:100])
    seldom = ["--gin.Run.rank_every=0", "--gin.Run.checkpoint_every=1000"]
    done = call("train", *training(text, workdir, "--gin.Mesh.fsdp=2", *seldom), devices=4)
    assert done.status == 0 and "at step 45" in done.stdout, done
    assert "checkpoints/50 is damaged" in done.stderr and (workdir / "checkpoints" / "damaged-50").is_dir()
    for ours, theirs in zip(repeated(workdir), repeated(uninterrupted), strict=True):
        assert ours[0] == theirs[0] and abs(ours[1] - theirs[1]) <= 2e-5 * theirs[1]


def test_a_run_whose_workdir_is_renamed_ends(text, tmp_path, monkeypatch):
    """Nothing of it goes into a new folder of the old name. No checkpoint is being written: Orbax prints tracebacks then."""
    begun, renamed = tmp_path / "begun", tmp_path / "renamed"
    write = Writer.write

    def write_and_rename(self, step, values):
        write(self, step, values)
        if step == 3:
            begun.rename(renamed)

    monkeypatch.setattr(Writer, "write", write_and_rename)
    done = call("train", *training(text, begun, "--gin.TRAIN_STEPS=8", "--gin.Run.rank_every=0"))
    assert done.status == 1 and f"{begun} was removed or renamed" in done.stderr.splitlines()[-1], done
    assert not begun.exists() and [line["step"] for line in metrics(renamed)] == [1, 2, 3]


def test_a_workdir_removed_during_a_save_ends_the_run_with_one_line(text, tmp_path):
    """Orbax's threads and TensorStore's callbacks would print hundreds."""
    run = tmp_path / "run"
    process = start("train", *training(text, run, "--gin.Encoder.layers=8", "--gin.Run.checkpoint_every=1"))
    send_when(process, 0, lambda: list(run.glob("checkpoints/*tmp")))
    while run.exists():  # threads write into it
        shutil.rmtree(run, ignore_errors=True)
    done = finish(process)
    assert done.status == 1 and "Traceback" not in done.stderr and "ERROR" not in done.stderr, done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith(f"error: {run} was removed or renamed")


def test_with_unigram_bias_the_loss_starts_near_the_unigram_cross_entropy(text, uninterrupted, tmp_path):
    argv = training(text, tmp_path, "--gin_file=mlm.gin", "--gin.TRAIN_STEPS=1", "--gin.Init.unigram_bias=True", "--gin.Run.rank_every=0")
    assert call("train", *argv).status == 0
    (line,) = steps_of(tmp_path)
    assert line["eval_loss"] < line["unigram"] + 0.4 < steps_of(uninterrupted)[0]["loss"]


def test_a_run_that_a_signal_stopped_at_its_last_step_says_that_it_is_not_evaluated(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 5.1, "eval_loss": 5.0}\n{"step": 3, "loss": 5.0}\n')
    summary.report_result(Workdir(tmp_path), gin_files.load(["tiny.gin"], ["TRAIN_STEPS=3"]), 0.0, baseline=None)
    assert "step 3" in capsys.readouterr().out


def test_checkpoints_at_words_are_kept_and_exported_by_the_names_of_the_challenge(text, tmp_path):
    run, exported = tmp_path / "run", tmp_path / "exported"
    sizes = ("TRAIN_STEPS=14", "Run.keep_at_words=(300, 1_000, 900_000_000)", "Run.keep_at=(8,)", "Run.rank_every=0", "Run.checkpoint_every=10")
    done = call("train", *training(text, run, *(f"--gin.{size}" for size in sizes)))
    assert done.status == 0, done
    words, rows = (json.loads((run / "rows.json").read_text())["words_per_row"], 8)
    assert f"14 steps of {rows} rows are " in done.stdout and " passes over " in done.stdout
    at = {"chck_0.0003M": max(round(300 / words / rows), 1), "chck_0.001M": round(1000 / words / rows), "step_8": 8}
    kept = {int(path.name) for path in (run / "checkpoints").iterdir()}
    assert set(at.values()) <= kept and kept - set(at.values()) <= {10, 14}
    assert call("export", f"--workdir={run}", f"--output={exported}", "--all_kept", "--no-verify").status == 0
    assert {path.name for path in exported.iterdir()} == set(at)
    for name, step in at.items():
        assert np.array_equal(load_encoder(exported / name).params["head/bias"], load_encoder(run, step).params["head/bias"])
    (tmp_path / "pairs.jsonl").write_text('{"sentence_good": "A cat sat.", "sentence_bad": "A cat sit."}\n')
    scored = call("evaluate", f"--models={run}", f"--pairs={tmp_path / 'pairs.jsonl'}", "--all_steps", f"--output={tmp_path / 'scores.json'}")
    models = [score["model"] for score in json.loads((tmp_path / "scores.json").read_text())["scores"]]
    assert scored.status == 0 and f"{run}, chck_0.001M" in models and f"{run}, step {max(kept)}" in models
    refused = call("export", f"--workdir={exported / 'step_8'}", f"--output={tmp_path / 'other'}", "--all_kept")
    assert refused.status == 2 and "is no run" in refused.stderr
