"""Training and evaluation steps: pure functions, the same on any mesh.

All random numbers of a step are a function of (seed, step). All shapes are static.
"""

import collections.abc
import functools
import typing

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Key, UInt32

from maelm_jax import config
from maelm_jax.model import keys, loss, maelm, masking
from maelm_jax.training import fsdp, optimizers, sharding

# (params, batch, row_numbers, key, train) -> sums over the batch
LossFn = collections.abc.Callable[..., loss.Sums]


class State(typing.NamedTuple):
    """The state of pretraining."""

    step: Int[Array, ""]  # optimiser steps done
    params: dict
    opt_state: optax.OptState
    average: dict | None = None  # moving average of `params`; None without Optimizer.ema_decay


def evaluated_params(state: tuple) -> dict:
    """Returns the parameters that are evaluated and measured: the average if there is one.

    Readers of a checkpoint choose in the same way (checkpoint_params.py).
    """
    average = getattr(state, "average", None)  # the state of fine-tuning has no such field
    return state.params if average is None else average


def pretraining_loss(experiment: config.Experiment, graph, special: config.SpecialIds) -> LossFn:
    """Returns the loss function of pretraining.

    The function draws masks for a batch of rows and sums the loss over the masked positions. Masks
    and dropout depend on (key, the row's number in the global batch). They are therefore the same
    on every mesh, with any number of hosts and microbatches.

    Args:
        experiment: The settings.
        graph: Graph of the model, from `maelm.create`.
        special: Ids of special tokens.
    """
    sizes = masking.budget(experiment.masking, experiment.corpus.sequence_length)

    def loss_fn(
        params: dict,
        rows: Int[Array, "B L"],
        numbers: UInt32[Array, " B"],
        key: Key[Array, ""],
        train: bool,
    ) -> loss.Sums:
        mask_keys, dropout_keys = (keys.make_row_keys(k, numbers) for k in keys.split_step_key(key))
        inputs = masking.draw(mask_keys, rows, experiment.masking, sizes, special)
        prediction = maelm.apply(graph, params).predict(inputs, dropout_keys if train else None)
        return loss.masked_cross_entropy(prediction, inputs, experiment.model.logit_tile)

    return loss_fn


def create_state(
    init: collections.abc.Callable,
    optimizer: optax.GradientTransformation,
    seed: int,
    mesh: jax.sharding.Mesh,
    ema_decay: float = 0.0,
) -> State:
    """Creates a fresh state. It is created sharded: no device ever holds more than its part.

    Args:
        init: key -> parameters.
        optimizer: Gives the state of the optimiser.
        seed: Seed of the initial weights.
        mesh: Devices of the state.
        ema_decay: Decay of the moving average of the parameters. 0: the state has none.
    """

    def fresh():
        return _initial_state(
            init(keys.make_stream_key(seed, keys.INIT_STREAM)), optimizer, ema_decay
        )

    shapes = state_shapes(init, optimizer, mesh, ema_decay)
    return jax.jit(fresh, out_shardings=jax.tree.map(lambda x: x.sharding, shapes))()


def state_shapes(
    init: collections.abc.Callable,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    ema_decay: float = 0.0,
) -> State:
    """Returns the shapes and shardings of a state of `create_state`. Allocates nothing.

    Raises:
        ConfigError: The mesh does not divide a parameter.
    """
    params = jax.eval_shape(init, keys.make_key(0))
    shapes = jax.eval_shape(lambda params: _initial_state(params, optimizer, ema_decay), params)
    return sharding.sharded_shapes(shapes, mesh)


def _initial_state(
    params: dict, optimizer: optax.GradientTransformation, ema_decay: float
) -> State:
    average = jax.tree.map(jnp.zeros_like, params) if ema_decay else None
    return State(jnp.zeros((), jnp.int32), params, optimizer.init(params), average)


class _GradientAndSums(typing.NamedTuple):
    """The gradient of a loss that is a sum over rows, and the sums."""

    gradient: dict
    sums: loss.Sums


def _gradient_on_device(
    loss_fn: LossFn, accumulate: int, params: dict, key: Key[Array, ""], batch, row_numbers
) -> _GradientAndSums:
    """Returns this device's part of the gradient, and the loss sums of all devices.

    The device adds up the gradient of its own rows over the microbatches. Then the devices' sums
    are added, once.
    """

    def loss_and_sums(variables, batch, row_numbers):
        sums = loss_fn(fsdp.parameters(variables, params), batch, row_numbers, key, True)
        return sums.loss_nats, sums

    gradient_of = jax.grad(loss_and_sums, has_aux=True)
    # For a stacked parameter sharded over `fsdp` this is a zero array of the whole shape
    # (stack.ShardedParameter), so that its gradient is that of the whole parameter.
    variables = fsdp.differentiable(params)
    if accumulate == 1:
        gradient, sums = gradient_of(variables, batch, row_numbers)
    else:
        parts = _microbatches((batch, row_numbers), accumulate)

        def add(total, part):
            return jax.tree.map(jnp.add, total, gradient_of(variables, *part)), None

        shapes = jax.eval_shape(gradient_of, variables, *jax.tree.map(lambda x: x[0], parts))
        zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        (gradient, sums), _ = jax.lax.scan(add, zero, parts)
    return _GradientAndSums(fsdp.sum_gradient(gradient), fsdp.sum_over_devices(sums))


