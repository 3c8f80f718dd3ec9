"""The command itself: invariants 5 (resume), 4 (another mesh), 7 (tiny.gin and its MLM), exit statuses, bad input."""

import math
import shutil
import signal

import pytest
from testing import STEPS, call, finish, metrics, repeated, send_when, start, steps_of, training

from maelm_jax import gin_files
from maelm_jax.pretraining import summary
from maelm_jax.training.metrics import Writer


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


@pytest.mark.slow
def test_evaluations_are_at_the_heldout_rate_whatever_the_rate_of_training(text, tmp_path):
    """The learning rates are so small that no weight changes."""
    settings = ["--gin.TRAIN_STEPS=1", "--gin.Optimizer.learning_rate=1e-30", "--gin.Optimizer.muon_learning_rate=1e-30"]
    masks = {
        "rate": ["Masking.rate=0.15", "Masking.heldout_rate=None"],
        "other_rate": ["Masking.rate=0.5", "Masking.heldout_rate=0.15"],
    }
    found = {}
    for name, bindings in masks.items():
        argv = training(text, tmp_path / name, *settings, *(f"--gin.{binding}" for binding in bindings))
        assert call("train", *argv).status == 0
        last = metrics(tmp_path / name)[0]
        found[name] = [value for key, value in last.items() if key.startswith(("eval_", "rank_", "unigram"))]
    assert len(found["rate"]) == 9
    assert found["other_rate"] == found["rate"]


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


def test_other_settings_do_not_touch_a_run(text, uninterrupted, tmp_path):
    workdir = shutil.copytree(uninterrupted, tmp_path / "run")
    before = repeated(workdir)
    done = call("train", *training(text, workdir, "--gin.SEED=5"))
    assert done.status == 2 and "Run.seed: 0 -> 5" in done.stderr
    assert repeated(workdir) == before


def test_nan_stops_the_run_and_names_the_last_good_checkpoint(text, tmp_path):
    diverging = ["--gin.Optimizer.learning_rate=1e30", "--gin.Optimizer.warmup_steps=8", "--gin.Run.checkpoint_every=1"]
    done = call("train", *training(text, tmp_path, *diverging, "--gin.Run.rank_every=0"))
    assert done.status == 3
    assert "the last good checkpoint is step" in done.stderr
    good = int(done.stderr.split("last good checkpoint is step ")[1].split(".")[0])
    assert all(math.isfinite(line["loss"]) for line in steps_of(tmp_path)) and (tmp_path / "checkpoints" / str(good)).is_dir()


def test_text_that_is_not_there_is_one_line_and_status_2(text, tmp_path):
    done = call("train", *training(text, tmp_path, "--gin.TEXT_FILES=nowhere/*.txt"))
    assert done.status == 2 and "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and "nowhere/*.txt" in last


@pytest.mark.parametrize("files,more", [(["tiny.gin"], []), (["tiny.gin", "mlm.gin"], ["--gin.Model.unigram_bias=True"])], ids=["mae-lm", "mlm"])
def test_small_configs_take_a_step(text, tmp_path, files, more):
    """With unigram_bias the loss starts near the unigram cross-entropy, without it far above."""
    argv = [*(f"--gin_file={name}" for name in files), "--gin.TRAIN_STEPS=1", f"--gin.TEXT_FILES={text}/*.txt", f"--workdir={tmp_path}"]
    argv += ["--gin.Vocabulary.size=400", "--gin.Corpus.heldout_fraction=0.1", f"--gin.Corpus.rows_dir={text}/rows", "--gin.Run.eval_rows=32"]
    done = call("train", *argv, "--gin.Run.rank_every=0", *more)
    assert done.status == 0, done.stderr
    (line,) = steps_of(tmp_path)
    assert (line["eval_loss"] < line["unigram"] + 0.4) == bool(more)


@pytest.mark.parametrize("name", ["modern_tiny.gin", *(pytest.param(f"{name}.gin", marks=pytest.mark.slow) for name in ("tiny", "large_plus"))])
def test_dry_run(name, tmp_path):
    """It reads no data and writes nothing. A run with other settings in the workdir is no error."""
    (tmp_path / "config.gin").write_text(gin_files.render(gin_files.load(["small.gin"])))
    done = call("train", f"--gin_file={name}", "--dry_run", f"--workdir={tmp_path}")
    assert done.status == 0, done.stderr
    for what in ("encoder/token_embedding", "FLOPs a step", "optimiser's state", "mesh {'data': 1"):
        assert what in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["config.gin"]


def test_a_run_that_a_signal_stopped_at_its_last_step_says_that_it_is_not_evaluated(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 5.1, "eval_loss": 5.0}\n{"step": 3, "loss": 5.0}\n')
    summary.report_result(str(tmp_path), gin_files.load(["tiny.gin"], ["TRAIN_STEPS=3"]), 0.0, baseline=None)
    assert "step 3" in capsys.readouterr().out
