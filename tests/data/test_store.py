"""Stores on disk: nothing damaged, missing or foreign is read, and the message names the file."""

import json
import shutil

import numpy as np
import pytest

from maelm_jax import config
from maelm_jax.data import blocks, rows, store, store_manifest, vocabulary_training

LENGTH = 32


@pytest.fixture(scope="module")
def vocabulary():
    from pydoc_data import topics

    return vocabulary_training.train(topics.topics.values(), config.Vocabulary(size=400))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    from pydoc_data import topics

    folder = tmp_path_factory.mktemp("store")
    (folder / "a.txt").write_text("\n\n".join(" ".join(topic.split()) for topic in topics.topics.values()))
    return config.Corpus(
        text_files=f"{folder}/*.txt", sequence_length=LENGTH, heldout_fraction=0.1, rows_dir=str(folder / "rows"), processes=1
    )


@pytest.fixture(scope="module")
def whole(corpus, vocabulary):
    """A store of some twenty files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "SHARD_ROWS", 256)
        patch.setattr(blocks, "BLOCK_CHARACTERS", 100_000)
        (splits,) = rows.prepare(corpus, vocabulary).values()
    assert len(list((splits["train"].folder / "train" / "c").iterdir())) > 5
    return splits["train"].folder


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / whole.name)


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
    for split in blocks.SPLITS:
        np.testing.assert_array_equal(before[split], after[split])
    (said,) = [record.getMessage() for record in caplog.records]
    assert "made before checksums were kept" in said and str(copy) in said
    assert store_manifest.fingerprint(copy) is None and len(store_manifest.fingerprint(whole)) == 64


def test_the_same_text_gives_the_same_fingerprint(corpus, vocabulary, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "SHARD_ROWS", 256)
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 100_000)
    (splits,) = rows.prepare(config.dataclasses.replace(corpus, rows_dir=str(tmp_path)), vocabulary).values()
    assert store_manifest.fingerprint(splits["train"].folder) == store_manifest.fingerprint(whole)


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


def test_rows_of_zeros_are_stored_and_read(tmp_path, vocabulary):
    """An id 0 in every slot of a chunk is data, not absence."""
    table = np.zeros((40, 8), np.uint16)
    counts = {split: dict.fromkeys(blocks.COUNTS, 40) for split in blocks.SPLITS}
    with open(tmp_path / "block.npz", "wb") as file:
        np.savez(file, counts=json.dumps(counts), train=table, heldout=table)
    (tmp_path / "store").mkdir()
    store.write(tmp_path / "store", [tmp_path / "block.npz"], "here", "0", 8, np.dtype(np.uint16), 16)
    assert read_all(tmp_path / "store")["train"].tolist() == table.tolist()


DAMAGED = {
    "text": b"not JSON",
    "empty": b"",
    "binary": b"\xff\xfe\x00",
    "list": b"[]",
    "deep": b"[" * 100_000,
    "digits": b'{"length": ' + b"9" * 5000 + b"}",
    "null": b"null",
    "splits": b'{"vocabulary": "0", "length": 32, "splits": {"train": 3}}',
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_manifest_is_one_line(copy, name):
    (copy / "store.json").write_bytes(DAMAGED[name])
    with pytest.raises(config.ConfigError, match=r"store\.json: damaged") as caught:
        store.Rows.open(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [
    {"length": "32"}, {"length": 31}, {"length": True}, {"files": []}, {"files": {}}, {"files": {"train/zarr.json": {"bytes": "1"}}},
    {"splits": {"train": {}, "heldout": {}}}, {"vocabulary": 3},
], ids=str)  # fmt: skip
def test_a_manifest_of_wrong_types_or_of_other_arrays_is_one_line(copy, change):
    manifest = json.loads((copy / "store.json").read_text())
    (copy / "store.json").write_text(json.dumps(manifest | change))
    with pytest.raises(config.ConfigError, match=r"damaged|not \d+ x 31"):
        store.open_splits(copy)


def test_damaged_blocks_of_an_earlier_start_are_made_again(corpus, vocabulary, whole, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(rows, "SHARD_ROWS", 256)
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 100_000)
    elsewhere = config.dataclasses.replace(corpus, rows_dir=str(tmp_path))

    def refuse(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", refuse)
        with pytest.raises(KeyboardInterrupt):
            rows.prepare(elsewhere, vocabulary)
    (parts,) = tmp_path.glob("*.parts")
    found = sorted(parts.glob("*.npz"))
    assert len(found) >= 3
    found[0].write_bytes(b"")
    found[1].write_bytes(found[1].read_bytes()[:-40])
    content = bytearray(found[2].read_bytes())
    content[len(content) // 2] ^= 1
    found[2].write_bytes(content)
    (parts / "000000.json").write_text('{"blocks": "many"}')
    (splits,) = rows.prepare(elsewhere, vocabulary).values()
    again = [record.getMessage() for record in caplog.records if "made again" in record.getMessage()]
    assert len(again) == 4
    before = store.Rows.open(whole)
    np.testing.assert_array_equal(splits["train"][np.arange(len(splits["train"]))], before[np.arange(len(before))])


def test_a_block_that_is_damaged_while_it_is_joined_is_named(tmp_path):
    (tmp_path / "000000-000000.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(config.ConfigError, match=r"000000-000000\.npz: damaged"):
        store.write(tmp_path / "store", [tmp_path / "000000-000000.npz"], "here", "0", 8, np.dtype(np.uint16), 16)
