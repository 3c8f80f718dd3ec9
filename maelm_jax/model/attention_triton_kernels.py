"""The bodies of the GPU kernels of attention_triton.py: one program, on arrays of a row and head.

Triton wants blocks of powers of two, so the last block reaches beyond the row. What lies there is
neither read nor written.

Axis letters: T queries, S keys, K size of a head, M queries of a block, N keys of a block.
"""

import typing

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from maelm_jax.model import attention_fused
from maelm_jax.model.attention_fused import Operands, Settings, scaled
from maelm_jax.model.positions import MASKED_OUT

BLOCK = 64  # queries of a block, and keys
SMALL_BLOCK = 32  # queries of a block in `backward_of_keys`, which has two sums in registers


class _Block(typing.NamedTuple):
    """Consecutive queries or keys of a row."""

    slice: pl.Slice
    slots: Int[Array, " M"]
    exist: Bool[Array, " M"]  # False beyond the end of the row

    def load(self, states):
        """Reads the block of [T, K]. It is 0 beyond the end of the row."""
        return plgpu.load(states.at[self.slice, :], mask=self.exist[:, None], other=0.0)

    def load_vector(self, values, other: float = 0.0):
        """Reads the block of a vector. It is `other` beyond the end of the row."""
        return plgpu.load(values.at[self.slice], mask=self.exist, other=other)

    def store(self, states, value):
        """Writes the block of [T, K]."""
        plgpu.store(states.at[self.slice, :], value.astype(states.dtype), mask=self.exist[:, None])


def _block(number, length: int, size: int = BLOCK) -> _Block:
    """Returns the block with this number of a row, if blocks have `size` slots."""
    slots = number * size + jnp.arange(size, dtype=jnp.int32)
    return _Block(pl.ds(number * size, size), slots, slots < length)


class _Row(typing.NamedTuple):
    """What the scores of one row and head depend on beside queries and keys."""

    settings: Settings
    bias: typing.Any  # [T, S], or None
    operands: Operands
    keys: int


class _Pairs(typing.NamedTuple):
    """The pairs of a block of queries and a block of keys: arrays [M, N]."""

    row: _Row
    queries: _Block
    keys: _Block

    @property
    def exist(self) -> Bool[Array, "M N"]:
        return self.queries.exist[:, None] & self.keys.exist[None]

    def load(self, pairs) -> Float[Array, "M N"]:
        """Reads from [T, S]."""
        block = pairs.at[self.queries.slice, self.keys.slice]
        return plgpu.load(block, mask=self.exist, other=0.0).astype(jnp.float32)

    def store(self, pairs, value):
        """Writes to [T, S]."""
        block = pairs.at[self.queries.slice, self.keys.slice]
        plgpu.store(block, value.astype(pairs.dtype), mask=self.exist)

    def scores(self, q, k) -> Float[Array, "M N"]:
        scores, operands = plgpu.dot(q, k.T), self.row.operands
        if self.row.bias is not None:
            scores += self.load(self.row.bias)
        if operands.query_segments is not None:
            query_segments = self.queries.load_vector(operands.query_segments)[:, None]
            key_segments = self.keys.load_vector(operands.key_segments)[None]
            visible = (query_segments == key_segments) & (key_segments > 0.0)
            if self.row.settings.causal:
                visible &= self.queries.slots[:, None] >= self.keys.slots[None]
            scores += jnp.where(visible, 0.0, MASKED_OUT)
        return jnp.where(self.keys.exist[None], scores, -jnp.inf)

    def dropped(self, values) -> Float[Array, "M N"]:
        """Returns the values times 0 or 1 / (1 - rate)."""
        if self.row.operands.head_words is None:
            return values
        return values * attention_fused.dropout_scale(
            self.row.settings.dropout_rate,
            self.row.operands.head_words[0, 0],
            self.row.operands.row_words[0],
            self.queries.slots[:, None].astype(jnp.uint32),
            self.keys.slots[None].astype(jnp.uint32),
            self.row.keys,
        )


