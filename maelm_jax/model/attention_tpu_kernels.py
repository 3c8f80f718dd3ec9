"""The bodies of the TPU kernels of attention_tpu.py: one grid step, on blocks in fast memory.

A grid step computes the heads of one row that stand side by side in a block of 128 lanes.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from maelm_jax.model import attention_fused
from maelm_jax.model.attention_fused import Operands, Settings, scaled
from maelm_jax.model.positions import MASKED_OUT

# Contracted axes of a matrix product: x y^T, x y, x^T y.
_ROWS_BY_ROWS, _ROWS_BY_COLUMNS, _COLUMNS_BY_COLUMNS = (
    (((1,), (1,)), ((), ())),
    (((1,), (0,)), ((), ())),
    (((0,), (0,)), ((), ())),
)


def _product(x, y, contracted):
    return jax.lax.dot_general(x, y, contracted, preferred_element_type=jnp.float32)


def _slots(shape: tuple[int, int], axis: int):
    """Returns the number of each element along an axis."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _mask(settings: Settings, operands: Operands, shape: tuple[int, int]):
    """0 where a query sees a key, else MASKED_OUT. None without segments."""
    if operands.query_segments is None:
        return None
    query_segments, key_segments = operands.query_segments[0].T, operands.key_segments[0]
    visible = (query_segments == key_segments) & (key_segments > 0.0)
    if settings.causal:
        visible &= _slots(shape, 0) >= _slots(shape, 1)
    return jnp.where(visible, 0.0, MASKED_OUT)


def _scores(q, k, bias, index: int, mask):
    """Returns the scores of the head with this index in its group."""
    scores = _product(q, k, _ROWS_BY_ROWS)
    if bias is not None:
        scores = scores + bias[0, min(index, bias.shape[1] - 1)].astype(jnp.float32)
    return scores if mask is None else scores + mask


def _dropout_scale(settings: Settings, operands: Operands, head, shape: tuple[int, int]):
    """0 or 1 / (1 - rate) for each weight of a head. None: no dropout."""
    if operands.head_words is None:
        return None
    row = pl.program_id(0)
    return attention_fused.dropout_scale(
        settings.dropout_rate,
        operands.head_words[row, head],
        operands.row_words[row],
        _slots((shape[0], 1), 0).astype(jnp.uint32),
        _slots((1, shape[1]), 1).astype(jnp.uint32),
        shape[1],
    )


def forward(settings: Settings, head_size: int, q, k, v, bias, operands, out, statistics):
    """Writes the output, and the largest score and the sum of each query."""
    shape, dtype = (q.shape[1], k.shape[1]), out.dtype
    group, outs, columns = q.shape[2] // head_size, [], []
    mask = _mask(settings, operands, shape)
    for index in range(group):
        lanes = slice(head_size * index, head_size * (index + 1))
        q_head = scaled(q[0, :, lanes], head_size, dtype)
        scores = _scores(q_head, k[0, :, lanes], bias, index, mask)
        largest = jnp.max(scores, axis=1, keepdims=True)
        weights = jnp.exp(scores - largest)
        total = jnp.sum(weights, axis=1, keepdims=True)
        head = pl.program_id(1) * group + index
        scale = _dropout_scale(settings, operands, head, shape)
        weights = weights if scale is None else weights * scale
        y = _product(weights.astype(dtype), v[0, :, lanes], _ROWS_BY_COLUMNS) / total
        outs.append(y.astype(dtype))
        columns += [largest, total]
    out[0] = jnp.concatenate(outs, axis=1)
    statistics[0, 0] = jnp.concatenate(columns, axis=1).T


def backward(
    bias_is_shared,
    settings,
    head_size,
    d_carrier,
    bias,
    q,
    k,
    v,
    operands,
    out,
    statistics,
    d_out,
    dq,
    dk,
    dv,
    d_bias,
):
    """Writes the gradients of queries, keys, values and, if there is one, of the bias.

    The gradient of a bias is added to `d_carrier`, or summed over heads if they share the bias.
    """
    shape, dtype = (q.shape[1], k.shape[1]), dq.dtype
    group, gradients, columns = q.shape[2] // head_size, ([], [], []), statistics[0, 0].T
    mask = _mask(settings, operands, shape)
    if bias_is_shared:

        @pl.when(pl.program_id(1) == 0)
        def _():
            d_bias[...] = jnp.zeros_like(d_bias)

    for index in range(group):
        lanes = slice(head_size * index, head_size * (index + 1))
        largest = columns[:, 2 * index : 2 * index + 1]
        total = columns[:, 2 * index + 1 : 2 * index + 2]
        q_head, k_head = scaled(q[0, :, lanes], head_size, dtype), k[0, :, lanes]
        # The weights are exp(...) / total. The gradient of the output takes the division.
        weights = jnp.exp(_scores(q_head, k_head, bias, index, mask) - largest)
        d_head = d_out[0, :, lanes].astype(jnp.float32) / total
        product = out[0, :, lanes].astype(jnp.float32) * d_head
        delta, d_head = jnp.sum(product, axis=1, keepdims=True), d_head.astype(dtype)
        d_weights = _product(d_head, v[0, :, lanes], _ROWS_BY_ROWS)
        head = pl.program_id(1) * group + index
        scale = _dropout_scale(settings, operands, head, shape)
        dropped = weights if scale is None else weights * scale
        d_weights = d_weights if scale is None else d_weights * scale
        dv_head = _product(dropped.astype(dtype), d_head, _COLUMNS_BY_COLUMNS)
        d_scores = weights * (d_weights - delta)
        narrow = d_scores.astype(dtype)
        dq_head = _product(narrow, k_head, _ROWS_BY_COLUMNS)
        gradients[0].append(scaled(dq_head, head_size, dtype))
        gradients[1].append(_product(narrow, q_head, _COLUMNS_BY_COLUMNS).astype(dtype))
        gradients[2].append(dv_head.astype(dtype))
        if bias_is_shared:
            d_bias[0, 0] += d_scores
        elif bias is not None:
            before = 0.0 if d_carrier is None else d_carrier[0, index].astype(jnp.float32)
            d_bias[0, index] = (before + d_scores).astype(d_bias.dtype)
    for reference, parts in zip((dq, dk, dv), gradients, strict=True):
        reference[0] = jnp.concatenate(parts, axis=1)
