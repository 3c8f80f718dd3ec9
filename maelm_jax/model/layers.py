"""The parts of encoder and decoder: linear maps, LayerNorm, dropout, attention, the post-LN block (as github.com/yumeng5/MAE-LM has them).

Modules hold parameters only (float32) and no random state: dropout takes an explicit key, None switching it off. Axis letters: B rows,
T tokens of a sequence, D width, H heads, K = D / H, N layers.
"""

import abc
import functools
import math
import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jax import ad_checkpoint
from jaxtyping import Array, Float, Int, Key, UInt32

from maelm_jax import config


class Linear(nnx.Module):
    """x W + b with W ~ N(0, init_std), computed in the model's dtype.

    Rows and tokens are one axis in the product: with two, the compiler for CPU forms the gradient of W at half the rate.
    """

    def __init__(self, inputs: int, outputs: int, settings: config.Model, rngs: nnx.Rngs, use_bias: bool = True):
        self.kernel = nnx.Param(nnx.initializers.normal(settings.init_std)(rngs.params(), (inputs, outputs), jnp.float32))
        if use_bias:
            self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32))
        self.dtype = jnp.dtype(settings.dtype)

    def __call__(self, x: Float[Array, "*S I"]) -> Float[Array, "*S O"]:
        y = x.astype(self.dtype).reshape(-1, x.shape[-1]) @ self.kernel[...].astype(self.dtype)
        if hasattr(self, "bias"):
            y = y + self.bias[...].astype(self.dtype)[None]
        return y.reshape(*x.shape[:-1], -1)


def kept(x: Array) -> Array:
    """Marks what the backward pass of a layer keeps from the forward pass. All else (dropout's masks, GELU, what LayerNorm gives) it computes again:
    a few operations an element, where storing it and reading it back costs more."""
    return ad_checkpoint.checkpoint_name(x, "kept")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: Float[Array, "B T D"], scale: Float[Array, " D"], bias: Float[Array, " D"], epsilon: float) -> Float[Array, "B T D"]:
    """The biased variance, as in PyTorch; computed in float32, two passes, whatever comes in (same dtype out)."""
    return _layer_norm_forward(x, scale, bias, epsilon)[0]


def _layer_norm_forward(x, scale, bias, epsilon):
    x = kept(x)
    wide = x.astype(jnp.float32)
    mean = kept(wide.mean(axis=-1, keepdims=True))
    inverse = kept(jax.lax.rsqrt(jnp.square(wide - mean).mean(axis=-1, keepdims=True) + epsilon))
    normal = (wide - mean) * inverse
    return (normal * scale[None, None] + bias[None, None]).astype(x.dtype), (x, mean, inverse, scale)


def _layer_norm_backward(epsilon, saved, dy):
    x, mean, inverse, scale = saved
    normal, dy = (x.astype(jnp.float32) - mean) * inverse, dy.astype(jnp.float32)
    d = dy * scale[None, None]
    dx = inverse * (d - d.mean(axis=-1, keepdims=True) - normal * (d * normal).mean(axis=-1, keepdims=True))
    return dx.astype(x.dtype), (dy * normal).sum(axis=(0, 1)), dy.sum(axis=(0, 1))


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


class LayerNorm(nnx.Module):
    """The parameters of `layer_norm`."""

    def __init__(self, settings: config.Model):
        self.scale = nnx.Param(jnp.ones(settings.width, jnp.float32))
        self.bias = nnx.Param(jnp.zeros(settings.width, jnp.float32))
        self.epsilon = settings.layer_norm_eps

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return layer_norm(x, self.scale[...], self.bias[...], self.epsilon)


def gelu(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """The exact GELU, computed in float32; the result has the dtype of x.

    1 + erf cancels for negative x: in bfloat16 nothing is left of the result below -3. The gradient
    is computed in float32 too. The form with erf is one rational function. The form with erfc
    (jax.nn.gelu) needs an exponential and two divisions on CPU.
    """
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1.0 + jax.lax.erf(wide * jnp.float32(math.sqrt(0.5))))).astype(x.dtype)


@jax.custom_vjp
def attention_weights(q: Float[Array, "B H T K"], k: Float[Array, "B H S K"], bias: Float[Array, "B G T S"]) -> Float[Array, "B H T S"]:
    """softmax over S of q k + bias (q is scaled already; G = H, or 1 for all heads alike), formed in float32, kept in q's dtype.

    So is the gradient of the scores: the products of the backward pass run in the dtype of the forward pass, not in float32.
    """
    return _attention_weights_forward(q, k, bias)[0]


