"""Prepared stores that tests of several modules use."""

import shutil

import pytest

from maelm_jax import config
from maelm_jax.data import blocks, rows, vocabulary_training, waiting

LENGTH = 32


@pytest.fixture(scope="session")
def small_vocabulary():
    from pydoc_data import topics

    return vocabulary_training.train(topics.topics.values(), config.Vocabulary(size=400))


@pytest.fixture(scope="session")
def topics_corpus(tmp_path_factory):
    from pydoc_data import topics

    folder = tmp_path_factory.mktemp("store")
    (folder / "a.txt").write_text("\n\n".join(" ".join(topic.split()) for topic in topics.topics.values()))
    return config.Corpus(text_files=f"{folder}/*.txt", sequence_length=LENGTH, heldout_fraction=0.1, rows_dir=str(folder / "rows"), processes=1)


@pytest.fixture(scope="session")
def whole(topics_corpus, small_vocabulary):
    """A store of some twenty files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "SHARD_ROWS", 256)
        patch.setattr(blocks, "BLOCK_CHARACTERS", 100_000)
        (splits,) = rows.prepare(topics_corpus, small_vocabulary).values()
    assert len(list((splits["train"].folder / "train" / "c").iterdir())) > 5
    return splits["train"].folder


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / whole.name)


@pytest.fixture(scope="session")
def vocabulary(documents):
    return vocabulary_training.train(documents, config.Vocabulary(size=2000))


@pytest.fixture
def corpus(documents, tmp_path, monkeypatch):
    """Two files, cut into about ten blocks."""
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 100_000)
    monkeypatch.setattr(rows, "SHARD_ROWS", 256)
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.05)
    half = len(documents) // 2
    for name, part in (("a", documents[:half]), ("b", documents[half:])):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(part))
    return config.Corpus(text_files=f"{tmp_path}/*.txt", sequence_length=128, heldout_fraction=0.1, rows_dir=str(tmp_path / "rows"), processes=1)


@pytest.fixture
def small_corpus(tmp_path):
    """One file of fifty short documents."""
    (tmp_path / "a.txt").write_text("\n\n".join(f"Document {number} says a few words." for number in range(50)))
    return config.Corpus(text_files=f"{tmp_path}/*.txt", sequence_length=16, heldout_fraction=0.1, rows_dir=str(tmp_path / "rows"), processes=1)


@pytest.fixture
def short_corpus(corpus, documents, tmp_path, monkeypatch):
    """The two files with the beginnings of some documents, cut into about as many blocks."""
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 4_000)
    beginnings = [text[:1500] for text in documents[::2]]
    half = len(beginnings) // 2
    for name, part in (("a", beginnings[:half]), ("b", beginnings[half:])):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(part))
    return corpus
