"""Fused attention for TPU in Pallas: scores and weights never leave the chip's fast memory (VMEM).

Each grid step computes the heads of one row that fill 128 lanes, read straight from [B, T, D].
T and S are multiples of 8.

The forward kernel saves the output and two statistics of each query: its largest score, and the sum
of exp(score - largest). The backward kernel computes the weights again from them. The log-sum-exp
alone would not do for a query that sees no key: its scores are near -1e9, and float32 loses the
logarithm beside them.

Axis letters: B rows, T queries, S keys, D = H K width, H heads, K size of a head.
"""

import collections.abc
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Key, UInt32

from maelm_jax.model import ops
from maelm_jax.model.positions import MASKED_OUT, Mask

LANES = 128  # width of a vector register
MIB = 2**20
# Bytes of VMEM of a TPU core by device kind, from jax/_src/pallas/mosaic/tpu_info.py. A kernel gets
# four fifths of it: the compiler keeps values of other operations there as well.
VMEM = {
    "TPU v4": 16 * MIB,
    "TPU v5 lite": 128 * MIB,
    "TPU v5": 64 * MIB,
    "TPU v6 lite": 128 * MIB,
    "TPU7x": 64 * MIB,
}
KERNEL_SHARE = 0.8
MEMORY_BY_DEFAULT = 16 * MIB  # bytes of VMEM that a kernel gets without asking


class Settings(typing.NamedTuple):
    """What is fixed when the kernels are compiled."""

    heads: int
    dropout_rate: float = 0.0
    causal: bool = False  # True hides the keys at later slots than the query's
    interpret: bool = False  # True runs on any platform, in Pallas' interpreter: a check, slow


class Operands(typing.NamedTuple):
    """Arrays beside queries, keys and values that have no gradient. None: not used."""

    # Queries see the keys of their own segment. 0 is an empty key.
    query_segments: Float[Array, "B 1 T"] | None = None
    key_segments: Float[Array, "B 1 S"] | None = None
    # Words of the hash of `ops.dropout`: one of each row and head, one of each row.
    head_words: UInt32[Array, "B H"] | None = None
    row_words: UInt32[Array, " B"] | None = None


class AttentionOutput(typing.NamedTuple):
    """The result of an attention."""

    states: Float[Array, "B T D"]
    carrier: Float[Array, "B H T S"] | None  # for the next layer


