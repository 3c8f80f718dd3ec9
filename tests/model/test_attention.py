"""What is added to the scores of attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maelm_jax.model import attention


@pytest.mark.parametrize("is_array", [True, False])
def test_a_mask_hides_keys_beside_a_bias_too(is_array):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 4, 8))
    bias = jax.random.normal(jax.random.key(1), (1, 2, 4, 4))
    segments = jnp.asarray([[1, 1, 2, 2]], jnp.int32)
    mask = attention.Mask(segments, segments)
    terms = attention.ScoreTerms(bias=bias, mask=mask.as_bias(jnp.dtype("float32")) if is_array else mask)
    states = attention.attention(q, k, v, heads=2, terms=terms, backend="xla").states
    other = attention.attention(q, k, v.at[:, 2:].set(9.0), heads=2, terms=terms, backend="xla").states
    np.testing.assert_array_equal(states[:, :2], other[:, :2])
    assert not np.array_equal(states[:, 2:], other[:, 2:])
