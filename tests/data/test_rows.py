"""Rows: nothing lost, segments whole, the same rows however the work is shared, and no store that only looks whole."""

import functools
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from maelm_jax import config, storage
from maelm_jax.data import blocks, packing, rows, vocabulary_training
from maelm_jax.data.documents import is_heldout
from maelm_jax.data.store import Rows

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def vocabulary(documents):
    return vocabulary_training.train(documents, config.Vocabulary(size=2000))


@pytest.fixture
def corpus(documents, tmp_path, monkeypatch):
    """Two files, cut into about ten blocks."""
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 100_000)
    monkeypatch.setattr(rows, "SHARD_ROWS", 256)
    monkeypatch.setattr(rows, "POLL_SECONDS", 0.05)
    half = len(documents) // 2
    for name, part in (("a", documents[:half]), ("b", documents[half:])):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(part))
    return config.Corpus(text_files=f"{tmp_path}/*.txt", sequence_length=128, heldout_fraction=0.1, rows_dir=str(tmp_path / "rows"), processes=1)


def variant(corpus, **changes):
    return config.dataclasses.replace(corpus, **changes)


def prepared(corpus, vocabulary, **kwargs):
    (splits,) = rows.prepare(corpus, vocabulary, **kwargs).values()
    return {split: store[np.arange(len(store))] for split, store in splits.items()}


def segments(table, vocabulary):
    """The segments of rows, in order, each a list of ids from `<s>` to before the next one or the padding."""
    result = []
    for row in table.tolist():
        filled = row[: row.index(vocabulary.pad)] if vocabulary.pad in row else row
        assert set(row[len(filled) :]) <= {vocabulary.pad}
        assert filled[0] == vocabulary.bos
        starts = [place for place, i in enumerate(filled) if i == vocabulary.bos]
        result += [filled[start:end] for start, end in zip(starts, [*starts[1:], len(filled)], strict=True)]
    return result


@pytest.mark.parametrize("length", [8, 17, 64, 512])
def test_packing_loses_nothing_and_mixes_no_documents(documents, vocabulary, length):
    chosen = documents[:12]
    table, count = packing.pack(chosen, vocabulary, length)
    found = segments(table, vocabulary)
    assert len(found) == count
    assert all(segment[-1] == vocabulary.eos and len(segment) > 2 for segment in found)
    for document in packing.tokenise(chosen, vocabulary):
        lines = [[i for ids in line for i in ids] for line in document]
        ids = [i for line in lines for i in line]
        collected, ends = [], set()
        while len(collected) < len(ids):  # whole segments add up to the document exactly: none holds a piece of the next
            for i in found.pop(0)[1:]:
                ends.add(len(collected)) if i == vocabulary.eos else collected.append(i)
        assert collected == ids
        assert set(np.cumsum([len(line) for line in lines])) <= ends, "each line ends with </s>"
    assert not found


def test_rows_break_at_sentences(documents, vocabulary):
    """A segment that goes on in the next row ends where a sentence ends, unless the sentence is longer than a row."""
    length = 128
    for text in documents[:30]:
        sentences = [ids for line in packing.tokenise([text], vocabulary)[0] for ids in line if ids]
        if max(map(len, sentences)) + 2 > length:
            continue
        ends = set(np.cumsum([len(ids) for ids in sentences]))
        place = 0
        for segment in segments(packing.pack([text], vocabulary, length)[0], vocabulary):
            place += sum(i not in (vocabulary.bos, vocabulary.eos) for i in segment)
            assert place in ends


def test_a_sentence_that_just_fits_fills_the_row(vocabulary):
    packer = packing.Packer(vocabulary, 16)
    packer.add([[[50] * 14]])
    packer.add([[[60] * 7]])
    packer.add([[[70] * 6]])  # 7 slots are left: too few to begin a segment
    assert packer.finish().tolist() == [[0, *[50] * 14, 2], [0, *[60] * 7, 2, *[1] * 7], [0, *[70] * 6, 2, *[1] * 8]]


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


def test_the_share_of_heldout_documents_is_the_fraction():
    share = np.mean([is_heldout(f"document {number}", 0.1) for number in range(10_000)])
    assert 0.09 < share < 0.11


