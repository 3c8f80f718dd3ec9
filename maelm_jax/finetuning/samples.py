"""Samples of the examples of a task: the same for every seed of a run."""

import numpy as np

SEED = 0


def numbers(count: int | None, available: int) -> np.ndarray | None:
    """Returns the numbers of the examples of a sample, ascending.

    Args:
        count: The size of the sample. None: all examples.
        available: The number of examples.

    Returns:
        int64 [count], or None if all examples are taken.
    """
    if count is None or count >= available:
        return None
    return np.sort(np.random.default_rng(SEED).permutation(available)[:count])


def dev_note(count: int, available: int, unit: str, which: str = "dev") -> str:
    """Returns the note of a dev set of which a sample is evaluated. `which` names the set."""
    return (
        f"{which}: scored on a sample of {count:,} of {available:,} {unit}; do not compare with "
        "scores on all of them"
    )
