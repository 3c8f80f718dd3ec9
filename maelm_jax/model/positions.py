"""Positions in attention: relative position biases, rotary positions, and masks of hidden keys.

Keys of other segments and empty keys are hidden.

Axis letters, as in layers.py: B rows, T queries, S keys, H heads, D width. R is the number of
buckets. P is half the size of a head. Of local attention: C blocks of a row, W slots of a block, V
keys that they see.
"""

import math
import typing

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

from maelm_jax import config
from maelm_jax.model.kernels.relative_bias import look_up

MASKED_OUT = -1e9  # finite: softmax over a row without any visible key then gives no NaN


class Mask(typing.NamedTuple):
    """Which keys a query sees: those of its own segment. Keys of segment 0 are empty."""

    queries: Int[Array, "B T"]  # segments
    keys: Int[Array, "B S"]  # segments
    causal: bool = False  # True also hides the keys at later slots than the query's

    def as_bias(self, dtype: jnp.dtype) -> Float[Array, "B 1 T S"]:
        """Returns the mask as a term of the scores: 0 at keys that are seen, -1e9 at others.

        The axis of size 1 stands for all heads.
        """
        return jnp.where(self.as_booleans(), 0.0, MASKED_OUT).astype(dtype)

    def as_booleans(self) -> Bool[Array, "B 1 T S"]:
        """Returns which keys are seen. The axis of size 1 stands for all heads."""
        same: Bool[Array, "B T S"] = self.queries[:, :, None] == self.keys[:, None, :]
        seen = same & (self.keys > 0)[:, None, :]
        if self.causal:
            seen &= jnp.tri(*seen.shape[1:], dtype=bool)[None]
        return seen[:, None]


def compute_distance_buckets(stack: config.Stack) -> np.ndarray:
    """Returns the bucket of each distance between two positions.

    `relative_buckets` of the encoder or decoder chooses the function: "t5" is that of Raffel et al.
    (2020) as stock MPNet has it. "reference" is that of github.com/yumeng5/MAE-LM, whose numbering
    of the buckets depends on N = max_positions.

    Returns:
        int32 [2 N - 1]: the row of the bias table for each distance (key position - query position)
        from -(N - 1) to N - 1.
    """
    distance = np.arange(-stack.max_positions + 1, stack.max_positions)
    n = np.abs(distance)
    half = stack.num_buckets // 2
    exact = half // 2
    is_reference = stack.relative_buckets == "reference"
    last, furthest = half, stack.max_distance
    if is_reference:
        last, furthest = last - 1, furthest - 1
    share = np.log(np.maximum(n, exact) / exact) / math.log(furthest / exact)
    spread = share * (last - exact)
    # The term 1e-9 puts a distance on a boundary into the same bucket whatever the rounding.
    steps = np.ceil(spread - 1e-9) if is_reference else np.floor(spread + 1e-9)
    bucket = np.where(n < exact, n, np.minimum(half - 1, exact + steps))
    if is_reference:
        bucket *= np.sign(distance)
        return (bucket - bucket.min()).astype(np.int32)
    return (bucket + half * (distance > 0)).astype(np.int32)


class RelativeBias(nnx.Module):
    """A table of R buckets x H heads. All layers add it to their attention scores.

    The row is chosen by (key position - query position). These are positions in the text, so
    distances stay true when masked tokens are dropped, unless `Masking.renumber` counts anew.
    """

    def __init__(self, settings: config.StackSettings, rngs: nnx.Rngs):
        stack = settings.stack
        self.buckets = tuple(compute_distance_buckets(stack).tolist())
        shape = (stack.num_buckets, stack.heads)
        if settings.init.relative_bias == "local":
            # Each row stands for the smallest distance in its bucket: the loop assigns it last.
            nearest = np.zeros(stack.num_buckets)
            distance = np.abs(np.arange(-stack.max_positions + 1, stack.max_positions))
            for far in np.argsort(-distance, kind="stable"):
                nearest[self.buckets[far]] = distance[far]
            slopes = 0.5 ** np.arange(1, stack.heads + 1)
            table = jnp.asarray(-nearest[:, None] * slopes, jnp.float32)
        else:
            table = nnx.initializers.normal(settings.init.std)(rngs.params(), shape, jnp.float32)
        self.table = nnx.Param(table)

    def __call__(
        self, queries: Int[Array, "B T"], keys: Int[Array, "B S"], dtype: jnp.dtype
    ) -> Float[Array, "B H T S"]:
        """Looks up the bias of each pair of query and key."""
        return look_up(self.table[...], queries, keys, self.buckets, jnp.dtype(dtype))


