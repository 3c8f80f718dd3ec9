"""Locks a workdir for one run: a file lock on a folder, a lease on a folder in a bucket.

The lock is flock(2) on the file `run.lock` in the workdir (`storage.try_lock`). The kernel releases
it when the process ends, even after SIGKILL.

A bucket has no locks, so the holder has a lease: an object `lease/N.json` that it renews. Another
process that wants the workdir watches the object. If the object changes, its holder is alive. If it
does not change for EXPIRES_AFTER seconds, the other process creates the object N + 1, on condition
that it does not exist. Only one process can succeed. Each process uses only its own clock. N only
increases, so the deletion of old objects is safe.
"""

import collections.abc
import contextlib
import datetime
import json
import logging
import os
import pathlib
import secrets
import socket
import sys
import threading
import time
import typing

from maelm_jax import storage
from maelm_jax.config import ConfigError
from maelm_jax.training import coordination

log = logging.getLogger(__name__)

FILE, LEASES = "run.lock", "lease"
# Seconds. The kernel releases the lock of a killed process only when it has freed its memory.
PATIENCE = 5.0
RENEW_EVERY, EXPIRES_AFTER, LOOK_EVERY = 30.0, 120.0, 5.0  # seconds


@contextlib.contextmanager
def held(workdir: str) -> collections.abc.Iterator[None]:
    """Context manager that holds the lock of a workdir. Creates the folder if necessary.

    In a multi-process run, process 0 holds the lock for all.

    Raises:
        ConfigError: Another process holds the lock, or the folder cannot be written to. All
            processes raise it.
    """
    with contextlib.ExitStack() as stack:
        coordination.run_on_process_zero(f"lock of {workdir}", lambda: _acquire(workdir, stack))
        yield


def _acquire(workdir: str, stack: contextlib.ExitStack):
    holder = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC",
        "id": secrets.token_hex(8),
    }
    before = stack.enter_context(_locked(workdir, holder))
    if storage.in_bucket(workdir):
        lease = Lease(workdir, holder)
        lease.acquire(before)
        stack.enter_context(lease)


@contextlib.contextmanager
def _locked(workdir: str, holder: dict) -> collections.abc.Iterator[dict]:
    """Holds run.lock and writes `holder` into it. Yields the holder before, {} if none."""
    path = storage.local_path(workdir) / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        reason = "is a file" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(
            f"--workdir={workdir} cannot be written to ({error.filename}: {reason}). "
            "Give another folder"
        ) from error
    try:
        if not _lock(file):
            raise ConfigError(_in_use(workdir, _holder_in(path)))
        before = _holder_in(path)
        os.ftruncate(file, 0)
        os.write(file, json.dumps(holder).encode() + b"\n")
        yield before
    finally:
        os.close(file)


def _lock(file: int) -> bool:
    """Locks an open file. Returns False if another process holds the lock after PATIENCE."""
    end = time.monotonic() + PATIENCE
    while not storage.try_lock(file):
        if time.monotonic() >= end:
            return False
        time.sleep(0.1)
    return True


def _holder_in(path: pathlib.Path) -> dict:
    """Returns the holder that run.lock names, or {} if it names none."""
    with contextlib.suppress(OSError, ValueError):
        holder = json.loads(path.read_bytes())
        if isinstance(holder, dict) and {"host", "process", "since"} <= holder.keys():
            return holder
    return {}


def _in_use(workdir: str, holder: dict) -> str:
    who = "another process"
    if holder:
        who = f"process {holder['process']} on {holder['host']} (since {holder['since']})"
    return (
        f"{workdir} is in use by {who}. Wait until that ends, or stop it. "
        "To run both, give another --workdir"
    )


class Lost(Exception):
    """Another process has taken the lease."""


class LeaseObject(typing.NamedTuple):
    """An object in the bucket that holds a lease."""

    number: int  # 0: there is none
    content: dict | None  # the holder, renewals and released


