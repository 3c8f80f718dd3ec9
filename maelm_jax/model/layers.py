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
from maelm_jax.model.kernels.attention_tpu import AttentionOutput
from maelm_jax.model.kernels.layer_norm import layer_norm
from maelm_jax.model.kernels.linear import linear
from maelm_jax.model.model_inputs import SlotInfo
from maelm_jax.model.ops import ACTIVATIONS, dropout, save_for_backward, split_keys
from maelm_jax.model.positions import Mask, RelativeBias, compute_rotations


class Linear(nnx.Module):
    """The affine map x W + b, computed in the model's dtype. W starts as N(0, init_std^2).

    The product joins rows and tokens into one axis. With two axes, XLA for CPU computes the
    gradient of W at half the speed.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        settings: config.StackSettings,
        rngs: nnx.Rngs,
        use_bias: bool = True,
    ):
        self.kernel = nnx.Param(
            nnx.initializers.normal(settings.init.std)(
                rngs.params(), (inputs, outputs), jnp.float32
            )
        )
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32)) if use_bias else None
        self.dtype = jnp.dtype(settings.compute.dtype)

    def __call__(self, x: Float[Array, "*S I"]) -> Float[Array, "*S O"]:
        kernel = self.kernel[...].astype(self.dtype)
        bias = None if self.bias is None else self.bias[...]
        y = linear(x.astype(self.dtype).reshape(-1, x.shape[-1]), kernel, bias)
        return y.reshape(*x.shape[:-1], -1)


def create_embedding(rows: int, settings: config.StackSettings, rngs: nnx.Rngs) -> nnx.Param:
    """Returns a table of `rows` vectors of the model's width."""
    init = nnx.initializers.normal(settings.init.std)
    return nnx.Param(init(rngs.params(), (rows, settings.stack.width), jnp.float32))


def zero_empty_slots(
    x: Float[Array, "B T D"], segments: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Returns x with 0 at empty slots (segment 0)."""
    return jnp.where((segments > 0)[:, :, None], x, jnp.zeros((), x.dtype))


def compute_terms(
    stack: config.Stack,
    queries: SlotInfo,
    keys: SlotInfo,
    dtype: jnp.dtype,
    bias: RelativeBias | None = None,
    causal: bool = False,
) -> attention.ScoreTerms:
    """Returns what segments and positions change in the scores of attention.

    `stack` is the encoder's or the decoder's. `causal` hides keys at later slots than the
    query's.
    """
    terms = attention.ScoreTerms(mask=Mask(queries.segments, keys.segments, causal))
    if bias is not None:
        terms = terms._replace(bias=bias(queries.positions, keys.positions, dtype))
    if stack.positions == "rotary":
        rotations = compute_rotations(
            stack.rotary_theta, stack.head_size, queries.positions, keys.positions
        )
        terms = terms._replace(rotations=rotations)
    return terms


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis, with a scale and, if set, a bias."""

    def __init__(self, settings: config.StackSettings):
        width, has_bias = settings.stack.width, settings.stack.biases
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32)) if has_bias else None
        self.epsilon = settings.stack.layer_norm_eps

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        bias = None if self.bias is None else self.bias[...]
        return layer_norm(x, self.scale[...], bias, self.epsilon)


