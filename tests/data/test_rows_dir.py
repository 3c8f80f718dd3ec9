"""Corpus.rows_dir: no folder, a read-only disk, a full disk."""

import errno
import os

import pytest
from testing import one_line

from maelm_jax import config, storage
from maelm_jax.data import rows, rows_dir, vocabulary_training


@pytest.mark.parametrize("place", ["a.txt", "a.txt/rows", "a.txt/deep/rows"])
def test_a_rows_dir_that_is_no_folder_is_one_line(small_corpus, small_vocabulary, tmp_path, place):
    corpus = config.dataclasses.replace(small_corpus, rows_dir=str(tmp_path / place))
    for work in (lambda: rows.prepare(corpus, small_vocabulary), lambda: vocabulary_training.vocabulary_for(config.Vocabulary(size=300), corpus)):
        with pytest.raises(config.ConfigError, match="Corpus.rows_dir") as caught:
            work()
        one_line(caught)


def read_only(monkeypatch, folder):
    """Makes writing under `folder` fail as on a read-only disk."""
    import pathlib

    original = pathlib.Path.mkdir

    def mkdir(path, *args, **kwargs):
        if not path.is_dir():
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return original(path, *args, **kwargs)

    def write(path, content):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(pathlib.Path, "mkdir", mkdir)
    monkeypatch.setattr(storage, "write", write)


def test_rows_on_a_read_only_disk_are_read(small_corpus, small_vocabulary, tmp_path, monkeypatch):
    (before,) = rows.prepare(small_corpus, small_vocabulary).values()
    (tmp_path / "rows" / "file_hashes.json").unlink()
    read_only(monkeypatch, tmp_path / "rows")
    (after,) = rows.prepare(small_corpus, small_vocabulary).values()
    assert after["train"].folder == before["train"].folder


def test_a_read_only_disk_without_rows_is_one_line(small_corpus, small_vocabulary, tmp_path, monkeypatch):
    read_only(monkeypatch, tmp_path)

    def train():
        vocabulary_training.vocabulary_for(config.Vocabulary(size=300), small_corpus)

    for work in (lambda: rows.prepare(small_corpus, small_vocabulary), train):
        with pytest.raises(config.ConfigError, match="Corpus.rows_dir=.*: cannot be written to .*Read-only") as caught:
            work()
        one_line(caught)


def test_a_full_disk_is_not_a_wrong_setting(small_corpus):
    with pytest.raises(OSError, match="No space"), rows_dir.writing(small_corpus):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rows")
