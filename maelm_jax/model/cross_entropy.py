"""Cross-entropy of states against the token table, computed together with its gradient.

Axis letters: P masked slots of all rows, D width, W rows of the token table.
"""

import collections.abc
import functools
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maelm_jax.model.ops import kernel_gradient


def logits(
    x: Float[Array, "P D"], table: Float[Array, "W D"], bias: Float[Array, " W"]
) -> Float[Array, "P W"]:
    """Computes x table^T + bias. The sums over D and the result are float32."""
    return jnp.einsum("pd,wd->pw", x, table, preferred_element_type=jnp.float32) + bias[None]


class CrossEntropy(typing.NamedTuple):
    """Weighted sums over masked slots."""

    loss_nats: Float[Array, ""]
    correct: Float[Array, ""]  # slots where no logit is larger than the target's


class _Tile(typing.NamedTuple):
    """What a tile of slots contributes: `sums` are added over the tiles, `slots` concatenated."""

    sums: typing.Any
    slots: typing.Any


def _over_tiles(function: collections.abc.Callable[..., _Tile], tile: int, *arrays: Array) -> _Tile:
    """Applies `function` to tiles of the arrays' first axis.

    Zeros fill the last tile. Their weight is 0, so they add no loss and no gradient.
    """
    size = arrays[0].shape[0]
    if tile >= size:
        return function(*arrays)
    tiles = [
        jnp.pad(x, ((0, -size % tile), *((0, 0),) * (x.ndim - 1))).reshape(-1, tile, *x.shape[1:])
        for x in arrays
    ]

    def add(sums, inputs):
        result = function(*inputs)
        return jax.tree.map(jnp.add, sums, result.sums), result.slots

    shapes = jax.eval_shape(function, *(x[0] for x in tiles)).sums
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    sums, slots = jax.lax.scan(add, zeros, tiles)
    return _Tile(sums, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:size], slots))


def _cross_entropy_of_logits(
    logits: Float[Array, "P W"],
    log_normalizer: Float[Array, " P"],
    targets: Int[Array, " P"],
    weights: Float[Array, " P"],
) -> CrossEntropy:
    at_target = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    loss_nats = log_normalizer - at_target
    # The maximum is computed for `log_normalizer` too. An argmax is slow on a CPU.
    correct = (at_target >= logits.max(axis=1)).astype(jnp.float32)
    return CrossEntropy((loss_nats * weights).sum(), (correct * weights).sum())


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def cross_entropy(
    x: Float[Array, "P D"],
    table: Float[Array, "W D"],
    bias: Float[Array, " W"],
    targets: Int[Array, " P"],
    weights: Float[Array, " P"],
    tile: int,
) -> CrossEntropy:
    """Sums -log softmax(x table^T + bias)[target] over slots, in float32.

    Under differentiation, the forward pass also computes the gradients and saves them. The loss is
    a sum, so its gradients are known up to the factor that the backward pass receives. Each tile's
    logits are computed once and then freed. Source: the fused linear cross-entropy of
    github.com/linkedin/Liger-Kernel.

    Args:
        x: States of the masked slots.
        table: Token table.
        bias: Added to the logits.
        targets: Rows of the table.
        weights: Weight of each slot; 0 where it is empty.
        tile: Number of slots whose logits exist at a time.

    Returns:
        The sums. Only the loss has a gradient, and only with respect to x, table and bias.
    """
    narrow = table.astype(x.dtype)

    def of_tile(x, targets, weights):
        scores = logits(x, narrow, bias)
        log_normalizer = jax.nn.logsumexp(scores, axis=1)
        return _Tile(_cross_entropy_of_logits(scores, log_normalizer, targets, weights), ())

    return _over_tiles(of_tile, tile, x, targets, weights).sums


def _cross_entropy_forward(x, table, bias, targets, weights, tile):
    narrow = table.astype(x.dtype)

    def of_tile(x, targets, weights):
        scores = logits(x, narrow, bias)
        log_normalizer = jax.nn.logsumexp(scores, axis=1)
        columns = jax.lax.broadcasted_iota(targets.dtype, scores.shape, 1)
        at_target = (columns == targets[:, None]).astype(jnp.float32)
        d_scores = (jnp.exp(scores - log_normalizer[:, None]) - at_target) * weights[:, None]
        d_narrow = d_scores.astype(x.dtype)
        d_table = kernel_gradient(d_narrow, x, jnp.dtype(jnp.float32))
        value = _cross_entropy_of_logits(scores, log_normalizer, targets, weights)
        return _Tile((value, d_table, d_scores.sum(axis=0)), d_narrow @ narrow)

    (value, d_table, d_bias), d_x = _over_tiles(of_tile, tile, x, targets, weights)
    return value, (d_x, d_table, d_bias)


def _cross_entropy_backward(tile, gradients, d_value):
    factor = d_value.loss_nats
    return *(gradient * factor.astype(gradient.dtype) for gradient in gradients), None, None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
