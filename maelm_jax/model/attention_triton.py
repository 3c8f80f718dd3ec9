"""Fused attention for NVIDIA GPUs in Pallas, which compiles it with Triton.

It is for dropout of the weights: cuDNN draws other masks than `ops.dropout`. A program of a kernel
computes one head of one row: a block of queries against all keys (forward; gradient of the
queries), or a block of keys against all queries (gradients of keys, values and bias). Axis letters
as in attention_fused.py.
"""

import functools
import typing

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from maelm_jax.model import attention_triton_kernels
from maelm_jax.model.attention_fused import Kernels, Operands, Settings

HEAD_SIZES = (16, 32, 64, 128)
# Warps of a program. With half as many, `backward_of_keys` spills registers on an H100.
WARPS, WARPS_OF_KEYS = 4, 8
STAGES = 2  # blocks of a loop that are loaded at a time


class _Specs(typing.NamedTuple):
    """The part of each array that belongs to one row and head. The grid is (block, head, row)."""

    queries: pl.BlockSpec
    keys: pl.BlockSpec
    pairs: pl.BlockSpec  # of an array with heads
    bias: pl.BlockSpec | None
    vector: pl.BlockSpec  # of an array with heads and queries
    operands: Operands


def _specs(settings: Settings, q, k, bias, operands: Operands) -> _Specs:
    (_, queries, width), keys = q.shape, k.shape[1]
    head_size = width // settings.heads
    operand_specs = Operands()
    if operands.query_segments is not None:
        operand_specs = Operands(
            pl.BlockSpec((None, None, queries), lambda i, h, b: (b, 0, 0)),
            pl.BlockSpec((None, None, keys), lambda i, h, b: (b, 0, 0)),
        )
    if operands.head_words is not None:
        operand_specs = operand_specs._replace(
            head_words=pl.BlockSpec((1, 1), lambda i, h, b: (b, h)),
            row_words=pl.BlockSpec((1,), lambda i, h, b: (b,)),
        )
    pairs = pl.BlockSpec((None, None, queries, keys), lambda i, h, b: (b, h, 0, 0))
    bias_spec = None if bias is None else pairs
    if bias is not None and bias.shape[1] == 1:
        bias_spec = pl.BlockSpec((None, None, queries, keys), lambda i, h, b: (b, 0, 0, 0))
    return _Specs(
        queries=pl.BlockSpec((None, queries, head_size), lambda i, h, b: (b, 0, h)),
        keys=pl.BlockSpec((None, keys, head_size), lambda i, h, b: (b, 0, h)),
        pairs=pairs,
        bias=bias_spec,
        vector=pl.BlockSpec((None, None, queries), lambda i, h, b: (b, h, 0)),
        operands=operand_specs,
    )


def _call(
    kernel, warps: int, settings: Settings, q, length: int, in_specs, out_specs, shapes, aliases
):
    """Returns the Pallas call of a kernel that divides `length` slots of each row into blocks."""
    return pl.pallas_call(
        functools.partial(kernel, settings),
        grid=(pl.cdiv(length, attention_triton_kernels.BLOCK), settings.heads, q.shape[0]),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=shapes,
        input_output_aliases=aliases,
        interpret=settings.interpret,
        name=f"attention_{kernel.__name__}",
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=STAGES),
    )


def run_forward_kernel(settings, q, k, v, bias, operands):
    """Returns the output, and the two statistics: of each head and query [B, H, T]."""
    specs = _specs(settings, q, k, bias, operands)
    vector = jax.ShapeDtypeStruct((q.shape[0], settings.heads, q.shape[1]), jnp.float32)
    out, *statistics = _call(
        attention_triton_kernels.forward,
        WARPS,
        settings,
        q,
        q.shape[1],
        in_specs=(specs.queries, specs.keys, specs.keys, specs.bias, specs.operands),
        out_specs=(specs.queries, specs.vector, specs.vector),
        shapes=(jax.ShapeDtypeStruct(q.shape, q.dtype), vector, vector),
        aliases={},
    )(q, k, v, bias, operands)
    return out, statistics


def run_backward_kernels(settings, q, k, v, bias, d_carrier, operands, out, statistics, d_out):
    """Returns the gradients of queries, keys, values and bias, as `Kernels.backward`."""
    specs = _specs(settings, q, k, bias, operands)
    product = out.astype(jnp.float32) * d_out.astype(jnp.float32)
    delta = product.reshape(*q.shape[:2], settings.heads, -1).sum(axis=3).swapaxes(1, 2)
    inputs = (q, k, v, bias, operands, *statistics, delta, d_out)
    in_specs = (
        *(specs.queries, specs.keys, specs.keys, specs.bias, specs.operands),
        *(specs.vector, specs.vector, specs.vector, specs.queries),
    )
    [dq] = _call(
        attention_triton_kernels.backward_of_queries,
        WARPS,
        settings,
        q,
        q.shape[1],
        in_specs=in_specs,
        out_specs=(specs.queries,),
        shapes=(jax.ShapeDtypeStruct(q.shape, q.dtype),),
        aliases={},
    )(*inputs)
    bias_is_shared = bias is not None and bias.shape[1] == 1 and settings.heads > 1
    d_bias_shape = None if bias is None else jax.ShapeDtypeStruct(bias.shape, bias.dtype)
    if bias_is_shared:  # its gradient is a sum over heads, which run in any order
        by_head = (len(q), settings.heads, *bias.shape[2:])
        d_bias_shape = jax.ShapeDtypeStruct(by_head, jnp.float32)
    dk, dv, d_bias = _call(
        attention_triton_kernels.backward_of_keys,
        WARPS_OF_KEYS,
        settings,
        q,
        k.shape[1],
        in_specs=(None if d_carrier is None else specs.pairs, *in_specs),
        out_specs=(specs.keys, specs.keys, None if bias is None else specs.pairs),
        shapes=(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)), d_bias_shape),
        aliases={} if d_carrier is None else {0: 2},
    )(d_carrier, *inputs)
    if bias_is_shared:
        d_bias = d_bias.sum(axis=1, keepdims=True).astype(bias.dtype)
    return dq, dk, dv, d_bias


KERNELS = Kernels("gpu", run_forward_kernel, run_backward_kernels)
