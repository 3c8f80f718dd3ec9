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
from jaxtyping import Array, Float, Int, Key, UInt32

from maelm_jax.model import keys, loss
from maelm_jax.training import fsdp, sharding

# (params, batch, row_numbers, key, train) -> sums over the batch. `row_numbers` are the numbers of
# the rows in the global batch, uint32 [B]. `train` is False in evaluations.
LossFn = collections.abc.Callable[..., loss.Sums]


class State(typing.NamedTuple):
    """The state of pretraining."""

    step: Int[Array, ""]  # optimiser steps of this run
    params: dict
    opt_state: optax.OptState


# On CPU, the program that makes a fresh state runs once: compiling it takes longer than running it.
COMPILED_QUICKLY = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # the compiler of jax 0.11.2 has no such option
    COMPILED_QUICKLY["xla_cpu_use_fusion_emitters"] = False


def create_state(
    init: collections.abc.Callable,
    optimizer: optax.GradientTransformation,
    seed: int,
    mesh: jax.sharding.Mesh,
) -> State:
    """Creates a fresh state. It is created sharded: no device ever holds more than its part.

    `init` maps a key to parameters.
    """

    def fresh():
        return _initial_state(init(keys.make_stream_key(seed, keys.INIT_STREAM)), optimizer)

    shardings = jax.tree.map(lambda x: x.sharding, state_shapes(init, optimizer, mesh))
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    options = COMPILED_QUICKLY if is_cpu else None
    return jax.jit(fresh, out_shardings=shardings, compiler_options=options)()


def state_shapes(
    init: collections.abc.Callable,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
) -> State:
    """Returns the shapes and shardings of a state of `create_state`. Allocates nothing.

    Raises ConfigError if the mesh does not divide a parameter.
    """
    params = jax.eval_shape(init, keys.make_key(0))
    shapes = jax.eval_shape(lambda params: _initial_state(params, optimizer), params)
    return sharding.sharded_shapes(shapes, mesh)


def _initial_state(params: dict, optimizer: optax.GradientTransformation) -> State:
    return State(jnp.zeros((), jnp.int32), params, optimizer.init(params))


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
        weights = fsdp.weights_of(variables, params)
        sums = loss_fn(weights, batch, row_numbers, key, True)
        return sums.loss_nats, sums

    gradient_of = jax.grad(loss_and_sums, has_aux=True)
    variables = fsdp.variables_of(params)
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

    The rows of a microbatch follow each other, so that the same rows are causal for any `count`.
    """
    return jax.tree.map(lambda x: x.reshape(count, len(x) // count, *x.shape[1:]), rows)


def _row_numbers(batch) -> UInt32[Array, " B"]:
    """Returns the numbers of the rows in the global batch."""
    return jnp.arange(jax.tree.leaves(batch)[0].shape[0], dtype=jnp.uint32)


def make_train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    state: tuple,
    seed: int,
    accumulate: int,
    mesh: jax.sharding.Mesh,
):
    """Returns the training step: (state, batch, learning rate) -> (state, metrics).

    The gradient is that of the loss summed over the whole batch, all devices and microbatches
    included. It is divided once by the count of the sums. `state` gives structure and shapes: a
    named tuple with the fields step, params and opt_state. Other fields are passed through.

    The step is compiled at its first call. It donates the buffers of the state. Metrics are
    scalars: loss (mean, in nats), accuracy, grad_norm (before clipping), and count, by which the
    sums are divided. causal_loss is the mean over next tokens, if some rows predict them.
    """
    specs = fsdp.specs(state.params)
    gradient_of_batch = fsdp.each_device(
        functools.partial(_gradient_on_device, loss_fn, accumulate),
        mesh,
        specs,
        _GradientAndSums(specs, PartitionSpec()),
    )

    def train_step(state, batch, learning_rate: Float[Array, ""]):
        key = jax.random.fold_in(keys.make_stream_key(seed, keys.TRAIN_STREAM), state.step)
        gradient, sums = gradient_of_batch(state.params, key, batch, _row_numbers(batch))
        count = jnp.maximum(sums.count, 1.0)
        # XLA rounds in another way if the divisions share `count`. Resumed runs need the same bits.
        gradient = jax.tree.map(lambda g: g / jnp.maximum(sums.count, 1.0), gradient)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p + learning_rate * u, state.params, updates)
        metrics = {
            "loss": sums.loss_nats / count,
            "accuracy": sums.correct / count,
            "grad_norm": optax.tree.norm(gradient),
            "count": sums.count,
        }
        if sums.causal_count is not None:
            metrics["causal_loss"] = sums.causal_nats / jnp.maximum(sums.causal_count, 1.0)
        state = state._replace(step=state.step + 1, params=params, opt_state=opt_state)
        return state, metrics

    shardings = sharding.shardings_of(state, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        train_step,
        in_shardings=(shardings, NamedSharding(mesh, sharding.BATCH), everywhere),
        out_shardings=(shardings, everywhere),
        donate_argnums=0,
    )


def make_eval_step(loss_fn: LossFn, params: dict, seed: int, mesh: jax.sharding.Mesh):
    """Returns the evaluation step: (params, batch, first row number) -> Sums over all devices.

    The key depends on the seed only, so every evaluation has the same masks. `params` gives the
    structure and the shapes of the parameters.
    """

    def sums(params, key, batch, row_numbers):
        weights = fsdp.weights_of(fsdp.variables_of(params), params)
        return fsdp.sum_over_devices(loss_fn(weights, batch, row_numbers, key, False))

    def eval_step(params: dict, batch, first):
        key = keys.make_stream_key(seed, keys.EVALUATION_STREAM)
        row_numbers = first + _row_numbers(batch)
        return fsdp.each_device(sums, mesh, fsdp.specs(params), PartitionSpec())(
            params, key, batch, row_numbers
        )

    everywhere = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, sharding.BATCH)
    return jax.jit(
        eval_step,
        in_shardings=(sharding.shardings_of(params, mesh), rows, everywhere),
        out_shardings=everywhere,
    )
