"""Several real processes over loopback: invariants 4 and 5 across processes, signals to one of them, and what must not differ."""

import pathlib
import signal
import socket
import time

import pytest
from testing import STEPS, call, finish, metrics, send_when, start, steps_of, training

from maelm_jax.training import distributed

pytestmark = pytest.mark.long

PATIENCE = 60  # seconds after which a process that does not answer is given up


class Processes:
    """The training command in `count` processes of `devices` CPU devices each."""

    def __init__(self, text: pathlib.Path, workdir: pathlib.Path, count: int, *more: str, devices: int = 1, only: dict[int, list[str]] | None = None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = f"127.0.0.1:{free.getsockname()[1]}"
        self.workdir, self.started, self.running = workdir, time.time(), []
        for number in range(count):
            argv = training(text, workdir, *more, *(only or {}).get(number, []))
            if count > 1:
                argv += [f"--coordinator={place}", f"--processes={count}", f"--process={number}", f"--peer_timeout={PATIENCE}"]
            self.running.append(start("train", *argv, devices=devices))

    def wait(self) -> tuple[list[int], list[str], list[str]]:
        """Exit statuses, what each wrote to stdout, and to stderr."""
        try:
            ended = [finish(process) for process in self.running]
        finally:
            for process in self.running:
                process.kill()
        return [one.status for one in ended], [one.stdout for one in ended], [one.stderr for one in ended]

    def signal(self, number: int, which: signal.Signals, step: int):
        """Sends a signal to one process once these processes have written the step to metrics.jsonl."""
        path = self.workdir / "metrics.jsonl"

        def reached() -> bool:
            if not path.exists() or path.stat().st_mtime < self.started:
                return False
            lines = metrics(self.workdir)
            return bool(lines) and lines[-1]["step"] >= step

        send_when(self.running[number], which, reached)


def agree(ours: list[dict], theirs: list[dict], tolerance: float):
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == list(range(1, STEPS + 1))
    for a, b in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", "eval_loss"):
            assert (name in a) == (name in b) and abs(a.get(name, 0) - b.get(name, 0)) <= tolerance * b.get(name, 0), (a, b)


@pytest.mark.slow
def test_killed_stopped_and_resumed_by_another_number_of_processes_is_the_run_of_one(text, uninterrupted, tmp_path):
    two = Processes(text, tmp_path, 2)
    two.signal(1, signal.SIGKILL, step=11)  # the checkpoint of step 5 is whole when that of step 10 is begun
    began = time.monotonic()
    status, said, errors = two.wait()
    assert time.monotonic() - began < PATIENCE + 30 and status == [1, -signal.SIGKILL]
    last = errors[0].strip().splitlines()[-1]
    assert last.startswith("error: ") and "Gloo" in last and "space" not in last and "Traceback" not in errors[0], errors[0]

    two = Processes(text, tmp_path, 2)
    two.signal(1, signal.SIGTERM, step=16)
    status, said, errors = two.wait()
    assert status == [143, 143], errors
    assert "resuming" in said[0] and "stopped by SIGTERM" in said[0], said[0]
    assert said[1] == "", "process 0 alone speaks"
    stopped = metrics(tmp_path)[-1]["step"]
    assert stopped < STEPS and (tmp_path / "checkpoints" / str(stopped)).is_dir()

    done = call("train", *training(text, tmp_path), devices=2)
    assert done.status == 0 and f"at step {stopped}" in done.stdout, done
    agree(steps_of(tmp_path), steps_of(uninterrupted), 1e-5)


@pytest.mark.slow
def test_two_processes_start_from_another_run(text, uninterrupted, tmp_path):
    """Finding the run must not wake JAX's devices: the processes have not met by then."""
    by_minutes = ["--gin.Run.checkpoint_minutes=0.0001", "--gin.Run.log_every=2"]  # the clocks are asked after step 2
    two = Processes(text, tmp_path, 2, f"--gin.Run.init_from={uninterrupted}", "--gin.TRAIN_STEPS=3", *by_minutes)
    status, said, errors = two.wait()
    assert status == [0, 0] and f"starting from {uninterrupted} (workdir); with fresh weights: nothing" in said[0], errors
    assert [line["step"] for line in steps_of(tmp_path)] == [2, 3], said
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]
    assert metrics(tmp_path)[0]["loss"] < metrics(uninterrupted)[0]["loss"] - 0.1, "it starts from trained weights"


@pytest.mark.slow
def test_four_processes_on_a_mesh_are_the_run_of_one(text, uninterrupted, tmp_path):
    status, _, errors = Processes(text, tmp_path, 4, "--gin.Mesh.fsdp=2", "--gin.Mesh.tensor=2").wait()
    assert status == [0] * 4, errors
    agree(steps_of(tmp_path), steps_of(uninterrupted), 1e-5)


def test_a_host_that_differs_says_how_and_ends_the_others(text, tmp_path):
    theirs = ["--gin.SEED=1", f"--workdir={tmp_path / 'elsewhere'}"]
    two = Processes(text, tmp_path / "run", 2, f"--gin.Corpus.rows_dir={tmp_path / 'rows'}", only={1: theirs})
    status, _, errors = two.wait()
    assert status[1] == 2 and status[0] != 0, errors
    last = errors[1].strip().splitlines()[-1]
    assert last.startswith("error: process 1 has another start than process 0: Run.seed: 1; workdir: "), last
    assert not (tmp_path / "run" / "config.gin").exists()


def test_an_error_of_process_0_before_the_loop_ends_the_others(text, tmp_path):
    status, _, errors = Processes(text, tmp_path, 2, "--gin.Vocabulary.size=60000").wait()
    assert status[0] == 2 and "Vocabulary.size" in errors[0].strip().splitlines()[-1], errors
    assert status[1] != 0


def test_code_that_differs_is_seen(tmp_path, monkeypatch):
    """The hash compared at the start covers every module, in a fixed order."""
    package = tmp_path / "maelm_jax"
    (package / "training").mkdir(parents=True)
    for name in ("train.py", "training/distributed.py"):
        (package / name).write_text("x = 1\n")
    monkeypatch.setattr(distributed, "__file__", str(package / "training" / "distributed.py"))
    before = distributed.code_hash()
    assert distributed.code_hash() == before
    (package / "train.py").write_text("x = 2\n")
    assert distributed.code_hash() != before


def test_a_coordinator_that_is_not_there(text, tmp_path):
    argv = ["--coordinator=127.0.0.1:9", "--processes=2", "--process=1", "--peer_timeout=3"]
    status, _, (error,) = Processes(text, tmp_path, 1, *argv).wait()
    assert status[0] != 0 and "joining the other processes at 127.0.0.1:9" in error and "DEADLINE_EXCEEDED" in error
    done = call("train", *training(text, tmp_path, "--processes=2"))
    assert done.status == 2 and "--processes and --process need --coordinator" in done.stderr
