"""Corpora and a store that tests of several modules use."""

import os
import shutil

import pytest
from testing import english, write_corpus

from maelm_jax import config
from maelm_jax.data import prepare, rows, sources, vocabulary_training


@pytest.fixture(scope="session")
def small_vocabulary():
    return vocabulary_training.train(english(), config.Vocabulary(size=400))


@pytest.fixture(scope="session")
def vocabulary(documents):
    return vocabulary_training.train(documents, config.Vocabulary(size=2000))


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch):
    """Flushing files to the disk takes half of the time of a small preparation."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def beginnings(documents, folder, patch):
    """A corpus of the beginnings of some documents in two files, which are cut into about ten parts."""
    patch.setattr(sources, "PART_BYTES", 8_000)
    patch.setattr(rows, "SHARD_ROWS", 64)
    texts = [text[:1500] for text in documents[:60]]
    return write_corpus(folder, texts[:40], texts[40:], sequence_length=64)


@pytest.fixture
def corpus(documents, tmp_path, monkeypatch):
    return beginnings(documents, tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def undisturbed(documents, vocabulary, tmp_path_factory):
    """A copy of `corpus` whose rows were prepared without a disturbance. Tests only read it."""
    with pytest.MonkeyPatch.context() as patch:
        copy = beginnings(documents, tmp_path_factory.mktemp("undisturbed"), patch)
        prepare.prepare(copy, vocabulary)
    return copy


@pytest.fixture(scope="session")
def whole(tmp_path_factory, small_vocabulary):
    """The folder of a store of some twenty files."""
    folder = tmp_path_factory.mktemp("store")
    corpus = write_corpus(folder, english())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "SHARD_ROWS", 256)
        prepared = prepare.prepare(corpus, small_vocabulary)
    (entry,) = prepared.record["sources"].values()
    store = folder / "rows" / entry["store"]
    assert len(list((store / "train" / "c").iterdir())) > 5
    return store


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / whole.name)
