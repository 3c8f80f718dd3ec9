"""Second moments of hidden states, one for each layer, in bounded memory.

The (tokens x width) matrix of states is never stored: only its D x D second moment is. The device
sums the products of one batch in float32 at the highest precision, after it has subtracted the mean
of the batch: that of some encoders is far larger than what varies. The host adds it again, and sums
the batches in float64. `ranks.py` computes the spectrum and the effective ranks from the second
moment.

Sets of tokens. None contains padding. `plain` and `real` contain <s> and </s>, unless these are
masked:
    plain  text without [MASK]
    real   masked input as in pretraining: every token that the encoder reads, except [MASK].
           Random and kept tokens at masked positions belong to it.
    mask   masked input as in pretraining: the [MASK] tokens that the encoder reads, if any
    all    the sum of real and mask

Every token has token type 0. Fine-tuning gives type 1 to the second sentence of a pair in BERT and
ELECTRA, so these encoders read such pairs otherwise there.

Axis letters: N layers (0 is the input of the first layer), B rows, T slots, D width.
"""

import collections.abc
import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from maelm_jax import config
from maelm_jax.model import keys, maelm, masking
from maelm_jax.model.kernels import backends

TOKEN_KINDS = ("plain", "real", "mask")  # "all" is the sum of the last two
# Slots of a batch. Each slot is encoded twice, with and without [MASK]. This bounds the device
# memory that the states of all layers take.
TOKENS_AT_ONCE = 8192


class Moments(typing.NamedTuple):
    """Number of tokens of one kind and, for every layer, the sums of states and outer products."""

    count: Float[np.ndarray, ""]
    total: Float[np.ndarray, "N D"]
    product: Float[np.ndarray, "N D D"]

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def of_layer(self, layer: int) -> "Moments":
        """The moments of one layer, as the only layer."""
        return Moments(self.count, self.total[[layer]], self.product[[layer]])

    def second(self, layer: int = 0, centred: bool = False) -> np.ndarray:
        """Mean of x x^T over the tokens, float64 [D, D]; with `centred`, their covariance."""
        mean = self.total[layer] / self.count
        return self.product[layer] / self.count - (np.outer(mean, mean) if centred else 0.0)


class Deviations(typing.NamedTuple):
    """As `Moments`, of the states minus `mean`, which is about that of the batch. float32."""

    mean: Float[np.ndarray | jax.Array, "N D"]
    count: Float[np.ndarray | jax.Array, ""]
    total: Float[np.ndarray | jax.Array, "N D"]
    product: Float[np.ndarray | jax.Array, "N D D"]

    def moments(self) -> Moments:
        """The moments of the states, in float64."""
        mean, count, total, product = (np.asarray(part, np.float64) for part in self)
        # sum (x + m)(x + m)^T = sum x x^T + m (sum x + count m)^T + (sum x) m^T
        whole = total + count * mean
        added = mean[:, :, None] * whole[:, None] + total[:, :, None] * mean[:, None]
        return Moments(count, whole, product + added)


def of_states(states: Float[Array, "N B T D"], members: Bool[Array, "B T"]) -> Deviations:
    """Sums of the states of the tokens that `members` selects."""
    selected, count = members[None, :, :, None], members.sum(dtype=jnp.float32)
    x = jnp.where(selected, states.astype(jnp.float32), 0.0)
    mean = x.sum((1, 2)) / jnp.maximum(count, 1.0)
    x = jnp.where(selected, x - mean[:, None, None], 0.0)
    product = jnp.einsum("nbtd,nbte->nde", x, x, precision=jax.lax.Precision.HIGHEST)
    return Deviations(mean, count, x.sum((1, 2)), product)


def measure(
    experiment: config.Experiment,
    vocabulary_size: int,
    special: config.SpecialIds,
    layers: tuple[int, ...] | None = None,
    target: backends.Target | None = None,
) -> collections.abc.Callable:
    """Builds the function that measures one batch. The caller compiles it.

    Masks are drawn as in evaluations, from the key and the number of the row. Two runs with the
    same `Objective` get the same masks. `layers` are the indices of the layers to measure.
    None measures all. `target` is that of `maelm.create`.

    Returns:
        A function (encoder parameters, rows [B, L], row numbers [B], key) -> {kind: Deviations}.
    """
    # A backend that is set may be that of another machine, or be unable to compute whole rows or
    # arrays that XLA shards.
    compute = dataclasses.replace(experiment.compute, attention_backend="auto")
    model = dataclasses.replace(experiment.model, compute=compute)
    graph = maelm.encoder_graph(model, vocabulary_size, special.pad, target)
    objective = experiment.evaluated.objective

    def batch(
        params: dict, rows: Int[Array, "B L"], numbers: UInt32[Array, " B"], key: Key[Array, ""]
    ) -> dict[str, Deviations]:
        length = rows.shape[1]
        # A budget of the full length leaves dropped slots empty. The encoder computes the same
        # function, and one pass serves the rows with and without [MASK].
        sizes = dataclasses.replace(masking.budget(objective, length), visible=length)
        inputs = masking.draw(keys.make_row_keys(key, numbers), rows, objective, sizes, special)
        visible = inputs.encoder_slots < length
        is_mask = visible & (inputs.encoder_ids == special.mask)
        visible_segments = jnp.where(visible, inputs.segments, 0)
        plain_input = (rows, inputs.positions, inputs.segments)
        masked_input = (inputs.encoder_ids, inputs.encoder_positions, visible_segments)
        both = (jnp.concatenate(pair) for pair in zip(plain_input, masked_input, strict=True))
        states = maelm.apply(graph, params)(*both, all_layers=True)
        if layers is not None:
            states = states[jnp.asarray(layers)]
        plain, masked = jnp.split(states, 2, axis=1)
        return {
            "plain": of_states(plain, inputs.segments > 0),
            "real": of_states(masked, visible & ~is_mask),
            "mask": of_states(masked, is_mask),
        }

    return batch


def rows_at_once(length: int) -> int:
    """Rows of `length` slots in a batch of `TOKENS_AT_ONCE` slots; at least one."""
    return max(1, TOKENS_AT_ONCE // length)


def accumulate(
    measure_batch: collections.abc.Callable,
    params: dict,
    rows: np.ndarray,
    first: int,
    key: jax.Array,
    pad: int,
    size: int | None = None,
    shard: collections.abc.Callable = jnp.asarray,
    progress: collections.abc.Callable = lambda rows: None,
) -> dict[str, Moments]:
    """Measures many rows [R, L], batch by batch, with the compiled function of `measure`.

    The numbers of the rows begin at `first` and select the masks. A batch has `size` rows. None:
    as many as `rows_at_once` says. `shard` puts them on the devices. `progress` is called after
    each batch with its number of rows.

    Returns:
        {kind: Moments} in float64.
    """
    size, total = size or rows_at_once(rows.shape[1]), None
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        # Rows of padding hold no tokens, so they add nothing.
        padding = np.full((size - len(part), rows.shape[1]), pad, rows.dtype)
        numbers = np.arange(first + start, first + start + size, dtype=np.uint32)
        batch = shard(np.concatenate([part, padding]))
        measured = {
            name: deviations.moments()
            for name, deviations in jax.device_get(
                measure_batch(params, batch, numbers, key)
            ).items()
        }
        total = {name: total[name] + measured[name] for name in TOKEN_KINDS} if total else measured
        progress(len(part))
    return total
