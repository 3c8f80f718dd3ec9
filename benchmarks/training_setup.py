"""The training step of an experiment on random rows. Several benchmarks time it."""

import typing

import flax.nnx
import jax
import numpy as np

from maelm_jax import config
from maelm_jax.model import maelm
from maelm_jax.training import optimizers, sharding, step


class TrainingSetup(typing.NamedTuple):
    """Everything that a training step needs."""

    special: config.SpecialIds
    graph: flax.nnx.GraphDef  # of the model
    state: step.State
    train_step: typing.Callable  # (state, batch) -> (state, metrics)
    ids: np.ndarray  # int32 [B, L]: rows of full length, of one segment
    batch: jax.Array  # the same on the devices


def set_up(experiment: config.Experiment) -> TrainingSetup:
    """Creates the model, its state, the step and a batch. The vocabulary has the configured size.

    Raises:
        ConfigError: The mesh does not divide the experiment.
    """
    mesh = sharding.make_mesh(experiment.mesh)
    sharding.check_mesh(experiment, mesh)
    size, run = experiment.vocabulary.size, experiment.run
    special = config.SpecialIds.of_size(size)
    graph, init = maelm.create(experiment.model, size, special)
    updates = optimizers.create(experiment.optimizer, run.train_steps)
    decay = experiment.optimizer.ema_decay
    state = step.create_state(init, updates, run.seed, mesh, decay)
    loss = step.pretraining_loss(experiment, graph, special)
    train_step = step.make_train_step(loss, updates, state, run.seed, run.accumulate, mesh, decay)
    shape = (run.batch_size, experiment.corpus.sequence_length)
    ids = np.random.default_rng(0).integers(special.unk + 1, special.mask, shape).astype(np.int32)
    ids[:, 0] = special.bos
    return TrainingSetup(special, graph, state, train_step, ids, sharding.shard_batch(ids, mesh))


def shape_of(experiment: config.Experiment) -> str:
    """The shape of the model and of a batch, as text."""
    model = experiment.model
    return (
        f"{model.layers}+{model.decoder_layers} x {model.width}, "
        f"vocabulary {experiment.vocabulary.size}, "
        f"length {experiment.corpus.sequence_length}, batch {experiment.run.batch_size}"
    )
