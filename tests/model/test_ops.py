"""Primitives: dropout and GELU, as exact as bfloat16 can hold, and the gradient of a kernel."""

import functools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from hypothesis import strategies

from maelm_jax.model import ops
from maelm_jax.model.kernels import linear as products

ROUNDING = 2**-8 + 2**-10  # half a unit in bfloat16's last place, and float32's own error in the tail


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


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("subscripts", ["ri,io->ro", "ro,io->ri", "ri,ro->io", "bhts,bhsk->bhtk", "bhts,bhtk->bhsk"])
def test_bfloat16_products_and_their_gradients_sum_in_float32(subscripts, platform, monkeypatch):
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, default, **by_platform: by_platform.get(platform, default)(*x))
    check_product(subscripts, dict(zip("riobhtsk", (300, 24, 40, 2, 3, 17, 300, 8), strict=True)))


def check_product(subscripts, sizes):
    """Compares a product of bfloat16, and its gradients, with einsum in float32."""
    draw = np.random.default_rng(0)
    x, y, d = (jnp.asarray(draw.normal(size=[sizes[axis] for axis in axes]), jnp.bfloat16) for axes in re.split(",|->", subscripts))

    def with_gradients(product, x, y, d):
        result, backward = jax.vjp(functools.partial(product, subscripts), x, y)
        return result, *backward(d)

    found = jax.jit(functools.partial(with_gradients, products.product))(x, y, d)
    exact = jax.jit(functools.partial(with_gradients, jnp.einsum))(*(part.astype(jnp.float32) for part in (x, y, d)))
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, rtol=ROUNDING, atol=1e-4)


@hypothesis.settings(max_examples=12)
@hypothesis.given(strategies.sampled_from(("", "b", "bh")), strategies.data())
def test_products_of_axes_in_any_order_are_those_of_einsum(batch, data):
    """Axes in both factors and the result, one axis of each factor alone, and the axis that is summed."""
    operands = (batch + "ri", batch + "io", batch + "ro")
    left, right, out = ("".join(data.draw(strategies.permutations(axes))) for axes in operands)
    check_product(f"{left},{right}->{out}", {"b": 2, "h": 3, "r": 5, "i": 7, "o": 4})


@pytest.mark.parametrize(
    "rows,inputs,outputs,transposed",
    [
        (products.LEAST_ROWS, 64, 8, True),
        (products.LEAST_ROWS, 8, 64, False),
        (products.LEAST_ROWS - 1, 64, 8, False),
        (products.LEAST_ROWS, 512, products.MOST_COLUMNS + 8, False),
    ],
)
def test_the_gradient_of_a_kernel_is_a_product_with_the_narrower_factor_on_the_left(rows, inputs, outputs, transposed):
    """XLA's CPU compiler multiplies it faster, and would merge a plain transposition into the product."""
    x, kernel, d_y = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(rows, inputs), (inputs, outputs), (rows, outputs)]))

    def gradients(product):
        return jax.jit(lambda x, kernel, d_y: jax.vjp(product, x, kernel)[1](d_y))

    def linear(x, kernel):
        return products.linear(x, kernel, None)

    found, expected = (gradients(product)(x, kernel, d_y) for product in (linear, jnp.matmul))
    for ours, plain in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-4)
    program = gradients(linear).lower(x, kernel, d_y).compile().as_text()
    # Either the result has the other shape, or its layout is the other one.
    other_shape, other_layout = rf"{outputs},{inputs}\]\{{1,0\}}", rf"{inputs},{outputs}\]\{{0,1\}}"
    assert bool(re.search(rf"= f32\[({other_shape}|{other_layout}) dot\(", program)) == transposed


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_the_gradient_of_a_bias_is_the_sum_of_the_rows_on_each_platform(platform, monkeypatch):
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, default, **by_platform: by_platform.get(platform, default)(*x))
    d_y = jax.random.normal(jax.random.key(0), (300, 24)).astype(jnp.bfloat16)
    x, kernel, bias = jnp.zeros((300, 8), jnp.bfloat16), jnp.zeros((8, 24), jnp.bfloat16), jnp.arange(24.0)
    y, backward = jax.vjp(products.linear, x, kernel, bias)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, y.shape))
    gradient = backward(d_y)[2]
    assert gradient.dtype == jnp.float32
    exact = np.asarray(d_y, np.float64).sum(axis=0)
    np.testing.assert_allclose(gradient, exact, rtol=1e-5, atol=1e-4)


def bfloat16_between(low: float, high: float) -> jnp.ndarray:
    """Every bfloat16 number between two others of the same sign."""
    bits = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16)
    return jnp.asarray(bits[(bits.astype(np.float32) >= low) & (bits.astype(np.float32) <= high)])


def exact_gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * scipy.special.erfc(-x * np.sqrt(0.5))


def exact_gelu_gradient(x: np.ndarray) -> np.ndarray:
    return 0.5 * scipy.special.erfc(-x * np.sqrt(0.5)) + x * np.exp(-0.5 * x**2) / np.sqrt(2 * np.pi)


@pytest.mark.parametrize("low,high", [(-4.0, -3.0), (-3.0, -1e-3), (1e-3, 6.0)])
def test_bfloat16_gelu_is_as_exact_as_its_type(low, high):
    x = bfloat16_between(low, high)
    assert x.size > 60
    y = jax.jit(ops.gelu)(x)
    dx = jax.jit(jax.grad(lambda x: ops.gelu(x).astype(jnp.float32).sum()))(x)
    assert y.dtype == dx.dtype == jnp.bfloat16
    wide = np.asarray(x, np.float64)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact_gelu(wide), rtol=ROUNDING)
    np.testing.assert_allclose(np.asarray(dx, np.float64), exact_gelu_gradient(wide), rtol=ROUNDING, atol=2e-4)  # it crosses 0 near -0.75


def test_bfloat16_dropout_keeps_the_mean():
    rate = 0.1  # bfloat16 rounds 1 / 0.9 to 1.1094
    x = jax.random.uniform(jax.random.key(1), (8, 64, 128), jnp.float32, 0.5, 2.0).astype(jnp.bfloat16)
    keys = jax.random.split(jax.random.key(0), 8)
    y, pull = jax.vjp(lambda x: ops.dropout(x, rate, keys), x)
    for result in (y, pull(x)[0]):  # the gradient is the same mask and scale
        assert result.dtype == jnp.bfloat16
        kept, result = np.asarray(result != 0), np.asarray(result, np.float64)
        ratio = result[kept].mean() / np.asarray(x, np.float64)[kept].mean()
        assert ratio == pytest.approx(1 / (1 - rate), rel=2e-4)
        np.testing.assert_allclose(result[kept], np.asarray(x, np.float64)[kept] / (1 - rate), rtol=ROUNDING)
