"""The number of disjoint sets of tokens."""

import pytest

from maelm_jax.analysis import measurement


@pytest.mark.parametrize(
    "requested,rows,visible,sets",
    [
        (5, 1000, 1_000_000, 5),
        (5, 3, 1_000_000, 3),
        (5, 1000, 800, 2),
        (5, 1000, 300, 1),
        (1, 1, 1, 1),
        (10**30, 10**6, 10**9, measurement.MOST_SETS),
        (10**30, 7, 10**9, 7),
    ],
)
def test_sets_are_bounded_by_the_data(requested, rows, visible, sets):
    assert measurement.number_of_sets(requested, rows, visible, width=16) == sets