class Lease:
    """The lease on a workdir in a bucket.

    As a context manager, it renews the lease in a thread and releases it at the end. Call `acquire`
    before.

    Args:
        workdir: The folder in the bucket.
        holder: This process: host, process, since, id.
        clock: Returns seconds. Tests replace it.
        sleep: Waits for a number of seconds. Tests replace it.
    """

    def __init__(
        self,
        workdir: str,
        holder: dict,
        clock: collections.abc.Callable[[], float] = time.monotonic,
        sleep: collections.abc.Callable[[float], None] = time.sleep,
    ):
        self.workdir, self.holder, self._clock, self._sleep = workdir, holder, clock, sleep
        self._files, root = storage.file_system(workdir)
        self._folder, self._number, self._renewals = f"{root}/{LEASES}", 0, 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def acquire(self, before: dict):
        """Waits until this process has the lease.

        Args:
            before: The last holder that this machine's run.lock names ({} if none). It has
                released that lock, so its lease counts as released.

        Raises:
            ConfigError: Another process renews the lease while this one watches it.
        """
        watched, since = None, self._clock()
        while True:
            number, lease = self._newest()
            if lease is None or lease["released"] or lease["id"] == before.get("id"):
                if self._create(number + 1):
                    return
                continue
            if watched is None:
                log.warning(
                    "the lease on %s is that of process %s on %s; "
                    "waiting up to %g s to see whether it is still renewed",
                    self.workdir,
                    lease["process"],
                    lease["host"],
                    EXPIRES_AFTER,
                )
                watched, since = lease, self._clock()
            elif lease != watched:
                raise ConfigError(_in_use(self.workdir, lease))
            elif self._clock() - since >= EXPIRES_AFTER:
                if self._create(number + 1):
                    return
                continue
            self._sleep(LOOK_EVERY)

    def renew(self):
        """Writes the lease again. Raises Lost if another process has taken it."""
        newest = self._newest()
        if newest.number != self._number:
            raise Lost(newest.content)
        self._renewals += 1
        self._files.pipe_file(self._path(self._number), self._content())

    def release(self):
        """Marks the lease as released, so that the next process does not wait."""
        self._files.pipe_file(self._path(self._number), self._content(released=True))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()
        try:
            if self._newest().number == self._number:
                self.release()
        except Exception as error:  # the run itself is complete, and the lease expires
            log.warning("the lease on %s could not be given back: %s", self.workdir, error)

    def _keep(self):
        while not self._done.wait(RENEW_EVERY):
            try:
                self.renew()
            except Lost as error:
                _end_process(self.workdir, error.args[0])
            except Exception as error:  # the next attempts come before the lease expires
                log.warning(
                    "the lease on %s could not be renewed: %s",
                    self.workdir,
                    " ".join(str(error).split())[:200],
                )

    def _create(self, number: int) -> bool:
        """Creates the lease `number`. Returns whether this process now holds the newest lease."""
        self._renewals = 0
        # It exists where another process was faster, or the answer to the first attempt was lost.
        with contextlib.suppress(FileExistsError):
            self._files.pipe_file(self._path(number), self._content(), mode="create")
        newest = self._newest()
        lease = newest.content
        if newest.number != number or lease is None or lease["id"] != self.holder["id"]:
            return False
        self._number = number
        for other in self._numbers():
            if other < number:
                self._files.rm_file(self._path(other))
        return True

    def _numbers(self) -> list[int]:
        return sorted(
            int(name)
            for path in self._files.find(self._folder)
            if (name := path.rsplit("/", 1)[-1].removesuffix(".json")).isdecimal()
        )

    def _newest(self) -> LeaseObject:
        """Returns the newest lease."""
        while numbers := self._numbers():
            number = numbers[-1]
            try:
                return LeaseObject(number, json.loads(self._files.cat_file(self._path(number))))
            except FileNotFoundError:  # the holder of a newer lease has removed it
                continue
        return LeaseObject(0, None)

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:08d}.json"

    def _content(self, released: bool = False) -> bytes:
        return json.dumps(self.holder | {"renewals": self._renewals, "released": released}).encode()


def _end_process(workdir: str, holder: dict):
    """Exits at once, even while a write is in progress. Two runs would mix their files."""
    print(
        f"error: this process lost its lease on {workdir}, which it could not renew in time. "
        f"{_in_use(workdir, holder)}",
        file=sys.stderr,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
