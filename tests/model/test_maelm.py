"""Invariants 1 and 3: what the encoder's output depends on, and that the compact layout is the full-length one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maelm_jax import config
from maelm_jax.model import loss, maelm, masking, ops
from maelm_jax.model.positions import RelativeBias, _bucket, _look_up, bucket_of_distance

pytestmark = pytest.mark.usefixtures("quickly_compiled")
SPECIAL = config.SpecialIds(bos=0, pad=1, eos=2, unk=3, mask=99)
LENGTH = 32
TINY = {"layers": 2, "width": 32, "heads": 4, "feed_forward": 64, "decoder_layers": 1, "max_positions": LENGTH, "init_std": 0.2,
        "dropout": 0.0, "attention_dropout": 0.0}

BERT = {}
MODERN = {
    "normalization": "pre", "positions": "rotary", "relative_buckets": "none", "feed_forward_gate": True, "biases": False, "decoder_layers": 2,
}  # fmt: skip


def make(masking_settings=None, **changes):
    settings = config.Model(**{**TINY, **changes})
    graph, init = maelm.create(settings, 100, SPECIAL)
    params = jax.jit(init)(jax.random.key(1))
    params = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), params)  # no bias is left at zero
    ids = np.random.default_rng(0).integers(4, 99, (3, LENGTH)).astype(np.int32)
    ids[:, [0, 12]], ids[:, [11, -4]], ids[:, -3:] = 0, 2, 1
    return graph, params, inputs_of(jnp.asarray(ids), masking_settings or config.Masking())


def inputs_of(ids, settings):
    keys = jax.random.split(jax.random.key(2), ids.shape[0])
    return masking.draw(keys, ids, settings, masking.budget(settings, LENGTH), SPECIAL)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("architecture", [BERT, MODERN], ids=["bert", "modern"])
def test_the_encoder_sees_visible_tokens_only(architecture, compact):
    settings = config.Masking(compact=compact)
    graph, params, _ = make(settings, **architecture)
    ids = np.random.default_rng(0).permutation(np.arange(4, 99))[: 2 * LENGTH].reshape(2, LENGTH).astype(np.int32)
    ids[:, [0, 12]], ids[:, [11, -4]], ids[:, -3:] = 0, 2, 1
    inputs = inputs_of(jnp.asarray(ids), settings)

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


def test_changing_a_dropped_token_changes_nothing_but_its_target():
    graph, params, inputs = make()
    encode, predict = (jax.jit(lambda x, f=f: f(maelm.apply(graph, params), x)) for f in (maelm.MaeLm.encode, maelm.MaeLm.__call__))
    dropped = np.asarray(inputs.masked_index) < inputs.masked_slots.shape[1]
    other = inputs_of(jnp.where(dropped, 50, inputs.ids), config.Masking())
    assert (other.masked_slots == inputs.masked_slots).all()
    assert (encode(inputs) == encode(other)).all()
    assert (predict(inputs) == predict(other)).all()
    visible = ~dropped & (np.asarray(inputs.ids) > 3)
    changed = inputs_of(jnp.where(visible, 50, inputs.ids), config.Masking())
    assert (np.abs(np.asarray(predict(inputs) - predict(changed)))[:, 0] > 0).any(-1).all()


def test_segments_do_not_see_each_other():
    graph, params, inputs = make()
    model = jax.jit(maelm.apply(graph, params))
    second = np.asarray(inputs.segments) == 2
    other = inputs_of(jnp.where(second & (np.asarray(inputs.ids) > 3), 50, inputs.ids), config.Masking())
    slots = np.asarray(inputs.masked_slots)
    first = np.take_along_axis(np.asarray(inputs.segments), np.minimum(slots, LENGTH - 1), 1) == 1
    first &= slots < LENGTH
    ours, theirs = np.asarray(model(inputs)), np.asarray(model(other))
    assert first.any() and np.array_equal(ours[first], theirs[first])
    assert not np.array_equal(ours, theirs)


@pytest.mark.parametrize("delta,changes", [
    (0.0, {}),
    (0.0, {"relative_buckets": "none"}),
    (0.5, {"relative_buckets": "reference"}),
    (1.0, {"decoder_layers": 0}),
    (0.0, MODERN),
    (0.5, MODERN | {"decoder_attention": "self+cross"}),
])  # fmt: skip
def test_compact_is_full_length(delta, changes):
    results = []
    for compact in (True, False):
        graph, params, inputs = make(config.Masking(encoder_mask_fraction=delta, compact=compact), **changes)

        def sums(params, graph=graph, inputs=inputs):
            total = loss.masked_cross_entropy(maelm.apply(graph, params).predict(inputs), inputs)
            return total.loss / total.count

        results.append(jax.jit(jax.value_and_grad(sums))(params))
    (ours, our_gradient), (theirs, their_gradient) = results
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(our_gradient), jax.tree.leaves(their_gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * max(float(jnp.abs(b).max()), 1e-3) + 1e-8, rtol=2e-4)


@pytest.mark.parametrize("refills", [True, False])
def test_the_decoder_reads_the_encoder_at_a_masked_slot_only_without_refilling(refills):
    graph, params, inputs = make(config.Masking(encoder_mask_fraction=0.5), decoder_refills_mask=refills)
    model = maelm.apply(graph, params)
    encoded = model.encode(inputs)
    by_slot = ops.gather_rows(encoded, inputs.encoder_index, inputs.encoder_slots)
    gradient = jax.grad(lambda x: (model._decode(x, encoded, inputs) ** 2).sum())(by_slot)
    size = np.abs(np.asarray(gradient)).sum(-1)
    visible = np.asarray(inputs.encoder_index) < inputs.encoder_slots.shape[1]
    masked = np.asarray(inputs.masked_index) < inputs.masked_slots.shape[1]
    assert (size[visible & ~masked] > 0).all() and (visible & masked).any()
    assert ((size[visible & masked] > 0) == (not refills)).all()


def test_t5_buckets_are_those_of_stock_mpnet():
    bucket = bucket_of_distance(config.Model())
    distances = np.arange(-511, 512)
    # Raffel et al., with 32 buckets up to 128: from these distances on the next bucket begins
    starts = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    expected = np.searchsorted(starts, np.abs(distances), side="right") - 1 + 16 * (distances > 0)
    assert (bucket == expected).all()


@pytest.mark.parametrize("buckets,farthest,starts", [
    (32, 128, {8: 8, 9: 9, 11: 9, 12: 10, 18: 11, 27: 12, 39: 13, 58: 14, 85: 14, 86: 15, 500: 15}),
    (64, 128, {17: 17, 19: 18, 22: 19, 49: 25, 111: 31, 110: 30}),
    (128, 256, {33: 33, 35: 34, 37: 35, 239: 63, 238: 62}),
])  # fmt: skip
def test_reference_buckets(buckets, farthest, starts):
    rows = bucket_of_distance(config.Model(relative_buckets="reference", num_buckets=buckets, max_distance=farthest))
    offset = buckets // 2 - 1
    for distance, bucket in starts.items():
        assert rows[511 + distance] - offset == bucket and rows[511 - distance] - offset == -bucket
    assert rows.min() == 0 and rows.max() <= buckets - 1


@pytest.mark.parametrize("kind", ["t5", "reference"])
def test_an_accelerator_looks_up_the_same_bias(monkeypatch, kind):
    """It selects where a CPU gathers, and multiplies by one-hot rows where a CPU adds one by one: those branches are run here by hand."""
    module = RelativeBias(config.Model(**TINY, relative_buckets=kind), maelm.nnx.Rngs(0))
    positions = jnp.asarray(np.sort(np.random.default_rng(0).permutation(LENGTH)[:20]))[None].repeat(2, 0).astype(jnp.int32)

    def bias(table):
        return _look_up(table, _bucket(positions[:, None] - positions[:, :, None], module.buckets))

    value_and_gradient = lambda: (bias(module.table[...]), jax.grad(lambda t: (bias(t) ** 3).sum())(module.table[...]))  # noqa: E731
    expected, gradient = value_and_gradient()
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *inputs, cpu, default: default(*inputs))
    found, again = value_and_gradient()
    assert (found == expected).all()
    np.testing.assert_allclose(again, gradient, rtol=1e-3, atol=1e-6)
    assert np.abs(gradient).max() > 1e-4


def test_bias_table_gradient():
    settings = config.Model(**TINY)
    table = RelativeBias(settings, maelm.nnx.Rngs(0))
    positions = jnp.asarray(np.sort(np.random.default_rng(0).permutation(LENGTH)[:20]))[None].repeat(2, 0).astype(jnp.int32)
    weight = jax.random.normal(jax.random.key(0), (2, 4, 20, 20))
    bucket = jnp.asarray(bucket_of_distance(settings))[positions[:, None, :] - positions[:, :, None] + LENGTH - 1]
    ours = jax.grad(lambda t: (_look_up(t, bucket) * weight).sum())(table.table[...])
    plain = jax.grad(lambda t: (jnp.moveaxis(t[bucket], -1, 1) * weight).sum())(table.table[...])
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)
    assert float(jnp.abs(ours).max()) > 1


def test_local_bias_favours_neighbours():
    table = RelativeBias(config.Model(relative_bias_init="local"), maelm.nnx.Rngs(0))
    bias = np.asarray(table(jnp.arange(64, dtype=jnp.int32)[None], jnp.dtype(jnp.float32)))[0]
    assert (np.diff(bias[0, 0]) <= 0).all() and bias[0, 0, 0] == 0 and bias[0, 0, 1] == -0.5 and bias[1, 5, 4] == -0.25


def test_dropout():
    x = jnp.ones((8, 16, 128, 64))
    keys = jax.random.split(jax.random.key(0), 8)
    y = np.asarray(ops.dropout(x, 0.1, keys))
    kept = y != 0
    assert abs(kept.mean() - 0.9) < 0.001
    np.testing.assert_allclose(y[kept], 1 / 0.9, rtol=1e-6)
    for axis in range(4):  # neighbours along every axis are independent
        a, b = np.take(kept, range(7), axis), np.take(kept, range(1, 8), axis)
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.01
    np.testing.assert_array_equal(ops.dropout(x[3:5], 0.1, keys[3:5]), y[3:5])  # a row's own affair
    other = np.asarray(ops.dropout(x, 0.1, jax.random.split(jax.random.key(1), 8))) != 0
    assert abs(np.corrcoef(kept.ravel(), other.ravel())[0, 1]) < 0.01
    assert ops.dropout(x, 0.1, None) is x


@pytest.mark.parametrize("architecture", [BERT, MODERN], ids=["bert", "modern"])
def test_the_states_of_all_layers_end_with_the_encoder_s_output(architecture):
    graph, params, inputs = make(**architecture)
    model = maelm.apply(graph, params)
    states, last = model.encode(inputs, every=True), model.encode(inputs)
    assert states.shape == (TINY["layers"] + 1, *last.shape)
    np.testing.assert_allclose(states[-1], last, rtol=1e-5, atol=1e-5)
    visible = np.asarray(inputs.encoder_slots) < LENGTH
    spread = np.asarray(states).std(axis=-1)[:, visible]
    assert np.abs(spread - 1).max() < 0.5, "each layer's states are normalized"


@pytest.mark.parametrize("architecture", [BERT, MODERN], ids=["bert", "modern"])
def test_rematerialised_gradients_are_the_same(architecture):
    changes = architecture | {"dropout": 0.1, "attention_dropout": 0.1}
    graph, params, inputs = make(**changes)
    again, _ = maelm.create(config.Model(**(TINY | changes | {"rematerialise": True})), 100, SPECIAL)
    keys = jax.random.split(jax.random.key(5), inputs.ids.shape[0])
    gradients = [
        jax.jit(jax.grad(lambda p, g=g: loss.masked_cross_entropy(maelm.apply(g, p).predict(inputs, keys), inputs).loss))(params)
        for g in (graph, again)
    ]
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_bfloat16_follows_float32():
    graph, params, inputs = make()
    half, _ = maelm.create(config.Model(**{**TINY, "dtype": "bfloat16"}), 100, SPECIAL)
    ours, theirs = (loss.masked_cross_entropy(maelm.apply(g, params).predict(inputs), inputs) for g in (half, graph))
    assert abs(float(ours.loss - theirs.loss)) / float(theirs.loss) < 0.05


def test_in_bfloat16_every_product_is_of_bfloat16():
    _graph, params, inputs = make()
    half, _ = maelm.create(config.Model(**{**TINY, "dtype": "bfloat16"}), 100, SPECIAL)

    def mean_loss(params):
        sums = loss.masked_cross_entropy(maelm.apply(half, params).predict(inputs), inputs)
        return sums.loss / sums.count

    text = jax.jit(jax.grad(mean_loss)).lower(params).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    operands = [re.search(r": \(tensor<(\S+?)>, tensor<(\S+?)>\)", line).groups() for line in products]
    assert len(operands) > 30
    wide = [line for line, pair in zip(products, operands, strict=True) if not all(one.endswith("xbf16") for one in pair)]
    assert not wide, "a product forward or backward is formed at the cost of float32:\n" + "\n".join(wide)
