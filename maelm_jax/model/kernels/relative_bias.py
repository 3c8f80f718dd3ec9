"""Looks relative position biases up in their table, with the gradient of the table.

Axis letters: B rows, T queries, S keys, H heads, R buckets.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def _find_buckets(
    positions: Int[Array, "B T"], keys: Int[Array, "B S"], buckets: tuple[int, ...]
) -> Int[Array, "B T S"]:
    """Returns the bucket of each pair of query and key.

    `buckets` is the result of `positions.compute_distance_buckets`.
    """
    middle = len(buckets) // 2

    def gather(distance):
        return jnp.take(jnp.asarray(buckets, jnp.int32), distance + middle, mode="clip")

    def select(distance):
        result = jnp.full(distance.shape, buckets[0], jnp.int32)
        for start in np.flatnonzero(np.diff(buckets)) + 1:
            result = jnp.where(distance >= int(start) - middle, jnp.int32(buckets[start]), result)
        return result

    # A TPU gathers numbers one by one. About thirty selections a number are one pass over memory
    # there. A GPU and a CPU have the table in their first cache.
    distance = keys[:, None, :] - positions[:, :, None]
    return jax.lax.platform_dependent(distance, tpu=select, default=gather)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def look_up(
    table: Float[Array, "R H"],
    positions: Int[Array, "B T"],
    keys: Int[Array, "B S"],
    buckets: tuple[int, ...],
    dtype: jnp.dtype,
) -> Float[Array, "B H T S"]:
    """Returns the bias of each pair of query and key: the row of `table` of its bucket.

    The table is float32, and so is its gradient.
    """
    return _look_up_forward(table, positions, keys, buckets, dtype)[0]


def _look_up_forward(table, positions, keys, buckets, dtype):
    def gather(table, bucket):
        return jax.vmap(lambda rows: jnp.take(table.T, rows, axis=1, mode="clip"))(bucket)

    def select(table, bucket):
        bucket, rows = bucket[:, None], table[:, None, :, None, None]
        result = jnp.broadcast_to(rows[0], (bucket.shape[0], table.shape[1], *bucket.shape[2:]))
        for number in range(1, len(table)):
            result = jnp.where(bucket == number, rows[number], result)
        return result

    bucket = _find_buckets(positions, keys, buckets)
    bias = jax.lax.platform_dependent(table.astype(dtype), bucket, tpu=select, default=gather)
    return bias, (bucket, positions, keys, table.shape[0])


def _look_up_backward(buckets, dtype, saved, d_bias):
    bucket, positions, keys, rows = saved
    zero = jnp.zeros((rows, d_bias.shape[1]), jnp.float32)

    def scatter(d_bias):
        by_pair = jnp.moveaxis(d_bias, 1, -1).astype(jnp.float32).reshape(-1, d_bias.shape[1])
        return zero.at[bucket.reshape(-1)].add(by_pair, mode="promise_in_bounds")

    def product(d_bias, bucket=bucket):
        one_hot = jax.nn.one_hot(bucket, rows, dtype=d_bias.dtype)
        return jnp.einsum("btsr,bhts->rh", one_hot, d_bias, preferred_element_type=jnp.float32)

    def products(d_bias):
        def add(total, sequence):
            positions, keys, d_bias = (x[None] for x in sequence)
            return total + product(d_bias, _find_buckets(positions, keys, buckets)), None

        return jax.lax.scan(add, zero, (positions, keys, d_bias))[0]

    # B H T S numbers are added into a few rows. On CPU a scatter-add is 30 times faster than the
    # product. On an accelerator its additions are atomic: slow, and in no fixed order. A TPU
    # rearranges both factors of the product: those of one sequence fit into its fast memory.
    d_table = jax.lax.platform_dependent(d_bias, cpu=scatter, tpu=products, default=product)
    return d_table, None, None


look_up.defvjp(_look_up_forward, _look_up_backward)
