"""Primitives with hand-written gradients or dropout, and what a layer saves for its backward pass.

Axis letters: B rows, T tokens of a sequence, D width, N slots before a gather, P slots after it. Of
matrices: R rows, I inputs, O outputs.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
from jax import ad_checkpoint
from jax.experimental import layout
from jaxtyping import Array, Float, Int, Key, UInt32

SAVED = "saved for backward"  # name of the values that `save_for_backward` marks
# Sizes of the products that `kernel_gradient` rearranges on CPU. At other sizes it gains nothing.
MOST_COLUMNS, LEAST_ROWS = 256, 256


def save_for_backward(x: Array) -> Array:
    """Marks a value of the forward pass that the backward pass keeps.

    All other values are computed again: dropout's masks, GELU, the output of LayerNorm. A few
    operations an element cost less than storing and reading the value.
    """
    return ad_checkpoint.checkpoint_name(x, SAVED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def product(
    subscripts: str, x: Array, y: Array, dtype: jax.typing.DTypeLike | None = None
) -> Array:
    """Returns jnp.einsum(subscripts, x, y) in `dtype`; None is the dtype of x. Sums are float32.

    The products of the backward pass have the dtype of x too.

    XLA's CPU compiler uses a processor's matrix units (AMX) for bfloat16 only if the result is
    float32 and both matrices are stored by rows: the summed axis is the last one of the left matrix
    and the first one of the right.
    """
    dtype = dtype or x.dtype

    def direct(x, y):
        return jnp.einsum(subscripts, x, y, preferred_element_type=dtype)

    def by_rows(x, y):
        left, right, out = re.split(",|->", subscripts)
        (summed,) = set(left) - set(out)
        batch = "".join(axis for axis in left if axis in right and axis in out)
        columns = "".join(axis for axis in right if axis not in batch + summed)
        x_axes, y_axes = left.replace(summed, "") + summed, batch + summed + columns
        x = _store(jnp.einsum(f"{left}->{x_axes}", x))
        y = _store(jnp.einsum(f"{right}->{y_axes}", y))
        wide = jnp.einsum(f"{x_axes},{y_axes}->{out}", x, y, preferred_element_type=jnp.float32)
        return wide.astype(dtype)

    if x.dtype != jnp.bfloat16:
        return direct(x, y)
    return jax.lax.platform_dependent(x, y, cpu=by_rows, default=direct)


def _store(x: Array) -> Array:
    """Stores the axes of x in their order."""
    return layout.with_layout_constraint(x, layout.Layout(tuple(range(x.ndim))))


def _product_forward(subscripts, x, y, dtype):
    return product(subscripts, x, y, dtype), (x, y)


def _product_backward(subscripts, _, saved, d):
    (x, y), (left, right, out) = saved, re.split(",|->", subscripts)
    d = d.astype(x.dtype)
    d_x = product(f"{out},{right}->{left}", d, y)
    return d_x, product(f"{left},{out}->{right}", x, d, y.dtype)


product.defvjp(_product_forward, _product_backward)


@jax.custom_vjp
def linear(
    x: Float[Array, "R I"], kernel: Float[Array, "I O"], bias: Float[Array, " O"] | None
) -> Float[Array, "R O"]:
    """Returns x kernel + bias in the dtype of x, with the gradients of the functions below."""
    y = product("ri,io->ro", x, kernel)
    return y if bias is None else y + bias.astype(y.dtype)[None]


def _linear_forward(x, kernel, bias):
    return linear(x, kernel, bias), (x, kernel, bias)


def _linear_backward(saved, d_y):
    x, kernel, bias = saved
    d_bias = None if bias is None else bias_gradient(d_y, bias.dtype)
    d_x = product("ro,io->ri", d_y, kernel)
    return d_x, kernel_gradient(x, d_y, kernel.dtype), d_bias


linear.defvjp(_linear_forward, _linear_backward)


def bias_gradient(d_y: Float[Array, "R O"], dtype: jnp.dtype) -> Float[Array, " O"]:
    """Returns the sum of the rows of d_y in `dtype`: the gradient of a bias.

    On accelerators it is a product with rows of ones. By the compilers' estimates a sum takes
    longer, and the gradient of GELU too, with which XLA fuses it (docs/notes/gpu_step.md).
    """

    def sum_by_product(d_y):
        ones = jnp.ones((8, len(d_y)), d_y.dtype)  # rows of a tile; fewer were not tried
        return jnp.einsum("nr,ro->no", ones, d_y, preferred_element_type=dtype)[0]

    return jax.lax.platform_dependent(
        d_y, cpu=lambda d_y: d_y.sum(axis=0, dtype=dtype), default=sum_by_product
    )


def kernel_gradient(
    x: Float[Array, "R I"], d_y: Float[Array, "R O"], dtype: jnp.dtype
) -> Float[Array, "I O"]:
    """Returns x^T d_y in `dtype`: the gradient of a kernel.

    x are the kernel's inputs, and d_y is the gradient of its outputs.

    XLA's CPU compiler multiplies small float32 matrices up to twice as fast if the narrower one is
    on the left (docs/notes/performance.md).
    """
    if x.dtype == jnp.bfloat16:
        return product("ri,ro->io", x, d_y, dtype)

    def direct(left, right):
        return product("ri,ro->io", left, right, dtype)

    def narrower_left(x, d_y):
        (rows, inputs), outputs = x.shape, d_y.shape[1]
        if inputs <= outputs or outputs > MOST_COLUMNS or rows < LEAST_ROWS:
            return direct(x, d_y)
        # Without the barrier, XLA makes the transposition a part of the product.
        return jax.lax.optimization_barrier(direct(d_y, x)).T

    return jax.lax.platform_dependent(x, d_y, cpu=narrower_left, default=direct)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(
    x: Float[Array, "B T D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    epsilon: float,
) -> Float[Array, "B T D"]:
    """Normalises the last axis with the biased variance, as PyTorch does.

    It computes in float32, in two passes (mean, variance). The result has the dtype of x.
    """
    return _layer_norm_forward(x, scale, bias, epsilon)[0]


def _layer_norm_forward(x, scale, bias, epsilon):
    wide = x.astype(jnp.float32)
    mean = save_for_backward(wide.mean(axis=-1, keepdims=True))
    inverse = save_for_backward(
        jax.lax.rsqrt(jnp.square(wide - mean).mean(axis=-1, keepdims=True) + epsilon)
    )
    y = (wide - mean) * inverse * scale[None, None]
    if bias is not None:
        y = y + bias[None, None]
    return y.astype(x.dtype), (x, mean, inverse, scale, bias)


def _layer_norm_backward(epsilon, saved, dy):
    x, mean, inverse, scale, bias = saved
    normal, dy = (x.astype(jnp.float32) - mean) * inverse, dy.astype(jnp.float32)
    d = dy * scale[None, None]
    dx = inverse * (
        d - d.mean(axis=-1, keepdims=True) - normal * (d * normal).mean(axis=-1, keepdims=True)
    )
    d_bias = None if bias is None else dy.sum(axis=(0, 1))
    return dx.astype(x.dtype), (dy * normal).sum(axis=(0, 1)), d_bias


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


def gelu(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Computes the exact GELU in float32. The result has the dtype of x.

    float32 is needed because 1 + erf cancels for negative x: bfloat16 loses the whole result below
    x = -3. The gradient is computed in float32 too. erf is one rational function; erfc
    (jax.nn.gelu) needs an exponential and two divisions on CPU.
    """
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1.0 + jax.lax.erf(wide * jnp.float32(math.sqrt(0.5))))).astype(x.dtype)


ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu, "gelu": gelu}
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


@jax.custom_vjp
def gather_rows(
    x: Float[Array, "B N D"], index: Int[Array, "B P"], inverse: Int[Array, "B N"]
) -> Float[Array, "B P D"]:
    """Computes y[p] = x[index[p]] in each row of the batch; 0 where index[p] = N.

    The backward pass is a gather with `inverse`. It needs no scatter-add and is deterministic.

    Args:
        x: Values to gather.
        index: Slots to read, each at most once; N where p is empty.
        inverse: Inverse of `index`: the p that reads a slot, or P where none does.

    Returns:
        The gathered values.
    """
    gathered = jnp.take_along_axis(
        x, jnp.minimum(index, x.shape[1] - 1)[:, :, None], axis=1, mode="promise_in_bounds"
    )
    return jnp.where((index < x.shape[1])[:, :, None], gathered, jnp.zeros((), x.dtype))


gather_rows.defvjp(
    lambda x, index, inverse: (gather_rows(x, index, inverse), (index, inverse)),
    lambda saved, dy: (gather_rows(dy, saved[1], saved[0]), None, None),
)
