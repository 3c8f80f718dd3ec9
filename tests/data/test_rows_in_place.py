"""Rows read from where they lie are those of the copy, with a cache smaller than the data; damaged files are named."""

import concurrent.futures
import dataclasses
import json

import numpy as np
import pytest

from maelm_jax import config
from maelm_jax.data import batches, rows_in_place, store

SHARD_BYTES = 256 * 32 * 2  # of a full file of the store `whole`
SOURCE = "files:*.txt"


def opened(folder, shards, **settings):
    """The store's splits with a cache of so many files."""
    corpus = config.Corpus(rows_dir=str(folder.parent), cache_gb=shards * SHARD_BYTES / 1e9, **settings)
    return rows_in_place.open_stores({SOURCE: folder}, corpus)[SOURCE]


def stream(splits, row_indices=None, shuffle_shards=0):
    return batches.Batches({SOURCE: splits["train"]}, {SOURCE: 1.0}, 16, 5, row_indices, shuffle_shards)


@pytest.mark.parametrize("shuffle_shards", [0, 3])
@pytest.mark.parametrize("shards", [1, 6])
def test_batches_are_those_of_the_copy_and_the_cache_stays_small(whole, shards, shuffle_shards):
    in_place = opened(whole, shards, shuffle_shards=shuffle_shards)
    here, there = (stream(splits, shuffle_shards=shuffle_shards) for splits in (store.open_splits(whole), in_place))
    assert len(in_place["train"]) > shards * 256, "the data is larger than the cache"
    for step in (*range(20), 10**6, 7):  # also from another step on, as a resumed run
        np.testing.assert_array_equal(there.batch(step), here.batch(step))
        assert in_place["train"]._cache.size <= shards * SHARD_BYTES
    numbers = np.arange(len(in_place["heldout"]))
    np.testing.assert_array_equal(in_place["heldout"][numbers], store.open_splits(whole)["heldout"][numbers])


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_read_their_share_of_the_same_batch(whole, hosts):
    one = stream(store.open_splits(whole), shuffle_shards=2)
    for host in range(hosts):
        mine = np.arange(host * 16 // hosts, (host + 1) * 16 // hosts)
        share = stream(opened(whole, 8, shuffle_shards=2), mine, shuffle_shards=2)
        for step in (0, 50):
            np.testing.assert_array_equal(share.batch(step), one.batch(step)[mine])


def test_an_epoch_fetches_each_file_once_if_windows_fit(whole, monkeypatch):
    splits, loaded = opened(whole, 4, shuffle_shards=2), []
    load = splits["train"]._load
    monkeypatch.setattr(splits["train"], "_load", lambda shard: loaded.append(shard) or load(shard))
    monkeypatch.setattr(batches, "STEPS_AHEAD", 8)
    in_place = batches.Batches({SOURCE: splits["train"]}, {SOURCE: 1.0}, 64, 5, shuffle_shards=2)
    for step in range(len(splits["train"]) // 64 - 8):  # nothing is fetched for the next epoch
        in_place.batch(step)
    splits["train"]._cache._pool.shutdown()  # after the files that are being fetched
    assert len(loaded) == len(set(loaded)) and set(loaded) >= set(range(len(splits["train"]) // 256))


@pytest.mark.parametrize(
    "damage,message",
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "damaged: its checksum"),
        (lambda path: path.write_bytes(b"\1" + path.read_bytes()[1:]), "damaged: its checksum"),
    ],
)
def test_missing_and_damaged_files_are_named_when_they_are_needed(copy, damage, message):
    damage(copy / "train" / "c" / "1" / "0")
    rows = opened(copy, 4)["train"]
    assert rows[np.arange(256)].shape == (256, 32), "other files can be read"
    for _ in range(2):
        with pytest.raises(config.ConfigError, match=f"{copy}/train/c/1/0: {message}") as caught:
            rows[np.array([300])]
        assert "\n" not in str(caught.value)


def test_a_file_that_is_loaded_twice_at_once_is_read(whole):
    """A file that is dropped while it is loaded, and needed again, is loaded by two threads."""
    train = opened(whole, 1)["train"]
    content = (whole / "train" / "c" / "0" / "0").read_bytes()
    expected = train._decoder.decode(0, content)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for rows in pool.map(lambda _: train._decoder.decode(0, content), range(2000)):
            np.testing.assert_array_equal(rows, expected)


def test_storage_that_does_not_answer_is_one_line(whole, monkeypatch):
    rows = opened(whole, 4)["train"]

    def fail(path):
        raise TimeoutError("no answer\nfrom there")

    monkeypatch.setattr(rows._files, "cat_file", fail)
    with pytest.raises(config.RunError, match=r"train/c/0/0: cannot be read \(no answer from there\); start the run again"):
        rows[np.array([0])]


def test_a_store_without_checksums_is_refused(copy):
    manifest = json.loads((copy / "store.json").read_text())
    del manifest["files"]
    (copy / "store.json").write_text(json.dumps(manifest))
    with pytest.raises(config.ConfigError, match="made before checksums were kept; set Corpus.cache_gb=0"):
        opened(copy, 4)


def test_a_cache_that_is_too_small_is_said(whole, caplog):
    for settings, message in (({}, "set Corpus.shuffle_shards, or raise"), ({"shuffle_shards": 2}, "raise Corpus.cache_gb to 6.9e-05")):
        caplog.clear()
        opened(whole, 3, **settings)
        assert message in caplog.text
    caplog.clear()
    opened(whole, 4, shuffle_shards=2)
    opened(whole, 1000)
    assert caplog.text == ""


def test_without_a_cache_the_folder_is_opened(whole):
    corpus = dataclasses.replace(config.Corpus(), rows_dir=str(whole.parent))
    assert type(rows_in_place.open_stores({SOURCE: whole}, corpus)[SOURCE]["train"]) is store.Rows
