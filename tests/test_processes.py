"""Several real processes over loopback: invariants 4 and 5 across processes, SIGTERM and SIGKILL on one of them, and what must not differ."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from maelm_jax.training import distributed

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS, PATIENCE = 40, 60  # steps of a run; seconds after which a process that does not answer is given up


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> pathlib.Path:
    """A few hundred kilobytes of English that come with Python itself."""
    from pydoc_data import topics

    folder = tmp_path_factory.mktemp("text")
    (folder / "topics.txt").write_text("\n\n".join(" ".join(topic.split()) for topic in topics.topics.values()))
    return folder


class Processes:
    """The training command in `count` processes of `devices` CPU devices each."""

    def __init__(self, text: pathlib.Path, workdir: pathlib.Path, count: int, *more: str, devices: int = 1, only: dict[int, list[str]] | None = None):
        settings = {
            "TRAIN_STEPS": STEPS, "BATCH_SIZE": 8, "SEQUENCE_LENGTH": 32, "TEXT_FILES": text / "*.txt", "Vocabulary.size": 400,
            "Corpus.rows_dir": text / "rows", "Corpus.processes": 1, "Corpus.heldout_fraction": 0.1, "Model.layers": 1, "Model.width": 32,
            "Model.heads": 2, "Model.feed_forward": 64, "Model.dropout": 0.1, "Model.attention_dropout": 0.1,
            "Run.log_every": 1, "Run.eval_every": 10, "Run.eval_rows": 24, "Run.checkpoint_every": 5,
        }  # fmt: skip
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = f"127.0.0.1:{free.getsockname()[1]}"
        self.workdir, self.started, self.running = workdir, time.time(), []
        for number in range(count):
            argv = [sys.executable, "-m", "maelm_jax.train", "--gin_file=tiny.gin", *(f"--gin.{name}={value}" for name, value in settings.items())]
            argv += [f"--workdir={workdir}", *more, *(only or {}).get(number, [])]
            if count > 1:
                argv += [f"--coordinator={place}", f"--processes={count}", f"--process={number}", f"--peer_timeout={PATIENCE}"]
            environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
            environment |= {"JAX_COMPILATION_CACHE_DIR": str(text / "compiled"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            self.running.append(subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))

    def wait(self, timeout: float = 600) -> tuple[list[int], list[str], list[str]]:
        """Exit statuses, what each wrote to stdout, and to stderr."""
        try:
            said = [process.communicate(timeout=timeout) for process in self.running]
        finally:
            for process in self.running:
                process.kill()
        return [process.returncode for process in self.running], [out for out, _ in said], [error for _, error in said]

    def signal(self, number: int, which: signal.Signals, step: int):
        """Sends a signal to one process once these processes have written the step to metrics.jsonl."""
        path = self.workdir / "metrics.jsonl"
        while not path.exists() or path.stat().st_mtime < self.started or not (said := lines(self.workdir)) or said[-1]["step"] < step:
            assert all(process.poll() is None for process in self.running), self.wait()[2]
            time.sleep(0.002)
        self.running[number].send_signal(which)


def lines(workdir: pathlib.Path) -> list[dict]:
    path = workdir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory) -> pathlib.Path:
    """The run of one process with one device."""
    workdir = tmp_path_factory.mktemp("runs") / "alone"
    status, _, errors = Processes(text, workdir, 1).wait()
    assert status == [0], errors
    return workdir


def agree(ours: list[dict], theirs: list[dict], tolerance: float):
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == list(range(1, STEPS + 1))
    for a, b in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", "eval_loss"):
            assert (name in a) == (name in b) and abs(a.get(name, 0) - b.get(name, 0)) <= tolerance * b.get(name, 0), (a, b)


def test_killed_stopped_and_resumed_by_another_number_of_processes_is_the_run_of_one(text, alone, tmp_path):
    two = Processes(text, tmp_path, 2)
    two.signal(1, signal.SIGKILL, step=11)  # the checkpoint of step 5 is whole when that of step 10 is begun
    began = time.monotonic()
    status, said, errors = two.wait()
    assert time.monotonic() - began < PATIENCE + 30 and status[0] == 1 and status[1] == -signal.SIGKILL
    assert errors[0].strip().splitlines()[-1].startswith("error: process 0 on ") and "lost contact with another process" in errors[0]

    two = Processes(text, tmp_path, 2)
    two.signal(1, signal.SIGTERM, step=16)
    status, said, errors = two.wait()
    assert status == [143, 143], errors
    assert "resuming" in said[0] and "stopped by SIGTERM" in said[0], said[0]
    assert said[1] == "", "process 0 alone speaks"
    stopped = lines(tmp_path)[-1]["step"]
    assert stopped < STEPS and (tmp_path / "checkpoints" / str(stopped)).is_dir()

    status, said, errors = Processes(text, tmp_path, 1, devices=2).wait()
    assert status == [0] and f"at step {stopped}" in said[0], errors
    agree(lines(tmp_path), lines(alone), 1e-5)


def test_two_processes_start_from_another_run(text, alone, tmp_path):
    """Finding the run must not wake JAX's devices: the processes have not met by then."""
    two = Processes(text, tmp_path, 2, f"--gin.Run.init_from={alone}", "--gin.TRAIN_STEPS=2")
    status, said, errors = two.wait()
    assert status == [0, 0] and f"starting from {alone} (workdir); with fresh weights: nothing" in said[0], errors
    assert [line["step"] for line in lines(tmp_path)] == [1, 2], said
    assert lines(tmp_path)[0]["loss"] < lines(alone)[0]["loss"] - 0.1, "it starts from trained weights"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 1, 4)], ids=str)
def test_four_processes_on_any_mesh_are_the_run_of_one(text, alone, tmp_path, mesh):
    sizes = [f"--gin.Mesh.{name}={size}" for name, size in zip(("data", "fsdp", "tensor"), mesh, strict=True)]
    more = [*sizes, "--gin.Model.heads=4"] if mesh[2] == 4 else sizes
    if mesh[2] == 4:
        one = Processes(text, tmp_path / "one", 1, "--gin.Model.heads=4")
        assert one.wait()[0] == [0]
        alone = tmp_path / "one"
    status, _, errors = Processes(text, tmp_path / "four", 4, *more).wait()
    assert status == [0] * 4, errors
    agree(lines(tmp_path / "four"), lines(alone), 1e-5)


@pytest.mark.parametrize("theirs,message", [
    (["--gin.SEED=1"], r"has another start than process 0 on \S+ \(Run.seed: 0 -> 1\)"),
    (["--gin.Corpus.rows_dir={other}"], r"has another view of the row store than .*; put it on storage that all of them share"),
], ids=["settings", "rows"])  # fmt: skip
def test_hosts_that_differ_are_named(text, tmp_path, monkeypatch, theirs, message):
    import re

    theirs = [value.format(other=tmp_path / "elsewhere") for value in theirs]
    two = Processes(text, tmp_path / "run", 2, f"--gin.Corpus.rows_dir={tmp_path / 'rows'}", only={1: theirs})
    status, _, errors = two.wait()
    assert status == [2, 2], errors
    for error in errors:
        last = error.strip().splitlines()[-1]
        assert re.match(r"error: process 1 on \S+ ", last) and re.search(message, last), error
    assert not (tmp_path / "run" / "checkpoints").exists()


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
    assert status == [1]
    assert error.strip().splitlines()[-1].startswith("error: the processes did not all meet at 127.0.0.1:9 (where process 0 listens) within 3 s")
    status, _, (error,) = Processes(text, tmp_path, 1, "--processes=2").wait()
    assert status == [2] and "--processes and --process need --coordinator" in error