def divide_into_blocks(x: Shaped[Array, "B T *S"], size: int) -> Shaped[Array, "B C W *S"]:
    """Divides the tokens of each row into C blocks of W = `size`. The last one ends with zeros."""
    missing = -x.shape[1] % size
    padded = jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))
    return padded.reshape(len(x), -1, size, *x.shape[2:])


def join_neighbours(blocks: Shaped[Array, "B C W *S"]) -> Shaped[Array, "B C V *S"]:
    """Returns each block between its neighbours: V = 3 W. A block that is alone stays so."""
    if blocks.shape[1] == 1:
        return blocks
    padded = jnp.pad(blocks, ((0, 0), (1, 1), *((0, 0),) * (blocks.ndim - 2)))
    return jnp.concatenate([padded[:, :-2], blocks, padded[:, 2:]], axis=2)


def choose_block(window: int, slots: int) -> int:
    """Returns the size of the blocks of local attention: half a window, or all slots of a row.

    Three blocks of half a window would be longer than a short row.
    """
    half = max(window // 2, 1)
    return half if slots > 3 * half else slots


def make_window_mask(
    segments: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    window: int,
    block: int,
    dtype: jnp.dtype,
) -> Float[Array, "R 1 W V"]:
    """Returns the mask of local attention, as a term of the scores of the R blocks of all rows.

    It is 0 where a key of the same segment is at most window // 2 positions away from the query,
    and -1e9 elsewhere, also at empty keys (segment 0). If there are several blocks, each has at
    least window // 2 slots. The axis of size 1 stands for all heads.
    """
    segments, positions = (divide_into_blocks(x, block) for x in (segments, positions))
    key_segments, key_positions = (join_neighbours(x)[:, :, None] for x in (segments, positions))
    near = jnp.abs(key_positions - positions[:, :, :, None]) <= window // 2
    seen = near & (key_segments == segments[:, :, :, None]) & (key_segments > 0)
    mask = jnp.where(seen, 0.0, MASKED_OUT).astype(dtype)
    return mask.reshape(-1, 1, *mask.shape[2:])


class Rotation(typing.NamedTuple):
    """The angles by which rotary positions turn the pairs of values of each head (float32)."""

    cos: Float[Array, "B T P"]
    sin: Float[Array, "B T P"]


class Rotations(typing.NamedTuple):
    """Rotary positions of the queries and of the keys."""

    queries: Rotation
    keys: Rotation


def compute_rotation(positions: Int[Array, "B T"], head_size: int, theta: float) -> Rotation:
    """Returns the rotation of each slot (Su et al. 2021, arXiv 2104.09864).

    Pair i turns by position * theta^(-2 i / head_size).
    """
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    frequencies = jnp.asarray(1.0 / np.float32(theta) ** exponents)
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies[None, None]
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def compute_rotations(
    theta: float, head_size: int, queries: Int[Array, "B T"], keys: Int[Array, "B S"]
) -> Rotations:
    """Returns the rotary positions of queries and keys."""
    return Rotations(
        compute_rotation(queries, head_size, theta), compute_rotation(keys, head_size, theta)
    )


def rotate(x: Float[Array, "B T D"], by: Rotation, heads: int) -> Float[Array, "B T D"]:
    """Rotates queries or keys. The scores then depend on distances only.

    As in stock transformers, pair i of a head is made of value i of its first half and value i of
    its second half. The computation is in float32. The result has the dtype of x.
    """
    pairs = x.astype(jnp.float32).reshape(*x.shape[:2], heads, 2, -1)
    first, second = pairs[:, :, :, 0], pairs[:, :, :, 1]
    cos, sin = by.cos[:, :, None], by.sin[:, :, None]
    rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=3)
    return rotated.reshape(x.shape).astype(x.dtype)
