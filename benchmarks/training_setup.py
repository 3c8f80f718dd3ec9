"""The training step of an experiment on random rows. Several benchmarks time it."""

import collections.abc
import time
import typing

import jax
import numpy as np

from maelm_jax import config
from maelm_jax.pretraining import objective as objectives
from maelm_jax.training import optimizers, sharding, step


class TrainingSetup(typing.NamedTuple):
    """Everything that a training step needs."""

    special: config.SpecialIds
    objective: objectives.MaskedTokens
    state: step.State
    train_step: typing.Callable  # (state, batch, learning rate) -> (state, metrics)
    ids: np.ndarray  # int32 [B, L]: rows of full length, of one segment
    batch: jax.Array  # the same on the devices
    learning_rate: np.float32  # the peak


def set_up(experiment: config.Experiment) -> TrainingSetup:
    """Creates the model, its state, the step and a batch. The vocabulary has the configured size.

    Raises:
        ConfigError: The mesh does not divide the experiment.
    """
    mesh = sharding.make_mesh(experiment.mesh)
    sharding.check_mesh(experiment, mesh)
    size, run = experiment.vocabulary.size, experiment.run
    special = config.SpecialIds.of_size(size)
    objective = objectives.create(experiment, size, special)
    optimizer = optimizers.create(experiment.optimizer, experiment.compute.dtype)
    state = step.create_state(objective.init, optimizer, run.seed, mesh)
    train_step = step.make_train_step(
        objective.loss, optimizer, state, run.seed, run.accumulate, mesh
    )
    shape = (run.batch_size, experiment.corpus.sequence_length)
    ids = np.random.default_rng(0).integers(special.unk + 1, special.mask, shape).astype(np.int32)
    ids[:, 0] = special.bos
    batch = sharding.shard_batch(ids, mesh)
    rate = np.float32(experiment.optimizer.learning_rate)
    return TrainingSetup(special, objective, state, train_step, ids, batch, rate)


def time_steps(
    setup: TrainingSetup,
    count: int,
    clock: collections.abc.Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Returns the seconds of each of `count` training steps. The first one includes compilation."""
    state, seconds = setup.state, []
    for _ in range(count):
        start = clock()
        state, _ = jax.block_until_ready(setup.train_step(state, setup.batch, setup.learning_rate))
        seconds.append(clock() - start)
    return seconds


def shape_of(experiment: config.Experiment) -> str:
    """The shape of the model and of a batch, as text."""
    decoder_layers = experiment.decoder.layers if experiment.decoder else 0
    return (
        f"{experiment.encoder.layers}+{decoder_layers} x {experiment.encoder.width}, "
        f"vocabulary {experiment.vocabulary.size}, "
        f"length {experiment.corpus.sequence_length}, batch {experiment.run.batch_size}"
    )