class Attention(nnx.Module):
    """Multi-head attention between linear maps: W_out attention(W_q x, W_k y, W_v y)."""

    def __init__(self, settings: config.StackSettings, rngs: nnx.Rngs):
        width, biases = settings.stack.width, settings.stack.biases
        self.query = Linear(width, width, settings, rngs, biases)
        self.key = Linear(width, width, settings, rngs, biases)
        self.value = Linear(width, width, settings, rngs, biases)
        self.out = Linear(width, width, settings, rngs, biases)
        self.heads = settings.stack.heads
        self.dropout = settings.dropout.attention

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Float[Array, "B S D"],
        terms: attention.ScoreTerms,
        keys: Key[Array, " B"] | None = None,
    ) -> AttentionOutput:
        """Lets each token of `x` attend to the tokens of `context`.

        `keys` has one key for each row, for the dropout of the attention weights. None: no dropout.

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
        )
        return output._replace(states=self.out(output.states))


class FeedForward(nnx.Module):
    """The feed-forward block: W_down gelu(W_up x), with the GELU of `hidden_act`.

    With a gate it is GeGLU (Shazeer 2020, arXiv 2002.05202): W_down (gelu(W_up x) * W_gate x).
    """

    def __init__(self, settings: config.StackSettings, rngs: nnx.Rngs):
        stack = settings.stack
        width, inner, biases = stack.width, stack.feed_forward, stack.biases
        self.up = Linear(width, inner, settings, rngs, biases)
        self.down = Linear(inner, width, settings, rngs, biases)
        has_gate = stack.feed_forward_gate
        self.gate = Linear(width, inner, settings, rngs, biases) if has_gate else None
        self.hidden_act = stack.hidden_act

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        activation = ACTIVATIONS[self.hidden_act](save_for_backward(self.up(x)))
        if self.gate is not None:
            activation = activation * save_for_backward(self.gate(x))
        return self.down(activation)


class CrossAttentionInputs(typing.NamedTuple):
    """What cross-attention reads: the encoder's states, at the decoder's width."""

    states: Float[Array, "B S D"]
    terms: attention.ScoreTerms
    # Whether a query has a visible token in its segment. The attention of the others would be an
    # average of other segments. It is 0 instead.
    has_keys: Bool[Array, "B T"]


# What a block attends to: its own states, these and then the encoder's, or the encoder's only.
AttendsTo = typing.Literal["self", "self+cross", "cross"]


class LayerState(typing.NamedTuple):
    """What a layer hands to the next one."""

    total: Float[Array, "B T D"]  # the sum of the residual connections
    states: Float[Array, "B T D"]  # the same after LayerNorm
    carrier: Float[Array, "B H T S"] | None  # of `attention.ScoreTerms`


class Block(nnx.Module):
    """One Transformer layer: attention, then feed-forward.

    Each part reads normalized states y and adds its output to a sum: x = r + part(y), y = LN(x).
    Post-LN adds to the normalized states, r = y. Pre-LN adds to the sum before, r = x.

    So every LayerNorm follows a part and has its name. In a pre-LN stack, the `feed_forward_norm`
    of a layer is what stock models call the next layer's attention norm, and that of the last layer
    is their final norm. The first layer reads the embeddings.

    With "self+cross", cross-attention stands between the two. With "cross", `attention` is
    cross-attention.
    """

    def __init__(
        self, settings: config.StackSettings, rngs: nnx.Rngs, attends_to: AttendsTo = "self"
    ):
        self.attention = Attention(settings, rngs)
        self.attention_norm = LayerNorm(settings)
        self.feed_forward = FeedForward(settings, rngs)
        self.feed_forward_norm = LayerNorm(settings)
        if attends_to == "self+cross":
            self.cross_attention = Attention(settings, rngs)
            self.cross_attention_norm = LayerNorm(settings)
        self.attends_to = attends_to
        self.is_pre_norm = settings.stack.normalization == "pre"
        self.dropout = settings.dropout.hidden

    def __call__(
        self,
        state: LayerState,
        terms: attention.ScoreTerms,
        keys: Key[Array, " B"] | None = None,
        cross: CrossAttentionInputs | None = None,
    ) -> LayerState:
        """Applies the layer to what the previous one returned.

        Self-attention takes `terms`, cross-attention takes `cross`. `keys` has one key of dropout
        for each row. None: no dropout.
        """
        weight_keys, attention_keys, feed_forward_keys = split_keys(keys, 3)
        x, y, carrier = state
        if self.attends_to == "cross":
            output = self._attend_to_encoder(self.attention, y, cross, weight_keys)
        else:
            terms = terms._replace(carrier=carrier)
            output, carrier = self.attention(y, y, terms, weight_keys)
        x = self._add(x, y, dropout(output, self.dropout, attention_keys))
        y = self.attention_norm(x)
        if self.attends_to == "self+cross":
            x = self._add(x, y, self._attend_to_encoder(self.cross_attention, y, cross))
            y = self.cross_attention_norm(x)
        x = self._add(x, y, dropout(self.feed_forward(y), self.dropout, feed_forward_keys))
        return LayerState(x, self.feed_forward_norm(x), carrier)

    def _attend_to_encoder(
        self,
        attend: Attention,
        y: Float[Array, "B T D"],
        cross: CrossAttentionInputs,
        keys: Key[Array, " B"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Returns the output of cross-attention."""
        output = attend(y, cross.states, cross.terms, keys).states
        return jnp.where(cross.has_keys[:, :, None], output, jnp.zeros((), output.dtype))

    def _add(
        self, x: Float[Array, "B T D"], y: Float[Array, "B T D"], output: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """Returns the sum after a part that read y, the normalized x."""
        return save_for_backward((x if self.is_pre_norm else y) + output)
