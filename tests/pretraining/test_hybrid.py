"""Rows of next tokens: what they see, which rows they are, and that the others do not change."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import call, experiment_of, mesh_of, model_of, steps_of, training

from maelm_jax import config
from maelm_jax.model import keys, maelm, masking
from maelm_jax.pretraining import objective as objectives
from maelm_jax.training import optimizers, sharding, step

SPECIAL = config.SpecialIds(bos=0, pad=1, eos=2, unk=3, mask=99)
LENGTH, ROWS = 32, 32
SIZES = {"layers": 2, "width": 32, "heads": 4, "feed_forward": 64, "max_positions": LENGTH, "init_std": 0.1}
MLM = model_of(**SIZES, decoder_layers=0)
MAE_LM = model_of(**SIZES, decoder_layers=1, decoder_width=16)
MODELS = pytest.mark.parametrize("model", [MLM, MAE_LM], ids=["mlm", "mae_lm"])


def experiment(model, share=0.25, mesh=(1, 1, 1), accumulate=1):
    name = "mae_lm" if model.decoder else "mlm"
    return experiment_of(
        model,
        objective=config.Objective(name=name, causal_share=share),
        vocabulary=config.Vocabulary(size=300),
        corpus=config.Corpus(sequence_length=LENGTH),
        optimizer=config.Optimizer(learning_rate=1e-2, warmup_steps=2),
        mesh=config.Mesh(**dict(zip(("data", "fsdp", "tensor"), mesh, strict=True))),
        run=config.Run(train_steps=10, batch_size=ROWS, accumulate=accumulate),
    )


def batch(number=0):
    ids = np.random.default_rng(number).integers(4, 99, (ROWS, LENGTH)).astype(np.int32)
    ids[:, [0, 12]], ids[:, [11, 31]] = 0, 2
    ids[::3, 25:] = 1
    return ids


def create(settings):
    """(the objective, its parameters)."""
    objective = objectives.create(settings, 100, SPECIAL)
    return objective, jax.jit(objective.init)(jax.random.key(0))


def train(settings, steps=2):
    """The metrics of each step on the settings' mesh."""
    mesh = mesh_of(settings.mesh.data, settings.mesh.fsdp, settings.mesh.tensor)
    sharding.check_mesh(settings, mesh)
    objective, updates = objectives.create(settings, 100, SPECIAL), optimizers.create(settings.optimizer)
    state = step.create_state(objective.init, updates, 0, mesh)
    train_step = step.make_train_step(objective.loss, updates, state, 0, settings.run.accumulate, mesh)
    results = []
    for number in range(steps):
        state, values = train_step(state, sharding.shard_batch(batch(number), mesh), jnp.float32(1e-2))
        results.append({name: float(value) for name, value in values.items()})
    return results


@MODELS
def test_a_causal_row_sees_no_later_token(model):
    _, params = create(experiment(model))
    ids = np.random.default_rng(0).permutation(np.arange(4, 36)).reshape(1, LENGTH).astype(np.int32)
    ids[0, [0, 12]], ids[0, [11, 31]] = 0, 2
    settings = experiment(model).left_to_right
    graph = maelm.create(settings.model, 100, SPECIAL).graph
    row_keys = keys.make_row_keys(jax.random.key(0), jnp.arange(1, dtype=jnp.uint32))
    inputs = masking.draw(row_keys, jnp.asarray(ids), settings.objective, masking.budget(settings.objective, LENGTH), SPECIAL)
    slots = np.asarray(inputs.masked_slots)[0]
    expected = [slot for slot in range(LENGTH) if ids[0, slot] > 3]
    assert slots[: len(expected)].tolist() == expected and (slots[len(expected) :] == LENGTH).all()

    def states(table):  # of which the logits are products with the table
        changed = params | {"encoder": params["encoder"] | {"token_embedding": table}}
        return maelm.apply(graph, maelm.encoder_and_head(changed)).predict(inputs).states[0, : len(expected)] @ jnp.arange(32.0)

    # Each id of text stands at one slot: the gradient of its row is that of the slot.
    size = np.abs(jax.jit(jax.jacrev(states))(params["encoder"]["token_embedding"])).sum(-1)[:, ids[0]]
    segments = np.cumsum(ids[0] == 0)
    for slot, of_slot in zip(expected, size, strict=True):
        before = (np.arange(LENGTH) < slot) & (segments == segments[slot])
        assert (of_slot[before & (ids[0] > 3)] > 0).all(), "an earlier token is not read"
        assert (of_slot[~before & (ids[0] > 3)] == 0.0).all(), "a later token or another segment is read"


