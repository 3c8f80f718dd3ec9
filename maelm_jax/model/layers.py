"""The parts of encoder and decoder: linear maps, LayerNorm, attention and the post-LN block.

The block is that of github.com/yumeng5/MAE-LM. Modules hold float32 parameters and no random
state. Dropout takes its keys as an argument; None turns it off.

Axis letters: B rows, T tokens of a sequence, S keys of attention, D width, H heads, G heads of the
bias (H, or 1 for a bias that all heads share), K = D / H, N layers.
"""

import abc
import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from maelm_jax import config
from maelm_jax.model import attention
from maelm_jax.model.ops import dropout, gelu, layer_norm, save_for_backward, split_keys


class Linear(nnx.Module):
    """The affine map x W + b, computed in the model's dtype. W starts as N(0, init_std^2).

    The product joins rows and tokens into one axis. With two axes, XLA for CPU computes the
    gradient of W at half the speed.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        settings: config.Model,
        rngs: nnx.Rngs,
        use_bias: bool = True,
    ):
        self.kernel = nnx.Param(
            nnx.initializers.normal(settings.init_std)(
                rngs.params(), (inputs, outputs), jnp.float32
            )
        )
        self.use_bias = use_bias
        if use_bias:
            self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32))
        self.dtype = jnp.dtype(settings.dtype)

    def __call__(self, x: Float[Array, "*S I"]) -> Float[Array, "*S O"]:
        y = x.astype(self.dtype).reshape(-1, x.shape[-1]) @ self.kernel[...].astype(self.dtype)
        if self.use_bias:
            y = y + self.bias[...].astype(self.dtype)[None]
        return y.reshape(*x.shape[:-1], -1)


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis, with the parameters of `ops.layer_norm`."""

    def __init__(self, settings: config.Model):
        self.scale = nnx.Param(jnp.ones(settings.width, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(settings.width, jnp.float32))
        self.epsilon = settings.layer_norm_eps

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return layer_norm(x, self.scale[...], self.bias[...], self.epsilon)


class Attention(nnx.Module):
    """Multi-head attention between linear maps: W_out attention(W_q x, W_k y, W_v y)."""

    def __init__(self, settings: config.Model, rngs: nnx.Rngs):
        width = settings.width
        self.query = Linear(width, width, settings, rngs)
        self.key = Linear(width, width, settings, rngs)
        self.value = Linear(width, width, settings, rngs)
        self.out = Linear(width, width, settings, rngs)
        self.heads = settings.heads
        self.dropout = settings.attention_dropout
        self.backend = settings.attention_backend

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Float[Array, "B S D"],
        terms: attention.ScoreTerms,
        keys: Key[Array, " B"] | None = None,
    ) -> attention.Attended:
        """Lets each token of `x` attend to the tokens of `context`.

        Args:
            x: States that the queries are computed from.
            context: States that keys and values are computed from.
            terms: What is added to the scores.
            keys: Keys of the dropout of the attention weights, one for each row. None: no dropout.

        Returns:
            The output, without the residual connection, and the carrier of `terms`.
        """
        attended = attention.attention(
            self.query(x),
            self.key(context),
            self.value(context),
            heads=self.heads,
            terms=terms,
            dropout=attention.Dropout(self.dropout, keys),
            backend=self.backend,
        )
        return attended._replace(states=self.out(attended.states))

    def prepare_terms(
        self,
        terms: attention.ScoreTerms,
        x: Float[Array, "B T D"],
        context: Float[Array, "B S D"],
        has_dropout: bool,
    ) -> attention.ScoreTerms:
        """Computes once what each layer of a stack adds to its scores."""
        call = attention.Call(
            self.heads,
            x.shape[2] // self.heads,
            x.shape[1],
            context.shape[1],
            x.dtype,
            self.dropout if has_dropout else 0.0,
            terms.bias is not None,
        )
        return attention.prepare_terms(terms, call, self.backend)


