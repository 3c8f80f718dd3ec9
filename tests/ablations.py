"""Models and inputs of the files of configs/ablations/, for the tests of what the files change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from maelm_jax import config, gin_files
from maelm_jax.model import maelm, masking, model_inputs

LENGTH, ROWS, SIZE = 32, 4, 100
# Ids below 50 begin a word, those from 50 on continue one.
SPECIAL = config.SpecialIds(0, 1, 2, 3, SIZE - 1, tuple(50 <= i < SIZE - 1 for i in range(SIZE)))
SMALL = (
    "TRAIN_STEPS=4",
    f"BATCH_SIZE={ROWS}",
    f"SEQUENCE_LENGTH={LENGTH}",
    f"Encoder.max_positions={LENGTH}",
    "Encoder.layers=1",
    "Encoder.width=64",
    "Encoder.heads=1",
    "Encoder.feed_forward=128",
    "Init.std=0.2",
)


def load(name: str, *more: str) -> config.Experiment:
    return gin_files.load(["tiny.gin", f"ablations/{name}.gin"], (*SMALL, *more))


def some_rows(rows=ROWS, length=LENGTH):
    """Two segments and some padding; about half of the pieces go on with a word."""
    ids = np.random.default_rng(0).integers(4, SIZE - 1, (rows, length)).astype(np.int32)
    ids[:, [0, 14]], ids[:, [13, -3]], ids[:, -2:] = SPECIAL.bos, SPECIAL.eos, SPECIAL.pad
    return jnp.asarray(ids)


def draw(settings: config.Objective, ids) -> model_inputs.Inputs:
    keys = jax.random.split(jax.random.key(0), ids.shape[0])
    sizes = masking.budget(settings, ids.shape[1])
    return jax.jit(lambda keys, ids: masking.draw(keys, ids, settings, sizes, SPECIAL))(keys, ids)


def make_model(experiment: config.Experiment):
    """(graph, parameters without a zero among them)"""
    graph, init = maelm.create(experiment.model, SIZE, SPECIAL)
    rng = np.random.default_rng(1)
    random = lambda x: jnp.asarray(rng.normal(0.0, 0.2, x.shape), x.dtype)  # noqa: E731
    return graph, jax.tree.map(random, jax.eval_shape(init, jax.random.key(0)))


def make(name: str, *more: str):
    """(settings, graph, parameters without a zero among them, inputs)"""
    experiment = load(name, *more)
    return experiment, *make_model(experiment), draw(experiment.objective, some_rows())


def is_masked(inputs: model_inputs.Inputs) -> np.ndarray:
    return np.asarray(inputs.masked_index) < inputs.masked_slots.shape[1]


@functools.partial(jax.jit, static_argnums=0)
def _encode(graph, params, inputs):
    return maelm.apply(graph, params).encode(inputs)


def encoded(graph, params, inputs) -> np.ndarray:
    """The encoder's states at the slots it reads, 0 elsewhere."""
    return np.asarray(_encode(graph, params, inputs)) * (np.asarray(inputs.encoder_slots) < LENGTH)[:, :, None]
