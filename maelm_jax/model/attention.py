"""Multi-head attention: what it computes. The fused kernels and their choice are in kernels/.

Axis letters: B rows, H heads, T queries, S keys, D width, K size of a head (D / H), G heads of the
bias (H, or 1 for a bias that all heads share).
"""

import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from maelm_jax import config
from maelm_jax.model import ops
from maelm_jax.model.kernels import attention_cudnn, attention_tpu, backends
from maelm_jax.model.kernels.attention_tpu import AttentionOutput
from maelm_jax.model.kernels.attention_weights import attention_weights
from maelm_jax.model.kernels.linear import product
from maelm_jax.model.ops import save_for_backward
from maelm_jax.model.positions import (
    Mask,
    Rotations,
    divide_into_blocks,
    join_neighbours,
    rotate,
)


class ScoreTerms(typing.NamedTuple):
    """What changes the scores of attention: positions and segments."""

    bias: Float[Array, "B H T S"] | None = None  # receives a gradient
    mask: Mask | Float[Array, "B 1 T S"] | None = None  # receives none
    # Collects the gradient of `bias` over the layers that share it: see `attention_tpu.attend`.
    carrier: Float[Array, "B H T S"] | None = None
    rotations: Rotations | None = None  # applied to queries and keys
    local: "ScoreTerms | None" = None  # what takes the place of all this in local layers
    block: int | None = None  # in local layers: slots of a block; `mask` is that of all blocks
    backend: backends.Backend = backends.XLA  # what computes the attention


NO_TERMS = ScoreTerms()


def attend(
    q: Float[Array, "B T D"],
    k: Float[Array, "B S D"],
    v: Float[Array, "B S D"],
    *,
    heads: int,
    terms: ScoreTerms = NO_TERMS,
    dropout_rate: float = 0.0,
    dropout_keys: Key[Array, " B"] | None = None,
) -> AttentionOutput:
    """Computes dropout(softmax(q k^T / sqrt(K) + bias + mask)) v for each head.

    The heads of q, k and v are side by side. Rotary positions first rotate q and k. `dropout_keys`
    has one key for each row. None: no dropout.

    Returns:
        The sums, in the dtype of q, and the carrier of `terms`.
    """
    if terms.rotations is not None:
        q = rotate(q, terms.rotations.queries, heads)
        k = rotate(k, terms.rotations.keys, heads)
    if terms.block is not None:
        return _attend_in_blocks(q, k, v, heads, terms, dropout_rate, dropout_keys)
    backend, target = terms.backend
    if backend == "pallas_tpu":
        q, k, v = (save_for_backward(x) for x in (q, k, v))
        return attention_tpu.attend(
            q,
            k,
            v,
            terms.bias,
            terms.carrier,
            terms.mask,
            heads=heads,
            dropout_rate=0.0 if dropout_keys is None else dropout_rate,
            dropout_keys=dropout_keys,
            tensor=target.tensor,
            sharded_rows=target.sharded_rows,
            interpret=target.platform != "tpu",
        )
    by_head = [x.reshape(*x.shape[:2], heads, -1) for x in (q, k, v)]
    if backend == "cudnn":
        if terms.bias is not None:
            terms = _merge_mask(terms, q.dtype)
        states = attention_cudnn.attend(*by_head, terms.bias, terms.mask, target.sharded_rows)
    else:
        terms = _merge_mask(terms, q.dtype)
        bias = terms.mask if terms.bias is None else terms.bias
        states = _attend_by_xla(*by_head, bias, dropout_rate, dropout_keys)
    return AttentionOutput(states, terms.carrier)


def _attend_in_blocks(
    q: Float[Array, "B T D"],
    k: Float[Array, "B T D"],
    v: Float[Array, "B T D"],
    heads: int,
    terms: ScoreTerms,
    dropout_rate: float,
    dropout_keys: Key[Array, " B"] | None,
) -> AttentionOutput:
    """Computes local attention: each block of slots attends to itself and to its neighbours.

    The slots of a segment are in the order of their positions. Two tokens are therefore at most as
    many slots apart as positions, with or without slots for dropped tokens.
    """

    def rows(blocks):
        return blocks.reshape(-1, *blocks.shape[2:])

    q_blocks, k_blocks, v_blocks = (divide_into_blocks(x, terms.block) for x in (q, k, v))
    if dropout_keys is not None:
        count = q_blocks.shape[1]
        dropout_keys = rows(jax.vmap(lambda key: jax.random.split(key, count))(dropout_keys))
    output = attend(
        rows(q_blocks),
        rows(join_neighbours(k_blocks)),
        rows(join_neighbours(v_blocks)),
        heads=heads,
        terms=ScoreTerms(mask=terms.mask, backend=terms.backend),
        dropout_rate=dropout_rate,
        dropout_keys=dropout_keys,
    )
    return AttentionOutput(output.states.reshape(len(q), -1, q.shape[2])[:, : q.shape[1]], None)


def prepare_terms(
    terms: ScoreTerms,
    settings: config.StackSettings,
    target: backends.Target,
    queries: int,
    keys: int,
    dropout_rate: float,
) -> ScoreTerms:
    """Chooses the backend, and computes once what changes the scores of all layers of a stack.

    The mask becomes a part of the bias, or an array. The fused backends keep a mask that stands
    alone as segments. `queries`, `keys` and `dropout_rate` are those of `backends.describe_call`.
    """
    requested = settings.compute.attention_backend
    call = backends.describe_call(settings, queries, keys, dropout_rate, terms.bias is not None)
    backend = backends.choose(requested, call, target)
    terms = terms._replace(backend=backend)
    if terms.local is not None:
        call = backends.describe_local_call(settings, queries, terms.local.block, dropout_rate)
        local = terms.local._replace(backend=backends.choose(requested, call, target))
        terms = terms._replace(local=local)
    if backend.name != "xla" and terms.bias is None:
        return terms
    terms = _merge_mask(terms, call.dtype)
    if backend.name != "pallas_tpu":
        return terms
    # Without the barrier, XLA adds mask and bias again in each layer, in both passes.
    bias = jax.lax.optimization_barrier(terms.bias)
    return terms._replace(bias=bias, carrier=bias)


def _merge_mask(terms: ScoreTerms, dtype: jnp.dtype) -> ScoreTerms:
    """Makes the mask an array, and adds it to the bias if there is one."""
    if terms.mask is None:
        return terms
    mask = terms.mask.as_bias(dtype) if isinstance(terms.mask, Mask) else terms.mask
    if terms.bias is None:
        return terms._replace(mask=mask)
    return terms._replace(bias=mask + terms.bias, mask=None)


def _attend_by_xla(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H K"],
    bias: Float[Array, "B G T S"] | None,
    dropout_rate: float,
    dropout_keys: Key[Array, " B"] | None,
) -> Float[Array, "B T D"]:
    """Computes attention from the scores, which are in memory."""
    q, k, v = (save_for_backward(x.swapaxes(1, 2)) for x in (q, k, v))
    if bias is None:
        bias = jnp.zeros((len(q), 1, q.shape[2], k.shape[2]), q.dtype)
    weights = attention_weights(q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype), k, bias)
    weights = ops.dropout(weights, dropout_rate, dropout_keys)
    y = product("bhts,bhsk->bhtk", weights, v)
    return save_for_backward(y.swapaxes(1, 2).reshape(len(y), y.shape[2], -1))
