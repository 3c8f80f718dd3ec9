"""One run at a time on a workdir: a lock of the operating system on a folder, a lease on a folder in a bucket.

The lock is flock(2) on the file `run.lock` in the workdir. The system releases it when the process ends, however it ends. It holds between hosts
on NFS version 4, and on Lustre and FUSE where they are mounted with locks; where the file system has none, a warning says so.

A bucket has no locks. There the holder renews an object, `lease/N.json`. Whoever wants the workdir watches that object: when it changes, its
holder is alive; when it does not for EXPIRES_AFTER seconds, the next object, N + 1, is created on the condition that it does not exist, which one
process alone achieves. No clock is compared with that of another host. The numbers only grow, so an object that was deleted does no harm.
"""

import collections.abc
import contextlib
import datetime
import errno
import fcntl
import json
import logging
import os
import pathlib
import secrets
import socket
import sys
import threading
import time

from maelm_jax import storage
from maelm_jax.config import ConfigError
from maelm_jax.training import distributed

log = logging.getLogger(__name__)

FILE, LEASES = "run.lock", "lease"
PATIENCE = 5.0  # seconds: a process that was just killed keeps its files until the kernel has freed its memory
RENEW_EVERY, EXPIRES_AFTER, LOOK_EVERY = 30.0, 120.0, 5.0  # seconds
WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # what flock(2) says on a file system that has none


@contextlib.contextmanager
def held(workdir: str) -> collections.abc.Iterator[None]:
    """Holds a workdir while the context lasts; of several processes of a run, process 0 does for all.

    Makes the folder if it is not there. Raises ConfigError, on all processes, when another process holds it or it cannot be written to.
    """
    with contextlib.ExitStack() as stack:
        distributed.from_first(f"lock of {workdir}", lambda: _take(workdir, stack))
        yield


def _take(workdir: str, stack: contextlib.ExitStack):
    holder = {
        "host": socket.gethostname(), "process": os.getpid(), "since": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC",
        "id": secrets.token_hex(8),
    }  # fmt: skip
    before = stack.enter_context(_locked(workdir, holder))
    if storage.in_bucket(workdir):
        lease = Lease(workdir, holder)
        lease.take(before)
        stack.enter_context(lease)


@contextlib.contextmanager
def _locked(workdir: str, holder: dict) -> collections.abc.Iterator[dict]:
    """Holds run.lock, in which it writes `holder`; yields who held it before ({} when nobody did)."""
    path = storage.local_path(workdir) / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        reason = "is a file" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(f"--workdir={workdir} cannot be written to ({error.filename}: {reason}): give another folder") from error
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
    """Whether the open file is locked for this process, or cannot be at all."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            log.warning("this file system has no locks: make sure that no other process works on the workdir")
            return True
        time.sleep(0.1)


def _holder_in(path: pathlib.Path) -> dict:
    """Who wrote run.lock last; {} when that cannot be told."""
    with contextlib.suppress(OSError, ValueError):
        if isinstance(found := json.loads(path.read_bytes()), dict):
            return found
    return {}


def _in_use(workdir: str, holder: dict) -> str:
    who = f"process {holder['process']} on {holder['host']} (since {holder['since']})" if holder else "another process"
    return f"{workdir} is in use by {who}: wait until that ends, or stop it; to run both, give another --workdir"


class Lost(Exception):
    """Another process has taken the lease."""


class Lease:
    """The lease on a workdir in a bucket. As a context it is renewed by a thread, and given back at the end."""

    def __init__(
        self, workdir: str, holder: dict, clock: collections.abc.Callable[[], float] = time.monotonic,
        sleep: collections.abc.Callable[[float], None] = time.sleep,
    ):  # fmt: skip
        self.workdir, self.holder, self._clock, self._sleep = workdir, holder, clock, sleep
        self._files, root = storage.file_system(workdir)
        self._folder, self._number, self._renewals = f"{root}/{LEASES}", 0, 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def take(self, before: dict):
        """Returns when this process has the lease. `before` is who held the lock of this machine's copy of the workdir last: it is gone.

        Raises ConfigError when another process holds it; that takes until the holder renews it, or it expires.
        """
        watched, since = None, self._clock()
        while True:
            number, found = self._newest()
            if found is None or found["released"] or found["id"] == before.get("id"):
                if self._create(number + 1):
                    return
                continue
            if watched is None:
                log.warning(
                    "the lease on %s is that of process %s on %s; waiting up to %g s to see whether it is still renewed",
                    self.workdir, found["process"], found["host"], EXPIRES_AFTER,
                )  # fmt: skip
                watched, since = found, self._clock()
            elif found != watched:
                raise ConfigError(_in_use(self.workdir, found))
            elif self._clock() - since >= EXPIRES_AFTER:
                if self._create(number + 1):
                    return
                continue
            self._sleep(LOOK_EVERY)

    def renew(self):
        """Raises Lost when another process has taken the lease, and whatever the storage raises."""
        if self._newest()[0] != self._number:
            raise Lost(self._newest()[1])
        self._renewals += 1
        self._files.pipe_file(self._path(self._number), self._content())

    def release(self):
        """The next process need not wait."""
        self._files.pipe_file(self._path(self._number), self._content(released=True))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()
        try:
            if self._newest()[0] == self._number:
                self.release()
        except Exception as error:  # the run itself is done; what is left expires
            log.warning("the lease on %s could not be given back: %s", self.workdir, error)

    def _keep(self):
        while not self._done.wait(RENEW_EVERY):
            try:
                self.renew()
            except Lost as error:
                _end_process(self.workdir, error.args[0])
            except Exception as error:  # it is tried again long before it expires
                log.warning("the lease on %s could not be renewed: %s", self.workdir, " ".join(str(error).split())[:200])

    def _create(self, number: int) -> bool:
        """Whether this process made the lease of that number, and it is the newest."""
        self._renewals = 0
        try:
            self._files.pipe_file(self._path(number), self._content(), mode="create")
        except FileExistsError:  # somebody was faster, unless the answer to our own first attempt was lost
            pass
        newest, found = self._newest()
        if newest != number or found is None or found["id"] != self.holder["id"]:
            return False
        self._number = number
        for other in self._numbers():
            if other < number:
                self._files.rm_file(self._path(other))
        return True

    def _numbers(self) -> list[int]:
        return sorted(int(name) for path in self._files.find(self._folder) if (name := path.rsplit("/", 1)[-1].removesuffix(".json")).isdecimal())

    def _newest(self) -> tuple[int, dict | None]:
        """(number, content) of the newest lease; (0, None) when there is none."""
        while numbers := self._numbers():
            try:
                return numbers[-1], json.loads(self._files.cat_file(self._path(numbers[-1])))
            except FileNotFoundError:  # removed since, by the holder of a newer one
                continue
        return 0, None

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:08d}.json"

    def _content(self, released: bool = False) -> bytes:
        return json.dumps(self.holder | {"renewals": self._renewals, "released": released}).encode()


def _end_process(workdir: str, holder: dict):
    """Ends this process at once, also while it waits for the storage: two runs on one workdir would mix what they write."""
    print(f"error: this process lost its lease on {workdir}, which it could not renew in time. {_in_use(workdir, holder)}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
