"""Corpora and a store that tests of several modules use."""

import shutil
from pydoc_data import topics

import pytest

from maelm_jax import config
from maelm_jax.data import prepare, rows, sources, vocabulary_training


@pytest.fixture(scope="session")
def small_vocabulary():
    return vocabulary_training.train(topics.topics.values(), config.Vocabulary(size=400))


@pytest.fixture(scope="session")
def vocabulary(documents):
    return vocabulary_training.train(documents, config.Vocabulary(size=2000))


@pytest.fixture
def corpus(documents, tmp_path, monkeypatch):
    """The beginnings of some documents in two files, which are cut into about ten parts."""
    monkeypatch.setattr(sources, "PART_BYTES", 8_000)
    monkeypatch.setattr(rows, "SHARD_ROWS", 64)
    beginnings = [text[:1500] for text in documents[:60]]
    for name, part in (("a", beginnings[:40]), ("b", beginnings[40:])):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(part))
    return config.Corpus(
        text_files=f"{tmp_path}/*.txt",
        sequence_length=64,
        heldout_fraction=0.1,
        rows_dir=str(tmp_path / "rows"),
        processes=1,
    )


@pytest.fixture(scope="session")
def whole(tmp_path_factory, small_vocabulary):
    """The folder of a store of some twenty files."""
    folder = tmp_path_factory.mktemp("store")
    texts = [" ".join(topic.split()) for topic in topics.topics.values()]
    (folder / "a.txt").write_text("\n\n".join(texts))
    corpus = config.Corpus(
        text_files=f"{folder}/*.txt",
        sequence_length=32,
        heldout_fraction=0.1,
        rows_dir=str(folder / "rows"),
        processes=1,
    )
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
