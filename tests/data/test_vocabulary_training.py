"""Training a vocabulary: without held-out text, the same in any order, the same on any machine."""

import os

import pytest

from maelm_jax import config
from maelm_jax.data import vocabulary_training
from maelm_jax.data.documents import is_heldout


def test_the_order_of_documents_changes_nothing(documents):
    settings = config.Vocabulary(size=1000, sample_megabytes=0.3)
    one, other = (vocabulary_training.train(texts, settings) for texts in (documents, documents[::-1]))
    assert one.fingerprint == other.fingerprint


def test_a_machine_with_more_cores_trains_the_same_vocabulary(documents, monkeypatch):
    """Its hash names the stores of rows, which hosts share."""
    fingerprints = set()
    for cores in (1, 3):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        fingerprints.add(vocabulary_training.train(documents, config.Vocabulary(size=500)).fingerprint)
    assert len(fingerprints) == 1


def test_a_vocabulary_larger_than_the_corpus_supports_says_what_is_possible(documents):
    with pytest.raises(config.ConfigError, match=r"larger than the corpus supports: set Vocabulary.size to at most \d+") as caught:
        vocabulary_training.train(documents[:3], config.Vocabulary(size=60000))
    most = int(str(caught.value).split("at most ")[1].split()[0])
    assert vocabulary_training.train(documents[:3], config.Vocabulary(size=most)).size == most


def test_a_text_that_is_too_short_for_any_vocabulary_says_so():
    with pytest.raises(config.ConfigError, match=r"supports a vocabulary of \d+ ids only, and the smallest has 300: give more text"):
        vocabulary_training.train(["One short text, and no more."], config.Vocabulary(size=1000))


def test_a_vocabulary_knows_nothing_of_heldout_text(corpus, tmp_path):
    trained = vocabulary_training.vocabulary_for(config.Vocabulary(size=500), corpus)
    candidates = (f"Zyzzyva zyzzyva number {number}." for number in range(1000))
    secret = next(text for text in candidates if is_heldout(text, corpus.heldout_fraction))
    (tmp_path / "c.txt").write_text(f"{secret}\n\n" * 1000)
    more = config.dataclasses.replace(corpus, text_files=f"{tmp_path}/*.txt")
    assert vocabulary_training.vocabulary_for(config.Vocabulary(size=500), more).fingerprint == trained.fingerprint
