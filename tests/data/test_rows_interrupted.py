"""Preparations of rows that are killed, cut off or stopped by a full disk: no store only looks whole, and the next one goes on."""

import contextlib
import functools
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from testing import prepared_rows

from maelm_jax import config, storage
from maelm_jax.data import blocks, deduplication, rows, store, waiting
from maelm_jax.data.store import Rows

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, time
from maelm_jax import config, storage
from maelm_jax.data import blocks, rows, vocabularies
if __name__ == "__main__":
    blocks.BLOCK_CHARACTERS = 4_000
    write, count = blocks._write_block, 0
    def three_blocks(*args):
        global count
        count += 1
        if count > 3:
            time.sleep(3600)
        return write(*args)
    blocks._write_block = three_blocks
    corpus = config.Corpus(text_files=sys.argv[1], sequence_length=128, heldout_fraction=0.1, rows_dir=sys.argv[2], processes=1)
    rows.prepare(corpus, vocabularies.load(sys.argv[3]))
"""


def test_killed_preparation_looks_unfinished_and_goes_on(short_corpus, vocabulary, tmp_path, monkeypatch):
    corpus = short_corpus
    whole = prepared_rows(config.dataclasses.replace(corpus, rows_dir=str(tmp_path / "whole")), vocabulary)
    saved = vocabulary.save(tmp_path / "vocabulary")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "script.py", corpus.text_files, corpus.rows_dir, saved]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    folder = tmp_path / "rows"
    deadline = time.monotonic() + 300
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
    resumed = prepared_rows(corpus, vocabulary)
    for split in whole:
        np.testing.assert_array_equal(resumed[split], whole[split])
    assert done == 3 and len(written) > 3
    written_whole = len(written)
    prepared_rows(corpus, vocabulary)
    assert len(written) == written_whole, "a whole store is used as it is"
    assert not list(folder.glob("*.parts"))
    prepared_rows(config.dataclasses.replace(corpus, rows_dir=str(tmp_path / "again")), vocabulary)
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
    assert len(prepared_rows(corpus, vocabulary)["train"]) > 100


@pytest.mark.parametrize("work", [rows.prepare, lambda *args: rows.write_part(*args, 0, 1)], ids=["prepare", "write_part"])
def test_a_source_that_changes_while_it_is_read_is_named_and_its_blocks_are_not_used(corpus, vocabulary, tmp_path, monkeypatch, work):
    original = blocks._write_block

    def change(job, vocabulary):
        (tmp_path / "b.txt").write_text("Another text. " * (job.block + 2))
        return original(job, vocabulary)

    monkeypatch.setattr(blocks, "_write_block", change)
    with pytest.raises(config.ConfigError, match=r"changed while it was read \(\S+/b\.txt \w+ -> \w+\); give the same command again"):
        work(corpus, vocabulary)
    assert not list((tmp_path / "rows").glob("*.parts")) and not list((tmp_path / "rows").glob("*/store.json"))


@pytest.mark.parametrize("work", [rows.prepare, lambda *args: rows.write_part(*args, 0, 2)], ids=["prepare", "write_part"])
def test_a_source_that_changes_before_it_is_read_makes_no_store_of_its_name(corpus, vocabulary, tmp_path, monkeypatch, work):
    """The folder is named after the text at the start of the command, which may then wait for another process."""
    only_process = rows._only_process

    def change(parts, host):
        (tmp_path / "b.txt").write_text("Another text.")
        return only_process(parts, host)

    monkeypatch.setattr(rows, "_only_process", change)
    with pytest.raises(config.ConfigError, match="the text changed after the command began; give the same command again"):
        work(corpus, vocabulary)
    assert not list((tmp_path / "rows").rglob("*.npz"))


def test_a_disk_that_is_full_at_the_join_is_one_line(corpus, vocabulary, monkeypatch):
    def full(*_):
        raise ValueError("RESOURCE_EXHAUSTED: Error writing local file: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(rows.store, "_write_array", full)
        with pytest.raises(config.RunError, match="the rows could not be written .*No space left.*it joins the finished blocks"):
            rows.prepare(corpus, vocabulary)
    assert len(prepared_rows(corpus, vocabulary)["train"]) > 100


@pytest.mark.parametrize("parts", [0, 1, 2, 3])
def test_preparations_killed_at_random_make_the_same_store(small_corpus, small_vocabulary, tmp_path, monkeypatch, parts):
    """The local driver (0) and tasks of an array job end before, within or after the write of a random file."""
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 200)
    (one,) = rows.prepare(small_corpus, small_vocabulary).values()
    random, write = np.random.default_rng(parts), storage.atomic_file

    class Killed(BaseException):
        pass

    @contextlib.contextmanager
    def killed_at_random(path):
        moment = random.integers(0, 9)
        if moment == 0:
            raise Killed
        with write(path) as file:
            yield file
            if moment == 1:
                raise Killed
        if moment == 2:
            raise Killed

    killed, kills = config.dataclasses.replace(small_corpus, rows_dir=str(tmp_path / "killed")), 0
    monkeypatch.setattr(storage, "atomic_file", killed_at_random)
    tasks = [functools.partial(rows.write_part, killed, small_vocabulary, part, parts) for part in range(parts)]
    tasks.append(functools.partial(rows.join if parts else rows.prepare, killed, small_vocabulary))
    while tasks:
        try:
            tasks[0]()
            tasks.pop(0)
        except Killed:
            kills += 1
    (folder,) = rows.folders(killed, small_vocabulary).values()
    assert kills > 1 and (folder / "store.json").read_bytes() == (one["train"].folder / "store.json").read_bytes()


@pytest.mark.parametrize("work", [rows.prepare, rows.join])
def test_blocks_that_a_kill_left_beside_a_whole_store_are_removed(small_corpus, small_vocabulary, monkeypatch, work):
    class Killed(BaseException):
        pass

    def killed(*_, **__):
        raise Killed

    rows.write_part(small_corpus, small_vocabulary, 0, 1)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(rows.shutil, "rmtree", killed)
        work(small_corpus, small_vocabulary)
    (folder,) = rows.folders(small_corpus, small_vocabulary).values()
    assert rows.is_complete(folder) and rows.blocks_folder(folder).is_dir()
    rows.prepare(small_corpus, small_vocabulary)
    assert rows.is_complete(folder) and not rows.blocks_folder(folder).exists()


@pytest.mark.parametrize("remaining", [1, 2, 4, 8])
def test_a_preparation_that_filled_the_disk_goes_on_to_the_same_store(small_corpus, small_vocabulary, tmp_path, monkeypatch, remaining):
    """The disk is full before the last writes."""
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 200)
    write, writes, space = storage.atomic_file, [], math.inf

    @contextlib.contextmanager
    def until_full(path):
        writes.append(path)
        with write(path) as file:
            yield file
            if len(writes) > space:
                raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(storage, "atomic_file", until_full)
    (one,) = rows.prepare(small_corpus, small_vocabulary).values()
    space = len(writes) - remaining
    writes.clear()
    other = config.dataclasses.replace(small_corpus, rows_dir=str(tmp_path / "other"))
    with pytest.raises(OSError, match="No space left on device"):
        rows.prepare(other, small_vocabulary)
    assert not list((tmp_path / "other").rglob("*.tmp")) and not list((tmp_path / "other").glob("*/store.json"))
    space = math.inf
    (two,) = rows.prepare(other, small_vocabulary).values()
    assert (two["train"].folder / "store.json").read_bytes() == (one["train"].folder / "store.json").read_bytes()


def test_a_host_waits_as_long_as_the_first_one_joins(small_corpus, small_vocabulary, monkeypatch):
    """A join adds no file to the folder that the others watch."""
    original = store.write

    def slow(*args):
        time.sleep(3 * waiting.SILENCE_SECONDS)
        original(*args)

    monkeypatch.setattr(store, "write", slow)
    monkeypatch.setattr(waiting, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(waiting, "BEAT_SECONDS", 0.05)
    first = threading.Thread(target=rows.prepare, args=(small_corpus, small_vocabulary, 0, 2), daemon=True)
    first.start()
    (stores,) = rows.prepare(small_corpus, small_vocabulary, 1, 2).values()
    first.join(60)
    assert len(stores["train"]) and not first.is_alive()


def test_a_host_that_waits_for_a_dead_one_gives_up(corpus, vocabulary, monkeypatch):
    monkeypatch.setattr(waiting, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.1)
    with pytest.raises(config.RunError, match="no host wrote anything"):
        rows.prepare(corpus, vocabulary, host=0, hosts=2)


def test_leaving_out_a_bad_file_keeps_the_blocks_that_are_finished(corpus, vocabulary, tmp_path, monkeypatch):
    (tmp_path / "c.jsonl").write_text("{")
    corpus = config.dataclasses.replace(corpus, text_files=f"{tmp_path}/[abc].*")
    with pytest.raises(config.ConfigError, match="c.jsonl:1: not JSON"):
        rows.prepare(corpus, vocabulary)
    (parts,) = (tmp_path / "rows").glob("*.parts")
    finished = len(list(parts.glob("*.npz")))
    written = []
    write = blocks._write_block
    monkeypatch.setattr(blocks, "_write_block", lambda block, vocabulary: written.append(block.block) or write(block, vocabulary))
    (splits,) = rows.prepare(config.dataclasses.replace(corpus, skip_bad_files=True), vocabulary).values()
    assert finished > 5 and not written and len(splits["train"]) > 100
    assert not list((tmp_path / "rows").glob("*.parts"))


def test_blocks_that_another_process_works_on_are_left_to_it(corpus, vocabulary, tmp_path):
    (tmp_path / "c.jsonl").write_text("{")
    corpus = config.dataclasses.replace(corpus, text_files=f"{tmp_path}/[abc].*")
    with pytest.raises(config.ConfigError, match="c.jsonl:1: not JSON"):
        rows.prepare(corpus, vocabulary)
    (parts,) = (tmp_path / "rows").glob("*.parts")
    with open(parts / "host-0.lock", "wb") as lock:
        assert storage.try_lock(lock)
        rows.prepare(config.dataclasses.replace(corpus, skip_bad_files=True), vocabulary)
    assert list(parts.glob("*.npz"))


def test_hosts_that_see_different_text_are_told_so(corpus, vocabulary, tmp_path, monkeypatch):
    monkeypatch.setattr(waiting, "OTHER_TEXT_SECONDS", 0.2)
    monkeypatch.setattr(waiting, "SILENCE_SECONDS", 2.0)
    with pytest.raises(config.RunError, match="no host wrote anything"):
        rows.prepare(corpus, vocabulary, host=0, hosts=2)
    (tmp_path / "b.txt").write_text("Another text, which only the second host has.\n\n" * 50)
    with pytest.raises(config.RunError, match="no host wrote anything"):  # the folder of the first host is older
        rows.prepare(corpus, vocabulary, host=1, hosts=2)
    first, second = sorted((tmp_path / "rows").glob("*.parts"), key=lambda path: path.stat().st_mtime)
    os.utime(first)
    with pytest.raises(config.RunError, match=f"works in {second}, another one in {first.name}: the hosts see different text"):
        rows.prepare(corpus, vocabulary, host=1, hosts=2)


def test_a_host_waits_as_long_as_another_one_reads_a_large_file(small_corpus, small_vocabulary, tmp_path, monkeypatch):
    """Hashes and blocks are written after a file is read, which can take longer than the hosts wait for a file."""
    original = deduplication.write_hashes

    def slow(folder, shards, host, hosts):
        if host == 1:
            time.sleep(3 * waiting.SILENCE_SECONDS)
        original(folder, shards, host, hosts)

    monkeypatch.setattr(deduplication, "write_hashes", slow)
    monkeypatch.setattr(waiting, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(waiting, "BEAT_SECONDS", 0.05)
    for name in "ab":  # one for each host
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"Text {number} of {name}. " * 20 for number in range(300)))
    unique = config.dataclasses.replace(small_corpus, deduplicate=True)
    second = threading.Thread(target=rows.prepare, args=(unique, small_vocabulary, 1, 2), daemon=True)
    second.start()
    (stores,) = rows.prepare(unique, small_vocabulary, 0, 2).values()
    second.join(60)
    assert len(stores["train"]) and not second.is_alive()
