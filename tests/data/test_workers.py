"""Work in processes of this machine: a worker that dies, also at its start, ends the command with a line."""

import os
import pathlib
import signal
import sys
import threading
import time
import types

import pytest

from maelm_jax import config
from maelm_jax.data import workers


@pytest.mark.parametrize(("processes", "threads"), [(1, None), (2, "false"), (0, "false")])
def test_results_have_the_order_of_the_jobs_up_to_an_error(monkeypatch, processes, threads):
    """tokenizers needs threads of its own in a process that is alone."""
    monkeypatch.setattr(workers, "usable_cores", lambda: 2)  # 0 processes are one for each
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setenv("SECOND", "2")
    monkeypatch.setenv("THIRD", "3")
    results = workers.results(os.getenv, ["TOKENIZERS_PARALLELISM", "SECOND", "THIRD", None, "SECOND"], processes)
    assert [next(results) for _ in range(3)] == [threads, "2", "3"]
    with pytest.raises(TypeError):
        next(results)
    assert list(workers.results(os.getenv, [], processes)) == []


def children() -> list[int]:
    """Returns the worker processes of this process."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
            stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        if b"spawn_main" in line and int(stat.rpartition(")")[2].split()[1]) == os.getpid():
            found.append(int(pid))
    return found


@pytest.mark.parametrize("seconds", [*[0.0] * 8, 0.1, 0.4])
def test_a_worker_that_is_killed_in_its_first_moments_ends_the_work(seconds):
    """At 0.0 it dies while the other one is started: a ProcessPoolExecutor of Python 3.11 can hang then."""

    def kill():
        while not (pids := children()):
            time.sleep(0.002)
        time.sleep(seconds)
        os.kill(min(pids), signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    with pytest.raises(config.RunError):
        list(workers.results(time.sleep, [3.0] * 20, 2))
    thread.join()


def test_a_worker_that_cannot_import_ends_the_work(monkeypatch):
    ghost = types.ModuleType("ghost")  # of this process alone
    exec("def work(job): return job", vars(ghost))
    monkeypatch.setitem(sys.modules, "ghost", ghost)
    with pytest.raises(config.RunError):
        list(workers.results(ghost.work, [1, 2], 2))
