"""Unigram distribution of the training rows.

Its cross-entropy is the loss that a useful encoder must beat. Its logarithms are initial values for
the bias of the prediction head.
"""

import jax
import numpy as np

from maelm_jax import config
from maelm_jax.data import prepare
from maelm_jax.model import keys, loss, masking

SAMPLED_ROWS = 8192  # of each source
# Files of each source's store that the sample reads. The store verifies a file as a whole.
SAMPLED_SHARDS = 16
# Counts of each source's sample are scaled to rate x this many tokens, before add-one smoothing.
WEIGHT = 1e7


def never_targets(settings: config.Masking, special: config.SpecialIds) -> tuple[int, ...]:
    """Returns the ids that are never predicted: special tokens, or padding alone."""
    return (special.pad,) if settings.mask_special_tokens else special.never_masked


def unigram_nll(
    rows: prepare.Prepared, vocabulary_size: int, excluded: tuple[int, ...]
) -> np.ndarray:
    """Negative log frequency of each token in a sample of the training rows.

    Frequencies have add-one smoothing. The sample reads at most `SAMPLED_SHARDS` files of a store,
    so a large store is not read as a whole at the start.

    Args:
        rows: Rows and mixing rates of the sources.
        vocabulary_size: Number of tokens in the vocabulary.
        excluded: Ids that are not counted: those of `never_targets`.

    Returns:
        Values in nats, float64 [vocabulary_size].
    """
    ids = list(excluded)
    counts = np.ones(vocabulary_size)
    for name, rate in rows.rates.items():
        store = rows.stores[name]["train"]
        numbers = sampled_rows(len(store), store.shard_rows)
        sampled = np.bincount(store[numbers].ravel(), minlength=vocabulary_size).astype(np.float64)
        sampled[ids] = 0
        counts += rate * WEIGHT * sampled / max(sampled.sum(), 1)
    counts[ids] = 0
    return -np.log(np.maximum(counts, 1e-300) / counts.sum())


def sampled_rows(count: int, shard_rows: int) -> np.ndarray:
    """Returns the numbers of the sampled rows of a store: evenly spaced, the same in every run.

    Args:
        count: Rows of the store.
        shard_rows: Rows of one of its files.

    Returns:
        int64 [n], ascending. n is at most `SAMPLED_ROWS`.
    """
    shards = -(-count // shard_rows)
    if shards <= SAMPLED_SHARDS:
        return _evenly_spaced(0, count, SAMPLED_ROWS)
    return np.concatenate(
        [
            _evenly_spaced(
                shard * shard_rows,
                min((shard + 1) * shard_rows, count),
                SAMPLED_ROWS // SAMPLED_SHARDS,
            )
            for shard in _evenly_spaced(0, shards, SAMPLED_SHARDS)
        ]
    )


def _evenly_spaced(start: int, end: int, most: int) -> np.ndarray:
    """Returns at most `most` whole numbers from `start` to `end` - 1, evenly spaced."""
    return np.linspace(start, end - 1, min(end - start, most)).astype(np.int64)


def head_bias(token_nll: np.ndarray, size: int, excluded: tuple[int, ...]) -> np.ndarray:
    """Initial bias of the prediction head for `Model.unigram_bias`: the log frequencies.

    Ids that are never targets get the value of the rarest other token. Entries beyond the
    vocabulary get 0.

    Args:
        token_nll: Result of `unigram_nll`.
        size: Number of entries of the bias, at least the vocabulary size.
        excluded: Ids that are never targets.

    Returns:
        float32 [size].
    """
    bias = np.zeros(size, np.float32)
    bias[: len(token_nll)] = -token_nll
    bias[list(excluded)] = -np.delete(token_nll, excluded).max()
    return bias


def set_head_bias(head: dict, token_nll: np.ndarray, excluded: tuple[int, ...]):
    """Replaces `head["bias"]` by `head_bias` with the same sharding."""
    zeros = head["bias"]
    bias = head_bias(token_nll, len(zeros), excluded)
    head["bias"] = jax.make_array_from_callback(
        zeros.shape, zeros.sharding, lambda index: bias[index]
    )


def cross_entropy(
    experiment: config.Experiment,
    token_nll: np.ndarray,
    heldout: np.ndarray,
    special: config.SpecialIds,
) -> float:
    """Mean of `token_nll` over the held-out targets that evaluation uses, in nats.

    Args:
        experiment: Settings of the run.
        token_nll: Result of `unigram_nll`.
        heldout: Held-out rows, int32 [evaluation batches, rows, L].
        special: Ids of the special tokens.

    Raises:
        ConfigError: No token is masked.
    """
    sizes = masking.budget(experiment.masking, experiment.corpus.sequence_length)
    mask_key = keys.split_step_key(
        keys.make_stream_key(experiment.run.seed, keys.EVALUATION_STREAM)
    ).masks

    @jax.jit
    def targets(part, numbers):
        mask_keys = keys.make_row_keys(mask_key, numbers)
        return loss.gather_targets(
            masking.draw(mask_keys, part, experiment.masking, sizes, special)
        )

    total = count = 0.0
    size = heldout.shape[1]
    for i, part in enumerate(heldout):
        numbers = np.arange(i * size, (i + 1) * size, dtype=np.uint32)
        ids, weights = jax.device_get(targets(part, numbers))
        total += float((token_nll[ids] * weights).sum())
        count += float(weights.sum())
    if not count:
        raise config.ConfigError(
            "no token of the held-out rows is masked, so no loss can be measured: raise "
            "Corpus.heldout_fraction, Run.eval_rows or Masking.rate"
        )
    return total / count
