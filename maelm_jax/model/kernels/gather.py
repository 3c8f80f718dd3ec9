"""Gathers whose gradient is a gather.

Axis letters: B rows, N slots before a gather, P slots after it, D width.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.custom_vjp
def gather_rows(
    x: Float[Array, "B N D"], index: Int[Array, "B P"], inverse: Int[Array, "B N"]
) -> Float[Array, "B P D"]:
    """Computes y[p] = x[index[p]] in each row of the batch; 0 where index[p] = N.

    The backward pass is a gather with `inverse`. It needs no scatter-add and is deterministic.

    Args:
        x: Values to gather.
        index: Slots to read, each at most once; N where p is empty.
        inverse: Inverse of `index`: the p that reads a slot, or P where none does.

    Returns:
        The gathered values.
    """
    gathered = jnp.take_along_axis(
        x, jnp.minimum(index, x.shape[1] - 1)[:, :, None], axis=1, mode="promise_in_bounds"
    )
    return jnp.where((index < x.shape[1])[:, :, None], gathered, jnp.zeros((), x.dtype))


gather_rows.defvjp(
    lambda x, index, inverse: (gather_rows(x, index, inverse), (index, inverse)),
    lambda saved, dy: (gather_rows(dy, saved[1], saved[0]), None, None),
)
