"""Masked cross-entropy as a sum and a count, computed together with its gradient.

The mean is taken once, over the whole batch of all devices and microbatches.

Axis letters: B rows, M masked slots of a row, P masked slots of all rows, D width, W rows of the
token table.
"""

import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maelm_jax.model.kernels.linear import kernel_gradient, product
from maelm_jax.model.model_inputs import Inputs, take_at_slots


class Sums(typing.NamedTuple):
    """Sums over masked slots. Microbatches and devices are added before any division."""

    loss_nats: Float[Array, ""]
    correct: Float[Array, ""]  # masked slots where no logit is larger than the target's
    count: Float[Array, ""]  # masked slots, without empty ones
    # Of the next tokens that some rows predict (`Objective.causal_share`), without their weight.
    causal_nats: Float[Array, ""] | None = None
    causal_count: Float[Array, ""] | None = None


class Prediction(typing.NamedTuple):
    """The factors of the logits: states times table, plus bias."""

    states: Float[Array, "B M D"]
    table: Float[Array, "W D"]  # float32
    bias: Float[Array, " W"]  # float32; -1e9 at the padding rows of the table

    @property
    def logits(self) -> Float[Array, "B M W"]:
        """All logits, in float32."""
        states = self.states.reshape(-1, self.states.shape[2])
        logits = _compute_logits(states, self.table.astype(states.dtype), self.bias)
        return logits.reshape(*self.states.shape[:2], -1)


class Targets(typing.NamedTuple):
    """What is to be predicted."""

    ids: Int[Array, "B M"]  # the tokens at the masked slots; 0 where a slot is empty
    weights: Float[Array, "B M"]  # 1, or 0 where a slot is empty


def gather_targets(inputs: Inputs) -> Targets:
    """Returns the target of each masked slot."""
    weights = (inputs.masked_slots < inputs.ids.shape[1]).astype(jnp.float32)
    return Targets(take_at_slots(inputs.ids, inputs.masked_slots), weights)


def masked_cross_entropy(prediction: Prediction, inputs: Inputs) -> Sums:
    """Sums -log softmax(logits)[target], in float32, over the masked slots but the empty ones."""
    targets, weights = (x.reshape(-1) for x in gather_targets(inputs))
    states = prediction.states.reshape(-1, prediction.states.shape[2])
    return _cross_entropy(states, prediction.table, prediction.bias, targets, weights)


def _compute_logits(
    x: Float[Array, "P D"], table: Float[Array, "W D"], bias: Float[Array, " W"]
) -> Float[Array, "P W"]:
    """Computes x table^T + bias. The sums over D and the result are float32."""
    return product("pd,wd->pw", x, table, jnp.float32) + bias[None]


@jax.custom_vjp
def _cross_entropy(
    x: Float[Array, "P D"],
    table: Float[Array, "W D"],
    bias: Float[Array, " W"],
    targets: Int[Array, " P"],
    weights: Float[Array, " P"],
) -> Sums:
    """Sums -log softmax(x table^T + bias)[target] over slots, in float32.

    The forward pass also computes the gradients and saves them. The loss is a sum, so its gradients
    are known up to the factor that the backward pass receives. The logits are computed once
    and then freed. Without differentiation, the compiler leaves the gradients out. Source: the
    fused linear cross-entropy of github.com/linkedin/Liger-Kernel.

    The weight of an empty slot is 0. Only the loss has a gradient, and only with respect to x,
    table and bias.
    """
    return _cross_entropy_forward(x, table, bias, targets, weights)[0]


def _cross_entropy_forward(x, table, bias, targets, weights):
    narrow = table.astype(x.dtype)
    logits = _compute_logits(x, narrow, bias)
    log_normalizer = jax.nn.logsumexp(logits, axis=1)
    logit = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    # The maximum is computed for `log_normalizer` too. An argmax is slow on a CPU.
    correct = (logit >= logits.max(axis=1)).astype(jnp.float32)
    loss = ((log_normalizer - logit) * weights).sum()
    sums = Sums(loss, (correct * weights).sum(), weights.sum())
    columns = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1)
    is_target = (columns == targets[:, None]).astype(jnp.float32)
    d_logits = (jnp.exp(logits - log_normalizer[:, None]) - is_target) * weights[:, None]
    d_narrow = d_logits.astype(x.dtype)
    d_table = kernel_gradient(d_narrow, x, jnp.dtype(jnp.float32))
    return sums, (product("pw,wd->pd", d_narrow, narrow), d_table, d_logits.sum(axis=0))


def _cross_entropy_backward(gradients, d_sums):
    factor = d_sums.loss_nats
    return *(gradient * factor.astype(gradient.dtype) for gradient in gradients), None, None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
