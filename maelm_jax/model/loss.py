"""Masked cross-entropy as a sum and a count.

The mean is taken once, over the whole batch of all devices and microbatches.

Axis letters: B rows, M masked slots, D width, W rows of the token table.
"""

import typing

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maelm_jax.model import cross_entropy
from maelm_jax.model.model_inputs import Inputs


class Sums(typing.NamedTuple):
    """Sums over masked slots. Microbatches and devices are added before any division."""

    loss_nats: Float[Array, ""]
    correct: Float[Array, ""]  # masked slots where no logit is larger than the target's
    count: Float[Array, ""]  # masked slots, without empty ones


class Prediction(typing.NamedTuple):
    """The factors of the logits: states times table, plus bias."""

    states: Float[Array, "B M D"]
    table: Float[Array, "W D"]  # float32
    bias: Float[Array, " W"]  # float32; -1e9 at the padding rows of the table

    @property
    def logits(self) -> Float[Array, "B M W"]:
        """All logits, in float32."""
        states = self.states.reshape(-1, self.states.shape[2])
        logits = cross_entropy.logits(states, self.table.astype(states.dtype), self.bias)
        return logits.reshape(*self.states.shape[:2], -1)


class Targets(typing.NamedTuple):
    """What is to be predicted."""

    ids: Int[Array, "B M"]  # the tokens at the masked slots
    weights: Float[Array, "B M"]  # 1, or 0 where a slot is empty


def targets(inputs: Inputs) -> Targets:
    """Returns the target of each masked slot."""
    length = inputs.ids.shape[1]
    ids = jnp.take_along_axis(inputs.ids, jnp.minimum(inputs.masked_slots, length - 1), axis=1)
    return Targets(ids, (inputs.masked_slots < length).astype(jnp.float32))


def masked_cross_entropy(prediction: Prediction, inputs: Inputs, tile: int | None = None) -> Sums:
    """Sums -log softmax(logits)[target], in float32, over the masked slots.

    Args:
        prediction: The factors of the logits.
        inputs: The masked rows that the prediction is for.
        tile: Number of slots whose logits exist at a time. None: all of them. A smaller tile needs
            less memory.

    Returns:
        Loss in nats, correct predictions and slots. Empty slots do not count.
    """
    ids, weights = (x.reshape(-1) for x in targets(inputs))
    states = prediction.states.reshape(-1, prediction.states.shape[2])
    loss, correct = cross_entropy.cross_entropy(
        states, prediction.table, prediction.bias, ids, weights, tile or len(states)
    )
    return Sums(loss, correct, weights.sum())
