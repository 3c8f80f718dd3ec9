"""Positions: the buckets of the relative bias, the bias as each platform computes it, and rotary positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from testing import model_of

from maelm_jax import config
from maelm_jax.model import positions

SETTINGS = model_of(width=32, heads=4, max_positions=64).encoder_settings
PLATFORMS = ("cpu", "cuda", "tpu")


@pytest.fixture(params=PLATFORMS)
def platform(request, monkeypatch):
    """Computes as on another platform, with the devices at hand."""

    def dependent(*arguments, default, **by_platform):
        return by_platform.get(request.param, default)(*arguments)

    monkeypatch.setattr(jax.lax, "platform_dependent", dependent)
    return request.param


@pytest.mark.parametrize("buckets", ["t5", "reference"])
def test_each_platform_looks_up_the_same_bias_and_gives_the_same_gradient(platform, buckets):
    settings = model_of(width=32, heads=4, max_positions=64, relative_buckets=buckets).encoder_settings
    rng = np.random.default_rng(0)
    where, weights = rng.integers(0, 64, (3, 9)).astype(np.int32), rng.normal(size=(3, 4, 9, 9)).astype(np.float32)
    module = positions.RelativeBias(settings, nnx.Rngs(0))
    graph, state = nnx.split(module)
    bias, pull_back = jax.vjp(lambda state: nnx.merge(graph, state)(jnp.asarray(where), jnp.asarray(where), jnp.dtype("float32")), state)
    rows = positions.compute_distance_buckets(settings.stack)[where[:, None, :] - where[:, :, None] + 63]
    np.testing.assert_array_equal(bias, np.moveaxis(np.asarray(module.table[...])[rows], 3, 1))
    gradient = np.zeros((settings.stack.num_buckets, 4), np.float32)
    np.add.at(gradient, rows, np.moveaxis(weights, 1, 3))
    np.testing.assert_allclose(jax.tree.leaves(pull_back(jnp.asarray(weights)))[0], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("platform_name,gathers", [("cpu", True), ("cuda", True), ("tpu", False)])
def test_only_a_tpu_selects_instead_of_gathering(platform_name, gathers):
    graph, state = nnx.split(positions.RelativeBias(SETTINGS, nnx.Rngs(0)))
    look_up = jax.jit(lambda state, where: nnx.merge(graph, state)(where, where, jnp.dtype("float32")))
    lowered = look_up.trace(state, jnp.zeros((2, 8), jnp.int32)).lower(lowering_platforms=(platform_name,))
    assert ("stablehlo.gather" in lowered.as_text()) == gathers


def test_a_decoder_beside_an_encoder_without_relative_positions_has_the_buckets_of_t5():
    without = model_of(relative_buckets="none", decoder_relative_bias=True).decoder_settings.stack
    assert (positions.compute_distance_buckets(without) == positions.compute_distance_buckets(config.Encoder())).all()


def test_t5_buckets_are_those_of_stock_mpnet():
    bucket = positions.compute_distance_buckets(config.Encoder())
    distances = np.arange(-511, 512)
    # Raffel et al., with 32 buckets up to 128: from these distances on the next bucket begins
    starts = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    expected = np.searchsorted(starts, np.abs(distances), side="right") - 1 + 16 * (distances > 0)
    assert (bucket == expected).all()


@pytest.mark.parametrize(
    "buckets,farthest,starts",
    [
        (32, 128, {8: 8, 9: 9, 11: 9, 12: 10, 18: 11, 27: 12, 39: 13, 58: 14, 85: 14, 86: 15, 500: 15}),
        (64, 128, {17: 17, 19: 18, 22: 19, 49: 25, 111: 31, 110: 30}),
        (128, 256, {33: 33, 35: 34, 37: 35, 239: 63, 238: 62}),
    ],
)
def test_reference_buckets(buckets, farthest, starts):
    rows = positions.compute_distance_buckets(config.Encoder(relative_buckets="reference", num_buckets=buckets, max_distance=farthest))
    offset = buckets // 2 - 1
    for distance, bucket in starts.items():
        assert rows[511 + distance] - offset == bucket and rows[511 - distance] - offset == -bucket
    assert rows.min() == 0 and rows.max() <= buckets - 1


def test_local_bias_favours_neighbours():
    table = positions.RelativeBias(model_of(relative_bias_init="local").encoder_settings, nnx.Rngs(0))
    at = jnp.arange(64, dtype=jnp.int32)[None]
    bias = np.asarray(table(at, at, jnp.dtype(jnp.float32)))[0]
    assert (np.diff(bias[0, 0]) <= 0).all() and bias[0, 0, 0] == 0 and bias[0, 0, 1] == -0.5 and bias[1, 5, 4] == -0.25


@pytest.mark.parametrize("window,farthest", [(1, 0), (8, 4), (9, 4)])
def test_a_window_reaches_half_its_size_to_each_side(window, farthest):
    at = jnp.asarray([[0, 3, 4, 5, 20]], jnp.int32)  # positions, not slots, are compared
    mask = np.asarray(positions.make_window_mask(jnp.ones_like(at), at, window, 5, jnp.dtype("float32")))[0, 0]
    distance = np.abs(np.subtract.outer(np.asarray(at[0]), np.asarray(at[0])))
    assert np.array_equal(mask, np.where(distance <= farthest, 0.0, positions.MASKED_OUT).astype(np.float32))


def test_rotated_scores_depend_on_distances_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 16)).astype(np.float32)) for _ in range(2))

    def scores(query: int, key: int) -> np.ndarray:
        a, b = (
            positions.rotate(x, positions.compute_rotation(jnp.full((1, 1), at, jnp.int32), 8, 100.0), heads=2) for x, at in ((q, query), (k, key))
        )
        return np.asarray((a * b).reshape(2, 8).sum(1))

    np.testing.assert_allclose(scores(7, 3), scores(104, 100), rtol=1e-4, atol=1e-5)
    assert np.abs(scores(7, 3) - scores(7, 4)).min() > 1e-2
    np.testing.assert_array_equal(positions.rotate(q, positions.compute_rotation(jnp.zeros((1, 1), jnp.int32), 8, 100.0), heads=2), q)
