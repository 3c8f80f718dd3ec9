"""Multi-head attention: one function, computed by one of several backends.

`xla` is the reference for the others. attention_choice.py says which backend a call takes.

Axis letters: B rows, H heads, T queries, S keys, D width, K size of a head (D / H), G heads of the
bias (H, or 1 for a bias that all heads share).
"""

import functools
import typing

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from maelm_jax import config
from maelm_jax.model import (
    attention_choice,
    attention_fused,
    attention_gpu,
    attention_tpu,
    attention_triton,
    ops,
)
from maelm_jax.model.attention_choice import Call as Call
from maelm_jax.model.attention_fused import Attended as Attended
from maelm_jax.model.ops import save_for_backward
from maelm_jax.model.positions import MASKED_OUT, Rotation, rotate, rotation


class Mask(typing.NamedTuple):
    """Which keys a query sees: those of its own segment. Keys of segment 0 are empty."""

    queries: Int[Array, "B T"]  # segments
    keys: Int[Array, "B S"]  # segments
    causal: bool = False  # True also hides the keys at later slots than the query's

    def as_bias(self, dtype: jnp.dtype) -> Float[Array, "B 1 T S"]:
        """Returns the mask as a term of the scores: 0 at keys that are seen, -1e9 at others.

        The axis of size 1 stands for all heads.
        """
        same: Bool[Array, "B T S"] = self.queries[:, :, None] == self.keys[:, None, :]
        seen = same & (self.keys > 0)[:, None, :]
        if self.causal:
            seen &= jnp.tri(*seen.shape[1:], dtype=bool)[None]
        return jnp.where(seen, 0.0, MASKED_OUT).astype(dtype)[:, None]


class Rotations(typing.NamedTuple):
    """Rotary positions of the queries and of the keys."""

    queries: Rotation
    keys: Rotation


def rotations(
    settings: config.Model, queries: Int[Array, "B T"], keys: Int[Array, "B S"]
) -> Rotations:
    """Returns the rotary positions of queries and keys."""
    head_size = settings.width // settings.heads
    return Rotations(
        rotation(queries, head_size, settings.rotary_theta),
        rotation(keys, head_size, settings.rotary_theta),
    )


class ScoreTerms(typing.NamedTuple):
    """What changes the scores of attention: positions and segments."""

    bias: Float[Array, "B G T S"] | None = None  # receives a gradient
    mask: Mask | Float[Array, "B 1 T S"] | None = None  # receives none
    # Collects the gradient of `bias` over the layers that share it, in place. Its value is never
    # read. See `attention_fused.attention`.
    carrier: Float[Array, "B H T S"] | None = None
    rotations: Rotations | None = None  # applied to queries and keys
    local: "ScoreTerms | None" = None  # what takes the place of all this in local layers


class Dropout(typing.NamedTuple):
    """Dropout of the attention weights."""

    rate: float = 0.0
    keys: Key[Array, " B"] | None = None  # one for each row; None: no dropout

    @property
    def active_rate(self) -> float:
        """The rate, or 0 without keys."""
        return 0.0 if self.keys is None else self.rate


NO_TERMS, NO_DROPOUT = ScoreTerms(), Dropout()
# Backends whose kernels are written here.
_KERNELS = {"pallas_tpu": attention_tpu.KERNELS, "pallas_gpu": attention_triton.KERNELS}


