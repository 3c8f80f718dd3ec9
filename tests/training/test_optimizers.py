"""The optimiser: learning rates, clipping, and what weight decay applies to."""

import dataclasses
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib
import pytest
from testing import model_of

from maelm_jax import config
from maelm_jax.model import maelm
from maelm_jax.training import checkpoint, optimizers, sharding, step
from maelm_jax.training.workdir import Workdir


def rates(steps, train_steps: int, start=None, **settings) -> list[float]:
    """The learning rates after these steps."""
    optimizer = config.Optimizer(learning_rate=2.0, **settings)
    every = optimizers.learning_rates(optimizer, train_steps, start)
    one_by_one = optimizers.LearningRates(optimizer, train_steps, start)
    found = [float(one_by_one[step]) for step in steps]
    assert [one_by_one[step] for step in range(train_steps)] == list(every)
    assert [every[step] for step in steps if step < train_steps] == [rate for step, rate in zip(steps, found, strict=True) if step < train_steps]
    return [round(rate, 6) for rate in found]


def test_a_linear_schedule_rises_to_the_peak_and_falls_to_0():
    assert rates((0, 5, 10, 60, 110), 110, warmup_steps=10) == [0.0, 1.0, 2.0, 1.0, 0.0]


def test_a_schedule_without_a_case_is_refused():
    settings = config.Optimizer()
    object.__setattr__(settings, "schedule", "steps")  # as a value of the setting that only config.py has
    with pytest.raises(ValueError, match="Optimizer.schedule='steps'"):
        optimizers.learning_rates(settings, 10)[0]


def test_a_run_of_a_billion_steps_needs_no_memory_for_its_rates():
    tracemalloc.start()
    rates_of_run = optimizers.LearningRates(config.Optimizer(learning_rate=2.0, warmup_steps=10), 10**9)
    assert [rates_of_run[step] for step in (0, 5, 10**9)] == [0.0, 1.0, 0.0] and rates_of_run[5 * 10**8] == pytest.approx(1.0)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


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


def test_a_decay_falls_as_one_minus_the_root_of_the_steps():
    assert rates((0, 25, 50, 100), 100, start=1.0, schedule="decay") == [1.0, 0.5, 0.292893, 0.0]


def test_a_run_that_goes_on_begins_at_the_rate_of_the_run_before():
    """It goes to its own peak in the warm-up, from above or below."""
    wsd = {"warmup_steps": 10, "schedule": "wsd", "decay_share": 0.0}
    assert rates((0, 5, 10, 99), 100, start=2.0, **wsd) == [2.0] * 4
    assert rates((0, 5, 10, 99), 100, start=4.0, **wsd) == [4.0, 3.0, 2.0, 2.0]


def test_a_longer_wsd_run_repeats_the_steps_before_the_decay_of_a_shorter_one():
    settings = {"warmup_steps": 10, "schedule": "wsd", "decay_share": 0.2}
    assert rates(range(81), 100, **settings) == rates(range(81), 500, **settings)
    assert rates((400, 450), 500, **settings) == [2.0, 1.0]


@pytest.mark.parametrize("everything", [True, False])
def test_weight_decay_is_decoupled_and_can_leave_out_biases_and_scales(everything):
    """The gradient is 0, so a parameter changes by the decay alone."""
    updates = optimizers.create(config.Optimizer(weight_decay=0.5, decay_norms_and_biases=everything))
    params = {"blocks": {"norm": {"scale": jnp.ones((2, 3)), "bias": jnp.ones((2, 3))}, "query": {"kernel": jnp.ones((2, 3, 3))}}}
    change, _ = updates.update(jax.tree.map(jnp.zeros_like, params), updates.init(params), params)
    expected = {"kernel": -0.5, "scale": -0.5 * everything, "bias": -0.5 * everything}
    for keys, value in jax.tree_util.tree_leaves_with_path(change):
        np.testing.assert_allclose(value, expected[keys[-1].key], rtol=1e-6)


@pytest.mark.parametrize("clip_norm,share", [(2.0, 0.2), (10.0, 1.0), (0.0, 1.0)])
def test_the_gradient_is_clipped_by_its_norm_over_all_parameters(clip_norm, share):
    updates = optimizers.create(config.Optimizer(clip_norm=clip_norm, b1=0.9))
    gradient = {"encoder": jnp.asarray([6.0]), "head": jnp.asarray([8.0])}
    _, state = updates.update(gradient, updates.init(gradient), gradient)
    mu = optax.tree.get(state, "mu")
    for name, value in gradient.items():
        np.testing.assert_allclose(mu[name], 0.1 * share * value, rtol=1e-5)


def test_updates_are_those_of_adamw_at_each_learning_rate():
    settings = config.Optimizer(learning_rate=3e-3, warmup_steps=4, clip_norm=0.0, b1=0.8, b2=0.95, eps=1e-5, weight_decay=0.1)
    rates = optimizers.learning_rates(settings, 20)
    ours, theirs = optimizers.create(settings), optax.adamw(lambda step: rates[step], 0.8, 0.95, 1e-5, weight_decay=0.1)
    a = b = {"encoder": jnp.asarray([1.0, -2.0, 3.0])}
    states = [ours.init(a), theirs.init(b)]
    for number in range(20):
        gradient = {"encoder": jnp.sin(jnp.arange(3.0) + number)}
        updates, states[0] = ours.update(gradient, states[0], a)
        a = jax.tree.map(lambda p, u, rate=rates[number]: p + rate * u, a, updates)
        with jax.numpy_dtype_promotion("standard"):
            updates, states[1] = theirs.update(gradient, states[1], b)
        b = optax.apply_updates(b, updates)
        np.testing.assert_allclose(a["encoder"], b["encoder"], rtol=1e-5)


