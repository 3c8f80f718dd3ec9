"""Primitives with their own gradients, and what a layer keeps for its backward pass.

Axis letters: B rows, T tokens of a sequence, D width, N slots before a gather, P slots after it.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import ad_checkpoint
from jaxtyping import Array, Float, Int, Key, UInt32


def save_for_backward(x: Array) -> Array:
    """Marks what the backward pass of a layer keeps from the forward pass. All else (dropout's masks, GELU, what LayerNorm gives) it computes again:
    a few operations an element, where storing it and reading it back costs more."""
    return ad_checkpoint.checkpoint_name(x, "kept")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: Float[Array, "B T D"], scale: Float[Array, " D"], bias: Float[Array, " D"], epsilon: float) -> Float[Array, "B T D"]:
    """The biased variance, as in PyTorch; computed in float32, two passes, whatever comes in (same dtype out)."""
    return _layer_norm_forward(x, scale, bias, epsilon)[0]


def _layer_norm_forward(x, scale, bias, epsilon):
    x = save_for_backward(x)
    wide = x.astype(jnp.float32)
    mean = save_for_backward(wide.mean(axis=-1, keepdims=True))
    inverse = save_for_backward(jax.lax.rsqrt(jnp.square(wide - mean).mean(axis=-1, keepdims=True) + epsilon))
    normal = (wide - mean) * inverse
    return (normal * scale[None, None] + bias[None, None]).astype(x.dtype), (x, mean, inverse, scale)


def _layer_norm_backward(epsilon, saved, dy):
    x, mean, inverse, scale = saved
    normal, dy = (x.astype(jnp.float32) - mean) * inverse, dy.astype(jnp.float32)
    d = dy * scale[None, None]
    dx = inverse * (d - d.mean(axis=-1, keepdims=True) - normal * (d * normal).mean(axis=-1, keepdims=True))
    return dx.astype(x.dtype), (dy * normal).sum(axis=(0, 1)), dy.sum(axis=(0, 1))


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


def gelu(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """The exact GELU, computed in float32; the result has the dtype of x.

    1 + erf cancels for negative x: in bfloat16 nothing is left of the result below -3. The gradient
    is computed in float32 too. The form with erf is one rational function. The form with erfc
    (jax.nn.gelu) needs an exponential and two divisions on CPU.
    """
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1.0 + jax.lax.erf(wide * jnp.float32(math.sqrt(0.5))))).astype(x.dtype)


def _scramble(x: UInt32[Array, "*S"]) -> UInt32[Array, "*S"]:
    """A bijection of 32-bit words that changes about half the bits when one changes ("lowbias32", C. Wellons, hash-prospector)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def split_keys(keys: Key[Array, " B"] | None, count: int) -> tuple[Key[Array, " B"] | None, ...]:
    """`count` independent keys for each row; None for each when there are none."""
    return (None,) * count if keys is None else tuple(jax.vmap(lambda key: jax.random.split(key, count), out_axes=1)(keys))


def dropout(x: Float[Array, "B *S"], rate: float, keys: Key[Array, " B"] | None) -> Float[Array, "B *S"]:
    """Sets a share `rate` of x to 0 and scales the rest by 1 / (1 - rate); x itself when `keys` is None or `rate` 0.

    The scale is applied in float32. bfloat16 rounds 1 / 0.9 to 1.1094: every kept element would be
    0.16% too small.

    Threefry costs about a hundred operations a word, a fifth of a training step on CPU. Here every element's index in its row is hashed
    with the row's key in about ten operations, which the compiler fuses into the multiplication forward and again backward: no mask is
    ever stored. It is a function of (the row's key, index) alone, so it is the same on every mesh and in any microbatch.
    """
    if keys is None or rate == 0.0:
        return x
    words = jax.random.key_data(keys).astype(jnp.uint32).reshape(x.shape[0], 2, *(1,) * (x.ndim - 1))
    iota = lambda axis: jax.lax.broadcasted_iota(jnp.uint32, (1, *x.shape[1:]), axis)  # noqa: E731
    matrix, element = jnp.zeros((1, *x.shape[1:]), jnp.uint32), jnp.zeros((1, *x.shape[1:]), jnp.uint32)
    for axis in range(1, x.ndim):  # two counters, so that neither wraps: which matrix of the row, and which element of it
        if axis < x.ndim - 2:
            matrix = matrix * jnp.uint32(x.shape[axis]) + iota(axis)
        else:
            element = element * jnp.uint32(x.shape[axis]) + iota(axis)
    bits = _scramble(_scramble(matrix + words[:, 0]) ^ (element + words[:, 1]) * jnp.uint32(0x9E3779B9))
    kept = bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
    scaled = (x.astype(jnp.float32) * jnp.float32(1.0 / (1.0 - rate))).astype(x.dtype)
    return jnp.where(kept, scaled, jnp.zeros((), x.dtype))


@jax.custom_vjp
def gather_rows(x: Float[Array, "B N D"], index: Int[Array, "B P"], inverse: Int[Array, "B N"]) -> Float[Array, "B P D"]:
    """y[p] = x[index[p]], 0 where index[p] = N. `inverse` is index's inverse (P where a row is not taken), so that the backward pass is a
    gather as well: no scatter-add, deterministic."""
    found = jnp.take_along_axis(x, jnp.minimum(index, x.shape[1] - 1)[:, :, None], axis=1, mode="promise_in_bounds")
    return jnp.where((index < x.shape[1])[:, :, None], found, jnp.zeros((), x.dtype))


gather_rows.defvjp(
    lambda x, index, inverse: (gather_rows(x, index, inverse), (index, inverse)),
    lambda saved, dy: (gather_rows(dy, saved[1], saved[0]), None, None),
)