def _microbatches(rows, count: int):
    """Divides the rows of a tree of arrays: a new first axis counts the microbatches.

    Microbatch i has the rows i, i + count, i + 2 count, ...
    """
    return jax.tree.map(
        lambda x: x.reshape(len(x) // count, count, *x.shape[1:]).swapaxes(0, 1), rows
    )


def _row_numbers(batch) -> UInt32[Array, " B"]:
    """Returns the numbers of the rows in the global batch."""
    return jnp.arange(jax.tree.leaves(batch)[0].shape[0], dtype=jnp.uint32)


def _updated(
    state: tuple, gradient: dict, optimizer: optax.GradientTransformation, ema_decay: float
) -> tuple:
    """Returns the state after one optimiser step. The step number is that before it."""
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    state = state._replace(params=params, opt_state=opt_state)
    if ema_decay:
        average = optimizers.moving_average(state.average, params, ema_decay, state.step + 1)
        state = state._replace(average=average)
    return state


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    state: tuple,
    seed: int,
    accumulate: int,
    mesh: jax.sharding.Mesh,
    ema_decay: float = 0.0,
):
    """Returns the training step: (state, batch) -> (state, metrics), one optimiser step.

    The gradient is that of the loss summed over the whole batch, all devices and microbatches
    included. It is divided once by the count of the sums.

    Args:
        loss_fn: Sums of the loss over a batch.
        optimizer: The optimiser.
        state: Gives structure and shapes of the state. A named tuple with the fields step, params
            and opt_state, and average if `ema_decay` is set. Other fields are passed through.
        seed: Seed of masks and dropout.
        accumulate: Number of microbatches.
        mesh: Devices.
        ema_decay: Decay of the moving average in `state.average`. 0: there is none.

    Returns:
        The step. It is compiled at its first call. It donates the buffers of the state. Metrics are
        scalars: loss (mean, in nats), accuracy, grad_norm (before clipping), and count, by which
        the sums are divided.
    """
    specs = fsdp.specs(state.params)
    gradient_of_batch = fsdp.each_device(
        functools.partial(_gradient_on_device, loss_fn, accumulate),
        mesh,
        specs,
        _GradientAndSums(specs, PartitionSpec()),
    )

    def train_step(state, batch):
        key = jax.random.fold_in(keys.make_stream_key(seed, keys.TRAIN_STREAM), state.step)
        gradient, sums = gradient_of_batch(state.params, key, batch, _row_numbers(batch))
        count = jnp.maximum(sums.count, 1.0)
        # XLA rounds in another way if the divisions share `count`. Resumed runs need the same bits.
        gradient = jax.tree.map(lambda g: g / jnp.maximum(sums.count, 1.0), gradient)
        state = _updated(state, gradient, optimizer, ema_decay)
        metrics = {
            "loss": sums.loss_nats / count,
            "accuracy": sums.correct / count,
            "grad_norm": optax.tree.norm(gradient),
            "count": sums.count,
        }
        return state._replace(step=state.step + 1), metrics

    shardings = sharding.shardings_of(state, mesh)
    return jax.jit(
        train_step,
        in_shardings=(shardings, NamedSharding(mesh, sharding.BATCH)),
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=0,
    )


class AbstractStep(typing.NamedTuple):
    """A training step, and the shapes and shardings of its arguments.

    `train_step.lower(state, batch).compile()` compiles it.
    """

    train_step: collections.abc.Callable
    state: State
    batch: jax.ShapeDtypeStruct


def abstract(experiment: config.Experiment, mesh: jax.sharding.Mesh) -> AbstractStep:
    """Returns the training step of an experiment, without allocating anything.

    The devices of the mesh need not exist on this machine. The vocabulary is assumed to have
    `Vocabulary.size` ids.
    """
    size, run = experiment.vocabulary.size, experiment.run
    special = config.SpecialIds.of_size(size)
    graph, init = maelm.create(experiment.model, size, special)
    optimizer = optimizers.create(experiment.optimizer, run.train_steps)
    state = state_shapes(init, optimizer, mesh, experiment.optimizer.ema_decay)
    shape, rows = (run.batch_size, experiment.corpus.sequence_length), sharding.BATCH
    batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, rows))
    loss_fn = pretraining_loss(experiment, graph, special)
    train_step = make_train_step(
        loss_fn, optimizer, state, run.seed, run.accumulate, mesh, experiment.optimizer.ema_decay
    )
    return AbstractStep(train_step, state, batch)


def make_eval_step(loss_fn: LossFn, state: State, seed: int, mesh: jax.sharding.Mesh):
    """Returns the evaluation step: (params, batch, first row number) -> Sums over all devices.

    The key depends on the seed only, so every evaluation has the same masks.
    """

    def sums(params, key, batch, numbers):
        gathered = fsdp.parameters(fsdp.differentiable(params), params)
        return fsdp.sum_over_devices(loss_fn(gathered, batch, numbers, key, False))

    def eval_step(params: dict, batch, first):
        key = keys.make_stream_key(seed, keys.EVALUATION_STREAM)
        numbers = first + _row_numbers(batch)
        return fsdp.each_device(sums, mesh, fsdp.specs(params), PartitionSpec())(
            params, key, batch, numbers
        )

    everywhere = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, sharding.BATCH)
    return jax.jit(
        eval_step,
        in_shardings=(sharding.shardings_of(state.params, mesh), rows, everywhere),
        out_shardings=everywhere,
    )
