"""Unigram distribution of the training rows: the baseline of predicting masked tokens."""

import typing

import numpy as np

from maelm_jax import config
from maelm_jax.data import prepare
from maelm_jax.data.rows import CHUNK_ROWS

SAMPLED_ROWS = 8192  # of each source, in whole chunks, which a store reads as a whole
# Counts of each source's sample are scaled to rate x this many tokens, before add-one smoothing.
WEIGHT = 1e7


class Unigram(typing.NamedTuple):
    """How often each token is in the training rows.

    Its cross-entropy is the loss that a useful encoder must beat. Its logarithms are initial values
    for the bias of the prediction head.
    """

    token_nll: np.ndarray  # negative log frequency of each id, float64 [vocabulary size]
    excluded: tuple[int, ...]  # ids that are never predicted
    name: str = "unigram"

    @classmethod
    def of_rows(
        cls, rows: prepare.Prepared, vocabulary_size: int, excluded: tuple[int, ...]
    ) -> "Unigram":
        """Counts the tokens in a sample of training rows, with add-one smoothing.

        The ids in `excluded` are never predicted, and not counted.
        """
        ids, counts = list(excluded), np.ones(vocabulary_size)
        for name, rate in rows.rates.items():
            store = rows.stores[name]["train"]
            sampled = store[sampled_rows(len(store))]
            sampled = np.bincount(sampled.ravel(), minlength=vocabulary_size)
            sampled[ids] = 0
            counts += rate * WEIGHT * sampled / max(sampled.sum(), 1)
        counts[ids] = 0
        return cls(-np.log(np.maximum(counts, 1e-300) / counts.sum()), excluded)

    def loss(self, rows: np.ndarray) -> float:
        """Returns its cross-entropy on the tokens of rows [R, L] that may be masked, in nats.

        Raises ConfigError if there is no such token.
        """
        tokens = rows[~np.isin(rows, self.excluded)]
        if not len(tokens):
            raise config.ConfigError(
                "no token of the held-out rows can be masked, so no loss can be measured: raise "
                "Corpus.heldout_fraction or Run.eval_rows, or give more text"
            )
        return float(self.token_nll[tokens].mean())

    def head_bias(self, size: int) -> np.ndarray:
        """Returns a bias of the prediction head that predicts these frequencies, float32 [size].

        Ids that are never predicted get the value of the rarest other token. Entries beyond the
        vocabulary get 0.
        """
        bias = np.zeros(size, np.float32)
        bias[: len(self.token_nll)] = -self.token_nll
        bias[list(self.excluded)] = -np.delete(self.token_nll, self.excluded).max()
        return bias


def sampled_rows(count: int) -> np.ndarray:
    """Returns the numbers of the sampled rows of a store of `count` rows, int64 [n], ascending.

    They are the same in every run: all rows of a small store, evenly spaced chunks of a large one.
    """
    if count <= SAMPLED_ROWS:
        return np.arange(count)
    chunks = np.linspace(0, count // CHUNK_ROWS - 1, SAMPLED_ROWS // CHUNK_ROWS)
    first_rows = chunks.astype(np.int64) * CHUNK_ROWS
    return (first_rows[:, None] + np.arange(CHUNK_ROWS)).ravel()
