"""Random keys. All of them are of one kind, so that a run is the same whatever JAX_DEFAULT_PRNG_IMPL says."""

import jax
from jaxtyping import Array, Key

IMPLEMENTATION = "threefry2x32"  # the same numbers on every backend and mesh; layers.py hashes its two words


def of_seed(seed: int) -> Key[Array, ""]:
    """The key that everything random of a run with this seed is derived from."""
    return jax.random.key(seed, impl=IMPLEMENTATION)