@MODELS
def test_the_loss_is_that_of_both_objectives_on_their_rows(model):
    settings = experiment(model, share=0.25)
    objective, params = create(settings)
    key, numbers, rows = jax.random.key(5), jnp.arange(ROWS, dtype=jnp.uint32), jnp.asarray(batch())
    sums = jax.jit(lambda: objective.loss(params, rows, numbers, key, True))()
    masked = objectives.create(experiment(model, share=0.0), 100, SPECIAL)

    def of_each_row(one):
        return jax.jit(lambda: jax.lax.map(lambda row: one.loss(params, row[0][None], row[1][None], key, True), (rows, numbers)))()

    masked, causal = (jax.tree.map(np.asarray, of_each_row(one)) for one in (masked, masked.left_to_right()))
    groups = [np.arange(ROWS) % 4 == first for first in range(4)]
    (chosen,) = [group for group in groups if np.isclose(causal.loss_nats[group].sum(), sums.causal_nats, rtol=1e-5)]
    assert float(sums.causal_count) == causal.count[chosen].sum()
    for ours, of_masked, of_causal in zip(sums[:3], masked, causal, strict=False):
        assert float(ours) == pytest.approx(of_masked[~chosen].sum() + 0.15 * of_causal[chosen].sum(), rel=1e-5)


@MODELS
def test_without_causal_rows_nothing_changes(model):
    settings = experiment(model, share=0.0)
    objective, params = create(settings)
    assert type(objective) is objectives.MaskedTokens
    hybrid = objectives.create(experiment(model, share=0.5), 100, SPECIAL)
    assert jax.tree.structure(jax.jit(hybrid.init)(jax.random.key(0))) == jax.tree.structure(params)
    held_out, plain = hybrid.evaluated(), objective.evaluated()
    assert type(held_out) is objectives.MaskedTokens and held_out.experiment == plain.experiment, "their held-out losses compare"


@pytest.fixture(scope="module")
def single():
    return train(experiment(MAE_LM))


@pytest.mark.parametrize("mesh,accumulate", [((1, 1, 1), 4), ((2, 2, 1), 2)], ids=["microbatches", "mesh"])
def test_any_mesh_and_microbatches_have_the_same_causal_rows(single, mesh, accumulate):
    ours, theirs = train(experiment(MAE_LM, 0.25, mesh, accumulate)), single
    for a, b in zip(ours, theirs, strict=True):
        assert a["count"] == pytest.approx(b["count"], rel=1e-6), "other rows or masks"
        for name in ("loss", "causal_loss", "accuracy", "grad_norm"):
            assert abs(a[name] - b[name]) <= 1e-5 * abs(b[name]), name


def test_each_row_is_causal_at_some_step():
    """Not always the first of a group: with two sources in turn these would be of one source."""
    objective, params = create(experiment(MLM, share=0.5))
    ids = batch()
    ids[1::2, 4:] = 1  # short rows and long ones in turn
    count = jax.jit(lambda key: objective.loss(params, jnp.asarray(ids), jnp.arange(ROWS, dtype=jnp.uint32), key, False).causal_count)
    assert len({float(count(jax.random.key(number))) for number in range(8)}) == 2


def test_shares_that_give_a_device_no_whole_rows_are_refused():
    for share, mesh, accumulate in ((1 / 16, (4, 1, 1), 1), (1 / 16, (1, 2, 1), 2), (0.3, (1, 1, 1), 1)):
        settings = experiment(MLM, share, mesh, accumulate)
        with pytest.raises(config.ConfigError, match="causal_share"):
            sharding.check_mesh(settings, mesh_of(*mesh))
    sharding.check_mesh(experiment(MLM, 3 / 8, (4, 1, 1)), mesh_of(4, 1, 1))


def test_a_resumed_run_is_bitwise_the_same_and_scores_as_it_logged(text, tmp_path):
    flags = ["--gin_file=mlm.gin", "--gin.Objective.causal_share=0.25", "--gin.TRAIN_STEPS=4", "--gin.Run.rank_every=0"]
    flags += ["--gin.Run.checkpoint_every=2", "--gin.Run.eval_every=2"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    done = call("train", *training(text, whole, *flags))
    assert done.status == 0, done.stderr
    shutil.copytree(whole, part)
    shutil.rmtree(part / "checkpoints" / "4")
    done = call("train", *training(text, part, *flags))
    assert done.status == 0 and "resuming" in done.stdout, done.stderr
    names = ("step", "loss", "causal_loss", "accuracy", "grad_norm", "eval_loss", "eval_causal_loss")
    ours, theirs = ([[line.get(name) for name in names] for line in steps_of(run)] for run in (part, whole))
    assert ours == theirs and None not in ours[-1]
    for more, name in (([], "eval_loss"), (["--left_to_right"], "eval_causal_loss")):
        done = call("evaluate", f"--models={whole}", *more, f"--output={tmp_path / 'out.json'}")
        assert done.status == 0, done.stderr
        (score,) = json.loads((tmp_path / "out.json").read_text())["scores"]
        assert score["loss"] == pytest.approx(steps_of(whole)[-1][name], rel=1e-6)


def test_a_share_that_does_not_fit_is_refused_before_text_is_read(text, tmp_path):
    flags = ["--gin_file=mlm.gin", "--gin.TEXT_FILES=nowhere"]
    for share in ("0.0625", "1.0", "-0.5"):
        done = call("train", *training(text, tmp_path / "run", *flags, f"--gin.Objective.causal_share={share}"))
        assert done.status == 2 and "Objective.causal_share" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert list(tmp_path.iterdir()) == []
