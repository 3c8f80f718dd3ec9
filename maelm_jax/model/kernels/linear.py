"""The affine map and its gradient, in products that suit each device.

Axis letters of matrices: R rows, I inputs, O outputs.
"""

import functools
import re

import jax
import jax.numpy as jnp
from jax.experimental import layout
from jaxtyping import Array, Float

# Sizes of the products that `kernel_gradient` rearranges on CPU. At other sizes it gains nothing.
MOST_COLUMNS, LEAST_ROWS = 256, 256


@jax.custom_vjp
def linear(
    x: Float[Array, "R I"], kernel: Float[Array, "I O"], bias: Float[Array, " O"] | None
) -> Float[Array, "R O"]:
    """Returns x kernel + bias in the dtype of x, with the gradients of `_linear_backward`."""
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def product(
    subscripts: str, x: Array, y: Array, dtype: jax.typing.DTypeLike | None = None
) -> Array:
    """Returns jnp.einsum(subscripts, x, y) in `dtype`; None is the dtype of x. Sums are float32.

    The products of the backward pass have the dtype of x too.

    XLA's CPU compiler uses a processor's instructions for bfloat16 (AMX, AVX512_BF16) only if the
    result is float32 and both matrices are stored by rows: the summed axis is the last one of the
    left matrix and the first one of the right.
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
