"""Exact duplicates: the first of equal documents stays, in the order of the text, whoever does the work."""

import dataclasses
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testing import prepared_rows

from maelm_jax import config
from maelm_jax.data import blocks, deduplication, sources, waiting


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=30))
def test_all_but_the_first_of_equal_rows_are_found(values):
    table = np.array([[value % 2, value // 2] for value in values], np.uint64).reshape(-1, 2)
    expected = [position for position, value in enumerate(values) if value in values[:position]]
    assert deduplication.positions_repeated(table).tolist() == expected


def test_duplicates_are_found_across_shards_without_their_text(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\none")
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "c.txt").write_text("three\n\n one \n\nthree")
    corpus = config.Corpus(rows_dir=str(tmp_path / "rows"), processes=1)
    shards = sources.shards(f"files:{tmp_path}/*.txt", corpus)
    deduplication.write_hashes(tmp_path / "parts", shards)
    assert [positions.tolist() for positions in deduplication.duplicates(tmp_path / "parts", 3)] == [[2], [0], [1, 2]]


def test_damaged_hashes_are_one_line(tmp_path):
    deduplication.hashes_path(tmp_path, 0).write_bytes(b"no array")
    with pytest.raises(config.ConfigError, match=r"000000\.hashes\.npy: damaged .*remove it and start prepare again"):
        deduplication.duplicates(tmp_path, 1)


def test_hosts_that_share_the_work_leave_out_the_same(documents, vocabulary, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 50_000)
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.05)
    for name, part in (("a", documents[:60]), ("b", documents[30:90]), ("c", documents[:90])):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(part))
    corpus = config.Corpus(
        text_files=f"{tmp_path}/*.txt", sequence_length=128, heldout_fraction=0.1, rows_dir=str(tmp_path / "one"), processes=1, deduplicate=True
    )
    alone = prepared_rows(corpus, vocabulary)
    shared = dataclasses.replace(corpus, rows_dir=str(tmp_path / "two"))
    other = threading.Thread(target=prepared_rows, args=(shared, vocabulary), kwargs={"host": 1, "hosts": 2}, daemon=True)
    other.start()
    both = prepared_rows(shared, vocabulary, host=0, hosts=2)
    other.join(timeout=60)
    for split, table in alone.items():
        np.testing.assert_array_equal(both[split], table)


def test_a_block_is_sent_to_a_worker_without_the_duplicates_of_its_file(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\none")
    [shard] = sources.shards(f"files:{tmp_path}/a.txt", config.Corpus(rows_dir=str(tmp_path / "rows"), processes=1))
    job = blocks.Job(tmp_path, shard, 0, 16, duplicates=np.asarray([2]))
    [block] = blocks._blocks(job)
    assert block.documents == ["one", "two"] and len(block.duplicates) == 0
