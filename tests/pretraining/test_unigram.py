"""Unigram distribution: what the sample of the training rows reads, and what it gives."""

import numpy as np
import pytest

from maelm_jax import config, gin_files
from maelm_jax.data import prepare, rows, vocabulary_training
from maelm_jax.pretraining import unigram


@pytest.mark.parametrize("count", [1, 100, 8192, 60_000, 16 * 4096])
def test_rows_of_a_small_store_are_sampled_over_all_of_it(count):
    numbers = unigram.sampled_rows(count, 4096)
    assert len(numbers) == min(count, unigram.SAMPLED_ROWS) and numbers[0] == 0 and numbers[-1] == count - 1
    assert (np.diff(numbers) >= 1).all()


@pytest.mark.parametrize("count", [16 * 4096 + 1, 10**6, 10**9])
def test_the_sample_of_a_large_store_reads_a_bounded_number_of_files(count):
    numbers = unigram.sampled_rows(count, 4096)
    assert len(np.unique(numbers // 4096)) == unigram.SAMPLED_SHARDS
    assert (np.diff(numbers) >= 1).all() and numbers[0] == 0 and numbers[-1] == count - 1
    assert unigram.SAMPLED_ROWS - 512 < len(numbers) <= unigram.SAMPLED_ROWS


@pytest.fixture(scope="module")
def vocabulary(documents):
    return vocabulary_training.train(documents[:200], config.Vocabulary(size=400))


@pytest.fixture
def run_rows(tmp_path, documents, vocabulary, monkeypatch):
    """The rows of a run, in files of 16 rows."""
    monkeypatch.setattr(rows, "SHARD_ROWS", 16)
    (tmp_path / "a.txt").write_text("\n\n".join(documents[:200]))
    corpus = config.Corpus(text_files=f"{tmp_path}/*.txt", sequence_length=32, heldout_fraction=0.1, rows_dir=str(tmp_path / "rows"), processes=1)
    return prepare.prepare(corpus, vocabulary)


def damage(tmp_path, shard: int):
    (path,) = tmp_path.glob(f"rows/*/train/c/{shard}/0")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def test_a_damaged_file_is_refused_when_its_row_is_sampled(run_rows, vocabulary, tmp_path):
    damage(tmp_path, 0)
    with pytest.raises(config.ConfigError, match="train/c/0/0"):
        unigram.unigram_nll(run_rows, vocabulary.size, vocabulary.special.never_masked)


def test_a_file_that_is_not_sampled_is_verified_when_training_reads_it(run_rows, vocabulary, tmp_path):
    ((splits),) = run_rows.stores.values()
    store = splits["train"]
    assert len(store) > 2 * unigram.SAMPLED_SHARDS * 16
    damage(tmp_path, 1)
    unigram.unigram_nll(run_rows, vocabulary.size, vocabulary.special.never_masked)
    with pytest.raises(config.ConfigError, match="train/c/1/0"):
        store[np.array([17])]


def test_the_distribution_is_that_of_the_text_tokens(run_rows, vocabulary):
    ((splits),) = run_rows.stores.values()
    numbers = unigram.sampled_rows(len(splits["train"]), 16)
    counts = np.bincount(splits["train"][numbers].ravel(), minlength=vocabulary.size).astype(float)
    counts[list(vocabulary.special.never_masked)] = 0
    expected = unigram.WEIGHT * counts / counts.sum() + 1
    expected[list(vocabulary.special.never_masked)] = 0
    frequencies = np.exp(-unigram.unigram_nll(run_rows, vocabulary.size, vocabulary.special.never_masked))
    np.testing.assert_allclose(frequencies, expected / expected.sum(), rtol=1e-12, atol=1e-12)


def test_special_tokens_that_are_masked_are_counted(run_rows, vocabulary):
    """With Masking.mask_special_tokens, the baseline is that of the targets that evaluation uses."""
    special, settings = vocabulary.special, config.Masking(mask_special_tokens=True, rate=0.4)
    excluded = unigram.never_targets(settings, special)
    assert excluded == (special.pad,) and unigram.never_targets(config.Masking(), special) == special.never_masked
    token_nll = unigram.unigram_nll(run_rows, vocabulary.size, excluded)
    ((splits),) = run_rows.stores.values()
    share = np.mean([np.mean(row[row != special.pad] == special.eos) for row in splits["train"][np.arange(64)]])
    assert abs(np.exp(-token_nll[special.eos]) / share - 1) < 0.3
    bias = unigram.head_bias(token_nll, vocabulary.size, excluded)
    assert bias[special.eos] == np.float32(-token_nll[special.eos]) > bias[special.pad]
    experiment = gin_files.load(["tiny.gin"], ["SEQUENCE_LENGTH=32", "Masking.mask_special_tokens=True"])
    heldout = splits["heldout"][np.arange(len(splits["heldout"]))].astype(np.int32)[None]
    without = np.where(np.isin(np.arange(vocabulary.size), [special.bos, special.eos]), 0.0, token_nll)
    values = [unigram.cross_entropy(experiment, nll, heldout, special) for nll in (token_nll, without)]
    assert values[0] > values[1], "<s> and </s> are among the targets"
