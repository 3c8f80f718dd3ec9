"""The held-out rows of a trained run."""

import numpy as np

from maelm_jax.analysis import runs


def test_more_tokens_than_there_are_is_all_of_them():
    held_rows = np.arange(12).reshape(3, 4) + 2
    assert np.array_equal(runs.first_rows(held_rows, pad=1, tokens=10**30), held_rows)
    assert np.array_equal(runs.first_rows(held_rows, pad=1, tokens=5), held_rows[:2])
    assert np.array_equal(runs.first_rows(held_rows, pad=1, tokens=4), held_rows[:1])
