"""The relative position bias, as each platform computes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maelm_jax import config
from maelm_jax.model import positions

SETTINGS = config.Model(width=32, heads=4, max_positions=64)
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
    settings = config.Model(width=32, heads=4, max_positions=64, relative_buckets=buckets)
    rng = np.random.default_rng(0)
    where, weights = rng.integers(0, 64, (3, 9)).astype(np.int32), rng.normal(size=(3, 4, 9, 9)).astype(np.float32)
    module = positions.RelativeBias(settings, nnx.Rngs(0))
    graph, state = nnx.split(module)
    bias, pull_back = jax.vjp(lambda state: nnx.merge(graph, state)(jnp.asarray(where), jnp.dtype("float32")), state)
    rows = positions.bucket_of_distance(settings)[where[:, None, :] - where[:, :, None] + 63]
    np.testing.assert_array_equal(bias, np.moveaxis(np.asarray(module.table[...])[rows], 3, 1))
    gradient = np.zeros((settings.num_buckets, 4), np.float32)
    np.add.at(gradient, rows, np.moveaxis(weights, 1, 3))
    np.testing.assert_allclose(jax.tree.leaves(pull_back(jnp.asarray(weights)))[0], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("platform_name,gathers", [("cpu", True), ("cuda", True), ("tpu", False)])
def test_only_a_tpu_selects_instead_of_gathering(platform_name, gathers):
    graph, state = nnx.split(positions.RelativeBias(SETTINGS, nnx.Rngs(0)))
    look_up = jax.jit(lambda state, where: nnx.merge(graph, state)(where, jnp.dtype("float32")))
    lowered = look_up.trace(state, jnp.zeros((2, 8), jnp.int32)).lower(lowering_platforms=(platform_name,))
    assert ("stablehlo.gather" in lowered.as_text()) == gathers
