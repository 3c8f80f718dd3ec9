"""What a compiler's error message says of the memory that a step needs."""

import pytest

from maelm_jax.planning import estimate

GIB = 2**30


@pytest.mark.parametrize(
    "message,needed",
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 30.25G of 15.75G hbm.", 30.25 * GIB),
        ("RESOURCE_EXHAUSTED: HLO temporaries (512.0M) do not fit", 2 * GIB + 512 * 2**20),
        ("RESOURCE_EXHAUSTED: too many requests", None),
        ("INTERNAL: Used 30.25G", None),
    ],
)
def test_the_bytes_that_a_refused_step_needs(message, needed):
    assert estimate.needed_bytes(message, 2 * GIB) == needed
