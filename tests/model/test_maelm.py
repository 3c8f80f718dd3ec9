"""Invariants 1 and 3: what the encoder's output depends on, and that the compact layout is the full-length one."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from testing import model_of, objective_of

from maelm_jax import config
from maelm_jax.model import loss, maelm, masking, model_inputs
from maelm_jax.model.kernels.backends import Target

pytestmark = pytest.mark.long

SPECIAL = config.SpecialIds(bos=0, pad=1, eos=2, unk=3, mask=99, continues_word=(False,) * 100)
LENGTH = 32
TINY = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "feed_forward": 64,
    "decoder_layers": 1,
    "max_positions": LENGTH,
    "init_std": 0.2,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}

BERT = {}
LOCAL = {"local_attention": 8, "global_every": 2, "local_rotary_theta": 100.0}
MODERN = {
    "normalization": "pre",
    "positions": "rotary",
    "relative_buckets": "none",
    "feed_forward_gate": True,
    "biases": False,
    "decoder_layers": 2,
}


def make(masking_settings=None, full_length=False, **changes):
    settings = model_of(**{**TINY, **changes})
    graph, init = maelm.create(settings, 100, SPECIAL)
    rng = np.random.default_rng(1)

    def leaf(keys, x):  # no bias is left at zero
        name = keys[-1].key
        values = rng.normal(0, 0.05 if name in ("scale", "bias") else 0.2, x.shape)
        return jnp.asarray(values + (name == "scale"), x.dtype)

    params = jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(init, jax.random.key(1)))
    ids = np.random.default_rng(0).integers(4, 99, (3, LENGTH)).astype(np.int32)
    ids[:, [0, 12]], ids[:, [11, -4]], ids[:, -3:] = 0, 2, 1
    return graph, params, inputs_of(jnp.asarray(ids), masking_settings or objective_of(), full_length)


@functools.cache
def draw(settings: config.Objective, full_length: bool):
    sizes = masking.budget(settings, LENGTH)
    if full_length:
        sizes = model_inputs.Budget(LENGTH, sizes.masked)
    return jax.jit(lambda keys, ids: masking.draw(keys, ids, settings, sizes, SPECIAL))


def inputs_of(ids, settings, full_length=False):
    return draw(settings, full_length)(jax.random.split(jax.random.key(2), ids.shape[0]), ids)


@pytest.mark.parametrize("architecture", [BERT, MODERN])
def test_the_encoder_sees_visible_tokens_only(architecture):
    graph, params, _ = make(**architecture)
    ids = np.random.default_rng(0).permutation(np.arange(4, 99))[: 2 * LENGTH].reshape(2, LENGTH).astype(np.int32)
    ids[:, [0, 12]], ids[:, [11, -4]], ids[:, -3:] = 0, 2, 1
    inputs = inputs_of(jnp.asarray(ids), objective_of(rate=0.5))

    def encoded_sum(table):
        changed = params | {"encoder": params["encoder"] | {"token_embedding": table}}
        states = maelm.apply(graph, changed).encode(inputs)
        weight = jax.random.normal(jax.random.key(3), states.shape)
        return (states * weight * (inputs.encoder_slots < LENGTH)[:, :, None].astype(jnp.float32)).sum()

    # Each id of text stands at one slot: the gradient of its row is that of the slot.
    size = np.abs(jax.jit(jax.grad(encoded_sum))(params["encoder"]["token_embedding"])).sum(-1)[ids]
    visible, text = np.asarray(inputs.encoder_index) < inputs.encoder_slots.shape[1], ids > 3
    assert (size[text & ~visible] == 0.0).all() and (text & ~visible).any(), "a dropped position reaches the encoder"
    assert (size[text & visible] > 0).all(), "a visible token does not reach the encoder's output"


def test_a_prediction_depends_on_visible_tokens_of_its_segment_only():
    graph, params, inputs = make()
    model = jax.jit(maelm.apply(graph, params))
    dropped = np.asarray(inputs.masked_index) < inputs.masked_slots.shape[1]
    other = inputs_of(jnp.where(dropped, 50, inputs.ids), objective_of())
    assert (other.masked_slots == inputs.masked_slots).all()
    ours = np.asarray(model(inputs))
    assert (ours == model(other)).all()
    visible = ~dropped & (np.asarray(inputs.ids) > 3)
    changed = inputs_of(jnp.where(visible & (np.asarray(inputs.segments) == 2), 50, inputs.ids), objective_of())
    slots = np.asarray(inputs.masked_slots)
    first = np.take_along_axis(np.asarray(inputs.segments), np.minimum(slots, LENGTH - 1), 1) == 1
    is_same = (ours == model(changed)).all(-1)
    assert is_same[first & (slots < LENGTH)].all() and first.any()
    assert not is_same[~first & (slots < LENGTH)].any()


@pytest.mark.parametrize("attends_to", ["cross", "self+cross"])
def test_a_segment_without_visible_tokens_reads_no_other(attends_to):
    graph, params, inputs = make(decoder_attention=attends_to, decoder_slots="masked")
    segments, slots = np.asarray(inputs.segments), np.asarray(inputs.masked_slots)
    dropped = np.asarray(inputs.masked_index) < inputs.masked_slots.shape[1]
    changed = inputs_of(jnp.where(~dropped & (segments == 1) & (inputs.ids > 3), 50, inputs.ids), objective_of())
    assert (changed.masked_slots == inputs.masked_slots).all() and (changed.ids != inputs.ids).any()

    def predict(inputs):
        slots, index = inputs.encoder_slots, inputs.encoder_index
        slots = jnp.where(slots < inputs.segments.argmax(axis=1)[:, None], slots, LENGTH)  # of segment 1
        index = jnp.where(jnp.asarray(segments) == 2, slots.shape[1], index)
        return np.asarray(maelm.apply(graph, params)(inputs._replace(encoder_slots=slots, encoder_index=index)))

    is_same = (predict(inputs) == predict(changed)).all(-1)
    is_second = np.take_along_axis(segments, np.minimum(slots, LENGTH - 1), 1) == 2
    assert is_same[is_second & (slots < LENGTH)].all() and is_second.any()
    assert not is_same[~is_second & (slots < LENGTH)].any()


def test_a_causal_model_predicts_a_token_from_those_before_it():
    settings = objective_of(rate=0.95, encoder_mask_fraction=1.0, keep_fraction=1.0)
    graph, params, inputs = make(settings, causal=True, decoder_layers=0)
    other = inputs_of(inputs.ids.at[:, 6].set(50), settings)
    model = jax.jit(maelm.apply(graph, params))
    slots, changed = np.asarray(inputs.masked_slots), np.asarray(model(inputs) != model(other)).any(-1)
    is_real = (slots < LENGTH) & (np.asarray(other.masked_slots) == slots)
    assert {4, 6, 7, 10, 13} < set(slots[0]), "slots before, at and after the token, and of the next segment"
    assert (changed == ((slots > 6) & (slots < 12)))[is_real].all()


@pytest.mark.parametrize(
    "masks,changes",
    [
        ({}, {}),
        ({"renumber": True}, {"decoder_attention": "cross", "decoder_slots": "masked"}),
        ({"encoder_mask_fraction": 0.5}, MODERN | LOCAL | {"decoder_attention": "self+cross"}),
    ],
)
def test_compact_is_full_length(masks, changes):
    results = []
    for full_length in (False, True):
        graph, params, inputs = make(objective_of(rate=0.5, **masks), full_length, **changes)
        assert (inputs.encoder_slots.shape[1] == LENGTH) == full_length

        def sums(params, graph=graph, inputs=inputs):
            total = loss.masked_cross_entropy(maelm.apply(graph, params).predict(inputs), inputs)
            return total.loss_nats / total.count

        results.append(jax.jit(jax.value_and_grad(sums))(params))
    (ours, our_gradient), (theirs, their_gradient) = results
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(our_gradient), jax.tree.leaves(their_gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * max(float(jnp.abs(b).max()), 1e-3) + 1e-8, rtol=2e-4)


@pytest.mark.parametrize("refills", [True, False])
def test_the_decoder_reads_the_encoder_at_a_masked_slot_only_without_refilling(refills):
    graph, params, inputs = make(objective_of(encoder_mask_fraction=0.5), decoder_refills_mask=refills)
    model = maelm.apply(graph, params)
    encoded, by_slot = (jax.random.normal(jax.random.key(0), (3, slots, TINY["width"])) for slots in (inputs.encoder_slots.shape[1], LENGTH))
    gradient = jax.jit(jax.grad(lambda x: (model._decode(x, encoded, inputs) ** 2).sum()))(by_slot)
    size = np.abs(np.asarray(gradient)).sum(-1)
    visible = np.asarray(inputs.encoder_index) < inputs.encoder_slots.shape[1]
    masked = np.asarray(inputs.masked_index) < inputs.masked_slots.shape[1]
    assert (size[visible & ~masked] > 0).all() and (visible & masked).any()
    assert ((size[visible & masked] > 0) == (not refills)).all()


def test_the_states_of_all_layers_end_with_the_encoder_s_output():
    graph, params, inputs = make(**MODERN)
    model = maelm.apply(graph, params)
    states, last = jax.jit(lambda inputs: (model.encode(inputs, all_layers=True), model.encode(inputs)))(inputs)
    assert states.shape == (TINY["layers"] + 1, *last.shape)
    np.testing.assert_allclose(states[-1], last, rtol=1e-5, atol=1e-5)
    visible = np.asarray(inputs.encoder_slots) < LENGTH
    spread = np.asarray(states).std(axis=-1)[:, visible]
    assert np.abs(spread - 1).max() < 0.5, "each layer's states are normalized"


@pytest.mark.parametrize("architecture", [pytest.param(BERT, marks=pytest.mark.slow), MODERN], ids=["bert", "modern"])
def test_gradients_are_the_same_however_they_are_computed(architecture):
    changes = architecture | {"decoder_layers": 1, "width": 128, "dropout": 0.1, "attention_dropout": 0.1}  # the kernels take heads of 32
    _, params, inputs = make(**changes)
    keys = jax.random.split(jax.random.key(5), inputs.ids.shape[0])

    def gradient(**way):
        graph, _ = maelm.create(model_of(**(TINY | changes | way)), 100, SPECIAL)
        return jax.jit(jax.grad(lambda p: loss.masked_cross_entropy(maelm.apply(graph, p).predict(inputs, keys), inputs).loss_nats))(params)

    expected = gradient()
    for way in ({"rematerialise": True}, {"scan_layers": False}, {"attention_backend": "pallas_tpu"}):
        for a, b in zip(*map(jax.tree.leaves, (gradient(**way), expected)), strict=True):
            assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b) + 1e-4, way


def test_what_is_traced_for_a_gpu_is_the_same_function():
    """There the layers are no loop, and all matrices are cast at once."""
    changes = {"dtype": "bfloat16", "decoder_layers": 0}
    settings, (_, params, inputs) = model_of(**(TINY | changes)), make(**changes)

    def gradients(target):
        graph, _ = maelm.create(settings, 100, SPECIAL, target)
        return jax.jit(jax.grad(lambda p: loss.masked_cross_entropy(maelm.apply(graph, p).predict(inputs), inputs).loss_nats))(params)

    targets = Target("gpu", "Tesla T4"), Target("cpu", "cpu")
    for a, b in zip(*(jax.tree.leaves(gradients(target)) for target in targets), strict=True):
        assert a.dtype == b.dtype == jnp.float32
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b) + 1e-3


@pytest.mark.parametrize("architecture", [BERT, MODERN], ids=["bert", "modern"])
def test_of_each_layer_the_backward_pass_keeps_four_arrays_of_states(architecture):
    """Its input, the sums after attention and feed-forward, attention's output; beside queries, keys, values, the inner product."""
    graph, params, inputs = make(**architecture)
    backward = jax.eval_shape(lambda p: jax.vjp(lambda p: maelm.apply(graph, p).encode(inputs), p)[1], params)
    states = (TINY["layers"], *inputs.encoder_slots.shape, TINY["width"])
    assert [x.shape for x in jax.tree.leaves(backward)].count(states) == 4


