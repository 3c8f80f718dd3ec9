"""GELU and dropout in bfloat16: as exact as the type can hold, and in float32 the same program as without conversions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from maelm_jax.model import ops

RATES = (0.1, 0.3, 0.5)
ROUNDING = 2**-8 + 2**-10  # half a unit in bfloat16's last place, and float32's own error in the tail


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


@pytest.mark.parametrize("rate", RATES)
def test_bfloat16_dropout_keeps_the_mean(rate):
    x = jax.random.uniform(jax.random.key(1), (8, 64, 128), jnp.float32, 0.5, 2.0).astype(jnp.bfloat16)
    keys = jax.random.split(jax.random.key(0), 8)
    y, pull = jax.vjp(lambda x: ops.dropout(x, rate, keys), x)
    for result in (y, pull(x)[0]):  # the gradient is the same mask and scale
        assert result.dtype == jnp.bfloat16
        kept, result = np.asarray(result != 0), np.asarray(result, np.float64)
        ratio = result[kept].mean() / np.asarray(x, np.float64)[kept].mean()
        assert ratio == pytest.approx(1 / (1 - rate), rel=2e-4)
        np.testing.assert_allclose(result[kept], np.asarray(x, np.float64)[kept] / (1 - rate), rtol=ROUNDING)


def test_a_dropout_rate_that_rounds_to_one_drops_everything():
    y = ops.dropout(jnp.ones((2, 8, 8)), 1 - 1e-12, jax.random.split(jax.random.key(0), 2))
    assert not y.any()


@pytest.mark.parametrize(
    "function",
    [ops.gelu, lambda x: ops.dropout(x, 0.1, jax.random.split(jax.random.key(0), 2))],
    ids=["gelu", "dropout"],
)
def test_the_float32_program_converts_no_float(function):
    x = jnp.ones((2, 8, 16))
    for traced in (function, jax.grad(lambda x: function(x).sum())):
        conversions = [line for line in str(jax.make_jaxpr(traced)(x)).splitlines() if "convert_element_type" in line and ":f32" in line]
        assert not conversions
