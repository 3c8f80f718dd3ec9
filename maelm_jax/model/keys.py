"""Random keys of one fixed kind: random numbers do not depend on JAX_DEFAULT_PRNG_IMPL."""

import jax
from jaxtyping import Array, Key

# Threefry gives the same numbers on every backend and mesh. Its keys are two words, which
# `ops.dropout` hashes.
IMPLEMENTATION = "threefry2x32"


def of_seed(seed: int) -> Key[Array, ""]:
    """Returns the root key of a seed.

    The keys of initial weights, masks and dropout are derived from it.
    """
    return jax.random.key(seed, impl=IMPLEMENTATION)