def test_bfloat16_follows_float32():
    graph, params, inputs = make()
    half, _ = maelm.create(model_of(**{**TINY, "dtype": "bfloat16"}), 100, SPECIAL)
    ours, theirs = (jax.jit(lambda x, g=g: loss.masked_cross_entropy(maelm.apply(g, params).predict(x), x))(inputs) for g in (half, graph))
    assert abs(float(ours.loss_nats - theirs.loss_nats)) / float(theirs.loss_nats) < 0.05


def test_in_bfloat16_every_product_is_of_bfloat16():
    _graph, params, inputs = make()
    half, _ = maelm.create(model_of(**{**TINY, "dtype": "bfloat16"}), 100, SPECIAL)

    def mean_loss(params):
        sums = loss.masked_cross_entropy(maelm.apply(half, params).predict(inputs), inputs)
        return sums.loss_nats / sums.count

    text = jax.jit(jax.grad(mean_loss)).lower(params).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    operands = [re.search(r": \(tensor<(\S+?)>, tensor<(\S+?)>\)", line).groups() for line in products]
    assert len(operands) > 30
    wide = [line for line, pair in zip(products, operands, strict=True) if not all(one.endswith("xbf16") for one in pair)]
    assert not wide, "a product forward or backward is formed at the cost of float32:\n" + "\n".join(wide)


def test_initial_weights_have_the_deviation_that_is_set():
    settings = model_of(layers=2, width=128, heads=4, feed_forward=512, decoder_layers=2, init_std=0.05, max_positions=64)
    _, init = maelm.create(settings, 500, config.SpecialIds.of_size(500))
    params = traverse_util.flatten_dict(jax.jit(init)(jax.random.key(0)), sep="/")
    for path, value in params.items():
        name = path.split("/")[-1]
        if name == "kernel" or name.endswith("embedding"):
            rows = value[:500] if path == "encoder/token_embedding" else value
            assert abs(float(rows.std()) / 0.05 - 1) < 0.1, path
            if "/blocks/" in path:
                assert not np.array_equal(value[0], value[1]), f"{path}: the layers have draws of their own"
        elif name in ("bias", "scale"):
            assert (np.asarray(value) == float(name == "scale")).all(), path
