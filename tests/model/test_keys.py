"""Runs do not depend on which kind of random key the environment asks JAX for."""

import jax
import numpy as np
import pytest

from maelm_jax import config
from maelm_jax.pretraining import objective as objectives
from maelm_jax.training import optimizers, sharding, step

SPECIAL = config.SpecialIds(bos=0, pad=1, eos=2, unk=3, mask=99)
MODEL = config.Model(layers=1, width=16, heads=2, feed_forward=32, decoder_layers=1, max_positions=16, init_std=0.1)


def losses() -> list[float]:
    """Of two steps with dropout, from fresh weights."""
    settings = config.Experiment(
        vocabulary=config.Vocabulary(size=300),
        corpus=config.Corpus(sequence_length=16),
        model=MODEL,
        optimizer=config.Optimizer(warmup_steps=1),
        mesh=config.Mesh(data=1),
        run=config.Run(train_steps=10, batch_size=4),
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    objective, updates = objectives.create(settings, 100, SPECIAL), optimizers.create(settings.optimizer)
    state = step.create_state(objective.init, updates, 7, mesh)
    train_step = step.make_train_step(objective.loss, updates, state, 7, 1, mesh)
    rows = sharding.shard_batch(np.random.default_rng(0).integers(4, 99, (4, 16)).astype(np.int32), mesh)
    result = []
    for _ in range(2):
        state, values = train_step(state, rows, np.float32(1e-3))
        result.append(float(values["loss"]))
    return result


@pytest.mark.parametrize("kind", ["rbg", pytest.param("unsafe_rbg", marks=pytest.mark.slow)])
def test_the_environments_kind_of_key_changes_nothing(kind):
    expected = losses()
    with jax.default_prng_impl(kind):
        assert losses() == expected
