"""Stores on disk: nothing damaged, missing or foreign is read, and the message names the file."""

import json
import shutil

import numpy as np
import pytest

from maelm_jax import config
from maelm_jax.data import block_files, store, store_manifest

LENGTH = 32


def read_all(folder):
    opened = store.open_splits(folder)
    return {split: found[np.arange(len(found))] for split, found in opened.items()}


def without_checksums(folder):
    """Makes the store what it was before checksums were kept."""
    manifest = json.loads((folder / "store.json").read_text())
    del manifest["files"]
    (folder / "store.json").write_text(json.dumps(manifest))


def test_a_whole_store_reads_the_same_with_and_without_checksums(whole, copy, caplog):
    without_checksums(copy)
    before, after = read_all(whole), read_all(copy)
    assert not (before["train"] == 0).all()
    for split in block_files.SPLITS:
        np.testing.assert_array_equal(before[split], after[split])
    (said,) = [record.getMessage() for record in caplog.records]
    assert "made before checksums were kept" in said and str(copy) in said
    assert store_manifest.fingerprint(copy) is None and len(store_manifest.fingerprint(whole)) == 64


@pytest.mark.parametrize("name", ["train/c/1/0", "heldout/c/0/0", "train/zarr.json"])
@pytest.mark.parametrize("old", [False, True], ids=["checksums", "sizes"])
@pytest.mark.parametrize("what", ["remove", "cut", "grow", "empty"])
def test_files_missing_or_of_another_size_are_named_at_opening(copy, name, old, what):
    if old:
        without_checksums(copy)
    path = copy / name
    content = path.read_bytes()
    path.unlink() if what == "remove" else path.write_bytes({"cut": content[:-1], "grow": content + b"0", "empty": b""}[what])
    with pytest.raises(config.ConfigError, match="maelm_jax.prepare again") as caught:
        store.open_splits(copy)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("place", [100, -30, -2], ids=["ids", "index", "index checksum"])
def test_a_flipped_bit_is_seen_at_the_first_read_of_its_file(copy, place):
    path = copy / "train" / "c" / "1" / "0"
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
    opened = store.open_splits(copy)["train"]
    assert opened[np.arange(256)].shape == (256, LENGTH), "other files can be read"
    for _ in range(2):
        with pytest.raises(config.ConfigError, match="damaged") as caught:
            opened[np.array([3, 300])]
        assert str(path) in str(caught.value)


def test_a_file_of_another_place_is_seen(copy):
    """The size is right and so is every checksum within the file."""
    shutil.copy(copy / "train" / "c" / "2" / "0", copy / "train" / "c" / "1" / "0")
    with pytest.raises(config.ConfigError, match="c/1/0: damaged"):
        store.open_splits(copy)["train"][np.array([256])]


def test_each_file_is_verified_once(copy, monkeypatch):
    checked = []
    original = store_manifest.check_content
    monkeypatch.setattr(store_manifest, "check_content", lambda folder, name, expected: checked.append(name) or original(folder, name, expected))
    opened = store.open_splits(copy)["train"]
    assert checked == ["train/zarr.json", "heldout/zarr.json"]
    opened[np.array([0, 1, 255])]
    opened[np.array([5, 256])]
    opened[np.array([6, 300])]
    assert checked[2:] == ["train/c/0/0", "train/c/1/0"]


def test_a_file_that_goes_while_rows_are_read_does_not_read_as_zeros(copy):
    without_checksums(copy)
    opened = store.open_splits(copy)["train"]
    (copy / "train" / "c" / "1" / "0").unlink()
    with pytest.raises(config.ConfigError, match="c/1/0"):
        opened[np.array([300])]


def test_rows_of_zeros_are_stored_and_read(tmp_path, small_vocabulary):
    """An id 0 in every slot of a chunk is data, not absence."""
    table = np.zeros((40, 8), np.uint16)
    counts = {split: dict.fromkeys(block_files.COUNTS, 40) for split in block_files.SPLITS}
    with open(tmp_path / "block.npz", "wb") as file:
        np.savez(file, counts=json.dumps(counts), train=table, heldout=table)
    (tmp_path / "store").mkdir()
    store.write(tmp_path / "store", [tmp_path / "block.npz"], "here", "0", 8, np.dtype(np.uint16), 16)
    assert read_all(tmp_path / "store")["train"].tolist() == table.tolist()
