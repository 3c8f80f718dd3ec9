"""The command itself, in processes of its own: invariants 5 (resume), 4 (another mesh), 7 (every small config), exit statuses, bad input."""

import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from maelm_jax import gin_files

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS = 60


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> pathlib.Path:
    """A few hundred kilobytes of English that come with Python itself."""
    from pydoc_data import topics

    folder = tmp_path_factory.mktemp("text")
    (folder / "topics.txt").write_text("\n\n".join(" ".join(topic.split()) for topic in topics.topics.values()))
    return folder


def command(text: pathlib.Path, workdir: pathlib.Path, *more: str) -> list[str]:
    settings = {
        "TRAIN_STEPS": STEPS,
        "BATCH_SIZE": 8, "SEQUENCE_LENGTH": 32, "TEXT_FILES": text / "*.txt", "Vocabulary.size": 400, "Corpus.rows_dir": text / "rows",
        "Corpus.processes": 1, "Corpus.heldout_fraction": 0.1, "Model.layers": 1, "Model.width": 32, "Model.heads": 2, "Model.feed_forward": 64,
        "Model.dropout": 0.1, "Model.attention_dropout": 0.1, "Run.log_every": 1, "Run.eval_every": 20, "Run.eval_rows": 40,
        "Run.checkpoint_every": 5, "Run.rank_every": 30,
    }  # fmt: skip
    bindings = [f"--gin.{name}={value}" for name, value in settings.items()]
    return [sys.executable, "-m", "maelm_jax.train", "--gin_file=tiny.gin", *bindings, f"--workdir={workdir}", *more]


def environment(devices: int = 1) -> dict:
    return os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}


def finish(argv: list[str], devices: int = 1) -> subprocess.CompletedProcess:
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=environment(devices))


def lines(workdir: pathlib.Path) -> list[dict]:
    path = workdir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def numbers(workdir: pathlib.Path) -> list[tuple]:
    """What must repeat to the last bit."""
    return [tuple(line.get(name) for name in ("step", "loss", "accuracy", "grad_norm", "eval_loss", "eval_accuracy")) for line in lines(workdir)]


