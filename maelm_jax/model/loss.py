"""Masked cross-entropy as sums and counts: means are taken once, over the whole (global, accumulated) batch."""

import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maelm_jax.model.masking import Inputs


class Sums(typing.NamedTuple):
    """Added over rows, microbatches and devices before any division."""

    loss: Float[Array, ""]  # nats
    correct: Float[Array, ""]
    count: Float[Array, ""]  # predicted slots that are not empty


def targets(inputs: Inputs) -> tuple[Int[Array, "B M"], Float[Array, "B M"]]:
    """The tokens at the masked slots, and weights: 1, or 0 where a slot is empty."""
    length = inputs.ids.shape[1]
    ids = jnp.take_along_axis(inputs.ids, jnp.minimum(inputs.masked_slots, length - 1), axis=1)
    return ids, (inputs.masked_slots < length).astype(jnp.float32)


def masked_cross_entropy(logits: Float[Array, "B M W"], inputs: Inputs) -> Sums:
    """-log softmax(logits)[target], summed in float32 over the slots that are not empty."""
    wanted, weights = targets(inputs)
    at_target = jnp.take_along_axis(logits, wanted[:, :, None], axis=2)[:, :, 0]
    nats = jax.nn.logsumexp(logits, axis=2) - at_target
    correct = (jnp.argmax(logits, axis=2).astype(wanted.dtype) == wanted).astype(jnp.float32)
    return Sums((nats * weights).sum(), (correct * weights).sum(), weights.sum())