def _attention_weights_forward(q, k, bias):
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k, preferred_element_type=jnp.float32) + bias.astype(jnp.float32)
    weights = kept(jax.nn.softmax(scores, axis=-1).astype(q.dtype))
    return weights, (q, k, weights, bias)


def _attention_weights_backward(saved, d_weights):
    q, k, weights, bias = saved
    wide = weights.astype(jnp.float32)
    product = wide * d_weights.astype(jnp.float32)
    d_scores = product - wide * product.sum(axis=-1, keepdims=True)
    d_bias = d_scores if bias.shape[1] == q.shape[1] else d_scores.sum(axis=1, keepdims=True)
    d_scores = d_scores.astype(q.dtype)
    return jnp.einsum("bhts,bhsk->bhtk", d_scores, k), jnp.einsum("bhts,bhtk->bhsk", d_scores, q), d_bias.astype(bias.dtype)


attention_weights.defvjp(_attention_weights_forward, _attention_weights_backward)


def _scramble(x: UInt32[Array, "*S"]) -> UInt32[Array, "*S"]:
    """A bijection of 32-bit words that changes about half the bits when one changes ("lowbias32", C. Wellons, hash-prospector)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def split_keys(keys: Key[Array, " B"] | None, count: int) -> tuple[Key[Array, " B"] | None, ...]:
    """`count` independent keys for each row; None for each when there are none."""
    return (None,) * count if keys is None else tuple(jax.vmap(lambda key: jax.random.split(key, count), out_axes=1)(keys))


def dropout(x: Float[Array, "B *S"], rate: float, keys: Key[Array, " B"] | None) -> Float[Array, "B *S"]:
    """Sets a share `rate` of x to 0 and scales the rest by 1 / (1 - rate); x itself when `keys` is None or `rate` 0.

    The scale is applied in float32. bfloat16 rounds 1 / 0.9 to 1.1094: every kept element would be
    0.16% too small.

    Threefry costs about a hundred operations a word, a fifth of a training step on CPU. Here every element's index in its row is hashed
    with the row's key in about ten operations, which the compiler fuses into the multiplication forward and again backward: no mask is
    ever stored. It is a function of (the row's key, index) alone, so it is the same on every mesh and in any microbatch.
    """
    if keys is None or rate == 0.0:
        return x
    words = jax.random.key_data(keys).astype(jnp.uint32).reshape(x.shape[0], 2, *(1,) * (x.ndim - 1))
    iota = lambda axis: jax.lax.broadcasted_iota(jnp.uint32, (1, *x.shape[1:]), axis)  # noqa: E731
    matrix, element = jnp.zeros((1, *x.shape[1:]), jnp.uint32), jnp.zeros((1, *x.shape[1:]), jnp.uint32)
    for axis in range(1, x.ndim):  # two counters, so that neither wraps: which matrix of the row, and which element of it
        if axis < x.ndim - 2:
            matrix = matrix * jnp.uint32(x.shape[axis]) + iota(axis)
        else:
            element = element * jnp.uint32(x.shape[axis]) + iota(axis)
    bits = _scramble(_scramble(matrix + words[:, 0]) ^ (element + words[:, 1]) * jnp.uint32(0x9E3779B9))
    kept = bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
    scaled = (x.astype(jnp.float32) * jnp.float32(1.0 / (1.0 - rate))).astype(x.dtype)
    return jnp.where(kept, scaled, jnp.zeros((), x.dtype))


@jax.custom_vjp
def gather_rows(x: Float[Array, "B N D"], index: Int[Array, "B P"], inverse: Int[Array, "B N"]) -> Float[Array, "B P D"]:
    """y[p] = x[index[p]], 0 where index[p] = N. `inverse` is index's inverse (P where a row is not taken), so that the backward pass is a
    gather as well: no scatter-add, deterministic."""
    found = jnp.take_along_axis(x, jnp.minimum(index, x.shape[1] - 1)[:, :, None], axis=1, mode="promise_in_bounds")
    return jnp.where((index < x.shape[1])[:, :, None], found, jnp.zeros((), x.dtype))


gather_rows.defvjp(
    lambda x, index, inverse: (gather_rows(x, index, inverse), (index, inverse)),
    lambda saved, dy: (gather_rows(dy, saved[1], saved[0]), None, None),
)


class Attention(nnx.Module):
    """LN(x + W attention(x, what it reads)): multi-head attention with its residual connection and post-LN."""

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
        """`bias` is added to the scores of all heads (G = H, or 1 for all alike). Dropout on the attention and on the branch."""
        split_heads = lambda y: y.reshape(*y.shape[:2], self.heads, -1).swapaxes(1, 2)  # noqa: E731
        q, k, v = (kept(split_heads(y)) for y in (self.query(x), self.key(read), self.value(read)))
        weights = attention_weights(q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype), k, bias)
        weights = dropout(weights, attention_dropout, keys[0])
        y = kept(jnp.einsum("bhts,bhsk->bhtk", weights, v).swapaxes(1, 2).reshape(x.shape))
        return self.attention_norm(x + dropout(self.out(y), dropout_rate, keys[1]))


class Memory(typing.NamedTuple):
    """What cross-attention reads: the encoder's states, as the decoder takes them, and the bias of the scores."""

    states: Float[Array, "B S D"]
    bias: Float[Array, "B G T S"]


class Block(Attention):
    """One post-LN Transformer layer: x = LN(x + attention(x)); x = LN(x + W2 gelu(W1 x)). Dropout on both branches and on the attention.

    With `cross` a second attention, to a memory, stands between the two. Given a memory but no second attention, the first one reads it.
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
        memory: Memory | None = None,
    ) -> Float[Array, "B T D"]:
        """`bias` is that of self-attention."""
        keys = split_keys(keys, 3)
        crossed = hasattr(self, "cross")
        read = (x, bias) if crossed or memory is None else memory
        x = self.attend(x, *read, dropout_rate, attention_dropout, (keys[0], keys[1]))
        if crossed:
            x = self.cross.attend(x, *memory)
        y = self.down(gelu(kept(self.up(x))))
        return self.output_norm(x + dropout(y, dropout_rate, keys[2]))


class Scattered(abc.ABC):
    """A parameter of a stack of layers of which this device holds a part; a pytree whose leaves have the leading layer axis."""

    @abc.abstractmethod
    def whole(self, dtype: jnp.dtype) -> Array:
        """The parameter of one layer (the layer axis is gone), in the dtype the layer computes in."""


def stack(settings: config.Model, rngs: nnx.Rngs, cross: bool = False) -> Block:
    """A Block whose every parameter has a leading axis N: `settings.layers` blocks with weights of their own."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: Block(settings, nnx.Rngs(0), cross)))
    keys = jax.random.split(rngs.params(), settings.layers)
    state = jax.vmap(lambda key: nnx.to_pure_dict(nnx.state(Block(settings, nnx.Rngs(key), cross))))(keys)
    return nnx.merge(graph, nnx.State(jax.tree.map(nnx.Param, state)))


def run_stack(
    blocks: Block,
    x: Float[Array, "B T D"],
    bias: Float[Array, "B G T T"],
    dropout_rate: float = 0.0,
    attention_dropout: float = 0.0,
    keys: Key[Array, " B"] | None = None,
    rematerialise: bool = False,
    memory: Memory | None = None,
    every: bool = False,
) -> Float[Array, "B T D"] | Float[Array, "N B T D"]:
    """x through every layer in turn: one compiled body, scanned. With `every`, the states after each layer instead of the last alone.

    For the backward pass what is marked `kept` stays, with `rematerialise` only the layers' inputs. Parameters that are `Scattered` are put together
    layer by layer, forward and again backward.
    """
    graph, state = nnx.split(blocks)
    layers = jax.tree.leaves(state)[0].shape[0]
    scattered = lambda leaf: isinstance(leaf, Scattered)  # noqa: E731

    def body(x, layer):
        index, parameters = layer
        parameters = jax.tree.map(lambda p: p.whole(x.dtype) if scattered(p) else p, parameters, is_leaf=scattered)
        layer_keys = None if keys is None else jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, index)
        x = nnx.merge(graph, parameters)(x, bias, dropout_rate, attention_dropout, layer_keys, memory)
        return x, x if every else None

    policy = jax.checkpoint_policies.nothing_saveable if rematerialise else jax.checkpoint_policies.save_only_these_names("kept")
    body = jax.checkpoint(body, prevent_cse=False, policy=policy)
    last, states = jax.lax.scan(body, x, (jnp.arange(layers, dtype=jnp.uint32), state))
    return states if every else last
