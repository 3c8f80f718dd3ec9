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
from maelm_jax.model.attention import attention_weights
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
        if use_bias:
            self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32))
        self.dtype = jnp.dtype(settings.dtype)

    def __call__(self, x: Float[Array, "*S I"]) -> Float[Array, "*S O"]:
        y = x.astype(self.dtype).reshape(-1, x.shape[-1]) @ self.kernel[...].astype(self.dtype)
        if hasattr(self, "bias"):
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
    """Multi-head attention with a residual connection and post-LN: LN(x + W attention(x))."""

    def __init__(self, settings: config.Model, rngs: nnx.Rngs):
        width = settings.width
        self.query = Linear(width, width, settings, rngs)
        self.key = Linear(width, width, settings, rngs)
        self.value = Linear(width, width, settings, rngs)
        self.out = Linear(width, width, settings, rngs)
        self.attention_norm = LayerNorm(settings)
        self.heads = settings.heads

    def attend(
        self,
        x: Float[Array, "B T D"],
        read: Float[Array, "B S D"],
        bias: Float[Array, "B G T S"],
        dropout_rate: float = 0.0,
        attention_dropout: float = 0.0,
        keys: tuple[Key[Array, " B"] | None, ...] = (None, None),
    ) -> Float[Array, "B T D"]:
        """Lets each token of `x` attend to the tokens of `read`.

        Args:
            x: Queries, and the residual branch.
            read: Keys and values.
            bias: Added to the scores.
            dropout_rate: Dropout of the output, before the residual sum.
            attention_dropout: Dropout of the attention weights.
            keys: Keys of the attention's dropout and of the output's, one for each row. None: no
                dropout.

        Returns:
            The new states.
        """
        split_heads = lambda y: y.reshape(*y.shape[:2], self.heads, -1).swapaxes(1, 2)  # noqa: E731
        q, k, v = (
            save_for_backward(split_heads(y))
            for y in (self.query(x), self.key(read), self.value(read))
        )
        weights = attention_weights(q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype), k, bias)
        weights = dropout(weights, attention_dropout, keys[0])
        y = save_for_backward(
            jnp.einsum("bhts,bhsk->bhtk", weights, v).swapaxes(1, 2).reshape(x.shape)
        )
        return self.attention_norm(x + dropout(self.out(y), dropout_rate, keys[1]))


class CrossAttentionInputs(typing.NamedTuple):
    """What cross-attention reads: the encoder's states, at the decoder's width, and a bias."""

    states: Float[Array, "B S D"]
    bias: Float[Array, "B G T S"]


class Block(Attention):
    """One post-LN Transformer layer: x = LN(x + attention(x)); x = LN(x + W2 gelu(W1 x)).

    With `cross`, a cross-attention stands between the two. Without `cross`, a block that is called
    with `memory` has cross-attention instead of self-attention.
    """

    def __init__(self, settings: config.Model, rngs: nnx.Rngs, cross: bool = False):
        super().__init__(settings, rngs)
        self.up = Linear(settings.width, settings.feed_forward, settings, rngs)
        self.down = Linear(settings.feed_forward, settings.width, settings, rngs)
        self.output_norm = LayerNorm(settings)
        if cross:
            self.cross = Attention(settings, rngs)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        bias: Float[Array, "B G T T"],
        dropout_rate: float = 0.0,
        attention_dropout: float = 0.0,
        keys: Key[Array, " B"] | None = None,
        memory: CrossAttentionInputs | None = None,
    ) -> Float[Array, "B T D"]:
        """Applies the layer.

        Args:
            x: States of the previous layer.
            bias: Added to the scores of self-attention.
            dropout_rate: Dropout of the outputs of self-attention and feed-forward. Cross-attention
                that follows self-attention has no dropout.
            attention_dropout: Dropout of the attention weights, with the same exception.
            keys: Keys of dropout, one for each row. None: no dropout.
            memory: What cross-attention reads. None: self-attention only.

        Returns:
            The new states.
        """
        keys = split_keys(keys, 3)
        crossed = hasattr(self, "cross")
        read = (x, bias) if crossed or memory is None else memory
        x = self.attend(x, *read, dropout_rate, attention_dropout, (keys[0], keys[1]))
        if crossed:
            x = self.cross.attend(x, *memory)
        y = self.down(gelu(save_for_backward(self.up(x))))
        return self.output_norm(x + dropout(y, dropout_rate, keys[2]))


class Scattered(abc.ABC):
    """A parameter of a stack of layers, of which this device holds a part.

    It is a pytree. Its leaves have the leading layer axis.
    """

    @abc.abstractmethod
    def whole(self, dtype: jnp.dtype) -> Array:
        """Returns the whole parameter of one layer, without the layer axis, cast to `dtype`."""


def stack(settings: config.Model, rngs: nnx.Rngs, cross: bool = False) -> Block:
    """Creates `settings.layers` blocks as one Block. Every parameter has a leading axis N."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: Block(settings, nnx.Rngs(0), cross)))
    keys = jax.random.split(rngs.params(), settings.layers)
    state = jax.vmap(
        lambda key: nnx.to_pure_dict(nnx.state(Block(settings, nnx.Rngs(key), cross)))
    )(keys)
    return nnx.merge(graph, nnx.State(jax.tree.map(nnx.Param, state)))


def run_stack(
    blocks: Block,
    x: Float[Array, "B T D"],
    bias: Float[Array, "B G T T"],
    dropout_rate: float = 0.0,
    attention_dropout: float = 0.0,
    keys: Key[Array, " B"] | None = None,
    rematerialise: bool = False,
    memory: CrossAttentionInputs | None = None,
    every: bool = False,
) -> Float[Array, "B T D"] | Float[Array, "N B T D"]:
    """Applies the layers in turn. The body of one layer is compiled once and scanned.

    The backward pass keeps the values marked by `save_for_backward` and computes all else again.

    Args:
        blocks: A result of `stack`. Parameters that are `Scattered` are gathered one layer at a
            time, in the forward pass and again in the backward pass.
        x: States that enter the first layer.
        bias: Added to the scores of self-attention in every layer.
        dropout_rate: As in `Block`.
        attention_dropout: As in `Block`.
        keys: Keys of dropout, one for each row. None: no dropout.
        rematerialise: True keeps only the layers' inputs for the backward pass.
        memory: What cross-attention reads. None: self-attention only.
        every: True returns the states after each layer, not only after the last.

    Returns:
        The states [B, T, D] after the last layer, or [N, B, T, D] with `every`.
    """
    graph, state = nnx.split(blocks)
    layers = jax.tree.leaves(state)[0].shape[0]
    scattered = lambda leaf: isinstance(leaf, Scattered)  # noqa: E731

    def body(x, layer):
        index, parameters = layer
        parameters = jax.tree.map(
            lambda p: p.whole(x.dtype) if scattered(p) else p, parameters, is_leaf=scattered
        )
        layer_keys = (
            None if keys is None else jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, index)
        )
        x = nnx.merge(graph, parameters)(
            x, bias, dropout_rate, attention_dropout, layer_keys, memory
        )
        return x, x if every else None

    policy = (
        jax.checkpoint_policies.nothing_saveable
        if rematerialise
        else jax.checkpoint_policies.save_only_these_names("kept")
    )
    body = jax.checkpoint(body, prevent_cse=False, policy=policy)
    last, states = jax.lax.scan(body, x, (jnp.arange(layers, dtype=jnp.uint32), state))
    return states if every else last
