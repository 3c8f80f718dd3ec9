"""Waits for another process that does the same work, and for the other hosts."""

import contextlib
import logging
import os
import pathlib
import threading
import time
import typing

from maelm_jax import config, storage

POLL_SECONDS = 2.0  # between checks
# A waiting host gives up after this long without a new file or a beat. A block takes seconds.
SILENCE_SECONDS = 1800
OTHER_TEXT_SECONDS = 60.0  # after this long, it looks for hosts that see other text
BEAT_SECONDS = 30.0
LOCK_FILE = "host-{}.lock"  # of a host, in the folder of the blocks
log = logging.getLogger(__name__)


@contextlib.contextmanager
def only_process(lock: pathlib.Path, what: str) -> typing.Iterator[None]:
    """Context manager that waits while another process holds a lock.

    A process that is killed frees its lock.

    Args:
        lock: The lock file. Its folder is created.
        what: What the other process does, for the message.
    """
    with _opened(lock) as file:
        if not storage.try_lock(file):
            log.warning("another process %s; waiting for it", what)
            while not storage.try_lock(file):
                time.sleep(POLL_SECONDS)
        yield


def _opened(lock: pathlib.Path) -> typing.BinaryIO:
    while True:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process has just removed the folder
            return open(lock, "wb")


@contextlib.contextmanager
def beating(parts: pathlib.Path, host: int) -> typing.Iterator[None]:
    """Context manager that touches a host's lock file now and then, a sign of life for the others.

    It is for work that can take long before it adds a file to `parts`, which they watch.
    """
    done, file = threading.Event(), parts / LOCK_FILE.format(host)

    def touch():
        while not done.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(file)

    thread = threading.Thread(target=touch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def for_hosts(source: str, parts: pathlib.Path, is_done: typing.Callable[[], bool]):
    """Waits for other hosts.

    Args:
        source: Name of the source, for the message.
        parts: The folder of the blocks, whose files show that hosts work.
        is_done: Called until it returns True.

    Raises:
        RunError: No host gave a sign of life for SILENCE_SECONDS.
    """
    seen, since = None, time.monotonic()
    while not is_done():
        if seen is None:
            log.warning("%s: waiting for the other hosts' share of %s", source, parts)
        if (present := _signs_of_life(parts)) != seen:
            seen, since = present, time.monotonic()
        elif time.monotonic() - since > OTHER_TEXT_SECONDS and (other := _other_text(parts)):
            raise config.RunError(
                f"{source}: this host works in {parts}, another one in {other}: the hosts see "
                "different text. Give all the same files and versions of Python and packages (or "
                "remove the second folder, if no host works there)"
            )
        elif time.monotonic() - since > SILENCE_SECONDS:
            raise config.RunError(
                f"{parts}: no host wrote anything for {SILENCE_SECONDS / 60:.0f} minutes; "
                "start prepare again where it ended"
            )
        time.sleep(POLL_SECONDS)


def _other_text(parts: pathlib.Path) -> str | None:
    """Returns the folder of the blocks of another state of the text, if it is newer, or None."""
    state = parts.name.rpartition("-")[0]
    others = [path for path in parts.parent.glob(f"{state}-*{parts.suffix}") if path != parts]
    began = min(_times_modified(parts.glob("*")).values(), default=0.0)
    newer = [path.name for path, time in _times_modified(others).items() if time >= began]
    return newer[0] if newer else None


def _signs_of_life(parts: pathlib.Path) -> tuple[int, float]:
    """Returns the number of files, and when a host touched its lock file last."""
    locks = _times_modified(parts.glob(LOCK_FILE.format("*")))
    return len(list(parts.glob("*"))), max(locks.values(), default=0.0)


def _times_modified(paths: typing.Iterable[pathlib.Path]) -> dict[pathlib.Path, float]:
    """Returns when each path was modified last, without paths that were removed meanwhile."""
    times = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            times[path] = path.stat().st_mtime
    return times
