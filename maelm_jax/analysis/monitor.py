"""Measures the effective rank of two layers during training, on held-out rows.

The layers are the middle one and the last one. Ranks are measured with and without [MASK].
"""

import jax
import numpy as np

from maelm_jax import config
from maelm_jax.analysis import moments, ranks
from maelm_jax.model import keys
from maelm_jax.training import sharding

# Unmasked tokens measured for each dimension, if the held-out rows have so many.
PER_DIMENSION = 2 * ranks.LEAST_PER_DIMENSION


class RankMonitor:
    """Measures the ranks when called with the parameters."""

    def __init__(
        self,
        experiment: config.Experiment,
        vocabulary_size: int,
        special: config.SpecialIds,
        heldout: np.ndarray,
        mesh: jax.sharding.Mesh,
    ):
        """Chooses the rows. The measurement is compiled at its first call.

        The rows are the first held-out ones [R, L] with `PER_DIMENSION` unmasked tokens a
        dimension, or all of them.
        """
        length, width = heldout.shape[1], experiment.encoder.width
        rate = experiment.evaluated.objective.masking.rate
        devices = sharding.row_shards(mesh)
        self._size = -(-moments.rows_at_once(length) // devices) * devices
        # Every kind of tokens that is ranked has at least these.
        unmasked = (heldout != special.pad).sum(1).cumsum() * (1 - rate)
        self._rows = heldout[: int(np.searchsorted(unmasked, PER_DIMENSION * width)) + 1]
        self._width, self._pad, self._mesh = width, special.pad, mesh
        self._key = keys.make_stream_key(experiment.run.seed, keys.RANK_STREAM)
        layers = (experiment.encoder.layers // 2, experiment.encoder.layers)
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self._measure = jax.jit(
            moments.measure(experiment, vocabulary_size, special, layers),
            out_shardings=everywhere,
        )

    def __call__(self, params: dict) -> dict[str, int]:
        """Measures the effective ranks of the middle and the last layer.

        Returns:
            rank_plain_middle and rank_plain_last for text without [MASK]. Also rank_real_* for the
            real tokens of masked input, and rank_all_* for all tokens of it (Figure 1a of arXiv
            2302.02060). A rank is missing when there are fewer than `ranks.LEAST_PER_DIMENSION`
            tokens for each dimension.
        """
        moments_of_set = moments.accumulate(
            self._measure,
            params["encoder"],
            self._rows,
            0,
            self._key,
            self._pad,
            size=self._size,
            shard=self._shard,
        )
        moments_of_set["all"] = moments_of_set["real"] + moments_of_set["mask"]
        result = {}
        for name in ("plain", "real", "all"):
            tokens = moments_of_set[name]
            if ranks.has_rank(tokens.count, self._width):
                for layer, depth in enumerate(("middle", "last")):
                    spectrum = ranks.spectrum(tokens.second(layer))
                    result[f"rank_{name}_{depth}"] = ranks.effective_rank(spectrum, ranks.TAU)
        return result

    def _shard(self, rows: np.ndarray) -> jax.Array:
        """Puts the rows of a batch on the devices. Each process puts those of its own devices."""
        local_rows = rows[sharding.local_row_indices(self._size, self._mesh)]
        return sharding.shard_batch(local_rows, self._mesh, self._size)
