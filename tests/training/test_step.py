"""Invariant 4: the same losses and gradients on every mesh and in any number of parts; every parameter has exactly one rule."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from testing import experiment_of, mesh_of, model_of

from maelm_jax import config
from maelm_jax.model import keys
from maelm_jax.pretraining import objective as objectives
from maelm_jax.training import optimizers, sharding, step

pytestmark = pytest.mark.long

SPECIAL = config.SpecialIds(bos=0, pad=1, eos=2, unk=3, mask=99)
LENGTH, ROWS = 32, 16
MODEL = model_of(layers=2, width=32, heads=4, feed_forward=64, decoder_layers=1, max_positions=LENGTH, init_std=0.1)
MODERN = model_of(MODEL, normalization="pre", positions="rotary", relative_buckets="none", feed_forward_gate=True, biases=False, decoder_layers=2)
MUON = config.Optimizer(kind="muon", learning_rate=1e-2, muon_learning_rate=1e-2, warmup_steps=2)


def experiment(mesh=(1, 1, 1), accumulate=1):
    return experiment_of(
        vocabulary=config.Vocabulary(size=300),
        corpus=config.Corpus(sequence_length=LENGTH),
        model=MODEL,
        optimizer=config.Optimizer(learning_rate=1e-2, warmup_steps=2),
        mesh=config.Mesh(**dict(zip(("data", "fsdp", "tensor"), mesh, strict=True))),
        run=config.Run(train_steps=10, batch_size=ROWS, accumulate=accumulate),
    )


def batches(count):
    rng = np.random.default_rng(0)
    ids = rng.integers(4, 99, (count, ROWS, LENGTH)).astype(np.int32)
    ids[..., [0, 12]], ids[..., [11, 31]] = 0, 2
    ids[:, ::3, 25:] = 1  # rows of unlike length: a mean of means would show
    return ids


def run(settings: config.Experiment, steps=3):
    """(metrics of each step, last state) on the settings' mesh."""
    sizes = (settings.mesh.data, settings.mesh.fsdp, settings.mesh.tensor)
    mesh = mesh_of(*sizes)
    sharding.check_mesh(settings, mesh)
    objective, updates = objectives.create(settings, 100, SPECIAL), optimizers.create(settings.optimizer)
    state = step.create_state(objective.init, updates, 0, mesh)
    train_step = step.make_train_step(objective.loss, updates, state, 0, settings.run.accumulate, mesh)
    rates = optimizers.learning_rates(settings.optimizer, settings.run.train_steps)
    results = []
    for batch, rate in zip(batches(steps), rates, strict=False):
        state, metrics = train_step(state, sharding.shard_batch(batch, mesh), rate)
        results.append({name: float(value) for name, value in metrics.items()})
    return results, state


@pytest.fixture(scope="module")
def single():
    return run(experiment())


@pytest.mark.parametrize("mesh", [(2, 2, 2), pytest.param((1, 1, 4), marks=pytest.mark.slow)], ids=str)
def test_any_mesh_and_two_microbatches_give_the_same_losses(single, mesh):
    ours, state = run(experiment(mesh, accumulate=2))
    for a, b in zip(ours, single[0], strict=True):
        assert a["count"] == b["count"], "other masks were drawn"
        for name in ("loss", "accuracy", "grad_norm"):
            assert abs(a[name] - b[name]) <= 1e-5 * abs(b[name]), name
    kernel = state.params["encoder"]["blocks"]["feed_forward"]["up"]["kernel"]
    shard = kernel.addressable_shards[0].data.shape
    assert shard == (2, 32 // mesh[1], 64 // mesh[2]), "the parameter lies on the mesh as the table says"
    moment = optax.tree.get(state.opt_state, "mu")["encoder"]["blocks"]["feed_forward"]["up"]["kernel"]
    assert moment.sharding == kernel.sharding


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes,tolerance",
    [
        (vars(MODERN), 1e-5),
        ({"compute": config.Compute(scan_layers=False)}, 1e-5),
        ({"optimizer": MUON}, 1e-4),
    ],
    ids=["modern layers", "each layer compiled by itself", "muon"],
)
def test_a_mesh_gives_the_same_losses_of_other_layers_and_optimizers(changes, tolerance):
    """In two microbatches. The learning rate of the first step is 0, so the third one is the first to see an update."""
    changes = {name: value for name, value in changes.items() if name != "causal"}
    ours, theirs = (run(dataclasses.replace(settings, **changes))[0] for settings in (experiment((2, 2, 2), accumulate=2), experiment()))
    for a, b in zip(ours, theirs, strict=True):
        assert a["count"] == b["count"]
        for name in ("loss", "grad_norm"):
            assert abs(a[name] - b[name]) <= tolerance * b[name], name


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_the_kind_of_random_key_that_jax_is_asked_for_changes_nothing(kind):
    expected = keys.make_stream_key(3, keys.TRAIN_STREAM)
    with jax.default_prng_impl(kind):
        found = keys.make_stream_key(3, keys.TRAIN_STREAM)
    assert found.dtype == expected.dtype and (jax.random.key_data(found) == jax.random.key_data(expected)).all()


def test_evaluation_draws_the_same_masks_each_time():
    settings = experiment()
    mesh = mesh_of(1, 1, 1)
    objective = objectives.create(settings, 100, SPECIAL)
    params = step.create_state(objective.init, optimizers.create(settings.optimizer), 0, mesh).params
    evaluate = step.make_eval_step(objective.loss, params, 0, mesh)
    rows = sharding.shard_batch(batches(1)[0], mesh)
    first, second = (evaluate(params, rows, np.uint32(0)) for _ in range(2))
    assert float(first.loss_nats) == float(second.loss_nats), "the same masks"
    model = model_of(settings.model, dropout=0.0, attention_dropout=0.0)
    assert model != settings.model
    plain = objectives.create(settings.with_model(model), 100, SPECIAL)
    without = step.make_eval_step(plain.loss, params, 0, mesh)(params, rows, np.uint32(0))
    assert float(without.loss_nats) == float(first.loss_nats), "no dropout"
    assert float(evaluate(params, rows, np.uint32(ROWS)).loss_nats) != float(first.loss_nats), "other rows of the set have masks of their own"
