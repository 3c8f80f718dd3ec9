"""Primitives: dropout, and the gradient of a kernel."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maelm_jax.model import ops


def test_dropout():
    x = jnp.ones((8, 16, 128, 64))
    keys = jax.random.split(jax.random.key(0), 8)
    y = np.asarray(ops.dropout(x, 0.1, keys))
    kept = y != 0
    assert abs(kept.mean() - 0.9) < 0.001
    np.testing.assert_allclose(y[kept], 1 / 0.9, rtol=1e-6)
    for axis in range(4):  # neighbours along every axis are independent
        a, b = np.take(kept, range(7), axis), np.take(kept, range(1, 8), axis)
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.01
    np.testing.assert_array_equal(ops.dropout(x[3:5], 0.1, keys[3:5]), y[3:5])  # a row's own affair
    other = np.asarray(ops.dropout(x, 0.1, jax.random.split(jax.random.key(1), 8))) != 0
    assert abs(np.corrcoef(kept.ravel(), other.ravel())[0, 1]) < 0.01
    assert ops.dropout(x, 0.1, None) is x


@pytest.mark.parametrize(
    "rows,inputs,outputs,transposed",
    [
        (ops.LEAST_ROWS, 64, 8, True),
        (ops.LEAST_ROWS, 8, 64, False),
        (ops.LEAST_ROWS - 1, 64, 8, False),
        (ops.LEAST_ROWS, 512, ops.MOST_COLUMNS + 8, False),
    ],
)
def test_the_gradient_of_a_kernel_is_a_product_with_the_narrower_factor_on_the_left(rows, inputs, outputs, transposed):
    """XLA's CPU compiler multiplies it faster, and would merge a plain transposition into the product."""
    x, kernel, d_y = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(rows, inputs), (inputs, outputs), (rows, outputs)]))

    def gradients(product):
        return jax.jit(lambda x, kernel, d_y: jax.vjp(product, x, kernel)[1](d_y))

    found, expected = (gradients(product)(x, kernel, d_y) for product in (ops.linear, jnp.matmul))
    for ours, plain in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-4)
    program = gradients(ops.linear).lower(x, kernel, d_y).compile().as_text()
    # Either the result has the other shape, or its layout is the other one.
    other_shape, other_layout = rf"{outputs},{inputs}\]\{{1,0\}}", rf"{inputs},{outputs}\]\{{0,1\}}"
    assert bool(re.search(rf"= f32\[({other_shape}|{other_layout}) dot\(", program)) == transposed