def forward(settings: Settings, q, k, v, bias, operands, out, largest_out, total_out):
    """Writes the output, and the largest score and the sum of each query."""
    (length, head_size), dtype = k.shape, out.dtype
    row = _Row(settings, bias, operands, length)
    queries = _block(pl.program_id(0), q.shape[0])
    q_block = scaled(queries.load(q), head_size, dtype)

    def add_keys(number, sums):
        out_sum, largest, total = sums
        keys = _block(number, length)
        pairs = _Pairs(row, queries, keys)
        scores = pairs.scores(q_block, keys.load(k))
        new_largest = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.exp(scores - new_largest[:, None])
        shrink = jnp.exp(largest - new_largest)
        total = total * shrink + jnp.sum(weights, axis=1)
        dropped = pairs.dropped(weights).astype(dtype)
        return out_sum * shrink[:, None] + plgpu.dot(dropped, keys.load(v)), new_largest, total

    zero = jnp.zeros(BLOCK, jnp.float32)
    start = jnp.zeros((BLOCK, head_size), jnp.float32), zero - jnp.inf, zero
    out_sum, largest, total = jax.lax.fori_loop(0, pl.cdiv(length, BLOCK), add_keys, start)
    queries.store(out, out_sum / total[:, None])
    plgpu.store(largest_out.at[queries.slice], largest, mask=queries.exist)
    plgpu.store(total_out.at[queries.slice], total, mask=queries.exist)


class _SavedQueries(typing.NamedTuple):
    """What the backward pass knows of a block of queries."""

    q: Float[Array, "M K"]  # divided by sqrt(K)
    d_out: Float[Array, "M K"]
    largest: Float[Array, " M"]
    scale: Float[Array, " M"]  # 1 over the sum of exp(score - largest)
    delta: Float[Array, " M"]  # d_out times the output, summed over K

    def weights(self, pairs: _Pairs, k):
        scores = pairs.scores(self.q, k)
        return jnp.exp(scores - self.largest[:, None]) * self.scale[:, None]

    def d_scores(self, pairs: _Pairs, weights, v):
        d_weights = pairs.dropped(plgpu.dot(self.d_out, v.T))
        return weights * (d_weights - self.delta[:, None])


def _load_saved(queries: _Block, q, largest, total, delta, d_out) -> _SavedQueries:
    return _SavedQueries(
        scaled(queries.load(q), q.shape[1], q.dtype),
        queries.load(d_out),
        queries.load_vector(largest),
        1.0 / queries.load_vector(total, other=1.0),
        queries.load_vector(delta),
    )


def backward_of_keys(
    settings: Settings,
    d_carrier,
    q,
    k,
    v,
    bias,
    operands,
    largest,
    total,
    delta,
    d_out,
    dk,
    dv,
    d_bias,
):
    """Writes the gradients of a block of keys and values, and of the bias at these keys."""
    length, head_size = k.shape
    row = _Row(settings, bias, operands, length)
    keys = _block(pl.program_id(0), length)
    k_block, v_block = keys.load(k), keys.load(v)

    def add_queries(number, sums):
        dk_sum, dv_sum = sums
        queries = _block(number, q.shape[0], SMALL_BLOCK)
        saved = _load_saved(queries, q, largest, total, delta, d_out)
        pairs = _Pairs(row, queries, keys)
        weights = saved.weights(pairs, k_block)
        dv_sum += plgpu.dot(pairs.dropped(weights).astype(q.dtype).T, saved.d_out)
        d_scores = saved.d_scores(pairs, weights, v_block)
        dk_sum += plgpu.dot(d_scores.astype(q.dtype).T, saved.q)
        if d_bias is not None:
            before = 0.0 if d_carrier is None else pairs.load(d_carrier)
            pairs.store(d_bias, before + d_scores)
        return dk_sum, dv_sum

    zeros = jnp.zeros((BLOCK, head_size), jnp.float32)
    dk_sum, dv_sum = jax.lax.fori_loop(
        0, pl.cdiv(q.shape[0], SMALL_BLOCK), add_queries, (zeros, zeros)
    )
    keys.store(dk, dk_sum)
    keys.store(dv, dv_sum)


def backward_of_queries(
    settings: Settings, q, k, v, bias, operands, largest, total, delta, d_out, dq
):
    """Writes the gradient of a block of queries."""
    length, head_size = k.shape
    row = _Row(settings, bias, operands, length)
    queries = _block(pl.program_id(0), q.shape[0])
    saved = _load_saved(queries, q, largest, total, delta, d_out)

    def add_keys(number, dq_sum):
        keys = _block(number, length)
        pairs = _Pairs(row, queries, keys)
        k_block = keys.load(k)
        d_scores = saved.d_scores(pairs, saved.weights(pairs, k_block), keys.load(v))
        return dq_sum + plgpu.dot(d_scores.astype(q.dtype), k_block)

    zeros = jnp.zeros((BLOCK, head_size), jnp.float32)
    dq_sum = jax.lax.fori_loop(0, pl.cdiv(length, BLOCK), add_keys, zeros)
    queries.store(dq, scaled(dq_sum, head_size, dq.dtype))