def attention(
    q: Float[Array, "B T D"],
    k: Float[Array, "B S D"],
    v: Float[Array, "B S D"],
    *,
    heads: int,
    terms: ScoreTerms = NO_TERMS,
    dropout: Dropout = NO_DROPOUT,
    backend: str = "auto",
) -> Attended:
    """Computes dropout(softmax(q k^T / sqrt(K) + bias + mask)) v for each head.

    Rotary positions first rotate q and k.

    Args:
        q: Queries, with the heads side by side.
        k: Keys.
        v: Values.
        heads: Number of heads.
        terms: What changes the scores.
        dropout: Dropout of the weights.
        backend: `Model.attention_backend`.

    Returns:
        The sums, in the dtype of q, and the carrier of the bias' gradient if `terms` has one.
    """
    if terms.rotations is not None:
        q = rotate(q, terms.rotations.queries, heads)
        k = rotate(k, terms.rotations.keys, heads)
    target = attention_choice.current_target()
    call = Call(
        heads,
        q.shape[2] // heads,
        q.shape[1],
        k.shape[1],
        q.dtype,
        dropout.active_rate,
        terms.bias is not None,
        isinstance(terms.mask, jax.Array),
    )
    chosen = attention_choice.choose(backend, call, target).backend
    if chosen in _KERNELS:
        return _by_kernels(_KERNELS[chosen], q, k, v, heads, terms, dropout)
    by = {"xla": _by_xla, "cudnn": _by_cudnn}[chosen]
    return by(q, k, v, heads, terms, dropout)


def prepare_terms(terms: ScoreTerms, call: Call, backend: str = "auto") -> ScoreTerms:
    """Computes once what all layers of a stack add to their scores.

    The mask becomes a part of the bias, or an array. Only the kernels written here keep a mask that
    stands alone as segments: they compare them.

    Args:
        terms: What each layer adds.
        call: Shapes and dtype of each layer's attention.
        backend: `Model.attention_backend`.
    """
    chosen = attention_choice.choose(backend, call, attention_choice.current_target()).backend
    if chosen in _KERNELS and terms.bias is None:
        return terms
    terms = _with_dense_mask(terms, call.dtype)
    if chosen in _KERNELS:
        # Without the barrier, XLA adds mask and bias again in each layer, in both passes.
        bias = jax.lax.optimization_barrier(terms.bias)
        carrier = bias if bias.shape[1] == call.heads else None
        return terms._replace(bias=bias, carrier=carrier)
    return terms


def _with_dense_mask(terms: ScoreTerms, dtype: jnp.dtype) -> ScoreTerms:
    """Makes the mask an array, and adds it to the bias if there is one."""
    if terms.mask is None:
        return terms
    mask = terms.mask.as_bias(dtype) if isinstance(terms.mask, Mask) else terms.mask
    if terms.bias is None:
        return terms._replace(mask=mask)
    return terms._replace(bias=mask + terms.bias, mask=None)


def _by_xla(q, k, v, heads: int, terms: ScoreTerms, dropout: Dropout) -> Attended:
    shape, split = q.shape, [y.reshape(*y.shape[:2], heads, -1) for y in (q, k, v)]
    q, k, v = (save_for_backward(y.swapaxes(1, 2)) for y in split)
    terms = _with_dense_mask(terms, q.dtype)
    added = terms.mask if terms.bias is None else terms.bias
    if added is None:
        added = jnp.zeros((len(q), 1, q.shape[2], k.shape[2]), q.dtype)
    weights = attention_weights(q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype), k, added)
    weights = ops.dropout(weights, dropout.rate, dropout.keys)
    y = jnp.einsum("bhts,bhsk->bhtk", weights, v)
    return Attended(save_for_backward(y.swapaxes(1, 2).reshape(shape)), terms.carrier)


def _by_cudnn(q, k, v, heads: int, terms: ScoreTerms, dropout: Dropout) -> Attended:
    shape, split = q.shape, [y.reshape(*y.shape[:2], heads, -1) for y in (q, k, v)]
    q, k, v = (save_for_backward(y) for y in split)
    terms = _with_dense_mask(terms, q.dtype)
    added = terms.mask if terms.bias is None else terms.bias
    run = functools.partial(attention_gpu.attention, terms.bias is not None)
    if attention_choice.current_target().sharded_rows:
        run = _cudnn_over_heads(run, added)
    return Attended(run(q, k, v, added).reshape(shape), terms.carrier)


