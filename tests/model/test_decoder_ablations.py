"""What the decoder of each file of configs/ablations/ attends to, its size and its cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ablations import LENGTH, SIZE, SPECIAL, load, make

from maelm_jax.model import maelm, model_inputs
from maelm_jax.training import flops


# What the state at a slot of the decoder depends on: other slots before it, after it, the encoder's states by cross-attention.
@pytest.mark.parametrize(
    "name,before,after,cross",
    [
        ("delta_0", True, True, False),
        ("decoder_causal", True, False, False),
        ("decoder_cross_added", True, True, True),
        ("decoder_cross_only", False, False, True),
        ("decoder_masked_only", False, False, True),
    ],
)
def test_what_the_decoder_attends_to(name, before, after, cross):
    experiment, graph, params, inputs = make(name, "Decoder.layers=2")
    width, slots = experiment.model.encoder.width, 8
    where = model_inputs.SlotInfo(jnp.ones((1, slots), jnp.int32), inputs.positions[:1, :slots])
    read = model_inputs.SlotInfo(jnp.asarray([[1, 1, 1, 2, 0]], jnp.int32), inputs.positions[:1, :5])
    x, states = (jax.random.normal(jax.random.key(i), (1, n, width)) for i, n in ((0, slots), (1, 5)))

    def decode(x, states):
        return maelm.apply(graph, params).decoder(x, where, states, read)

    by_slot, by_state = (np.abs(np.asarray(d)).sum((0, 2, 3, 5)) for d in jax.jit(jax.jacrev(decode, (0, 1)))(x, states))
    own, earlier = np.eye(slots, dtype=bool), np.tri(slots, k=-1, dtype=bool)
    assert (by_slot[own] > 0).all()
    assert (by_slot[earlier] > 0).all() == before and by_slot[earlier].any() == before
    assert (by_slot[earlier.T] > 0).all() == after and by_slot[earlier.T].any() == after
    assert (by_state[:, :3] > 0).all() == cross and by_state[:, :3].any() == cross
    assert not by_state[:, 3:].any(), "another segment's states, or an empty slot's"


def test_the_cheap_decoder_is_the_same_function():
    _, graph, params, inputs = make("decoder_cross_only")
    _, cheap, other, _ = make("decoder_masked_only")
    assert jax.tree.structure(params) == jax.tree.structure(other)
    full, less = (np.asarray(jax.jit(lambda p, x, g=g: maelm.apply(g, p)(x))(params, inputs)) for g in (graph, cheap))
    real = np.asarray(inputs.masked_slots) < LENGTH
    np.testing.assert_allclose(less[real], full[real], rtol=1e-4, atol=1e-4)
    cost = {name: flops.flops_terms(load(name), SIZE) for name in ("decoder_masked_only", "decoder_cross_only", "delta_0")}
    decoder = {name: terms["decoder matrices"] + terms["decoder attention"] for name, terms in cost.items()}
    assert decoder["decoder_masked_only"] < 0.6 * decoder["decoder_cross_only"] and decoder["decoder_masked_only"] < 0.6 * decoder["delta_0"]


@pytest.mark.parametrize("width", [512, 1024])
def test_decoder_width(width):
    experiment = load(f"decoder_width_{width}")
    _, init = maelm.create(experiment.model, SIZE, SPECIAL)
    params = jax.eval_shape(init, jax.random.key(0))
    blocks = params["decoder"]["blocks"]
    assert blocks["attention"]["query"]["kernel"].shape == (1, width, width) and blocks["feed_forward"]["up"]["kernel"].shape == (1, width, 2 * width)
    assert experiment.model.decoder_settings.stack.heads == width // 64
    assert params["decoder"]["relative_bias"]["table"].shape[1] == width // 64
    assert params["decoder"]["resize"]["kernel"].shape == (64, width) and params["head"]["resize"]["kernel"].shape == (width, 64)
    assert "bias" not in params["head"]["resize"]
    assert params["encoder"]["blocks"]["attention"]["query"]["kernel"].shape[1:] == (64, 64), "the encoder stays as it is"