def attend(
    q: Float[Array, "B T D"],
    k: Float[Array, "B S D"],
    v: Float[Array, "B S D"],
    bias: Float[Array, "B H T S"] | None,
    carrier: Float[Array, "B H T S"] | None,
    mask: Mask | None,
    *,
    heads: int,
    dropout_rate: float,
    dropout_keys: Key[Array, " B"] | None,
    tensor: int,
    sharded_rows: bool,
    interpret: bool,
) -> AttentionOutput:
    """Computes softmax(q k^T / sqrt(K) + bias + mask) v for each head, with dropout of the weights.

    Scores, softmax and sums are float32. Matrix products take the dtype of q. The heads are side by
    side. `tensor` and `sharded_rows` are those of `backends.Target`. Without a `mask`, all keys
    are seen. `interpret` runs the kernels in Pallas' interpreter, on any platform.

    The gradient of the bias goes through the carrier. Layers that share a bias pass one carrier
    from each to the next, and start it with the bias (`carrier` None). Its value is never read. In
    the backward pass, each kernel adds its gradient of the bias to that of the carrier, in place.
    If XLA summed the gradients of the layers, the step of base would take 7.6% more time on a
    TPU v5e.

    Returns:
        The sums, in the dtype of q, and the carrier.
    """
    causal = mask is not None and mask.causal
    settings = Settings(heads // tensor, dropout_rate, causal, interpret)
    operands = Operands()
    if mask is not None:
        queries, keys = (x.astype(jnp.float32)[:, None] for x in (mask.queries, mask.keys))
        operands = Operands(queries, keys)
    if dropout_rate > 0:
        words = jax.random.key_data(dropout_keys)
        head_words = ops.hash_words(jnp.arange(heads, dtype=jnp.uint32)[None] + words[:, :1])
        operands = operands._replace(head_words=head_words, row_words=words[:, 1])
    if bias is not None:
        carrier = bias if carrier is None else carrier
        bias = jax.lax.stop_gradient(bias)
    arrays = (q, k, v, bias, carrier, operands)
    run = functools.partial(_attend, settings)
    if sharded_rows:
        run = _divide_heads(run, arrays)
    return run(*arrays)


def _divide_heads(run: collections.abc.Callable, arrays: tuple) -> collections.abc.Callable:
    """Wraps a call of the kernels in a `shard_map` over heads. XLA cannot partition a kernel."""
    heads_last, heads_second = PartitionSpec(None, None, "tensor"), PartitionSpec(None, "tensor")
    *_, bias, _, operands = arrays
    operand_specs = jax.tree.map(lambda _: PartitionSpec(), operands)  # whole on each device
    if operands.head_words is not None:
        operand_specs = operand_specs._replace(head_words=heads_second)
    bias_spec = None if bias is None else heads_second  # and of the carrier
    return jax.shard_map(
        run,
        in_specs=(heads_last, heads_last, heads_last, bias_spec, bias_spec, operand_specs),
        out_specs=AttentionOutput(heads_last, bias_spec),
        axis_names={"tensor"},
        check_vma=False,
    )


# The statistics have the shape [B, H / g, 2 g, T], with g heads in a step of the grid.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings: Settings, q, k, v, bias, carrier, operands: Operands) -> AttentionOutput:
    return _attend_forward(settings, q, k, v, bias, carrier, operands)[0]


def _attend_forward(settings, q, k, v, bias, carrier, operands):
    specs = _specs(settings, q, k, bias, operands)
    group = heads_per_step(q.shape[2] // settings.heads)
    statistics = (q.shape[0], settings.heads // group, 2 * group, q.shape[1])
    results = _call(
        _forward,
        settings,
        q,
        k,
        bias,
        in_specs=(specs.queries, specs.keys, specs.keys, specs.bias, specs.operands),
        out_specs=(specs.queries, specs.statistics),
        out_shape=(_shape_of(q), jax.ShapeDtypeStruct(statistics, jnp.float32)),
    )(q, k, v, bias, operands)
    out, statistics = (ops.save_for_backward(x) for x in results)
    return AttentionOutput(out, carrier), (q, k, v, out, statistics, bias, operands)


def _attend_backward(settings, saved, gradients):
    q, k, v, out, statistics, bias, operands = saved
    d_out, d_carrier = gradients
    specs = _specs(settings, q, k, bias, operands)
    dq, dk, dv, d_carrier = _call(
        _backward,
        settings,
        q,
        k,
        bias,
        in_specs=(
            *(specs.bias, specs.bias, specs.queries, specs.keys, specs.keys),
            *(specs.operands, specs.queries, specs.statistics, specs.queries),
        ),
        out_specs=(specs.queries, specs.keys, specs.keys, specs.bias),
        out_shape=jax.tree.map(_shape_of, (q, k, v, bias)),
        # The gradient of the bias is added to that of later layers in place.
        input_output_aliases={} if bias is None else {0: 3},
    )(d_carrier, bias, q, k, v, operands, out, statistics, d_out)
    return dq, dk, dv, None, d_carrier, None


_attend.defvjp(_attend_forward, _attend_backward)


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
    if bias:  # read; the carrier's gradient read and written
        blocks += 3 * heads * scores * itemsize
    return 2 * blocks + (4 + heads) * scores * 4


def memory_limit(device_kind: str) -> float:
    """Returns the bytes of VMEM that a kernel may use."""
    return KERNEL_SHARE * VMEM.get(device_kind, min(VMEM.values()))


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
    words = pl.BlockSpec(memory_space=pltpu.SMEM)
    operand_specs = (
        pl.BlockSpec((1, 1, queries), lambda i, j: (i, 0, 0)),
        pl.BlockSpec((1, 1, keys), lambda i, j: (i, 0, 0)),
        words,
        words,
    )
    given = zip(operands, operand_specs, strict=True)
    bias_spec = pl.BlockSpec((1, group, queries, keys), lambda i, j: (i, j, 0, 0))
    return _Specs(
        pl.BlockSpec((1, queries, lanes), lambda i, j: (i, 0, j)),
        pl.BlockSpec((1, keys, lanes), lambda i, j: (i, 0, j)),
        None if bias is None else bias_spec,
        pl.BlockSpec((1, 1, 2 * group, queries), lambda i, j: (i, j, 0, 0)),
        Operands(*(None if operand is None else spec for operand, spec in given)),
    )


def _shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(kernel, settings: Settings, q, k, bias, **blocks):
    """Returns the Pallas call of a kernel, over the grid (rows, groups of heads)."""
    rows, queries, width = q.shape
    head_size = width // settings.heads
    needed = memory_needed(queries, k.shape[1], head_size, q.dtype.itemsize, bias is not None)
    return pl.pallas_call(
        functools.partial(kernel, settings, head_size),
        grid=(rows, settings.heads // heads_per_step(head_size)),
        interpret=settings.interpret,
        name=f"attention{kernel.__name__}",
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=max(needed, MEMORY_BY_DEFAULT),
        ),
        **blocks,
    )


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
        scores = scores + bias[0, index].astype(jnp.float32)
    return scores if mask is None else scores + mask


def _scale(x, head_size: int, dtype: jnp.dtype):
    """Computes x / sqrt(K), with 1 / sqrt(K) rounded to `dtype` as the xla backend does."""
    scale = float(np.asarray(head_size**-0.5, dtype))
    return (x.astype(jnp.float32) * jnp.float32(scale)).astype(dtype)


def _dropout_scale(settings: Settings, operands: Operands, head, shape: tuple[int, int]):
    """0 or 1 / (1 - rate) for each weight of a head, as `ops.dropout`. None: no dropout.

    The element (t, s) has the number t * S + s. Its product with the hash's factor is the sum of
    one of t and one of s, modulo 2^32.
    """
    if operands.head_words is None:
        return None
    row, factor = pl.program_id(0), jnp.uint32(ops.ELEMENT_FACTOR)
    queries = _slots((shape[0], 1), 0).astype(jnp.uint32)
    keys = _slots((1, shape[1]), 1).astype(jnp.uint32)
    by_query = (queries * jnp.uint32(shape[1]) + operands.row_words[row]) * factor
    bits = ops.hash_words((by_query + keys * factor) ^ operands.head_words[row, head])
    keep_mask = bits >= jnp.uint32(ops.dropout_threshold(settings.dropout_rate))
    return jnp.where(keep_mask, jnp.float32(1.0 / (1.0 - settings.dropout_rate)), jnp.float32(0.0))


def _forward(settings: Settings, head_size: int, q, k, v, bias, operands, out, statistics):
    """Writes the output, and the largest score and the sum of each query."""
    shape, dtype = (q.shape[1], k.shape[1]), out.dtype
    group, outs, columns = q.shape[2] // head_size, [], []
    mask = _mask(settings, operands, shape)
    for index in range(group):
        lanes = slice(head_size * index, head_size * (index + 1))
        q_head = _scale(q[0, :, lanes], head_size, dtype)
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


def _backward(
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
    """Writes the gradients of queries, keys and values.

    If there is a bias, its gradient is added to `d_carrier`, which `d_bias` overwrites.
    """
    shape, dtype = (q.shape[1], k.shape[1]), dq.dtype
    group, gradients, columns = q.shape[2] // head_size, ([], [], []), statistics[0, 0].T
    mask = _mask(settings, operands, shape)
    for index in range(group):
        lanes = slice(head_size * index, head_size * (index + 1))
        largest = columns[:, 2 * index : 2 * index + 1]
        total = columns[:, 2 * index + 1 : 2 * index + 2]
        q_head, k_head = _scale(q[0, :, lanes], head_size, dtype), k[0, :, lanes]
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
        gradients[0].append(_scale(dq_head, head_size, dtype))
        gradients[1].append(_product(narrow, q_head, _COLUMNS_BY_COLUMNS).astype(dtype))
        gradients[2].append(dv_head.astype(dtype))
        if bias is not None:
            later_layers = d_carrier[0, index].astype(jnp.float32)
            d_bias[0, index] = (later_layers + d_scores).astype(d_bias.dtype)
    for reference, parts in zip((dq, dk, dv), gradients, strict=True):
        reference[0] = jnp.concatenate(parts, axis=1)
