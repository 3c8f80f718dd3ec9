"""Masked cross-entropy as a sum and a count.

The mean is taken once, over the whole batch of all devices and microbatches.

Axis letters: B rows, M predicted slots, D width, W rows of the token table, P predicted slots of
all rows (B M).
"""

import collections.abc
import functools
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maelm_jax.model.masking import Inputs


class Sums(typing.NamedTuple):
    """Sums over predicted slots. Microbatches and devices are added before any division."""

    loss: Float[Array, ""]  # nats
    correct: Float[Array, ""]  # predicted slots whose largest logit is the target's
    count: Float[Array, ""]  # predicted slots, without empty ones


class Prediction(typing.NamedTuple):
    """The factors of the logits: states times table, plus bias."""

    states: Float[Array, "B M D"]
    table: Float[Array, "W D"]  # float32
    bias: Float[Array, " W"]  # float32; -1e9 at the padding rows of the table

    @property
    def logits(self) -> Float[Array, "B M W"]:
        """All logits, in float32."""
        flat = self.states.reshape(-1, self.states.shape[2])
        return _logits(flat, self.table.astype(flat.dtype), self.bias).reshape(
            *self.states.shape[:2], -1
        )


def targets(inputs: Inputs) -> tuple[Int[Array, "B M"], Float[Array, "B M"]]:
    """Returns the target of each predicted slot.

    Returns:
        The tokens at the masked slots, and weights: 1, or 0 where a slot is empty.
    """
    length = inputs.ids.shape[1]
    ids = jnp.take_along_axis(inputs.ids, jnp.minimum(inputs.masked_slots, length - 1), axis=1)
    return ids, (inputs.masked_slots < length).astype(jnp.float32)


def masked_cross_entropy(prediction: Prediction, inputs: Inputs, tile: int | None = None) -> Sums:
    """Sums -log softmax(logits)[target], in float32, over the predicted slots.

    Args:
        prediction: The factors of the logits.
        inputs: The masked rows that the prediction is for.
        tile: Number of slots whose logits exist at a time. None: all of them. A smaller tile needs
            less memory.

    Returns:
        Loss in nats, correct predictions (argmax) and slots. Empty slots do not count.
    """
    wanted, weights = (x.reshape(-1) for x in targets(inputs))
    flat = prediction.states.reshape(-1, prediction.states.shape[2])
    loss, correct = _cross_entropy(
        flat, prediction.table, prediction.bias, wanted, weights, tile or len(flat)
    )
    return Sums(loss, correct, weights.sum())


def _logits(
    x: Float[Array, "P D"], table: Float[Array, "W D"], bias: Float[Array, " W"]
) -> Float[Array, "P W"]:
    return jnp.einsum("pd,wd->pw", x, table, preferred_element_type=jnp.float32) + bias[None]


def _summed_over_tiles(function: collections.abc.Callable, tile: int, *arrays: Array):
    """Applies `function` to tiles of the arrays' first axis: sums result 1, concatenates result 2.

    Zeros fill the last tile. Their weight is 0, so they add no loss and no gradient.
    """
    size = arrays[0].shape[0]
    if tile >= size:
        return function(*arrays)
    pieces = [
        jnp.pad(x, ((0, -size % tile), *((0, 0),) * (x.ndim - 1))).reshape(-1, tile, *x.shape[1:])
        for x in arrays
    ]

    def add(sums, piece):
        here, each = function(*piece)
        return jax.tree.map(jnp.add, sums, here), each

    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *(x[0] for x in pieces))[0]
    )
    sums, each = jax.lax.scan(add, zeros, pieces)
    return sums, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:size], each)


def _sums(
    logits: Float[Array, "P W"],
    norm: Float[Array, " P"],
    wanted: Int[Array, " P"],
    weights: Float[Array, " P"],
) -> tuple[Array, Array]:
    """Loss in nats and number of correct predictions. `norm` is the logsumexp of the logits."""
    nats = norm - jnp.take_along_axis(logits, wanted[:, None], axis=1)[:, 0]
    correct = (jnp.argmax(logits, axis=1).astype(wanted.dtype) == wanted).astype(jnp.float32)
    return (nats * weights).sum(), (correct * weights).sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _cross_entropy(x, table, bias, wanted, weights, tile):
    """The loss and the number of correct predictions of states x [P, D]."""
    narrow = table.astype(x.dtype)

    def of_tile(x, wanted, weights):
        logits = _logits(x, narrow, bias)
        return _sums(logits, jax.nn.logsumexp(logits, axis=1), wanted, weights), ()

    return _summed_over_tiles(of_tile, tile, x, wanted, weights)[0]


def _forward(x, table, bias, wanted, weights, tile):
    """Computes the gradients together with the loss.

    The loss is a sum, so its gradients are known up to the factor that the backward pass receives.
    Each tile's logits are computed once and then freed. Source: the fused linear cross-entropy of
    github.com/linkedin/Liger-Kernel.
    """
    narrow = table.astype(x.dtype)

    def of_tile(x, wanted, weights):
        logits = _logits(x, narrow, bias)
        norm = jax.nn.logsumexp(logits, axis=1)
        at_target = (
            jax.lax.broadcasted_iota(wanted.dtype, logits.shape, 1) == wanted[:, None]
        ).astype(jnp.float32)
        d_logits = (jnp.exp(logits - norm[:, None]) - at_target) * weights[:, None]
        d_narrow = d_logits.astype(x.dtype)
        d_table = jnp.einsum("pw,pd->wd", d_narrow, x, preferred_element_type=jnp.float32)
        return (
            _sums(logits, norm, wanted, weights),
            d_table,
            d_logits.sum(axis=0),
        ), d_narrow @ narrow

    (sums, d_table, d_bias), d_x = _summed_over_tiles(of_tile, tile, x, wanted, weights)
    return sums, (d_x, d_table, d_bias)


def _backward(tile, gradients, given):
    return *(gradient * given[0].astype(gradient.dtype) for gradient in gradients), None, None


_cross_entropy.defvjp(_forward, _backward)
