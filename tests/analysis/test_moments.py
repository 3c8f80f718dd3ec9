"""Moments of an encoder's states are those of the matrix that is never built; the sets of tokens are what they are called."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import LITTLE, experiment_of, little_rows, objective_of, random_parameters

from maelm_jax import config
from maelm_jax.analysis import moments, ranks
from maelm_jax.model import maelm, masking, model_inputs

SPECIAL = config.SpecialIds.of_size(100)
LENGTH, ROWS = LITTLE.encoder.max_positions, 70


@pytest.fixture(scope="module")
def encoder():
    graph = maelm.encoder_graph(LITTLE, 100, SPECIAL.pad)
    return graph, random_parameters(jax.eval_shape(maelm.create(LITTLE, 100, SPECIAL).init, jax.random.key(0))["encoder"], seed=1)


def measured(encoder, settings, layers=None, size=16):
    _, params = encoder
    experiment = experiment_of(corpus=config.Corpus(sequence_length=LENGTH), objective=settings, model=LITTLE)
    compiled = jax.jit(moments.measure(experiment, 100, SPECIAL, layers))
    return moments.accumulate(compiled, params, little_rows(ROWS), 5, jax.random.key(3), SPECIAL.pad, size=size)


def states(encoder, settings):
    """{set: [tokens, layers + 1, width]}: the matrices themselves, from the encoder alone."""
    graph, params = encoder
    ids = jnp.asarray(little_rows(ROWS))
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(3), jnp.arange(5, 5 + ROWS, dtype=jnp.uint32))
    inputs = masking.draw(keys, ids, settings, masking.budget(settings, LENGTH), SPECIAL)
    run = jax.jit(lambda p, *where: maelm.apply(graph, p)(*where, all_layers=True))
    read = np.asarray(inputs.encoder_slots) < LENGTH
    masked = np.asarray(run(params, inputs.encoder_ids, inputs.encoder_positions, model_inputs.take_at_slots(inputs.segments, inputs.encoder_slots)))
    plain = np.asarray(run(params, ids, inputs.positions, inputs.segments))
    is_mask = read & (np.asarray(inputs.encoder_ids) == SPECIAL.mask)
    chosen = {"plain": (plain, np.asarray(ids) != SPECIAL.pad), "real": (masked, read & ~is_mask), "mask": (masked, is_mask)}
    return {name: np.moveaxis(x, 0, 2)[member].astype(np.float64) for name, (x, member) in chosen.items()}


@pytest.mark.parametrize(
    "settings",
    [
        objective_of(rate=0.3),
        objective_of(rate=0.4, encoder_mask_fraction=1.0, random_fraction=0.2, keep_fraction=0.2),
    ],
    ids=["mae-lm", "corrupted mlm"],
)
def test_moments_are_those_of_the_whole_matrix(encoder, settings):
    found, whole = measured(encoder, settings), states(encoder, settings)
    for name in moments.TOKEN_KINDS:
        assert found[name].count == len(whole[name]), name
        assert found[name].product.dtype == np.float64
        for layer in range(LITTLE.encoder.layers + 1):
            x = whole[name][:, layer]
            np.testing.assert_allclose(found[name].product[layer], x.T @ x, rtol=1e-4, atol=1e-3)
            np.testing.assert_allclose(found[name].total[layer], x.sum(0), rtol=1e-4, atol=1e-3)
            if len(x):
                squares = np.linalg.svd(x, compute_uv=False) ** 2
                for tau in (0.5, 0.9, 0.99):
                    expected = int(np.searchsorted(np.cumsum(squares), tau * squares.sum()) + 1)
                    assert ranks.effective_rank(ranks.spectrum(found[name].second(layer)), tau) == expected, (name, layer, tau)
    assert (found["mask"].count > 0) == (settings.encoder_mask_fraction > 0)
    if settings.encoder_mask_fraction == 1.0:
        assert found["real"].count + found["mask"].count == found["plain"].count, "nothing is dropped, nothing counted twice"


def test_batches_and_layers_make_no_difference(encoder):
    settings = objective_of(rate=0.3, encoder_mask_fraction=1.0)
    every, last = measured(encoder, settings), measured(encoder, settings, layers=(1, 2), size=ROWS)
    for name in moments.TOKEN_KINDS:
        np.testing.assert_allclose(last[name].product, every[name].product[1:], rtol=1e-4, atol=1e-3)
        assert every[name].count == last[name].count
