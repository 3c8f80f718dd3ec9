"""Rows: nothing lost, segments whole, the same rows however the work is shared."""

import functools
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from testing import prepared_rows

from maelm_jax import config
from maelm_jax.data import packing, rows
from maelm_jax.data.documents import is_heldout

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_splits_are_disjoint_and_by_text(documents, corpus, vocabulary):
    (stores,) = rows.prepare(corpus, vocabulary).values()
    counted = {split: store.statistics["documents"] for split, store in stores.items()}
    assert sum(counted.values()) == len(documents)
    assert counted["heldout"] == sum(is_heldout(text, 0.1) for text in documents) > 2
    for split, store in stores.items():
        chosen = [text for text in documents if is_heldout(text, 0.1) == (split == "heldout")]
        expected = [i for document in packing.tokenise(chosen, vocabulary) for line in document for ids in line for i in ids]
        table = store[np.arange(len(store))]
        assert table[np.isin(table, (vocabulary.bos, vocabulary.eos, vocabulary.pad), invert=True)].tolist() == expected, "the text in its order"
        assert store.statistics["tokens"] == (table != vocabulary.pad).sum()
        assert store.statistics["segments"] == (table == vocabulary.bos).sum()
        assert store.statistics["bytes"] == sum(len(text.encode()) for text in chosen)


def test_any_number_of_processes_and_hosts_makes_the_same_rows(short_corpus, vocabulary, tmp_path):
    corpus = short_corpus
    one = prepared_rows(corpus, vocabulary)
    two = prepared_rows(config.dataclasses.replace(corpus, processes=2, rows_dir=str(tmp_path / "two")), vocabulary)
    results = {"two processes": two}
    for hosts in (2, 3):  # three hosts share two files by their blocks
        shared = config.dataclasses.replace(corpus, rows_dir=str(tmp_path / f"hosts{hosts}"))
        work = functools.partial(prepared_rows, shared, vocabulary, hosts=hosts)
        others = [threading.Thread(target=work, kwargs={"host": host}, daemon=True) for host in range(1, hosts)]
        for thread in others:
            thread.start()
        results[f"{hosts} hosts"] = prepared_rows(shared, vocabulary, host=0, hosts=hosts)
        for thread in others:
            thread.join(timeout=300)
            assert not thread.is_alive()
    for name, tables in results.items():
        for split, table in tables.items():
            np.testing.assert_array_equal(table, one[split], err_msg=f"{name}, {split}")


def test_parts_of_an_array_job_join_to_the_same_store(corpus, vocabulary, tmp_path):
    """In any order, one of them twice; more parts than files are divided by blocks."""
    (one,) = rows.prepare(corpus, vocabulary).values()
    for order in ((1, 0, 1), (2, 0, 1)):
        parted = config.dataclasses.replace(corpus, rows_dir=str(tmp_path / f"parts{len(set(order))}"))
        for position, part in enumerate(order):
            if position == len(set(order)) - 1:
                with pytest.raises(config.ConfigError, match=r"files are not finished, the first is \S+\.txt; run prepare with every --shard"):
                    rows.join(parted, vocabulary)
            rows.write_part(parted, vocabulary, part, len(set(order)))
        rows.join(parted, vocabulary)
        (folder,) = rows.folders(parted, vocabulary).values()
        assert (folder / "store.json").read_bytes() == (one["train"].folder / "store.json").read_bytes()
        assert not list(folder.parent.glob("*.parts"))
        rows.join(parted, vocabulary)  # once more changes nothing


def test_an_array_job_cannot_deduplicate(corpus, vocabulary):
    with pytest.raises(config.ConfigError, match="Corpus.deduplicate compares all documents.* start prepare with --host=I --hosts=N instead"):
        rows.write_part(config.dataclasses.replace(corpus, deduplicate=True), vocabulary, 0, 2)


def test_two_preparations_at_once_make_one_whole_store(corpus, vocabulary, tmp_path, monkeypatch):
    """Both begin before either has written anything. The second waits for the first and uses its store."""
    alone = prepared_rows(config.dataclasses.replace(corpus, rows_dir=str(tmp_path / "alone")), vocabulary)
    joined, results = [], []
    both_started, join = threading.Barrier(2), rows.store.write
    make = rows._make

    def slow_join(*arguments):
        joined.append(arguments)
        time.sleep(0.3)
        join(*arguments)

    monkeypatch.setattr(rows.store, "write", slow_join)
    monkeypatch.setattr(rows, "_make", lambda *arguments: both_started.wait(120) is not None and make(*arguments))
    threads = [threading.Thread(target=lambda: results.append(prepared_rows(corpus, vocabulary)), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert len(results) == 2 and len(joined) == 1
    for tables in results:
        for split, table in tables.items():
            np.testing.assert_array_equal(table, alone[split])
    assert not list((tmp_path / "rows").glob("*.parts"))


def test_rows_are_read_in_any_order(corpus, vocabulary):
    (stores,) = rows.prepare(corpus, vocabulary).values()
    store = stores["train"]
    table = store[np.arange(len(store))]
    numbers = np.random.default_rng(0).integers(0, len(store), 100)
    assert table.dtype == np.int32 and table.shape == (len(store), 128)
    np.testing.assert_array_equal(store[numbers], table[numbers])


def test_too_little_text_is_an_error(vocabulary, tmp_path):
    text = next(f"Document {number}." for number in range(1000) if is_heldout(f"Document {number}.", 0.1))
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(config.ConfigError, match="no text left to train on"):
        rows.prepare(config.Corpus(text_files=f"{tmp_path}/a.txt", heldout_fraction=0.1, rows_dir=str(tmp_path / "rows"), processes=1), vocabulary)


def test_reading_rows_needs_neither_tensorflow_nor_seqio():
    heavy = "{'tensorflow', 'seqio', 'tensorflow_datasets', 'jax'}"
    code = f"import sys, maelm_jax.data.batches, maelm_jax.data.rows, maelm_jax.prepare; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip() == "[]"
