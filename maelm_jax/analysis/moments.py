"""Second moments of hidden states, layer by layer, in bounded memory: never a matrix of tokens, whatever their number.

The products of a batch are summed on the device in float32 at the highest precision, batches on the host in float64. From the d x d second
moment of a set of tokens ranks.py gets the spectrum, and so every effective rank at once.

Sets of tokens, all of them without padding, with <s> and </s>:
    plain  text as it is, without [MASK]: what fine-tuning sees
    real   masked input as in pretraining, what is not [MASK] (random and kept tokens in its place among it); of MAE-LM, the visible tokens
    mask   masked input, the [MASK]s that the encoder sees, if any
    all    masked input, real and mask together

Axis letters: N layers (0 is what enters the first), B rows, T slots, D width.
"""

import collections.abc
import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from maelm_jax import config
from maelm_jax.model import maelm, masking

SETS = ("plain", "real", "mask")  # what is measured; "all" is the sum of the last two
TOKENS_AT_ONCE = 8192  # slots of a batch, each of them read with and without [MASK]: bounds the states of all layers on the device


class Moments(typing.NamedTuple):
    """Of a set of tokens, for every layer: how many, their sum, and the sum of their outer products."""

    count: Float[np.ndarray | jax.Array, ""]
    total: Float[np.ndarray | jax.Array, "N D"]
    product: Float[np.ndarray | jax.Array, "N D D"]

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def second(self, layer: int, centred: bool = False) -> np.ndarray:
        """float64 [D, D]: the mean of x x^T over the tokens, or with `centred` their covariance."""
        mean = self.total[layer] / self.count
        return self.product[layer] / self.count - (np.outer(mean, mean) if centred else 0.0)


def of_states(states: Float[Array, "N B T D"], members: Bool[Array, "B T"]) -> Moments:
    """The moments of the states of `members`, in float32."""
    x = jnp.where(members[None, :, :, None], states.astype(jnp.float32), 0.0)
    product = jnp.einsum("nbtd,nbte->nde", x, x, precision=jax.lax.Precision.HIGHEST)
    return Moments(members.sum(dtype=jnp.float32), x.sum((1, 2)), product)


def measure(
    graph: nnx.GraphDef, settings: config.Masking, length: int, special: config.SpecialIds, layers: tuple[int, ...] | None = None
) -> collections.abc.Callable:
    """(encoder parameters, rows [B, L], row numbers [B], key) -> {set: Moments} of a batch, to be compiled. `layers`: of these alone.

    `graph` is that of the encoder. Masks are drawn as in pretraining, from the key and the row's number: two runs with the same settings of
    Masking get the same ones.
    """
    # In full length (dropped slots empty, the same function): so one pass of the encoder, compiled once, does with and without [MASK].
    settings = dataclasses.replace(settings, compact=False)
    sizes = masking.budget(settings, length)

    def batch(params: dict, rows: Int[Array, "B L"], numbers: UInt32[Array, " B"], key: Key[Array, ""]) -> dict[str, Moments]:
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)
        inputs = masking.draw(keys, rows, settings, sizes, special)
        read = inputs.encoder_slots < length
        is_mask = read & (inputs.encoder_ids == special.mask)
        masked = (inputs.encoder_ids, inputs.encoder_positions, jnp.where(read, inputs.segments, 0))
        both = (jnp.concatenate(pair) for pair in zip((rows, inputs.positions, inputs.segments), masked, strict=True))
        states = maelm.apply(graph, params)(*both, every=True)
        if layers is not None:
            states = states[jnp.asarray(layers)]
        plain, masked = jnp.split(states, 2, axis=1)
        return {"plain": of_states(plain, inputs.segments > 0), "real": of_states(masked, read & ~is_mask), "mask": of_states(masked, is_mask)}

    return batch


def rows_at_once(length: int) -> int:
    return max(1, TOKENS_AT_ONCE // length)


def accumulate(
    compiled: collections.abc.Callable,
    params: dict,
    rows: np.ndarray,
    first: int,
    key: jax.Array,
    pad: int,
    size: int | None = None,
    place: collections.abc.Callable = jnp.asarray,
    progress: collections.abc.Callable = lambda rows: None,
) -> dict[str, Moments]:
    """{set: Moments} in float64 of `rows` [R, L], the first of which has the number `first`.

    `size` rows go to the devices at once, put there by `place`; `progress(n)` is called after n rows.
    """
    size, total = size or rows_at_once(rows.shape[1]), None
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        padding = np.full((size - len(part), rows.shape[1]), pad, rows.dtype)  # rows without tokens count for nothing
        numbers = np.arange(first + start, first + start + size, dtype=np.uint32)
        found = jax.device_get(compiled(params, place(np.concatenate([part, padding])), numbers, key))
        found = {name: Moments(*(np.asarray(value, np.float64) for value in moments)) for name, moments in found.items()}
        total = found if total is None else {name: total[name] + found[name] for name in SETS}
        progress(len(part))
    return total