class FeedForward(nnx.Module):
    """The feed-forward block: W_down gelu(W_up x)."""

    def __init__(self, settings: config.Model, rngs: nnx.Rngs):
        self.up = Linear(settings.width, settings.feed_forward, settings, rngs)
        self.down = Linear(settings.feed_forward, settings.width, settings, rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(gelu(save_for_backward(self.up(x))))


class CrossAttentionInputs(typing.NamedTuple):
    """What cross-attention reads: the encoder's states, at the decoder's width."""

    states: Float[Array, "B S D"]
    terms: attention.ScoreTerms


# What a block attends to: its own states, these and then the encoder's, or the encoder's only.
AttendsTo = typing.Literal["self", "self+cross", "cross"]


class Block(nnx.Module):
    """One post-LN Transformer layer: x = LN(x + attention(x)); x = LN(x + feed_forward(x)).

    With "self+cross", cross-attention stands between the two. With "cross", `attention` is
    cross-attention.
    """

    def __init__(self, settings: config.Model, rngs: nnx.Rngs, attends_to: AttendsTo = "self"):
        self.attention = Attention(settings, rngs)
        self.attention_norm = LayerNorm(settings)
        self.feed_forward = FeedForward(settings, rngs)
        self.feed_forward_norm = LayerNorm(settings)
        if attends_to == "self+cross":
            self.cross_attention = Attention(settings, rngs)
            self.cross_attention_norm = LayerNorm(settings)
        self.attends_to = attends_to
        self.dropout = settings.dropout

    def __call__(
        self,
        x: Float[Array, "B T D"],
        terms: attention.ScoreTerms,
        keys: Key[Array, " B"] | None = None,
        cross: CrossAttentionInputs | None = None,
    ) -> attention.Attended:
        """Applies the layer.

        Args:
            x: States of the previous layer.
            terms: What is added to the scores of self-attention.
            keys: Keys of dropout, one for each row. None: no dropout. Cross-attention that follows
                self-attention has none.
            cross: What cross-attention reads. None: there is no cross-attention.

        Returns:
            The new states, and the carrier of `terms`.
        """
        weight_keys, attention_keys, feed_forward_keys = split_keys(keys, 3)
        context, context_terms = cross if self.attends_to == "cross" else (x, terms)
        y, carrier = self.attention(x, context, context_terms, weight_keys)
        x = self.attention_norm(x + dropout(y, self.dropout, attention_keys))
        if self.attends_to == "self+cross":
            x = self.cross_attention_norm(x + self.cross_attention(x, *cross).states)
        y = self.feed_forward(x)
        x = self.feed_forward_norm(x + dropout(y, self.dropout, feed_forward_keys))
        return attention.Attended(x, carrier)


class Scattered(abc.ABC):
    """A parameter of a stack of layers, of which this device holds a part.

    It is a pytree. Its leaves have the leading layer axis.
    """

    @abc.abstractmethod
    def whole(self, dtype: jnp.dtype) -> Array:
        """Returns the whole parameter of one layer, without the layer axis, cast to `dtype`."""


def _is_scattered(leaf) -> bool:
    return isinstance(leaf, Scattered)


def stack(settings: config.Model, rngs: nnx.Rngs, attends_to: AttendsTo = "self") -> Block:
    """Creates `settings.layers` blocks as one Block. Every parameter has a leading axis N."""

    def block(key) -> Block:
        return Block(settings, nnx.Rngs(key), attends_to)

    graph = nnx.graphdef(nnx.eval_shape(lambda: block(0)))
    keys = jax.random.split(rngs.params(), settings.layers)
    state = jax.vmap(lambda key: nnx.to_pure_dict(nnx.state(block(key))))(keys)
    return nnx.merge(graph, nnx.State(jax.tree.map(nnx.Param, state)))


def run_stack(
    blocks: Block,
    x: Float[Array, "B T D"],
    terms: attention.ScoreTerms,
    keys: Key[Array, " B"] | None = None,
    rematerialise: bool = False,
    cross: CrossAttentionInputs | None = None,
    every: bool = False,
) -> Float[Array, "B T D"] | Float[Array, "N B T D"]:
    """Applies the layers in turn. The body of one layer is compiled once and scanned.

    The backward pass keeps the values marked by `save_for_backward` and computes all else again.

    Args:
        blocks: A result of `stack`. Parameters that are `Scattered` are gathered one layer at a
            time, in the forward pass and again in the backward pass.
        x: States that enter the first layer.
        terms: What every layer adds to the scores of self-attention.
        keys: Keys of dropout, one for each row. None: no dropout.
        rematerialise: True keeps only the layers' inputs for the backward pass.
        cross: What cross-attention reads. None: there is no cross-attention.
        every: True returns the states after each layer, not only after the last.

    Returns:
        The states [B, T, D] after the last layer, or [N, B, T, D] with `every`.
    """
    graph, state = nnx.split(blocks)
    layers = jax.tree.leaves(state)[0].shape[0]
    if blocks.attends_to != "cross":
        terms = blocks.attention.prepare_terms(terms, x, x, keys is not None)
    cross = _prepare_cross_attention(blocks, x, cross, keys is not None)

    def body(carry, layer):
        (x, carrier), (index, parameters) = carry, layer
        parameters = jax.tree.map(
            lambda p: p.whole(x.dtype) if _is_scattered(p) else p, parameters, is_leaf=_is_scattered
        )
        layer_keys = (
            None if keys is None else jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, index)
        )
        block = nnx.merge(graph, parameters)
        carry = block(x, terms._replace(carrier=carrier), layer_keys, cross)
        return carry, carry.states if every else None

    policy = (
        jax.checkpoint_policies.nothing_saveable
        if rematerialise
        else jax.checkpoint_policies.save_only_these_names("kept")
    )
    body = jax.checkpoint(body, prevent_cse=False, policy=policy)
    start = attention.Attended(x, terms.carrier)
    last, states = jax.lax.scan(body, start, (jnp.arange(layers, dtype=jnp.uint32), state))
    return states if every else last.states


def _prepare_cross_attention(
    blocks: Block,
    x: Float[Array, "B T D"],
    cross: CrossAttentionInputs | None,
    has_dropout: bool,
) -> CrossAttentionInputs | None:
    """Computes once what every layer adds to the scores of cross-attention.

    It has no carrier: the gradients of its bias are left to XLA to sum.
    """
    if cross is None:
        return None
    is_only = blocks.attends_to == "cross"
    module = blocks.attention if is_only else blocks.cross_attention
    terms = module.prepare_terms(cross.terms, x, cross.states, has_dropout and is_only)
    return cross._replace(terms=terms._replace(carrier=None))
