"""Activations, dropout, and what a layer saves for its backward pass.

Products, LayerNorm and gathers have hand-written gradients: kernels/. Axis letter: B rows.
"""

import math

import jax
import jax.numpy as jnp
from jax import ad_checkpoint
from jaxtyping import Array, Float, Key, UInt32

SAVED = "saved for backward"  # name of the values that `save_for_backward` marks


def save_for_backward(x: Array) -> Array:
    """Marks a value of the forward pass that the backward pass keeps.

    All other values are computed again: dropout's masks, GELU, the output of LayerNorm. A few
    operations an element cost less than storing and reading the value.
    """
    return ad_checkpoint.checkpoint_name(x, SAVED)


def gelu(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Computes the exact GELU in float32. The result has the dtype of x.

    float32 is needed because 1 + erf cancels for negative x: bfloat16 loses the whole result below
    x = -3. The gradient is computed in float32 too. erf is one rational function; erfc
    (jax.nn.gelu) needs an exponential and two divisions on CPU.
    """
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1.0 + jax.lax.erf(wide * jnp.float32(math.sqrt(0.5))))).astype(x.dtype)


def gelu_new(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Computes the approximation of GELU by tanh in float32. The result has the dtype of x."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


# By the names of `hidden_act` in transformers.
ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu, "gelu": gelu, "gelu_new": gelu_new}
# The hash of `dropout` multiplies the number of an element by this odd number near 2^32 / 1.618.
ELEMENT_FACTOR = 0x9E3779B9


def hash_words(x: UInt32[Array, "*S"]) -> UInt32[Array, "*S"]:
    """Hashes 32-bit words, one to one. One changed input bit changes about half of the output bits.

    Source: "lowbias32" of C. Wellons (github.com/skeeto/hash-prospector).
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def split_keys(keys: Key[Array, " B"] | None, count: int) -> tuple[Key[Array, " B"] | None, ...]:
    """Returns `count` independent keys for each row, or `count` times None without keys."""
    return (
        (None,) * count
        if keys is None
        else tuple(jax.vmap(lambda key: jax.random.split(key, count), out_axes=1)(keys))
    )


def dropout_threshold(rate: float) -> int:
    """Returns the threshold of the 32-bit hashes. `dropout` sets an element below it to 0."""
    return round(rate * 2**32)


def dropout(
    x: Float[Array, "B *S"],  # noqa: F821
    rate: float,
    keys: Key[Array, " B"] | None,
) -> Float[Array, "B *S"]:  # noqa: F821
    """Sets a share `rate` of x to 0 and multiplies the rest by 1 / (1 - rate).

    The mask is a hash of the row's key and of the element's index in the row. It is therefore the
    same on every mesh and in any microbatch. The hash takes about ten operations a word. XLA fuses
    it into the multiplication, forward and again backward, so no mask is stored. Threefry takes
    about a hundred operations a word, a fifth of a training step on CPU.

    The scale is applied in float32, because bfloat16 rounds 1 / 0.9 to 1.1094: every element that
    remains would be 0.16% too small.

    Returns:
        The new values, in the dtype of x. x itself when `keys` is None or `rate` is 0.
    """
    if keys is None or rate == 0.0:
        return x
    words = jax.random.key_data(keys).reshape(x.shape[0], 2, *(1,) * (x.ndim - 1))
    shape = (1, *x.shape[1:])
    matrix, element = jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32)
    # One counter numbers the matrices of a row, one the elements of a matrix. A single counter of
    # 32 bits could overflow.
    for axis in range(1, x.ndim):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        if axis < x.ndim - 2:
            matrix = matrix * jnp.uint32(x.shape[axis]) + index
        else:
            element = element * jnp.uint32(x.shape[axis]) + index
    bits = hash_words(
        hash_words(matrix + words[:, 0]) ^ (element + words[:, 1]) * jnp.uint32(ELEMENT_FACTOR)
    )
    keep_mask = bits >= jnp.uint32(dropout_threshold(rate))
    scaled = (x.astype(jnp.float32) * jnp.float32(1.0 / (1.0 - rate))).astype(x.dtype)
    return jnp.where(keep_mask, scaled, jnp.zeros((), x.dtype))