def test_any_number_of_processes_and_hosts_makes_the_same_rows(corpus, vocabulary, tmp_path):
    one = prepared(corpus, vocabulary)
    two = prepared(variant(corpus, processes=2, rows_dir=str(tmp_path / "two")), vocabulary)
    results = {"two processes": two}
    for hosts in (2, 3):  # three hosts share two files by their blocks
        shared = variant(corpus, rows_dir=str(tmp_path / f"hosts{hosts}"))
        work = functools.partial(prepared, shared, vocabulary, hosts=hosts)
        others = [threading.Thread(target=work, kwargs={"host": host}, daemon=True) for host in range(1, hosts)]
        for thread in others:
            thread.start()
        results[f"{hosts} hosts"] = prepared(shared, vocabulary, host=0, hosts=hosts)
        for thread in others:
            thread.join(timeout=60)
            assert not thread.is_alive()
    for name, tables in results.items():
        for split, table in tables.items():
            np.testing.assert_array_equal(table, one[split], err_msg=f"{name}, {split}")


def test_two_preparations_at_once_make_one_whole_store(corpus, vocabulary, tmp_path, monkeypatch):
    """Both begin before either has written anything. The second waits for the first and uses its store."""
    alone = prepared(variant(corpus, rows_dir=str(tmp_path / "alone")), vocabulary)
    joined, results = [], []
    both_started, join = threading.Barrier(2), rows.store.write
    make = rows._make

    def slow_join(*arguments):
        joined.append(arguments)
        time.sleep(0.3)
        join(*arguments)

    monkeypatch.setattr(rows.store, "write", slow_join)
    monkeypatch.setattr(rows, "_make", lambda *arguments: both_started.wait(10) is not None and make(*arguments))
    threads = [threading.Thread(target=lambda: results.append(prepared(corpus, vocabulary)), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == 2 and len(joined) == 1
    for tables in results:
        for split, table in tables.items():
            np.testing.assert_array_equal(table, alone[split])
    assert not list((tmp_path / "rows").glob("*.parts"))


SCRIPT = """
import sys, time
from maelm_jax import config, storage
from maelm_jax.data import blocks, rows, vocabulary
if __name__ == "__main__":
    blocks.BLOCK_CHARACTERS = 100_000
    written = blocks._write_block
    def slow(*args):
        time.sleep(0.3)
        return written(*args)
    blocks._write_block = slow
    corpus = config.Corpus(text_files=sys.argv[1], sequence_length=128, heldout_fraction=0.1, rows_dir=sys.argv[2], processes=1)
    rows.prepare(corpus, vocabulary.load(sys.argv[3]))
"""


def test_killed_preparation_looks_unfinished_and_goes_on(corpus, vocabulary, tmp_path, monkeypatch):
    whole = prepared(variant(corpus, rows_dir=str(tmp_path / "whole")), vocabulary)
    saved = vocabulary.save(tmp_path / "vocabulary")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "script.py", corpus.text_files, corpus.rows_dir, saved]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    folder = tmp_path / "rows"
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*.parts/*.npz"))) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(list(folder.glob("*.parts/*.npz")))
    assert not list(folder.glob("*/store.json"))
    with pytest.raises(config.ConfigError, match="no whole store"):
        Rows.open(next(folder.glob("*.parts")))

    written = []
    original = blocks._write_block
    monkeypatch.setattr(blocks, "_write_block", lambda job, vocabulary: written.append(job.block) or original(job, vocabulary))
    resumed = prepared(corpus, vocabulary)
    for split in whole:
        np.testing.assert_array_equal(resumed[split], whole[split])
    assert done >= 3 and len(written) > 0
    written_whole = len(written)
    prepared(corpus, vocabulary)
    assert len(written) == written_whole, "a whole store is used as it is"
    assert not list(folder.glob("*.parts"))
    prepared(variant(corpus, rows_dir=str(tmp_path / "again")), vocabulary)
    assert len(written) - written_whole == written_whole + done, "finished blocks are not done twice"


def test_a_join_that_was_cut_off_is_done_again(corpus, vocabulary, monkeypatch):
    def full(path, content):
        if path.name == "store.json":
            raise OSError(28, "No space left on device")
        return original(path, content)

    original = storage.write
    monkeypatch.setattr(storage, "write", full)
    with pytest.raises(OSError, match="No space"):
        rows.prepare(corpus, vocabulary)
    monkeypatch.setattr(storage, "write", original)
    assert len(prepared(corpus, vocabulary)["train"]) > 100


def test_a_host_that_waits_for_a_dead_one_gives_up(corpus, vocabulary, monkeypatch):
    monkeypatch.setattr(rows, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(rows, "POLL_SECONDS", 0.1)
    with pytest.raises(config.RunError, match="no host wrote anything"):
        rows.prepare(corpus, vocabulary, host=0, hosts=2)


def test_a_vocabulary_knows_nothing_of_heldout_text(corpus, tmp_path):
    trained = vocabulary_training.vocabulary_for(config.Vocabulary(size=500), corpus)
    candidates = (f"Zyzzyva zyzzyva number {number}." for number in range(1000))
    secret = next(text for text in candidates if is_heldout(text, corpus.heldout_fraction))
    (tmp_path / "c.txt").write_text(f"{secret}\n\n" * 1000)
    more = variant(corpus, text_files=f"{tmp_path}/*.txt")
    assert vocabulary_training.vocabulary_for(config.Vocabulary(size=500), more).fingerprint == trained.fingerprint


def test_what_determines_the_rows_is_in_their_key(corpus, vocabulary, documents, tmp_path):
    def stores():
        return {path.parent.name for path in (tmp_path / "rows").glob("*/store.json")}

    rows.prepare(corpus, vocabulary)
    other = vocabulary_training.train(documents, config.Vocabulary(size=1000))
    for number, change in enumerate(
        (
            lambda: rows.prepare(corpus, other),
            lambda: rows.prepare(variant(corpus, sequence_length=64), vocabulary),
            lambda: rows.prepare(variant(corpus, heldout_fraction=0.2), vocabulary),
            lambda: (tmp_path / "b.txt").write_text("Another text altogether, though a short one.") and rows.prepare(corpus, vocabulary),
        )
    ):
        change()
        assert len(stores()) == number + 2
    rows.prepare(variant(corpus, processes=2), vocabulary)
    assert len(stores()) == 5


def test_rows_copied_to_a_machine_without_the_text_are_used(corpus, vocabulary, tmp_path):
    here = prepared(corpus, vocabulary)
    trained = vocabulary_training.vocabulary_for(config.Vocabulary(size=500), corpus)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).unlink()
    np.testing.assert_array_equal(prepared(corpus, vocabulary)["train"], here["train"])
    assert vocabulary_training.vocabulary_for(config.Vocabulary(size=500), corpus).fingerprint == trained.fingerprint
    with pytest.raises(config.ConfigError, match="no text file matches"):
        rows.prepare(variant(corpus, sequence_length=64), vocabulary)


def test_rows_are_read_in_any_order(corpus, vocabulary):
    (stores,) = rows.prepare(corpus, vocabulary).values()
    store = stores["train"]
    table = store[np.arange(len(store))]
    numbers = np.random.default_rng(0).integers(0, len(store), 100)
    assert table.dtype == np.int32 and table.shape == (len(store), 128)
    np.testing.assert_array_equal(store[numbers], table[numbers])


def test_fill_at_512_on_the_corpus(documents, vocabulary):
    table, _ = packing.pack(documents, vocabulary, 512)
    assert (table != vocabulary.pad).mean() > 0.94


def test_too_little_text_is_an_error(vocabulary, tmp_path):
    text = next(f"Document {number}." for number in range(1000) if is_heldout(f"Document {number}.", 0.1))
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(config.ConfigError, match="no text left to train on"):
        rows.prepare(config.Corpus(text_files=f"{tmp_path}/a.txt", heldout_fraction=0.1, rows_dir=str(tmp_path / "rows"), processes=1), vocabulary)


def test_reading_rows_needs_neither_tensorflow_nor_seqio():
    heavy = "{'tensorflow', 'seqio', 'tensorflow_datasets', 'jax'}"
    code = f"import sys, maelm_jax.data.batches, maelm_jax.data.rows, maelm_jax.prepare; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip() == "[]"
