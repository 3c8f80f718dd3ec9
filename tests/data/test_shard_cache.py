"""The cache of files of rows: its size, what it drops, what it fetches ahead, and errors."""

import threading

import numpy as np
import pytest

from maelm_jax.data import shard_cache

SIZE = 100


class Loader:
    """Loads file n as an array of n, and counts the loads."""

    def __init__(self):
        self.loaded = []

    def __call__(self, number):
        def load():
            self.loaded.append(number)
            return np.full(SIZE, number, np.uint8)

        return load


def test_files_used_longest_ago_are_dropped():
    cache, loader = shard_cache.ShardCache(3 * SIZE), Loader()
    for number in (1, 2, 3, 1, 4, 1, 3, 2):
        assert (cache.get(f"{number}", SIZE, loader(number)) == number).all()
        assert cache.size <= 3 * SIZE
    assert loader.loaded == [1, 2, 3, 4, 2], "4 drops 2, and 2 drops 4"


def test_a_file_larger_than_the_cache_is_read():
    cache, loader = shard_cache.ShardCache(SIZE // 2), Loader()
    for number in (1, 1, 2, 1):
        assert (cache.get(f"{number}", SIZE, loader(number)) == number).all()
    assert loader.loaded == [1, 2, 1] and cache.size == SIZE


def test_fetched_files_fill_at_most_half_of_the_cache_until_they_are_used():
    cache, loader = shard_cache.ShardCache(4 * SIZE), Loader()
    assert [cache.fetch(f"{number}", SIZE, loader(number)) for number in (1, 2, 3)] == [True, True, False]
    assert cache.fetch("1", SIZE, loader(1)), "it is there already"
    cache.get("1", SIZE, loader(1))
    assert cache.fetch("3", SIZE, loader(3))
    for number in (2, 3):
        cache.get(f"{number}", SIZE, loader(number))
    assert sorted(loader.loaded) == [1, 2, 3]


def test_an_error_of_a_fetched_file_is_raised_when_it_is_needed_and_not_kept():
    cache, loader = shard_cache.ShardCache(4 * SIZE), Loader()

    def fail():
        raise ValueError("no such file")

    assert cache.fetch("1", SIZE, fail)
    with pytest.raises(ValueError, match="no such file"):
        cache.get("1", SIZE, fail)
    assert cache.size == 0 and (cache.get("1", SIZE, loader(1)) == 1).all()


def test_a_process_that_ends_fetches_nothing_more(monkeypatch):
    loader, ended = Loader(), threading.Thread()
    monkeypatch.setattr(shard_cache.threading, "main_thread", lambda: ended)
    cache = shard_cache.ShardCache(4 * SIZE)
    with pytest.raises(shard_cache.concurrent.futures.CancelledError):
        cache.get("1", SIZE, loader(1))
    assert loader.loaded == []
