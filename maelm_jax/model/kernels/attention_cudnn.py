"""JAX's fused attention for NVIDIA GPUs, which calls cuDNN.

Axis letters: B rows, H heads, T queries, S keys, D width, K size of a head (D / H), G heads of the
bias (H, or 1 for a bias that all heads share).
"""

import typing

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from maelm_jax.model.ops import save_for_backward
from maelm_jax.model.positions import Mask

MOST_VALUES = 128  # of a head
# What `_append_segments` adds to a head: a multiple of the 16 that a matrix unit sums at once, and
# a size that makes scores of 64 values at least 256 less.
SEGMENT_VALUES, SEGMENT_SIZE = 16, 32


def attend(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H K"],
    bias: Float[Array, "B G T S"] | None,
    mask: Mask | Float[Array, "B 1 T S"] | None,
    sharded_rows: bool,
) -> Float[Array, "B T D"]:
    """Computes softmax(q k^T / sqrt(K) + bias) v, or with a mask instead of the bias.

    To cuDNN, a boolean mask is a bias too, and jax 0.10 computes its gradient. Where a mask stands
    alone as segments, they go into the heads instead, if there is room. `sharded_rows` is that of
    `backends.Target`.
    """
    head_size, is_causal = q.shape[3], False
    q, k, v = (save_for_backward(x) for x in (q, k, v))
    if isinstance(mask, Mask) and head_size + SEGMENT_VALUES <= MOST_VALUES:
        q, k, v = _append_segments(q, k, v, mask)
        mask, is_causal = None, mask.causal
    elif mask is not None:
        mask = mask.as_booleans() if isinstance(mask, Mask) else mask >= 0

    def run(q, k, v, bias, mask):
        return jax.nn.dot_product_attention(
            q, k, v, bias, mask, scale=head_size**-0.5, is_causal=is_causal, implementation="cudnn"
        )

    if sharded_rows:
        # XLA cannot partition the call. Inside `shard_map` over all axes it has nothing to do.
        by_head, whole = PartitionSpec(None, None, "tensor"), PartitionSpec()
        bias_spec = whole if bias is None or bias.shape[1] == 1 else PartitionSpec(None, "tensor")
        run = jax.shard_map(
            run,
            in_specs=(by_head, by_head, by_head, bias_spec, whole),
            out_specs=by_head,
            axis_names={"tensor"},
            check_vma=False,
        )
    return run(q, k, v, bias, mask)[..., :head_size].reshape(*q.shape[:2], -1)


def _append_segments(
    q: Float[Array, "B T H K"], k: Float[Array, "B S H K"], v: Float[Array, "B S H K"], mask: Mask
) -> tuple[Float[Array, "B T H _"], Float[Array, "B S H _"], Float[Array, "B S H _"]]:
    """Appends values to each head that hide the keys of other segments, without an array [T, S].

    They are the binary digits of the segment's number, as SEGMENT_SIZE and its negative. In q k^T
    they add 2 SEGMENT_SIZE^2 less for each digit that differs. The last value makes that 0 for
    equal segments. All of them are exact in bfloat16. The segment of empty slots is 0, so an empty
    query, whose result has no meaning, sees the empty keys.
    """
    digits = SEGMENT_VALUES - 1

    def append(x, segments, last):
        bits = (segments[:, :, None] >> jnp.arange(digits)[None, None]) & 1
        values = (2 * bits - 1) * SEGMENT_SIZE
        values = jnp.pad(values, ((0, 0), (0, 0), (0, 1)), constant_values=last)
        values = jnp.broadcast_to(values[:, :, None], (*x.shape[:3], SEGMENT_VALUES))
        return jnp.concatenate([x, values.astype(x.dtype)], axis=3)

    return (
        append(q, mask.queries, digits * SEGMENT_SIZE),
        append(k, mask.keys, -SEGMENT_SIZE),
        jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, SEGMENT_VALUES))),
    )


def saves_outputs(primitive: typing.Any, *_: typing.Any, **__: typing.Any) -> bool:
    """A policy of `jax.checkpoint`: keeps what cuDNN's forward kernel returns.

    The backward kernel needs the softmax statistics, and `jax.nn.dot_product_attention` gives them
    no name that `save_for_backward` could mark. Without this policy, the backward pass runs the
    forward kernel again.
    """
    return primitive.name.startswith("dot_product_attention_fwd")