def _cudnn_over_heads(run, bias: Float[Array, "B G T S"] | None):
    """Wraps the call in a `shard_map` over heads. XLA cannot partition it."""
    by_head = PartitionSpec(None, None, "tensor")
    bias_by_head = PartitionSpec(None, "tensor")
    shared = bias is None or bias.shape[1] == 1
    return jax.shard_map(
        run,
        in_specs=(by_head, by_head, by_head, PartitionSpec() if shared else bias_by_head),
        out_specs=by_head,
        axis_names={"tensor"},
        check_vma=False,
    )


def _by_kernels(
    kernels: attention_fused.Kernels, q, k, v, heads: int, terms: ScoreTerms, dropout: Dropout
) -> Attended:
    """Runs the kernels, inside a `shard_map` over heads where the devices divide them."""
    target = attention_choice.current_target()
    q, k, v = (save_for_backward(y) for y in (q, k, v))
    settings = attention_fused.Settings(
        heads // target.tensor,
        dropout.active_rate,
        causal=terms.mask is not None and terms.mask.causal,
        interpret=target.platform != kernels.platform,
    )
    operands = _kernel_operands(terms.mask, dropout, heads)
    arrays = (q, k, v, terms.bias, terms.carrier, operands)
    run = functools.partial(attention_fused.attention, kernels, settings)
    if target.sharded_rows:
        run = attention_fused.over_heads(run, arrays)
    return run(*arrays)


def _kernel_operands(mask: Mask | None, dropout: Dropout, heads: int) -> attention_fused.Operands:
    """Segments as rows of float32, and the words of the dropout hash for each row and head."""
    operands = attention_fused.Operands()
    if mask is not None:
        queries, keys = (x.astype(jnp.float32)[:, None] for x in (mask.queries, mask.keys))
        operands = operands._replace(query_segments=queries, key_segments=keys)
    if dropout.active_rate > 0:
        words = ops.key_words(dropout.keys)
        head_words = ops.hash_words(jnp.arange(heads, dtype=jnp.uint32)[None] + words[:, :1])
        operands = operands._replace(head_words=head_words, row_words=words[:, 1])
    return operands


@jax.custom_vjp
def attention_weights(
    q: Float[Array, "B H T K"], k: Float[Array, "B H S K"], bias: Float[Array, "B G T S"]
) -> Float[Array, "B H T S"]:
    """Computes the softmax of q k^T + bias over the keys.

    Scores and softmax are computed in float32. The weights have the dtype of q. The backward pass
    casts the gradient of the scores to the dtype of q, so that its matrix products run in that
    dtype. Automatic differentiation would run them in float32.

    Args:
        q: Queries, already divided by sqrt(K).
        k: Keys.
        bias: Added to the scores. G is H, or 1 for a bias that all heads share.

    Returns:
        The weights, in the dtype of q. They sum to 1 over S.
    """
    return _attention_weights_forward(q, k, bias)[0]


def _attention_weights_forward(q, k, bias):
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k, preferred_element_type=jnp.float32) + bias.astype(
        jnp.float32
    )
    weights = save_for_backward(jax.nn.softmax(scores, axis=-1).astype(q.dtype))
    return weights, (q, k, weights, bias)


def _attention_weights_backward(saved, d_weights):
    q, k, weights, bias = saved
    wide = weights.astype(jnp.float32)
    product = wide * d_weights.astype(jnp.float32)
    d_scores = product - wide * product.sum(axis=-1, keepdims=True)
    d_bias = d_scores if bias.shape[1] == q.shape[1] else d_scores.sum(axis=1, keepdims=True)
    d_scores = d_scores.astype(q.dtype)
    return (
        jnp.einsum("bhts,bhsk->bhtk", d_scores, k),
        jnp.einsum("bhts,bhtk->bhsk", d_scores, q),
        d_bias.astype(bias.dtype),
    )


attention_weights.defvjp(_attention_weights_forward, _attention_weights_backward)
