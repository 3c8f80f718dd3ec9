"""The file that names the row stores of a run."""

import pytest

from maelm_jax import config
from maelm_jax.training import row_record


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"vocabulary": "a", "length": 32, "sources": {}}',
        b'{"vocabulary": "a", "length": 32, "sources": {"files:a": {"store": "../x", "fingerprint": null, "rows": {}, "rate": 1.0, "text": {}}}}',
        b'{"vocabulary": "a", "length": 32, "sources": {"files:a": {"store": "x", "fingerprint": 3, "rows": {}, "rate": 1.0, "text": {}}}}',
    ],
)
def test_a_damaged_record_is_one_line(tmp_path, content):
    (tmp_path / row_record.FILE).write_bytes(content)
    with pytest.raises(config.ConfigError, match=r"rows\.json: damaged") as caught:
        row_record.read(str(tmp_path))
    assert "\n" not in str(caught.value)


def record(**changes) -> dict:
    entry = {"store": "a-1-2", "fingerprint": "0" * 64, "rows": {"train": 9, "heldout": 1}, "rate": 1.0, "text": {"a.txt": "1"}}
    return {"vocabulary": "v", "length": 32, "sources": {"files:a": entry | changes}}


@pytest.mark.parametrize(
    "changes,described",
    [
        ({}, []),
        ({"text": {"a.txt": "2"}}, []),
        ({"store": "a-1-3"}, []),
        ({"rate": 0.5}, ["rate of files:a 1.0 -> 0.5"]),
        ({"fingerprint": "1" * 64}, ["fingerprint of files:a 000000000000 -> 111111111111"]),
        ({"fingerprint": None, "store": "a-1-3"}, ["store of files:a a-1-2 -> a-1-3"]),
    ],
    ids=str,
)
def test_records_differ_in_what_the_rows_hold(changes, described):
    """The text that rows were made from does not count, nor a store's name where fingerprints tell."""
    assert row_record.differences(record(), record(**changes)) == described


def test_sources_that_are_new_or_gone_are_named():
    other = record()
    other["sources"] = {"files:b": other["sources"]["files:a"]}
    assert row_record.differences(record(), other) == ["files:a is gone", "files:b is new"]
