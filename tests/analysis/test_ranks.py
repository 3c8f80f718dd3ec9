"""The definitions of ranks.py on matrices whose answers are known."""

import jax.numpy as jnp
import numpy as np
import pytest

from maelm_jax.analysis import moments, ranks

WIDTH = 24


def moments_of(states: np.ndarray) -> moments.Moments:
    """Of one layer, from the whole matrix."""
    return moments.Moments(np.asarray(float(len(states))), states.sum(0)[None], (states.T @ states)[None])


def states_of_rank(rank: int, tokens: int = 2000, seed: int = 0) -> np.ndarray:
    """Equal singular values, `rank` of them, in a random subspace."""
    rng = np.random.default_rng(seed)
    left, _ = np.linalg.qr(rng.normal(size=(tokens, rank)))
    right, _ = np.linalg.qr(rng.normal(size=(WIDTH, rank)))
    return left @ right.T


@pytest.mark.parametrize("tau", [0.5, 0.9, 0.99, 1.0])
def test_effective_rank_is_that_of_a_plain_svd(tau):
    rng = np.random.default_rng(3)
    states = rng.normal(size=(3000, WIDTH)) * 0.85 ** np.arange(WIDTH) + rng.normal(size=WIDTH) * 0.1
    singular = np.linalg.svd(states, compute_uv=False) ** 2
    expected = next(k for k in range(1, WIDTH + 1) if singular[:k].sum() >= tau * singular.sum() * (1 - 1e-12))
    found = moments_of(states)
    assert ranks.effective_rank(ranks.spectrum(found.second(0)), tau) == expected
    centred = np.linalg.svd(states - states.mean(0), compute_uv=False) ** 2
    np.testing.assert_allclose(ranks.spectrum(found.second(0, centred=True)), centred / len(states), rtol=1e-8, atol=1e-12)


def test_a_common_mean_counts_unless_centred():
    states = states_of_rank(6) + 10 * np.eye(WIDTH)[0]
    found = moments_of(states)
    assert ranks.effective_rank(ranks.spectrum(found.second(0)), 0.9) == 1
    assert ranks.effective_rank(ranks.spectrum(found.second(0, centred=True)), 0.9) == 6


def test_equal_states_have_no_variance():
    """As the [MASK] states of layer 0 without position embeddings. Rounding is no variance."""
    states = np.tile(np.random.default_rng(0).normal(0, 0.02, 128), (25_000, 1))
    found = moments.of_states(jnp.asarray(states, jnp.float32)[None, None], jnp.ones((1, len(states)), bool)).moments()
    described = ranks.describe([{"plain": found, "real": found, "mask": found}], 0, 0.9)
    assert described["mask"]["rank"] == 1 and described["mask"]["centred_rank"] == 0
    assert described["mask_alone"]["variance_outside"] == 0


def test_a_large_common_mean_changes_no_centred_rank():
    """As of RoBERTa. The product of the states in float32 holds little of what varies."""
    sizes = np.geomspace(1, 1e-2, WIDTH)
    states = np.random.default_rng(0).normal(size=(8192, WIDTH)) * sizes
    found = []
    for mean in (0.0, 30.0):
        of_device = moments.of_states(jnp.asarray(states + mean, jnp.float32)[None, None], jnp.ones((1, len(states)), bool))
        spectra = ranks.spectra(*(of_device.moments().second(0, centred=centred) for centred in (False, True)))
        found.append(spectra.centred)
        assert spectra.second[0] > 100 * spectra.centred[0] or not mean
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3)
    assert ranks.effective_rank(found[1], 0.999) == ranks.effective_rank(found[0], 0.999)


def test_rounding_is_no_dimension():
    """Float32 sums of the deviations leave eigenvalues of about 1e-8 of the largest."""
    rng = np.random.default_rng(0)
    states = rng.normal(size=(20_000, 4)) @ rng.normal(size=(4, 128)) + 3.0
    of_device = moments.of_states(jnp.asarray(states, jnp.float32)[None, None], jnp.ones((1, len(states)), bool))
    found = ranks.spectra(*(of_device.moments().second(0, centred=centred) for centred in (False, True)))
    assert np.count_nonzero(found.second) == 5 and np.count_nonzero(found.centred) == 4


def test_what_lies_outside_a_span():
    basis = np.eye(WIDTH)[:, :5]
    weights = np.zeros(WIDTH)
    weights[3:9] = [4, 1, 1, 1, 1, 2]  # dimensions 3 and 4 are in the span, 5 to 8 are not
    assert ranks.share_outside(np.diag(weights), basis) == pytest.approx(5 / 10)
    other = ranks.span(np.diag(weights), 1.0)
    assert other.shape == (WIDTH, 6)
    np.testing.assert_allclose(ranks.principal_angles(basis, other), [0, 0, 90, 90, 90, 90], atol=1e-5)
    turned = np.cos(np.radians(30)) * np.eye(WIDTH)[:, :1] + np.sin(np.radians(30)) * np.eye(WIDTH)[:, 10:11]
    np.testing.assert_allclose(ranks.principal_angles(basis, turned), [30], atol=1e-5)


def test_dimensions_kept_for_mask_alone():
    real = moments_of(states_of_rank(6) @ np.eye(WIDTH))
    right = np.linalg.eigh(real.second(0))[1][:, ::-1]  # the first six columns span the real tokens
    rng = np.random.default_rng(0)
    mask = moments_of(rng.normal(size=(4000, 7)) @ right[:, 3:10].T)  # three dimensions shared, four of its own
    found = ranks.mask_alone(real.second(), mask, 1.0)
    assert found["dimensions"] == 4 and len(found["principal_angles"]) == 7
    assert found["share_outside"] == pytest.approx(4 / 7, abs=0.02) and found["variance_outside"] == pytest.approx(4 / 7, abs=0.02)
    inside = ranks.mask_alone(real.second(), moments_of(rng.normal(size=(4000, 3)) @ right[:, :3].T), 1.0)
    assert inside["dimensions"] == 0 and inside["share_outside"] == pytest.approx(0, abs=1e-9)


def test_a_layer_described():
    rng = np.random.default_rng(0)
    full, few = rng.normal(size=(2000, WIDTH)), rng.normal(size=(100, WIDTH))
    none = moments_of(np.zeros((0, WIDTH)))
    sets = [{"plain": moments_of(full[i::2]), "real": moments_of(states_of_rank(4, seed=i) * 9), "mask": moments_of(few)} for i in (0, 1)]
    found = ranks.describe(sets, 0, 0.9)
    assert found["plain"]["tokens"] == 2000 and len(found["plain"]["rank_by_set"]) == 2
    assert found["plain"]["rank"] == ranks.effective_rank(np.linalg.svd(full, compute_uv=False) ** 2, 0.9)
    assert found["all"]["tokens"] == found["real"]["tokens"] + 200
    assert found["mask"] == {"tokens": 200} and "mask_alone" not in found, f"200 tokens are fewer than {20 * WIDTH}"
    assert ranks.describe([sets[0] | {"mask": none}], 0, 0.9)["mask"] == {"tokens": 0}
    assert ranks.has_rank(480, 24) and not ranks.has_rank(479, 24)
