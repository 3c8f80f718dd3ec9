"""Fused attention for TPU in Pallas: scores and weights never leave the chip's fast memory (VMEM).

Each grid step computes the heads of one row that fill 128 lanes, read straight from [B, T, D].
T and S are multiples of 8. Axis letters as in attention_fused.py.
"""

import functools
import typing

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from maelm_jax.model import attention_tpu_kernels
from maelm_jax.model.attention_fused import Kernels, Operands, Settings

LANES = 128  # width of a vector register
MOST_MEMORY_BY_DEFAULT = 16 * 2**20  # bytes of VMEM that a kernel gets without asking


def heads_per_step(head_size: int) -> int:
    """Returns the number of heads that fill the lanes, or 0 for a size that does not fit them."""
    return {32: 4, 64: 2, 128: 1}.get(head_size, 0)


def memory_needed(queries: int, keys: int, head_size: int, itemsize: int, bias: bool) -> int:
    """Returns the bytes of VMEM that the backward kernel, the larger one, needs.

    Blocks count twice, because the next one is loaded while one is used. The scores' intermediate
    values are float32 [T, S] of one head, four at a time.
    """
    heads = heads_per_step(head_size)
    scores = queries * -(-keys // LANES) * LANES  # of one head
    blocks = (5 * queries + 4 * keys) * LANES * itemsize
    if bias:  # read, and its gradient read and written
        blocks += 3 * heads * scores * itemsize
    return 2 * blocks + (4 + heads) * scores * 4


class _Specs(typing.NamedTuple):
    """How arrays are cut into the blocks of a grid step: row i, group of heads j."""

    queries: pl.BlockSpec
    keys: pl.BlockSpec
    bias: pl.BlockSpec | None
    statistics: pl.BlockSpec
    operands: Operands


def _specs(settings: Settings, q, k, bias, operands: Operands) -> _Specs:
    """Returns the blocks of each operand."""
    (_, queries, width), keys = q.shape, k.shape[1]
    group = heads_per_step(width // settings.heads)
    lanes = width // settings.heads * group
    operand_specs = Operands()
    if operands.query_segments is not None:
        query_segments = pl.BlockSpec((1, 1, queries), lambda i, j: (i, 0, 0))
        key_segments = pl.BlockSpec((1, 1, keys), lambda i, j: (i, 0, 0))
        operand_specs = Operands(query_segments, key_segments)
    if operands.head_words is not None:
        words = pl.BlockSpec(memory_space=pltpu.SMEM)
        operand_specs = operand_specs._replace(head_words=words, row_words=words)
    bias_spec = None
    if bias is not None and bias.shape[1] == 1:
        bias_spec = pl.BlockSpec((1, 1, queries, keys), lambda i, j: (i, 0, 0, 0))
    elif bias is not None:
        bias_spec = pl.BlockSpec((1, group, queries, keys), lambda i, j: (i, j, 0, 0))
    return _Specs(
        pl.BlockSpec((1, queries, lanes), lambda i, j: (i, 0, j)),
        pl.BlockSpec((1, keys, lanes), lambda i, j: (i, 0, j)),
        bias_spec,
        pl.BlockSpec((1, 1, 2 * group, queries), lambda i, j: (i, j, 0, 0)),
        operand_specs,
    )


def _call(name: str, kernel, settings: Settings, q, k, bias, in_specs, out_specs, shapes, aliases):
    """Returns the Pallas call of a kernel, over the grid (rows, groups of heads)."""
    rows, queries, width = q.shape
    head_size = width // settings.heads
    needed = memory_needed(queries, k.shape[1], head_size, q.dtype.itemsize, bias is not None)
    return pl.pallas_call(
        functools.partial(kernel, settings, head_size),
        grid=(rows, settings.heads // heads_per_step(head_size)),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=shapes,
        input_output_aliases=aliases,
        interpret=settings.interpret,
        name=f"attention_{name}",
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=max(needed, MOST_MEMORY_BY_DEFAULT),
        ),
    )


def run_forward_kernel(settings, q, k, v, bias, operands):
    """Returns the output, and the two statistics of each query and head [B, H / g, 2 g, T].

    g is `heads_per_step`. The arguments are those of `attention_fused.attention`.
    """
    specs = _specs(settings, q, k, bias, operands)
    group = heads_per_step(q.shape[2] // settings.heads)
    shape = (q.shape[0], settings.heads // group, 2 * group, q.shape[1])
    statistics = jax.ShapeDtypeStruct(shape, jnp.float32)
    return _call(
        "forward",
        attention_tpu_kernels.forward,
        settings,
        q,
        k,
        bias,
        in_specs=(specs.queries, specs.keys, specs.keys, specs.bias, specs.operands),
        out_specs=(specs.queries, specs.statistics),
        shapes=(jax.ShapeDtypeStruct(q.shape, q.dtype), statistics),
        aliases={},
    )(q, k, v, bias, operands)


def run_backward_kernel(settings, q, k, v, bias, d_carrier, operands, out, statistics, d_out):
    """Returns the gradients of queries, keys, values and bias.

    Args:
        settings: As in `attention_fused.attention`, like q, k, v, bias and operands.
        q: Queries.
        k: Keys.
        v: Values.
        bias: Added to the scores, or None.
        d_carrier: Sum of the gradients of the bias in later layers. The kernel adds its own in
            place. None: the kernel returns its own alone.
        operands: Segments, and words of the dropout hash.
        out: Output of the forward kernel.
        statistics: Statistics of the forward kernel.
        d_out: Gradient of the output.
    """
    specs = _specs(settings, q, k, bias, operands)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    d_bias_shape = None if bias is None else jax.ShapeDtypeStruct(bias.shape, bias.dtype)
    bias_is_shared = bias is not None and bias.shape[1] == 1 and settings.heads > 1
    if bias_is_shared:  # its gradient is a sum over heads
        d_bias_shape = jax.ShapeDtypeStruct(bias.shape, jnp.float32)
    carrier_spec = None if d_carrier is None else specs.bias
    *gradients, d_bias = _call(
        "backward",
        functools.partial(attention_tpu_kernels.backward, bias_is_shared),
        settings,
        q,
        k,
        bias,
        in_specs=(
            *(carrier_spec, specs.bias, specs.queries, specs.keys, specs.keys),
            *(specs.operands, specs.queries, specs.statistics, specs.queries),
        ),
        out_specs=(specs.queries, specs.keys, specs.keys, specs.bias),
        shapes=(*shapes, d_bias_shape),
        aliases={} if d_carrier is None else {0: 3},
    )(d_carrier, bias, q, k, v, operands, out, statistics, d_out)
    return *gradients, None if bias is None else d_bias.astype(bias.dtype)


KERNELS = Kernels("tpu", run_forward_kernel, run_backward_kernel)
