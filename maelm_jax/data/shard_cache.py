"""Keeps files of rows in memory, up to a size. Fetches coming files in threads."""

import collections
import concurrent.futures
import dataclasses
import threading
import typing

import numpy as np

THREADS = 8  # files that are fetched at once


@dataclasses.dataclass
class _Entry:
    rows: concurrent.futures.Future[np.ndarray]
    size: int
    used: bool = False


class ShardCache:
    """Cache of the rows of files, for one thread. A full cache drops the files used longest ago.

    Args:
        limit: Most bytes of rows. One file may be larger.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.size = 0  # bytes of all entries
        self._unused = 0  # bytes of entries that were fetched and not used yet
        self._entries: collections.OrderedDict[str, _Entry] = collections.OrderedDict()
        self._pool = concurrent.futures.ThreadPoolExecutor(THREADS)

    def get(self, name: str, size: int, load: typing.Callable[[], np.ndarray]) -> np.ndarray:
        """Returns the rows of a file.

        Args:
            name: Identifies the file.
            size: Bytes of its rows.
            load: Reads the file, in another thread. Its errors are raised here.
        """
        self._load(name, size, load)
        entry = self._entries[name]
        if not entry.used:
            entry.used = True
            self._unused -= size
        try:
            return entry.rows.result()
        except BaseException:
            self._drop(name)  # the next call tries again
            raise

    def fetch(self, name: str, size: int, load: typing.Callable[[], np.ndarray]) -> bool:
        """Begins to load a file that `get` will need. Returns False if there is no space yet."""
        # Fetched files fill at most half of the cache, so that they do not drop each other.
        if name not in self._entries and self._unused + size > self.limit // 2:
            return False
        self._load(name, size, load)
        return True

    def _load(self, name: str, size: int, load: typing.Callable[[], np.ndarray]):
        """Begins to load a file that is not in the cache, and makes it the one used last."""
        if name in self._entries:
            self._entries.move_to_end(name)
            return
        self._entries[name] = _Entry(self._pool.submit(_load_unless_ending, load), size)
        self.size += size
        self._unused += size
        while self.size > self.limit and len(self._entries) > 1:
            self._drop(next(iter(self._entries)))

    def _drop(self, name: str):
        entry = self._entries.pop(name)
        entry.rows.cancel()
        self.size -= entry.size
        if not entry.used:
            self._unused -= entry.size


def _load_unless_ending(load: typing.Callable[[], np.ndarray]) -> np.ndarray:
    """Loads a file. A process that ends does not wait for the files that it has not begun."""
    if not threading.main_thread().is_alive():
        raise concurrent.futures.CancelledError
    return load()
