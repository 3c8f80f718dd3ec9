"""Hashes of files: several at a time, kept while the work goes on, and the work ends with an error."""

import concurrent.futures
import hashlib
import json
import pathlib
import threading
import time

import pytest

from maelm_jax import config
from maelm_jax.data import file_access, file_hashes, waiting
from maelm_jax.data.documents import BadFile


@pytest.fixture
def files(tmp_path) -> list[str]:
    paths = [tmp_path / f"{number:03}.txt" for number in range(40)]
    for path in paths:
        path.write_text(path.name)
    return list(map(str, paths))


def corpus_of(tmp_path, **settings) -> config.Corpus:
    return config.Corpus(rows_dir=str(tmp_path / "rows"), **settings)


def test_the_hashes_are_those_of_the_contents(files, tmp_path):
    corpus = corpus_of(tmp_path, processes=3)
    expected = {path: hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest() for path in files}
    assert file_hashes.of_files(files, corpus) == expected == file_hashes.of_files(files, corpus)


def test_an_unchanged_file_is_read_once(files, tmp_path, monkeypatch):
    corpus = corpus_of(tmp_path, processes=2)
    first = file_hashes.of_files(files, corpus)
    monkeypatch.setattr(file_access, "content_hash", lambda path: pytest.fail(f"{path} is read again"))
    assert file_hashes.of_files(files, corpus) == first


def test_files_are_read_at_the_same_time(files, tmp_path, monkeypatch):
    together, original = threading.Barrier(4), file_access.content_hash

    def read(path):
        together.wait(timeout=60)
        return original(path)

    monkeypatch.setattr(file_access, "content_hash", read)
    file_hashes.of_files(files, corpus_of(tmp_path, processes=4))


def test_of_processes_that_start_together_one_reads_the_files(files, tmp_path, monkeypatch):
    """Each of these threads opens the lock file itself, as a process would."""
    read, original, both = [], file_access.content_hash, threading.Barrier(2)

    def slow(path):
        read.append(path)
        time.sleep(0.005)
        return original(path)

    def start(results):
        both.wait(60)
        results.append(file_hashes.of_files(files, corpus_of(tmp_path, processes=1)))

    monkeypatch.setattr(file_access, "content_hash", slow)
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.01)
    results = []
    threads = [threading.Thread(target=start, args=(results,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(read) == files and results[0] == results[1] and len(results[0]) == len(files)


def test_hashes_are_kept_while_others_are_computed(files, tmp_path, monkeypatch):
    """So that a process that is killed does not lose them."""
    original, record = file_access.content_hash, tmp_path / "rows" / file_hashes.FILE

    def read(path):
        end = time.monotonic() + 60
        while path == files[-1] and not (record.is_file() and len(json.loads(record.read_text())) > 20):
            assert time.monotonic() < end
            time.sleep(0.01)
        return original(path)

    monkeypatch.setattr(file_access, "content_hash", read)
    monkeypatch.setattr(file_hashes, "KEEP_SECONDS", 0.0)
    file_hashes.of_files(files, corpus_of(tmp_path, processes=2))


def test_after_an_unreadable_file_no_other_is_begun(files, tmp_path, monkeypatch):
    begun, released, shutdown = [], threading.Event(), concurrent.futures.ThreadPoolExecutor.shutdown

    def read(path):
        begun.append(path)
        if path == files[0]:
            raise PermissionError(13, "Permission denied", path)
        assert released.wait(60)
        return "0" * 64

    def release(pool, wait=True, **kwargs):
        shutdown(pool, wait=False, **kwargs)
        released.set()  # the other thread ends its file
        shutdown(pool, wait)

    monkeypatch.setattr(file_access, "content_hash", read)
    monkeypatch.setattr(concurrent.futures.ThreadPoolExecutor, "shutdown", release)
    with pytest.raises(BadFile, match="000.txt: cannot be read"):
        file_hashes.of_files(files, corpus_of(tmp_path, processes=2))
    assert len(begun) <= 3
