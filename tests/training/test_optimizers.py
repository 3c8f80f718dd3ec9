"""The optimiser: learning rates, clipping, and what weight decay applies to."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maelm_jax import config
from maelm_jax.model import maelm
from maelm_jax.training import checkpoint, optimizers, sharding, step


def rates(steps, train_steps: int, **settings) -> list[float]:
    rate = optimizers.schedule(config.Optimizer(learning_rate=2.0, **settings), train_steps)
    with jax.numpy_dtype_promotion("standard"):
        return [round(float(rate(step)), 6) for step in steps]


def test_a_linear_schedule_rises_to_the_peak_and_falls_to_0():
    assert rates((0, 5, 10, 60, 110), 110, warmup_steps=10) == [0.0, 1.0, 2.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "warmup,share,steps,expected",
    [
        (10, 0.2, (0, 5, 10, 50, 80, 90, 100), [0.0, 1.0, 2.0, 2.0, 2.0, 1.0, 0.0]),
        (10, 0.0, (10, 99, 100), [2.0, 2.0, 2.0]),
        (80, 0.5, (40, 80, 90, 100), [1.0, 2.0, 1.0, 0.0]),  # the decay begins after the warm-up at the earliest
        (0, 0.5, (0, 50, 75), [2.0, 2.0, 1.0]),
    ],
    ids=str,
)
def test_wsd_stays_at_the_peak_until_the_last_share_of_the_steps(warmup, share, steps, expected):
    assert rates(steps, 100, warmup_steps=warmup, schedule="wsd", decay_share=share) == expected


def test_a_longer_wsd_run_repeats_the_steps_before_the_decay_of_a_shorter_one():
    settings = {"warmup_steps": 10, "schedule": "wsd", "decay_share": 0.2}
    assert rates(range(81), 100, **settings) == rates(range(81), 500, **settings)
    assert rates((400, 450), 500, **settings) == [2.0, 1.0]


@pytest.mark.parametrize("create", [lambda settings: optimizers.create(settings, 10**9), optimizers.create_adjustable])
@pytest.mark.parametrize("everything", [True, False])
def test_weight_decay_can_leave_out_biases_and_scales(create, everything):
    """The gradient is 0, so a parameter changes by the decay alone."""
    settings = config.Optimizer(learning_rate=1.0, warmup_steps=0, weight_decay=0.5, decay_norms_and_biases=everything)
    updates = create(settings)
    params = {"blocks": {"norm": {"scale": jnp.ones((2, 3)), "bias": jnp.ones((2, 3))}, "query": {"kernel": jnp.ones((2, 3, 3))}}}
    state = updates.init(params)
    if create is optimizers.create_adjustable:
        state = optimizers.with_schedule(state, 1.0, 0, 10**9)
    change, _ = updates.update(jax.tree.map(jnp.zeros_like, params), state, params)
    expected = {"kernel": -0.5, "scale": -0.5 * everything, "bias": -0.5 * everything}
    for keys, value in jax.tree_util.tree_leaves_with_path(change):
        np.testing.assert_allclose(value, expected[keys[-1].key], rtol=1e-6)


def test_decay_is_decoupled_from_the_gradient():
    updates = optimizers.create(config.Optimizer(learning_rate=1.0, warmup_steps=0, weight_decay=0.5), 10**9)
    params = {"w": jnp.asarray([10.0])}
    change, _ = updates.update({"w": jnp.asarray([0.0])}, updates.init(params), params)
    np.testing.assert_allclose(change["w"], [-5.0], rtol=1e-5)


@pytest.mark.parametrize("create", [lambda settings: optimizers.create(settings, 10**9), optimizers.create_adjustable])
@pytest.mark.parametrize("clip_norm,share", [(2.0, 0.2), (10.0, 1.0), (0.0, 1.0)])
def test_the_gradient_is_clipped_by_its_norm_over_all_parameters(create, clip_norm, share):
    updates = create(config.Optimizer(clip_norm=clip_norm, b1=0.9))
    gradient = {"encoder": jnp.asarray([6.0]), "head": jnp.asarray([8.0])}
    _, state = updates.update(gradient, updates.init(gradient), gradient)
    mu = optax.tree.get(state, "mu")
    for name, value in gradient.items():
        np.testing.assert_allclose(mu[name], 0.1 * share * value, rtol=1e-5)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_encoder_stays_as_it_is_in_its_frozen_steps_only(kind):
    settings = config.Optimizer(kind=kind, warmup_steps=0, weight_decay=0.5, freeze_encoder_steps=2)
    updates = optimizers.create(settings, 10)
    part = {"blocks": {"query": {"kernel": jnp.ones((1, 2, 2))}}, "norm": {"scale": jnp.ones(2)}}
    params = {"encoder": part, "decoder": part}
    state = updates.init(params)
    for number in range(3):
        change, state = updates.update(params, state, params)
        for path, value in flat(change).items():
            assert bool((value != 0).all()) == (path.startswith("decoder") or number == 2), (number, path)


def test_the_moving_average_weighs_steps_by_the_decay_and_forgets_how_it_began():
    values = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    for decay in (0.5, 0.9, 0.9999):
        average = {"scale": jnp.full(3, 10.0)}  # what it holds before the first step has no weight
        for number, value in enumerate(values, start=1):
            average = optimizers.moving_average(average, {"scale": jnp.asarray(value)}, decay, jnp.int32(number))
            weights = decay ** np.arange(number - 1, -1, -1.0)
            np.testing.assert_allclose(average["scale"], weights @ values[:number] / weights.sum(), atol=1e-5)


MUON = config.Optimizer(kind="muon", learning_rate=1e-3, muon_learning_rate=1e-2, warmup_steps=0, weight_decay=0.0)


def flat(tree) -> dict[str, jax.Array]:
    return {sharding.parameter_path(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_muon_updates_every_matrix_of_the_layers_and_nothing_else():
    model = config.Model(layers=2, width=16, heads=2, feed_forward=32, feed_forward_gate=True, decoder_attention="self+cross", max_positions=16)
    params = jax.eval_shape(maelm.create(model, 100, config.SpecialIds.of_size(100)).init, jax.random.key(0))
    state = jax.eval_shape(optimizers.create(MUON, 10).init, params)
    groups = state[1].inner_states
    by_muon, by_adam = (flat(groups[rule]).keys() - {""} for rule in ("muon", "adamw"))
    matrices = {path for path in flat(params) if "/blocks/" in path and len(flat(params)[path].shape) == 3}
    assert by_muon == matrices and len(matrices) == 2 * 7 + 4
    assert by_muon | by_adam == flat(params).keys() and not by_muon & by_adam


def test_muon_s_update_of_each_layer_is_nearly_orthogonal_and_its_state_is_restored(tmp_path):
    keys = jax.random.split(jax.random.key(0), 4)
    kernel = jax.random.normal(keys[0], (2, 8, 16)) * jnp.asarray([1.0, 100.0])[:, None, None]
    params = {"encoder": {"blocks": {"attention": {"query": {"kernel": kernel}}}, "norm": {"scale": jnp.ones(8)}}}
    updates = optimizers.create(MUON, 10**9)
    change, opt_state = updates.update(params, updates.init(params), params)
    matrices = np.asarray(change["encoder"]["blocks"]["attention"]["query"]["kernel"])
    for matrix in matrices:
        size = np.linalg.svd(matrix, compute_uv=False) / (1e-2 * 0.2 * 4)  # 4: the root of the longer side
        assert (np.abs(size - 0.95) < 0.35).all()
    np.testing.assert_allclose(change["encoder"]["norm"]["scale"], -1e-3, rtol=1e-3)

    state = step.State(jnp.int32(1), params, opt_state)
    checkpoints = checkpoint.Checkpoints(str(tmp_path))
    checkpoints.save(1, state)
    checkpoints.wait()
    restored = checkpoints.restore(jax.tree.map(jnp.zeros_like, state)).state
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_the_adjustable_optimiser_is_the_other_one():
    settings = config.Optimizer(learning_rate=3e-3, warmup_steps=4, clip_norm=0.5)
    one, other = optimizers.create(settings, 20), optimizers.create_adjustable(settings)
    params = {"encoder": jnp.asarray([1.0, -2.0, 3.0])}
    a, b = one.init(params), optimizers.with_schedule(other.init(params), 3e-3, 4, 20)
    ours = theirs = params
    for number in range(20):
        gradient = {"encoder": jnp.sin(jnp.arange(3.0) + number)}
        updates, a = one.update(gradient, a, theirs)
        theirs = optax.apply_updates(theirs, updates)
        assert float(b[1].rate()) == pytest.approx(float(optimizers.schedule(settings, 20)(number)), rel=1e-5)
        updates, b = other.update(gradient, b, ours)
        ours = optax.apply_updates(ours, updates)
        np.testing.assert_allclose(ours["encoder"], theirs["encoder"], rtol=1e-5)
