"""Attention by fused kernels: what the kernels of TPUs and GPUs have in common.

A kernel never writes scores or weights to memory. The forward kernel saves the output and two
statistics of each query: its largest score, and the sum of exp(score - largest). The backward
kernels compute the weights again from them. The log-sum-exp alone would not do for a query that
sees no key: its scores are near -1e9, and float32 loses the logarithm beside them.

Axis letters: B rows, T queries, S keys, D = H K width, H heads, K size of a head, G heads of the
bias (H, or 1 for a bias that all heads share).
"""

import collections.abc
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, UInt32

from maelm_jax.model import ops


class Settings(typing.NamedTuple):
    """What is fixed when the kernels are compiled."""

    heads: int
    dropout_rate: float = 0.0
    causal: bool = False  # True hides the keys at later slots than the query's
    interpret: bool = False  # True runs on any platform, in Pallas' interpreter: a check, slow


class Operands(typing.NamedTuple):
    """Arrays beside queries, keys and values that have no gradient. None: not used."""

    # Queries see the keys of their own segment. 0 is an empty key.
    query_segments: Float[Array, "B 1 T"] | None = None
    key_segments: Float[Array, "B 1 S"] | None = None
    # Words of the hash of `ops.dropout`: one of each row and head, one of each row.
    head_words: UInt32[Array, "B H"] | None = None
    row_words: UInt32[Array, " B"] | None = None


class Kernels(typing.NamedTuple):
    """The kernels of a platform.

    `forward(settings, q, k, v, bias, operands)` returns the output and the statistics.
    `backward(settings, q, k, v, bias, d_carrier, operands, out, statistics, d_out)` returns the
    gradients of queries, keys, values and bias. It adds the gradient of the bias to `d_carrier` in
    place, unless that is None.
    """

    platform: str  # "gpu" or "tpu": on any other, Pallas' interpreter runs them
    forward: collections.abc.Callable
    backward: collections.abc.Callable


class Attended(typing.NamedTuple):
    """The result of an attention."""

    states: Float[Array, "B T D"]
    carrier: Float[Array, "B H T S"] | None  # for the next layer


def attention(
    kernels: Kernels,
    settings: Settings,
    q: Float[Array, "B T D"],
    k: Float[Array, "B S D"],
    v: Float[Array, "B S D"],
    bias: Float[Array, "B G T S"] | None,
    carrier: Float[Array, "B H T S"] | None,
    operands: Operands,
) -> Attended:
    """Computes softmax(q k^T / sqrt(K) + bias) v for each head, with dropout of the weights.

    Scores, softmax and sums are float32. Matrix products take the dtype of q.

    Layers that share a bias pass one carrier from each to the next, and start it with the bias. The
    carrier's value is never read. Its gradient is that of the bias: each backward kernel adds its
    own to it in place. With a carrier, `bias` itself receives no gradient.

    Args:
        kernels: What computes it.
        settings: Heads, dropout and masks.
        q: Queries.
        k: Keys.
        v: Values.
        bias: Added to the scores, or None.
        carrier: Collects the gradient of the bias. None: `bias` receives its gradient.
        operands: Segments, and words of the dropout hash.

    Returns:
        The sums, in the dtype of q, with the heads side by side, and the carrier.
    """
    if carrier is not None:
        bias = jax.lax.stop_gradient(bias)
    return _attention(kernels, settings, q, k, v, bias, carrier, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(kernels, settings, q, k, v, bias, carrier, operands):
    return _attention_forward(kernels, settings, q, k, v, bias, carrier, operands)[0]


def _attention_forward(kernels, settings, q, k, v, bias, carrier, operands):
    results = kernels.forward(settings, q, k, v, bias, operands)
    out, statistics = jax.tree.map(ops.save_for_backward, results)
    return Attended(out, carrier), (q, k, v, out, statistics, bias, operands)


def _attention_backward(kernels, settings, saved, gradients):
    q, k, v, out, statistics, bias, operands = saved
    d_out, d_carrier = gradients
    dq, dk, dv, d_bias = kernels.backward(
        settings, q, k, v, bias, d_carrier, operands, out, statistics, d_out
    )
    if d_carrier is None:
        return dq, dk, dv, d_bias, None, None
    return dq, dk, dv, None, d_bias, None


_attention.defvjp(_attention_forward, _attention_backward)


def over_heads(run: collections.abc.Callable, arrays: tuple) -> collections.abc.Callable:
    """Wraps a call of the kernels in a `shard_map` over heads. XLA cannot partition a kernel.

    Args:
        run: `attention`, with kernels and settings given.
        arrays: The other arguments of the call.
    """
    heads_last, heads_second = PartitionSpec(None, None, "tensor"), PartitionSpec(None, "tensor")
    *_, bias, carrier, operands = arrays
    whole = jax.tree.map(lambda _: PartitionSpec(), operands)
    if operands.head_words is not None:
        whole = whole._replace(head_words=heads_second)
    carrier_spec = None if carrier is None else heads_second
    bias_spec = jax.tree.map(lambda x: heads_second if x.shape[1] > 1 else PartitionSpec(), bias)
    return jax.shard_map(
        run,
        in_specs=(heads_last, heads_last, heads_last, bias_spec, carrier_spec, whole),
        out_specs=Attended(heads_last, carrier_spec),
        axis_names={"tensor"},
        check_vma=False,
    )


def scaled(x: Float[Array, "N K"], head_size: int, dtype: jnp.dtype) -> Float[Array, "N K"]:
    """Computes x / sqrt(K), with 1 / sqrt(K) rounded to `dtype` as the xla backend does."""
    scale = float(np.asarray(head_size**-0.5, dtype))
    return (x.astype(jnp.float32) * jnp.float32(scale)).astype(dtype)


def dropout_scale(
    rate: float,
    head_word: UInt32[Array, ""],
    row_word: UInt32[Array, ""],
    queries: UInt32[Array, "*T"],
    keys: UInt32[Array, "*S"],
    row_length: int,
) -> Float[Array, "M N"]:
    """Returns 0 or 1 / (1 - rate) for weights of a head, as `ops.dropout` draws them.

    The element (t, s) has the number t * row_length + s. Its product with the hash's factor is the
    sum of one of t and one of s, modulo 2^32.

    Args:
        rate: Share of the weights set to 0.
        head_word: Word of the hash for the row and head.
        row_word: Word of the hash for the row.
        queries: Numbers of the queries, [T, 1] or [1, T].
        keys: Numbers of the keys, [1, S] or [S, 1].
        row_length: Number of keys of a row.
    """
    factor = jnp.uint32(ops.ELEMENT_FACTOR)
    of_query = (queries * jnp.uint32(row_length) + row_word) * factor
    bits = ops.hash_words((of_query + keys * factor) ^ head_word)
    keep_mask = bits >= jnp.uint32(ops.dropout_threshold(rate))
    return jnp.where(keep_mask, jnp.float32(1.0 / (1.0 - rate)), jnp.float32(0.0))
