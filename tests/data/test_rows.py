"""The store: nothing damaged, missing or foreign is read, and the message names the file."""

import shutil

import numpy as np
import pytest

from maelm_jax import config
from maelm_jax.data import rows

LENGTH = 32


def opened(store):
    return rows.open_stores({"here": str(store)})["here"]


def test_rows_are_read_in_any_order_with_repeats(whole):
    train = opened(whole)["train"]
    table = train[np.arange(len(train))]
    numbers = np.random.default_rng(0).integers(0, len(train), 100)
    assert table.dtype == np.int32 and table.shape == (len(train), LENGTH)
    np.testing.assert_array_equal(train[numbers], table[numbers])
    assert train[np.zeros(0, np.int64)].shape == (0, LENGTH)
    assert train.shard_rows == 256 and train.length == LENGTH


@pytest.mark.parametrize("place", [2500, -30, 8], ids=["ids", "last ids", "index"])
def test_a_flipped_bit_is_seen_at_the_first_read(copy, place):
    path = copy / "train" / "c" / "1" / "0"
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
    train = opened(copy)["train"]
    assert train[np.arange(256)].shape == (256, LENGTH), "other files can be read"
    for _ in range(2):
        with pytest.raises(config.ConfigError) as caught:
            train[np.arange(3, 512)]
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("cut", [0, 1, 5000])
def test_a_file_that_is_cut_off_is_seen(copy, cut):
    path = copy / "train" / "c" / "1" / "0"
    path.write_bytes(path.read_bytes()[:-cut] if cut else b"")
    with pytest.raises(config.ConfigError, match="c/1/0"):
        opened(copy)["train"][np.arange(512)]


@pytest.mark.parametrize("name", ["train/c/1/0", "train/zarr.json", "heldout/zarr.json", "store.json"])
def test_a_file_that_is_missing_is_no_file_of_zeros(copy, name):
    (copy / name).unlink()
    with pytest.raises(config.ConfigError, match=name):
        opened(copy)["train"][np.arange(512)]


def test_a_file_that_goes_while_rows_are_read_does_not_read_as_zeros(copy):
    train = opened(copy)["train"]
    (copy / "train" / "c" / "1" / "0").unlink()
    with pytest.raises(config.ConfigError, match="c/1/0"):
        train[np.array([300])]


@pytest.mark.parametrize("name", ["train/zarr.json", "store.json"])
@pytest.mark.parametrize("content", [b"{", b"{}"])
def test_damaged_metadata_is_named(copy, name, content):
    (copy / name).write_bytes(content)
    with pytest.raises(config.ConfigError, match=name):
        opened(copy)


def test_an_array_of_another_store_is_seen(copy):
    shutil.rmtree(copy / "train")
    shutil.copytree(copy / "heldout", copy / "train")
    with pytest.raises(config.ConfigError, match="train"):
        opened(copy)


def test_rows_of_zeros_are_stored_and_read(tmp_path):
    """An id 0 in every slot of a chunk is data, not absence."""
    table = np.zeros((40, 8), np.uint16)
    counts = {split: dict.fromkeys(rows.COUNTS, 40) for split in rows.SPLITS}
    rows.write(tmp_path / "store", lambda split: [table[:7], table[7:]], counts, 8, table.dtype, {})
    assert opened(tmp_path / "store")["train"][np.arange(40)].tolist() == table.tolist()
    one = rows.read_manifest(tmp_path / "store")["fingerprint"]
    rows.write(tmp_path / "other", lambda split: [table], counts, 8, table.dtype, {})
    assert rows.read_manifest(tmp_path / "other")["fingerprint"] == one
    table[3, 3] = 1
    rows.write(tmp_path / "third", lambda split: [table], counts, 8, table.dtype, {})
    assert rows.read_manifest(tmp_path / "third")["fingerprint"] != one


def test_what_is_remembered_is_recalled(tmp_path):
    corpus = config.Corpus(rows_dir=str(tmp_path))
    assert rows.recall(corpus, "rows-1") is None
    rows.remember(corpus, "rows-1", {"a": [1]})
    assert rows.recall(corpus, "rows-1") == {"a": [1]}
    (tmp_path / "rows-1.json").write_text("{")
    with pytest.raises(config.ConfigError, match="rows-1.json"):
        rows.recall(corpus, "rows-1")
