"""The loss against its definition, gradients too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from testing import objective_of

from maelm_jax import config
from maelm_jax.model import loss, masking, model_inputs

SPECIAL = config.SpecialIds.of_size(300)
RATE = objective_of()


@functools.cache
def case(dtype: str) -> tuple[loss.Prediction, model_inputs.Inputs]:
    """Random states for three rows, one of them half padding (so that some masked slots are empty)."""
    rng = np.random.default_rng(0)
    ids = rng.integers(4, 299, (3, 64)).astype(np.int32)
    ids[:, 0] = SPECIAL.bos
    ids[2, 32:] = SPECIAL.pad
    draw = jax.jit(lambda keys, ids: masking.draw(keys, ids, RATE, masking.budget(RATE, 64), SPECIAL))
    inputs = draw(jax.random.split(jax.random.key(0), 3), jnp.asarray(ids))
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    bias = jnp.where(jnp.arange(384) < 300, normal(384), -1e9)
    return loss.Prediction(normal(3, inputs.masked_slots.shape[1], 32).astype(dtype), normal(384, 32), bias), inputs


def defined(prediction: loss.Prediction, inputs: model_inputs.Inputs) -> jax.Array:
    """-log softmax of all the logits, one array."""
    wanted, weights = loss.gather_targets(inputs)
    return -(jnp.take_along_axis(jax.nn.log_softmax(prediction.logits), wanted[:, :, None], axis=2)[:, :, 0] * weights).sum()


def test_loss_and_gradients_are_those_of_the_definition():
    prediction, inputs = case("float32")
    expected, wanted = jax.jit(jax.value_and_grad(defined))(prediction, inputs)
    found, gradient = jax.jit(jax.value_and_grad(lambda p: 3.0 * loss.masked_cross_entropy(p, inputs).loss_nats))(prediction)
    assert abs(found - 3 * expected) < 1e-5 * found
    for a, b in zip(gradient, wanted, strict=True):
        assert np.abs(a - 3 * b).max() < 1e-5 * np.abs(b).max() + 1e-6
        assert np.abs(b).max() > 0.01
    sums, plain = loss.masked_cross_entropy(prediction, inputs), np.asarray(prediction.logits.argmax(2) == loss.gather_targets(inputs)[0])
    real = np.asarray(loss.gather_targets(inputs)[1], bool)
    assert (float(sums.count), float(sums.correct)) == (real.sum(), plain[real].sum()) and not real.all()
    assert abs(sums.loss_nats - expected) < 1e-5 * expected  # without a gradient


def test_in_bfloat16_the_gradient_is_as_near_as_its_dtype():
    wide, inputs = case("float32")
    narrow, _ = case("bfloat16")
    expected = jax.jit(jax.grad(defined))(wide, inputs)
    found = jax.jit(jax.grad(lambda p: loss.masked_cross_entropy(p, inputs).loss_nats))(narrow)
    assert [x.dtype for x in found] == [jnp.bfloat16, jnp.float32, jnp.float32]
    for a, b in zip(found, expected, strict=True):
        assert np.linalg.norm(a.astype(jnp.float32) - b) < 0.02 * np.linalg.norm(b)