@pytest.fixture(scope="session")
def uninterrupted(text, tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    done = finish(command(text, workdir))
    assert done.returncode == 0, done.stderr
    return workdir


def test_a_run_leaves_what_it_promises(uninterrupted):
    assert [line["step"] for line in lines(uninterrupted)] == list(range(1, STEPS + 1))
    assert set(lines(uninterrupted)[-1]) >= {
        "step", "loss", "accuracy", "learning_rate", "grad_norm", "tokens_per_second", "eval_loss", "eval_accuracy", "unigram",
        "rank_plain_middle", "rank_plain_last", "rank_real_middle", "rank_real_last",
    }  # fmt: skip
    assert [line["step"] for line in lines(uninterrupted) if "rank_plain_last" in line] == [30, STEPS], "every 30 steps, and after the last"
    first, last = lines(uninterrupted)[0], lines(uninterrupted)[-1]
    assert 1 < last["rank_plain_last"] <= 32
    assert last["eval_loss"] < first["loss"] - 0.3 and math.isfinite(last["grad_norm"])
    for name in ("config.gin", "environment.txt", "loss_curve.png", "tensorboard"):
        assert (uninterrupted / name).exists(), name
    assert any((uninterrupted / "vocabulary").iterdir())
    assert gin_files.load([str(uninterrupted / "config.gin")]).run.train_steps == STEPS
    assert (uninterrupted / "checkpoints" / str(STEPS)).is_dir()


def kill_when(argv, workdir, condition):
    """Starts the command and sends SIGKILL as soon as `condition()` holds."""
    process = subprocess.Popen(argv, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_killed_three_times_is_bit_for_bit_the_run_never_killed(text, uninterrupted, tmp_path):
    workdir = tmp_path / "killed"
    argv = command(text, workdir)
    at = lambda: max((line["step"] for line in lines(workdir)), default=0)  # noqa: E731
    whole = lambda: max((int(p.name) for p in (workdir / "checkpoints").glob("*") if p.name.isdigit()), default=0)  # noqa: E731
    kill_when(argv, workdir, lambda: at() >= 13)
    kill_when(argv, workdir, lambda: at() > 20 and any("tmp" in p.name for p in (workdir / "checkpoints").iterdir()))  # while one is written
    kill_when(argv, workdir, lambda: at() > max(whole(), 30) + 2)
    done = finish(argv)
    assert done.returncode == 0, done.stderr
    assert "resuming" in done.stdout
    assert numbers(workdir) == numbers(uninterrupted)


def test_sigterm_saves_and_the_run_goes_on(text, uninterrupted, tmp_path):
    argv = command(text, tmp_path, "--gin.Run.checkpoint_every=1000")
    process = subprocess.Popen(argv, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    while len(lines(tmp_path)) < 7:
        assert process.poll() is None
        time.sleep(0.002)
    process.terminate()
    said, _ = process.communicate()
    assert process.returncode == 143
    assert "stopped by SIGTERM at step" in said
    stopped_at = lines(tmp_path)[-1]["step"]
    assert (tmp_path / "checkpoints" / str(stopped_at)).is_dir()
    done = finish(argv)
    assert done.returncode == 0 and f"at step {stopped_at}" in done.stdout
    assert numbers(tmp_path) == numbers(uninterrupted)


def test_a_damaged_checkpoint_is_passed_over_and_another_mesh_goes_on(text, uninterrupted, tmp_path):
    argv = command(text, tmp_path, f"--gin.Run.keep_checkpoints={STEPS}")
    kill_when(argv, tmp_path, lambda: (tmp_path / "checkpoints" / "20").is_dir())
    newest = max(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit())
    for path in (tmp_path / "checkpoints" / str(newest)).rglob("*"):
        if path.is_file() and path.stat().st_size > 500 and "metadata" not in path.name.lower():
            path.write_bytes(path.read_bytes()[:100])
    done = finish([*argv, "--gin.Mesh.fsdp=2"], devices=4)
    assert done.returncode == 0, done.stderr
    assert f"checkpoint {newest} cannot be read" in done.stderr
    for ours, theirs in zip(numbers(tmp_path), numbers(uninterrupted), strict=True):
        assert ours[0] == theirs[0] and abs(ours[1] - theirs[1]) <= 2e-5 * theirs[1]


def test_other_settings_do_not_touch_a_run(text, uninterrupted):
    before = numbers(uninterrupted)
    done = finish(command(text, uninterrupted, "--gin.SEED=5"))
    assert done.returncode == 2 and "Run.seed: 0 -> 5" in done.stderr
    assert numbers(uninterrupted) == before


def test_init_from(text, uninterrupted, tmp_path):
    done = finish(command(text, tmp_path, f"--gin.Run.init_from={uninterrupted}", "--gin.SEED=1"))
    assert done.returncode == 0, done.stderr
    assert lines(tmp_path)[0]["loss"] < lines(uninterrupted)[0]["loss"] - 0.3
    done = finish(command(text, tmp_path / "other", f"--gin.Run.init_from={uninterrupted}", "--gin.Model.layers=2"))
    assert done.returncode == 2 and "does not fit this model" in done.stderr


def test_nan_stops_the_run_and_names_the_last_good_checkpoint(text, tmp_path):
    done = finish(command(text, tmp_path, "--gin.Optimizer.learning_rate=1e30", "--gin.Optimizer.warmup_steps=8", "--gin.Run.checkpoint_every=1"))
    assert done.returncode == 1
    assert "the last good checkpoint is step" in done.stderr
    good = int(done.stderr.split("last good checkpoint is step ")[1].split(".")[0])
    assert all(math.isfinite(line["loss"]) for line in lines(tmp_path)) and (tmp_path / "checkpoints" / str(good)).is_dir()


@pytest.mark.parametrize("more,message", [
    (["--gin.TEXT_FILES=nowhere/*.txt"], "nowhere/*.txt"),
    (["--gin.Vocabulary.size=60000"], "Vocabulary.size"),
    (["--gin.Mesh.fsdp=3"], "does not make the 1 devices"),
])  # fmt: skip
def test_bad_input_is_one_line_and_status_2(text, tmp_path, more, message):
    done = finish(command(text, tmp_path, *more))
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("files,more", [(["tiny.gin"], []), (["tiny.gin", "mlm.gin"], ["--gin.Model.unigram_bias=True"])], ids=["mae-lm", "mlm"])
def test_small_configs_take_a_step(text, tmp_path, files, more):
    """With unigram_bias the loss starts near the unigram cross-entropy, without it far above."""
    argv = [
        sys.executable,
        "-m",
        "maelm_jax.train",
        *(f"--gin_file={name}" for name in files),
        "--gin.TRAIN_STEPS=1",
        f"--gin.TEXT_FILES={text}/*.txt",
    ]
    argv += ["--gin.Vocabulary.size=400", "--gin.Corpus.heldout_fraction=0.1", f"--gin.Corpus.rows_dir={text}/rows", f"--workdir={tmp_path}"]
    done = finish([*argv, "--gin.Run.eval_rows=32", *more])
    assert done.returncode == 0, done.stderr
    (line,) = lines(tmp_path)
    assert (line["eval_loss"] < line["unigram"] + 0.4) == bool(more)


@pytest.mark.parametrize(
    "name", ["tiny.gin", "small.gin", pytest.param("base.gin", marks=pytest.mark.slow), pytest.param("large_plus.gin", marks=pytest.mark.slow)]
)
def test_dry_run(name, tmp_path):
    done = finish([sys.executable, "-m", "maelm_jax.train", f"--gin_file={name}", "--dry_run", f"--workdir={tmp_path}"])
    assert done.returncode == 0, done.stderr
    for what in ("encoder/token_embedding", "FLOPs a step", "Adam's moments", "mesh {'data': 1"):
        assert what in done.stdout
    assert list(tmp_path.iterdir()) == []
