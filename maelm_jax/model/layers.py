"""The parts of encoder and decoder: linear maps, LayerNorm, attention, feed-forward and the block.

By default the block is that of github.com/yumeng5/MAE-LM. Settings make it that of ModernBERT.
Modules hold float32 parameters and no random state. Dropout takes its keys as an argument; None
turns it off.

Axis letters: B rows, T tokens of a sequence, S keys of attention, D width, H heads, G heads of the
bias (H, or 1 for a bias that all heads share), K = D / H, N layers.
"""

import typing

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from maelm_jax import config
from maelm_jax.model import attention
from maelm_jax.model.ops import dropout, gelu, layer_norm, linear, save_for_backward, split_keys


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
        kernel = self.kernel[...].astype(self.dtype)
        y = linear(x.astype(self.dtype).reshape(-1, x.shape[-1]), kernel)
        if self.use_bias:
            y = y + self.bias[...].astype(self.dtype)[None]
        return y.reshape(*x.shape[:-1], -1)


def embedding(rows: int, settings: config.Model, rngs: nnx.Rngs) -> nnx.Param:
    """Returns a table of `rows` vectors of the model's width."""
    init = nnx.initializers.normal(settings.init_std)
    return nnx.Param(init(rngs.params(), (rows, settings.width), jnp.float32))


def zero_at_empty(x: Float[Array, "B T D"], segments: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Returns x with 0 at empty slots (segment 0)."""
    return jnp.where((segments > 0)[:, :, None], x, jnp.zeros((), x.dtype))


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis, with the parameters of `ops.layer_norm`."""

    def __init__(self, settings: config.Model):
        self.scale = nnx.Param(jnp.ones(settings.width, jnp.float32))
        self.use_bias = settings.biases
        if self.use_bias:
            self.bias = nnx.Param(jnp.zeros(settings.width, jnp.float32))
        self.epsilon = settings.layer_norm_eps

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        bias = self.bias[...] if self.use_bias else None
        return layer_norm(x, self.scale[...], bias, self.epsilon)


class Attention(nnx.Module):
    """Multi-head attention between linear maps: W_out attention(W_q x, W_k y, W_v y)."""

    def __init__(self, settings: config.Model, rngs: nnx.Rngs):
        shape = (settings.width, settings.width)
        self.query = Linear(*shape, settings, rngs, settings.biases)
        self.key = Linear(*shape, settings, rngs, settings.biases)
        self.value = Linear(*shape, settings, rngs, settings.biases)
        self.out = Linear(*shape, settings, rngs, settings.biases)
        self.heads = settings.heads
        self.dropout = settings.attention_dropout
        self.backend = settings.attention_backend

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Float[Array, "B S D"],
        terms: attention.ScoreTerms,
        keys: Key[Array, " B"] | None = None,
    ) -> attention.AttentionOutput:
        """Lets each token of `x` attend to the tokens of `context`.

        Args:
            x: States that the queries are computed from.
            context: States that keys and values are computed from.
            terms: What is added to the scores.
            keys: Keys of the dropout of the attention weights, one for each row. None: no dropout.

        Returns:
            The output, without the residual connection, and the carrier of `terms`.
        """
        output = attention.attend(
            self.query(x),
            self.key(context),
            self.value(context),
            heads=self.heads,
            terms=terms,
            dropout_rate=self.dropout,
            dropout_keys=keys,
            backend=self.backend,
        )
        return output._replace(states=self.out(output.states))


class FeedForward(nnx.Module):
    """The feed-forward block: W_down gelu(W_up x).

    With a gate it is GeGLU (Shazeer 2020, arXiv 2002.05202): W_down (gelu(W_up x) * W_gate x).
    """

    def __init__(self, settings: config.Model, rngs: nnx.Rngs):
        width, inner, biases = settings.width, settings.feed_forward, settings.biases
        self.up = Linear(width, inner, settings, rngs, biases)
        self.down = Linear(inner, width, settings, rngs, biases)
        self.has_gate = settings.feed_forward_gate
        if self.has_gate:
            self.gate = Linear(width, inner, settings, rngs, biases)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        activation = gelu(save_for_backward(self.up(x)))
        if self.has_gate:
            activation = activation * save_for_backward(self.gate(x))
        return self.down(activation)


class CrossAttentionInputs(typing.NamedTuple):
    """What cross-attention reads: the encoder's states, at the decoder's width."""

    states: Float[Array, "B S D"]
    terms: attention.ScoreTerms


# What a block attends to: its own states, these and then the encoder's, or the encoder's only.
AttendsTo = typing.Literal["self", "self+cross", "cross"]


class Block(nnx.Module):
    """One Transformer layer: attention, then feed-forward, each with a residual connection.

    It takes and returns the sum x of a residual connection. The layer that reads a sum normalizes
    it, so that the backward pass keeps sums only and computes the normalized states again.

    Post-LN: y = LN(x); x = y + attention(y); y = LN(x); x = y + feed_forward(y). The first of these
    LNs is the one after the feed-forward block of the layer before.
    Pre-LN: x = x + attention(LN(x)); x = x + feed_forward(LN(x)).
    The first layer of a stack has no LN before its attention.

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
        self.normalizes_first = settings.normalization == "pre"
        self.dropout = settings.dropout

    def __call__(
        self,
        x: Float[Array, "B T D"],
        terms: attention.ScoreTerms,
        norm: LayerNorm,
        is_first: Bool[Array, ""],
        keys: Key[Array, " B"] | None = None,
        cross: CrossAttentionInputs | None = None,
    ) -> attention.AttentionOutput:
        """Applies the layer.

        Args:
            x: The sum that the previous layer returned.
            terms: What changes the scores of self-attention.
            norm: Normalizes x. A post-LN layer is given the LN of the layer before.
            is_first: Whether this is the first layer of its stack, which does not normalize x.
            keys: Keys of dropout, one for each row. None: no dropout.
            cross: What cross-attention reads. None: there is no cross-attention.

        Returns:
            The new sum, and the carrier of `terms`.
        """
        weight_keys, attention_keys, feed_forward_keys = split_keys(keys, 3)
        norms = self._norms_between_parts()
        y = jnp.where(is_first, x, norm(x))
        context, context_terms = cross if self.attends_to == "cross" else (y, terms)
        output, carrier = self.attention(y, context, context_terms, weight_keys)
        x = self._residual(x, y) + dropout(output, self.dropout, attention_keys)
        x = save_for_backward(x)
        if self.attends_to == "self+cross":
            y = norms[0](x)
            x = save_for_backward(self._residual(x, y) + self.cross_attention(y, *cross).states)
        y = norms[-1](x)
        x = self._residual(x, y) + dropout(self.feed_forward(y), self.dropout, feed_forward_keys)
        return attention.AttentionOutput(x, carrier)

    def _norms_between_parts(self) -> list[LayerNorm]:
        """Returns the LNs after the layer's first part and before its last."""
        norms = [self.attention_norm, self.feed_forward_norm]
        if self.attends_to == "self+cross":
            norms.insert(1, self.cross_attention_norm)
        return norms[1:] if self.normalizes_first else norms[:-1]

    def _residual(
        self, x: Float[Array, "B T D"], normalized: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """Returns what the output of a part is added to, given the sum x and LN(x)."""
        return x if self.normalizes_first else normalized
