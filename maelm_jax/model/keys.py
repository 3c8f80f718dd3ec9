"""Random keys: one kind of key, and the numbers of all random streams.

A stream is a source of random numbers that is independent of the others. Its key is made from
another key and the stream's number, with `jax.random.fold_in`. The numbers here are part of the
results: another number gives other weights, masks or dropout.
"""

import jax
from jaxtyping import Array, Key, UInt32

# Threefry gives the same numbers on every backend and mesh, whatever JAX_DEFAULT_PRNG_IMPL says.
# Its keys are two words, which `ops.dropout` hashes.
IMPLEMENTATION = "threefry2x32"

# Streams of a seed.
INIT_STREAM, TRAIN_STREAM, EVALUATION_STREAM, RANK_STREAM = 0, 1, 2, 3
# Stream of a step: which rows are causal. `jax.random.split` takes 0 and 1 for masks and dropout.
CAUSAL_STREAM = 2
# Streams of the mask of a row.
COUNT_STREAM, ORDER_STREAM, SPANS_STREAM, LAST_UNIT_STREAM, REPLACEMENT_STREAM = 0, 1, 2, 3, 4
# Streams of the replacement ids of a row: a random token, and which replacement a slot gets.
TOKEN_STREAM, KIND_STREAM = 0, 1


def make_key(seed: int) -> Key[Array, ""]:
    """Returns the root key of a seed."""
    return jax.random.key(seed, impl=IMPLEMENTATION)


def make_stream_key(seed: int, stream: int) -> Key[Array, ""]:
    """Returns the key of one of the streams of a seed."""
    return jax.random.fold_in(make_key(seed), stream)


def make_row_keys(key: Key[Array, ""], row_numbers: UInt32[Array, " B"]) -> Key[Array, " B"]:
    """Returns one key for each row, which depends on the row's number in the global batch."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, row_numbers)
