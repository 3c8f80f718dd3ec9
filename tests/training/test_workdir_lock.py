"""One run at a time on a workdir: two processes on a folder, and leases on a folder of an object store."""

import errno
import json
import logging
import os
import pathlib
import subprocess
import sys
import time

import fsspec
import pytest

from maelm_jax import config, finetune, storage, train
from maelm_jax.finetuning import grid
from maelm_jax.training import workdir_lock

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOLDER = """
import sys
from maelm_jax.training import workdir_lock
with workdir_lock.held(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the workdir `run`."""
    argv = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_workdir_in_use_is_refused_with_the_name_of_its_holder_until_that_is_killed(holder, tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    monkeypatch.setattr(workdir_lock, "PATIENCE", 0.0)
    message = rf"run is in use by process {holder.pid} on \S+ \(since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC\)\. Wait until that ends, or stop it"
    with pytest.raises(config.ConfigError, match=message):
        train.main(["--gin_file=tiny.gin", f"--workdir={workdir}"])
    with pytest.raises(config.ConfigError, match=message):
        for name in ("_earlier_reports", "session_key", "open_session"):  # the start and the data are checked first
            monkeypatch.setattr(grid, name, lambda *_: None)
        monkeypatch.setattr(grid, "plan", lambda *_: [grid.Planned("rte", None, "tiny", None, True)])
        finetune.main(["--gin_file=finetune/rte.gin", f"--init_from={tmp_path}", f"--workdir={workdir}"])
    assert [path.name for path in workdir.iterdir()] == ["run.lock"]
    holder.kill()
    holder.wait()
    with workdir_lock.held(str(workdir)):
        assert json.loads((workdir / "run.lock").read_text())["process"] == os.getpid()


def test_a_process_that_is_just_ending_is_waited_for(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(workdir_lock, "PATIENCE", 120.0)
    holder.stdin.close()
    with workdir_lock.held(str(tmp_path / "run")):
        pass


def test_a_lock_is_given_back_when_the_run_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir_lock, "PATIENCE", 0.0)
    with pytest.raises(ZeroDivisionError), workdir_lock.held(str(tmp_path)):
        with pytest.raises(config.ConfigError, match="is in use by process"), workdir_lock.held(str(tmp_path)):
            pass
        raise ZeroDivisionError
    for content in ("[1, 2", '{"x": 1}'):
        (tmp_path / "run.lock").write_text(content)
        assert workdir_lock._holder_in(tmp_path / "run.lock") == {}
        with workdir_lock.held(str(tmp_path)):
            pass


def test_a_file_system_without_locks_is_named_and_does_not_stop_a_run(tmp_path, monkeypatch, caplog):
    def flock(file, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(storage.fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING), workdir_lock.held(str(tmp_path)):
        assert "this file system has no locks" in caplog.text


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_workdir_that_is_a_file_or_lies_under_one_is_an_error_of_the_settings(tmp_path, name):
    (tmp_path / "file").write_text("text")
    with pytest.raises(config.ConfigError, match=rf"--workdir=\S+{name}: \S+file is a file; give a folder"):
        train.main(["--gin_file=tiny.gin", f"--workdir={tmp_path / name}"])
    assert (tmp_path / "file").read_text() == "text"


def test_a_disk_that_cannot_be_written_to_is_an_error_of_the_settings(tmp_path, monkeypatch):
    plain = os.open

    def read_only(path, flags, *rest, **more):
        if pathlib.Path(path).name == "run.lock":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return plain(path, flags, *rest, **more)

    monkeypatch.setattr(workdir_lock.os, "open", read_only)
    with pytest.raises(config.ConfigError, match=r"cannot be written to \(\S+run.lock: Read-only file system\)\. Give another folder"):
        train.main(["--gin_file=tiny.gin", f"--workdir={tmp_path}"])


class Process:
    """A process that wants the lease on memory://bucket/run. Its time passes as it sleeps; `meanwhile` is what others do then."""

    def __init__(self, name: str, meanwhile=lambda: None):
        self.slept, self.meanwhile = 0.0, meanwhile
        holder = {"host": "host", "process": name, "since": "today", "id": name}
        self.lease = workdir_lock.Lease("memory://bucket/run", holder, lambda: self.slept, self.sleep)

    def sleep(self, seconds: float):
        self.slept += seconds
        self.meanwhile()

    def acquire(self, before: str | None = None):
        self.lease.acquire({"id": before} if before else {})
        return self


@pytest.fixture(autouse=True)
def objects():
    fsspec.filesystem("memory").store.clear()
    yield fsspec.filesystem("memory").store
    fsspec.filesystem("memory").store.clear()


def test_a_lease_that_is_renewed_is_not_taken(objects):
    first = Process("first").acquire()
    second = Process("second", meanwhile=first.lease.renew)
    with pytest.raises(config.ConfigError, match="run is in use by process first on host"):
        second.acquire()
    first.lease.renew()
    assert second.slept <= 30 and len(objects) == 1


def test_a_lease_that_is_not_renewed_expires_and_its_holder_notices(caplog):
    first, second = Process("first").acquire(), Process("second")
    second.acquire()
    assert 120 <= second.slept <= 125 and "waiting up to 120 s" in caplog.text
    with pytest.raises(workdir_lock.Lost):
        first.lease.renew()
    second.lease.renew()


def test_a_lease_that_was_given_back_is_taken_at_once():
    first, second = Process("first").acquire(), Process("second")
    first.lease.release()
    assert second.acquire().slept == 0


def test_on_the_machine_of_the_process_that_was_killed_its_lease_is_taken_at_once():
    first, second = Process("first").acquire(), Process("second")
    assert second.acquire(before="first").slept == 0
    with pytest.raises(workdir_lock.Lost):
        first.lease.renew()


def test_of_two_that_wait_for_the_same_lease_one_gets_it():
    Process("first").acquire()
    third = Process("third")
    second = Process("second", meanwhile=lambda: third.acquire(before="first") if second.slept == 120 else None)
    with pytest.raises(config.ConfigError, match="in use by process third"):
        second.acquire()


def test_an_object_of_the_same_number_that_another_made_first_is_respected(monkeypatch):
    """Both saw that there was no lease; the condition at the creation decides."""
    second = Process("second")
    plain, first = second.lease._create, Process("first")
    monkeypatch.setattr(second.lease, "_create", lambda number: (first.acquire(), plain(number))[1])
    second.meanwhile = first.lease.renew
    with pytest.raises(config.ConfigError, match="in use by process first"):
        second.acquire()


def test_an_answer_that_was_lost_does_not_lose_the_lease(monkeypatch):
    """The client tries again what it did not hear the answer to, and is told that the object exists: it is its own."""
    first = Process("first")
    plain = first.lease._files.pipe_file

    def twice(path, content, mode="overwrite"):
        plain(path, content, mode=mode)
        plain(path, content, mode=mode)

    monkeypatch.setattr(first.lease._files, "pipe_file", twice)
    assert first.acquire().slept == 0
    monkeypatch.undo()
    first.lease.renew()


def test_a_lower_number_than_the_newest_holds_nothing(objects):
    """Left by one that saw a lease which was released, taken and removed since."""
    first = Process("first")
    first.lease._create(7)
    late = Process("late")
    assert not late.lease._create(3)
    first.lease.renew()


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_lease_that_was_lost_ends_the_process(monkeypatch):
    monkeypatch.setattr(workdir_lock, "RENEW_EVERY", 0.01)
    ended = []
    monkeypatch.setattr(workdir_lock, "_end_process", lambda workdir, holder: ended.append((workdir, holder["process"])))
    first = Process("first").acquire()
    with first.lease:
        wait_until(lambda: first.lease._renewals > 0)
        assert not ended
        Process("second").acquire(before="first")
        wait_until(lambda: ended)
    assert ended[0] == ("memory://bucket/run", "second")


def test_the_end_of_a_run_gives_the_lease_back():
    first = Process("first").acquire()
    with first.lease:
        pass
    assert Process("second").acquire().slept == 0
