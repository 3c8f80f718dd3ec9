"""What the model reads: segments and positions of packed rows."""

import jax.numpy as jnp

from maelm_jax.model import model_inputs


def test_segments_and_positions():
    ids = jnp.asarray([[0, 9, 9, 2, 0, 9, 2, 1, 1], [1] * 9])
    segments, positions = model_inputs.segments_and_positions(ids, bos=0, pad=1)
    assert segments.tolist() == [[1, 1, 1, 1, 2, 2, 2, 0, 0], [0] * 9]
    assert positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 0], [0] * 9]
