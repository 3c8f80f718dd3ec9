"""Primitives: dropout."""

import jax
import jax.numpy as jnp
import numpy as np

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
