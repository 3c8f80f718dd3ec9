"""Unigram distribution: what the sample of the training rows reads, and what it gives."""

import numpy as np
import pytest
from testing import write_corpus

from maelm_jax import config
from maelm_jax.data import prepare, vocabulary_training
from maelm_jax.data.rows import CHUNK_ROWS
from maelm_jax.pretraining import unigram


@pytest.mark.parametrize("count", [1, 100, unigram.SAMPLED_ROWS])
def test_all_rows_of_a_small_store_are_sampled(count):
    assert np.array_equal(unigram.sampled_rows(count), np.arange(count))


@pytest.mark.parametrize("count", [unigram.SAMPLED_ROWS + 1, 60_007, 10**9])
def test_the_sample_of_a_large_store_is_whole_chunks_from_its_first_to_its_last(count):
    numbers = unigram.sampled_rows(count)
    assert len(np.unique(numbers)) == unigram.SAMPLED_ROWS and len(np.unique(numbers // CHUNK_ROWS)) == unigram.SAMPLED_ROWS // CHUNK_ROWS
    assert numbers[0] == 0 and count - CHUNK_ROWS <= numbers[-1] < count


@pytest.fixture(scope="module")
def vocabulary(documents):
    return vocabulary_training.train(documents[:200], config.Vocabulary(size=400))


@pytest.fixture
def run_rows(tmp_path, documents, vocabulary):
    return prepare.prepare(write_corpus(tmp_path, documents[:200]), vocabulary)


def test_the_distribution_is_that_of_the_text_tokens(run_rows, vocabulary):
    ((splits),) = run_rows.stores.values()
    train, never = splits["train"], list(vocabulary.special.never_masked)
    counts = np.bincount(train[unigram.sampled_rows(len(train))].ravel(), minlength=vocabulary.size).astype(float)
    counts[never] = 0
    expected = unigram.WEIGHT * counts / counts.sum() + 1
    expected[never] = 0
    found = unigram.Unigram.of_rows(run_rows, vocabulary.size, vocabulary.special.never_masked)
    np.testing.assert_allclose(np.exp(-found.token_nll), expected / expected.sum(), rtol=1e-12, atol=1e-12)


def test_its_loss_is_that_of_predicting_every_text_token_by_its_frequency():
    found = unigram.Unigram(-np.log([0.5, 0.25, 0.25, 1.0]), excluded=(3,))
    assert found.loss(np.array([[0, 1, 3], [0, 3, 3]])) == pytest.approx((np.log(2) + np.log(4) + np.log(2)) / 3)
    bias = found.head_bias(6)
    np.testing.assert_allclose(bias, [np.log(0.5), np.log(0.25), np.log(0.25), np.log(0.25), 0, 0])
    with pytest.raises(config.ConfigError):
        found.loss(np.array([[3, 3]]))
