"""The optimiser: learning rates, clipping, and what weight decay applies to."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maelm_jax import config
from maelm_jax.training import optimizer


def rates(steps, train_steps: int, **settings) -> list[float]:
    rate = optimizer.schedule(config.Optimizer(learning_rate=2.0, **settings), train_steps)
    with jax.numpy_dtype_promotion("standard"):
        return [round(float(rate(step)), 6) for step in steps]


def test_a_linear_schedule_rises_to_the_peak_and_falls_to_0():
    assert rates((0, 5, 10, 60, 110), 110, warmup_steps=10) == [0.0, 1.0, 2.0, 1.0, 0.0]


@pytest.mark.parametrize("warmup,share,steps,expected", [
    (10, 0.2, (0, 5, 10, 50, 80, 90, 100), [0.0, 1.0, 2.0, 2.0, 2.0, 1.0, 0.0]),
    (10, 0.0, (10, 99, 100), [2.0, 2.0, 2.0]),
    (80, 0.5, (40, 80, 90, 100), [1.0, 2.0, 1.0, 0.0]),  # the decay begins after the warm-up at the earliest
    (0, 0.5, (0, 50, 75), [2.0, 2.0, 1.0]),
], ids=str)  # fmt: skip
def test_wsd_stays_at_the_peak_until_the_last_share_of_the_steps(warmup, share, steps, expected):
    assert rates(steps, 100, warmup_steps=warmup, schedule="wsd", decay_share=share) == expected


def test_a_longer_wsd_run_repeats_the_steps_before_the_decay_of_a_shorter_one():
    settings = {"warmup_steps": 10, "schedule": "wsd", "decay_share": 0.2}
    assert rates(range(81), 100, **settings) == rates(range(81), 500, **settings)
    assert rates((400, 450), 500, **settings) == [2.0, 1.0]


@pytest.mark.parametrize("create", [lambda settings: optimizer.create(settings, 10**9), optimizer.create_adjustable])
@pytest.mark.parametrize("everything", [True, False])
def test_weight_decay_can_leave_out_biases_and_scales(create, everything):
    """The gradient is 0, so a parameter changes by the decay alone."""
    settings = config.Optimizer(learning_rate=1.0, warmup_steps=0, weight_decay=0.5, decay_norms_and_biases=everything)
    updates = create(settings)
    params = {"blocks": {"norm": {"scale": jnp.ones((2, 3)), "bias": jnp.ones((2, 3))}, "query": {"kernel": jnp.ones((2, 3, 3))}}}
    state = updates.init(params)
    if create is optimizer.create_adjustable:
        state = optimizer.with_schedule(state, 1.0, 0, 10**9)
    change, _ = updates.update(jax.tree.map(jnp.zeros_like, params), state, params)
    expected = {"kernel": -0.5, "scale": -0.5 * everything, "bias": -0.5 * everything}
    for keys, value in jax.tree_util.tree_leaves_with_path(change):
        np.testing.assert_allclose(value, expected[keys[-1].key], rtol=1e-6)


def test_clipping_and_decay():
    updates = optimizer.create(config.Optimizer(learning_rate=1.0, warmup_steps=0, weight_decay=0.5, clip_norm=2.0), 10**9)
    params = {"w": jnp.asarray([10.0])}
    state = updates.init(params)
    change, _ = updates.update({"w": jnp.asarray([0.0])}, state, params)
    np.testing.assert_allclose(change["w"], [-5.0], rtol=1e-5)
    clipped, _ = optax.clip_by_global_norm(2.0).update({"w": jnp.asarray([8.0])}, optax.EmptyState())
    np.testing.assert_allclose(clipped["w"], [2.0])