MUON = config.Optimizer(kind="muon", learning_rate=1e-3, muon_learning_rate=1e-2, weight_decay=0.0)


def flat(tree) -> dict[str, jax.Array]:
    return {sharding.parameter_path(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_muon_updates_every_matrix_of_the_layers_and_nothing_else():
    model = model_of(layers=2, width=16, heads=2, feed_forward=32, feed_forward_gate=True, decoder_attention="self+cross", max_positions=16)
    params = jax.eval_shape(maelm.create(model, 100, config.SpecialIds.of_size(100)).init, jax.random.key(0))
    state = jax.eval_shape(optimizers.create(MUON).init, params)
    groups = state.inner_states
    by_muon, by_adam = (flat(groups[rule]).keys() - {""} for rule in ("muon", "adamw"))
    matrices = {path for path in flat(params) if "/blocks/" in path and len(flat(params)[path].shape) == 3}
    assert by_muon == matrices and len(matrices) == 2 * 7 + 4
    assert by_muon | by_adam == flat(params).keys() and not by_muon & by_adam


@pytest.mark.parametrize("dtype,tolerance", [("float32", 2e-3), ("bfloat16", 0.06)])
@pytest.mark.parametrize("spread", [0.0, 1.5], ids=["equal columns", "few large columns"])
def test_muon_updates_square_tall_and_wide_matrices_as_optax_s_does(dtype, tolerance, spread):
    """Of the norm, ours differ by up to 1.03e-3 in float32 (on AVX2; 5e-4 on AVX-512), and by 0.05 in bfloat16, one by one."""
    shapes = {"square": (64, 64), "wide": (48, 192), "tall": (192, 48), "nearly square": (64, 96)}
    keys = jax.random.split(jax.random.key(1), 2)
    sizes = {name: (jnp.arange(1.0, columns + 1) ** -spread)[None] for name, (_, columns) in shapes.items()}
    gradients = [{name: jax.random.normal(key, shape) * sizes[name] for name, shape in shapes.items()} for key in keys]
    theirs = optax.contrib.muon(1.0, weight_decay=0.0, consistent_rms=0.2)
    stacked = [jax.tree.map(lambda kernel: jnp.stack([kernel, -3 * kernel]), gradient) for gradient in gradients]
    ours, their_state = optimizers.create(dataclasses.replace(MUON, clip_norm=0.0), dtype), theirs.init(gradients[0])
    params = {"encoder": {"blocks": {name: {"kernel": kernel} for name, kernel in stacked[0].items()}}}
    state = ours.init(params)
    for gradient, whole in zip(gradients, stacked, strict=True):
        with jax.numpy_dtype_promotion("standard"):
            expected, their_state = theirs.update(gradient, their_state, gradient)
        change, state = ours.update({"encoder": {"blocks": {name: {"kernel": kernel} for name, kernel in whole.items()}}}, state, params)
        for name, kernel in change["encoder"]["blocks"].items():
            for layer, sign in ((0, 1.0), (1, -1.0)):  # learning_rate / muon_learning_rate is 1 / 10
                difference = jnp.linalg.norm(sign * kernel["kernel"][layer] / 10 - expected[name])
                assert difference < tolerance * jnp.linalg.norm(expected[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_muon_s_update_of_each_layer_is_nearly_orthogonal_and_its_state_is_restored(dtype, tmp_path):
    keys = jax.random.split(jax.random.key(0), 4)
    kernel = jax.random.normal(keys[0], (2, 8, 16)) * jnp.asarray([1.0, 100.0])[:, None, None]
    params = {"encoder": {"blocks": {"attention": {"query": {"kernel": kernel}}}, "norm": {"scale": jnp.ones(8)}}}
    updates = optimizers.create(MUON, dtype)
    change, opt_state = updates.update(params, updates.init(params), params)
    matrices = np.asarray(change["encoder"]["blocks"]["attention"]["query"]["kernel"])
    for matrix in matrices:
        size = 1e-3 * np.linalg.svd(matrix, compute_uv=False) / (1e-2 * 0.2 * 4)  # 4: the root of the longer side
        assert (np.abs(size - 0.95) < 0.35).all()
    np.testing.assert_allclose(change["encoder"]["norm"]["scale"], -1.0, rtol=1e-3)

    state = step.State(jnp.int32(1), params, opt_state)
    checkpoints = checkpoint.Checkpoints(Workdir(tmp_path))
    checkpoints.save(1, state)
    checkpoints.wait()
    checkpoints.close()
    restored = checkpoint.restore_newest(Workdir(tmp_path), jax.tree.map(jnp.zeros_like, state)).state
    jax.tree.map(np.testing.assert_array_equal, restored, state)
