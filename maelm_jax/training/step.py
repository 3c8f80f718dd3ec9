"""The training step: pure, flag-free, on any mesh. State is {step, params, opt_state}; everything random is a function of (seed, step)."""

import collections.abc
import typing

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Key, UInt32

from maelm_jax import config
from maelm_jax.model import keys, loss, maelm, masking
from maelm_jax.training import fsdp, sharding
from maelm_jax.training import optimizer as optimizers

LossFn = collections.abc.Callable[..., loss.Sums]  # (params, batch, row_numbers, key, train) -> sums over the batch


class State(typing.NamedTuple):
    step: Int[Array, ""]  # optimiser steps done
    params: dict
    opt_state: optax.OptState


def pretraining_loss(experiment: config.Experiment, graph, special: config.SpecialIds) -> LossFn:
    """Draws the masks of a batch of rows and sums the loss over its masked positions.

    Masks and dropout are functions of (key, the row's number in the global batch): the same on every mesh, host count and accumulation.
    """
    sizes = masking.budget(experiment.masking, experiment.corpus.sequence_length)

    def loss_fn(params: dict, rows: Int[Array, "B L"], numbers: UInt32[Array, " B"], key: Key[Array, ""], train: bool) -> loss.Sums:
        mask_keys, dropout_keys = (jax.vmap(jax.random.fold_in, in_axes=(None, 0))(k, numbers) for k in jax.random.split(key))
        inputs = masking.draw(mask_keys, rows, experiment.masking, sizes, special)
        prediction = maelm.apply(graph, params).predict(inputs, dropout_keys if train else None)
        return loss.masked_cross_entropy(prediction, inputs, experiment.model.logit_tile)

    return loss_fn


def create_state(init: collections.abc.Callable, optimizer: optax.GradientTransformation, seed: int, mesh: jax.sharding.Mesh) -> State:
    """A fresh state, born sharded: no device ever holds more than its part."""

    def fresh():
        params = init(jax.random.fold_in(keys.of_seed(seed), 0))
        return State(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    return jax.jit(fresh, out_shardings=sharding.tree(jax.eval_shape(fresh), mesh))()


def make_train_step(loss_fn: LossFn, optimizer: optax.GradientTransformation, state: tuple, seed: int, accumulate: int, mesh: jax.sharding.Mesh):
    """(state, batch) -> (state, metrics): one optimiser step. The state given is used up (donated): a State, or a named tuple with more fields,
    which are handed on.

    Metrics are scalars: loss (nats per predicted token), accuracy, grad_norm (before clipping), count. The gradient is that of the
    sum of losses over the global, accumulated batch, divided once by the number of predicted tokens in it. Each device adds up its own
    rows' part of it, over the microbatches too; then it is summed over the devices, once.
    """

    def gradient_and_sums(params, key, batch, numbers):
        """On one device: its rows, its part of the parameters; its part of the whole gradient."""

        def sums(variables, batch, numbers):
            total = loss_fn(fsdp.parameters(variables, params), batch, numbers, key, True)
            return total.loss, total

        gradient_of = jax.grad(sums, has_aux=True)
        variables, rows = fsdp.variables(params), len(numbers)
        if accumulate == 1:
            gradient, total = gradient_of(variables, batch, numbers)
        else:
            parts = jax.tree.map(lambda x: x.reshape(rows // accumulate, accumulate, *x.shape[1:]).swapaxes(0, 1), (batch, numbers))

            def add(carry, part):
                return jax.tree.map(jnp.add, carry, gradient_of(variables, *part)), None

            shapes = jax.eval_shape(gradient_of, variables, *jax.tree.map(lambda x: x[0], parts))
            zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            (gradient, total), _ = jax.lax.scan(add, zero, parts)
        return fsdp.reduced(gradient), fsdp.summed(total)

    def train_step(state, batch):
        key = jax.random.fold_in(jax.random.fold_in(keys.of_seed(seed), 1), state.step)
        numbers = jnp.arange(jax.tree.leaves(batch)[0].shape[0], dtype=jnp.uint32)
        specs = fsdp.specs(state.params)
        gradient, total = fsdp.each_device(gradient_and_sums, mesh, specs, (specs, PartitionSpec()))(state.params, key, batch, numbers)
        gradient = jax.tree.map(lambda g: g / jnp.maximum(total.count, 1.0), gradient)
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        metrics = {
            "loss": total.loss / jnp.maximum(total.count, 1.0),
            "accuracy": total.correct / jnp.maximum(total.count, 1.0),
            "grad_norm": optax.tree.norm(gradient),
            "count": total.count,
        }
        params = optax.apply_updates(state.params, updates)
        return state._replace(step=state.step + 1, params=params, opt_state=opt_state), metrics

    shardings = sharding.tree(state, mesh)
    rows = NamedSharding(mesh, sharding.BATCH)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(train_step, in_shardings=(shardings, rows), out_shardings=(shardings, everywhere), donate_argnums=0)


def abstract(experiment: config.Experiment, mesh: jax.sharding.Mesh):
    """(train step, state, batch) of the experiment, state and batch as shapes with shardings: for `train_step.lower(state, batch).compile()`.

    The vocabulary is taken to have `Vocabulary.size` ids; nothing is allocated, and the mesh may be of devices that are not here.
    """
    size, run = experiment.vocabulary.size, experiment.run
    special = config.SpecialIds.of_size(size)
    graph, init = maelm.create(experiment.model, size, special)
    updates = optimizers.create(experiment.optimizer, run.train_steps)

    def fresh(key):
        params = init(key)
        return State(jnp.zeros((), jnp.int32), params, updates.init(params))

    shapes = jax.eval_shape(fresh, keys.of_seed(0))
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, sharding.tree(shapes, mesh))
    rows = NamedSharding(mesh, sharding.BATCH)
    batch = jax.ShapeDtypeStruct((run.batch_size, experiment.corpus.sequence_length), jnp.int32, sharding=rows)
    return make_train_step(pretraining_loss(experiment, graph, special), updates, state, run.seed, run.accumulate, mesh), state, batch


def make_eval_step(loss_fn: LossFn, state: State, seed: int, mesh: jax.sharding.Mesh):
    """(params, batch, first row number) -> Sums. The key depends on the seed alone: the same masks at every evaluation."""

    def sums(params, key, batch, numbers):
        total = loss_fn(fsdp.parameters(fsdp.variables(params), params), batch, numbers, key, False)
        return fsdp.summed(total)

    def eval_step(params: dict, batch, first):
        key = jax.random.fold_in(keys.of_seed(seed), 2)
        numbers = first + jnp.arange(jax.tree.leaves(batch)[0].shape[0], dtype=jnp.uint32)
        return fsdp.each_device(sums, mesh, fsdp.specs(params), PartitionSpec())(params, key, batch, numbers)

    everywhere = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, sharding.BATCH)
    return jax.jit(eval_step, in_shardings=(sharding.tree(state.params, mesh), rows, everywhere), out_shardings=everywhere)
