"""store.json: damaged or of wrong types it is one line; its fingerprint is of the text."""

import json

import pytest

from maelm_jax import config
from maelm_jax.data import blocks, rows, store, store_manifest

LENGTH = 32


def without_checksums(folder):
    """Makes the store what it was before checksums were kept."""
    manifest = json.loads((folder / "store.json").read_text())
    del manifest["files"]
    (folder / "store.json").write_text(json.dumps(manifest))


def test_the_same_text_gives_the_same_fingerprint(topics_corpus, small_vocabulary, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "SHARD_ROWS", 256)
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 100_000)
    (splits,) = rows.prepare(config.dataclasses.replace(topics_corpus, rows_dir=str(tmp_path)), small_vocabulary).values()
    assert store_manifest.fingerprint(splits["train"].folder) == store_manifest.fingerprint(whole)


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


@pytest.mark.parametrize(
    "change",
    [
        {"length": "32"},
        {"length": 31},
        {"length": True},
        {"files": []},
        {"files": {}},
        {"files": {"train/zarr.json": {"bytes": "1"}}},
        {"splits": {"train": {}, "heldout": {}}},
        {"vocabulary": 3},
    ],
    ids=str,
)
def test_a_manifest_of_wrong_types_or_of_other_arrays_is_one_line(copy, change):
    manifest = json.loads((copy / "store.json").read_text())
    (copy / "store.json").write_text(json.dumps(manifest | change))
    with pytest.raises(config.ConfigError, match=r"damaged|not \d+ x 31"):
        store.open_splits(copy)
