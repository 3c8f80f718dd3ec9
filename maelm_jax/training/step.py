"""The training step: pure, flag-free, on any mesh. State is {step, params, opt_state}; everything random is a function of (seed, step)."""

import collections.abc
import typing

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Int, Key, UInt32

from maelm_jax import config
from maelm_jax.model import loss, maelm, masking
from maelm_jax.training import sharding

LossFn = collections.abc.Callable[..., loss.Sums]  # (params, batch, row_numbers, key, train) -> sums over the batch


class State(typing.NamedTuple):
    step: Int[Array, ""]  # optimiser steps done
    params: dict
    opt_state: optax.OptState


def pretraining_loss(experiment: config.Experiment, graph, special: config.SpecialIds) -> LossFn:
    """Draws the masks of a batch of rows and sums the loss over its masked positions.

    The masks are a function of (key, the row's number in the global batch): the same on every mesh, host count and accumulation.
    """
    sizes = masking.budget(experiment.masking, experiment.corpus.sequence_length)

    def loss_fn(params: dict, rows: Int[Array, "B L"], numbers: UInt32[Array, " B"], key: Key[Array, ""], train: bool) -> loss.Sums:
        mask_key, dropout_key = jax.random.split(key)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(mask_key, numbers)
        inputs = masking.draw(keys, rows, experiment.masking, sizes, special)
        dropout_key = jax.random.fold_in(dropout_key, numbers[0]) if train else None  # microbatches differ
        return loss.masked_cross_entropy(maelm.apply(graph, params)(inputs, dropout_key), inputs)

    return loss_fn


def create_state(init: collections.abc.Callable, optimizer: optax.GradientTransformation, seed: int, mesh: jax.sharding.Mesh) -> State:
    """A fresh state, born sharded: no device ever holds more than its part."""

    def fresh():
        params = init(jax.random.fold_in(jax.random.key(seed), 0))
        return State(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    return jax.jit(fresh, out_shardings=sharding.tree(jax.eval_shape(fresh), mesh))()


def make_train_step(loss_fn: LossFn, optimizer: optax.GradientTransformation, state: tuple, seed: int, accumulate: int, mesh: jax.sharding.Mesh):
    """(state, batch) -> (state, metrics): one optimiser step. The state given is used up (donated): a State, or a named tuple with more fields,
    which are handed on.

    Metrics are scalars: loss (nats per predicted token), accuracy, grad_norm (before clipping), count. The gradient is that of the
    sum of losses over the global, accumulated batch, divided once by the number of predicted tokens in it.
    """

    def train_step(state, batch):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), state.step)

        def sums(params, batch, numbers):
            total = loss_fn(params, batch, numbers, key, True)
            return total.loss, total

        gradient_of = jax.grad(sums, has_aux=True)
        size = jax.tree.leaves(batch)[0].shape[0]
        numbers = jnp.arange(size, dtype=jnp.uint32)
        if accumulate == 1:
            gradient, total = gradient_of(state.params, batch, numbers)
        else:
            # Microbatch i takes rows i, i + accumulate, ...: then every device keeps working on the rows it holds.
            parts = jax.tree.map(lambda x: x.reshape(size // accumulate, accumulate, *x.shape[1:]).swapaxes(0, 1), (batch, numbers))

            def add(carry, part):
                return jax.tree.map(jnp.add, carry, gradient_of(state.params, *part)), None

            zero = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient_of, state.params, *jax.tree.map(lambda x: x[0], parts))
            )
            (gradient, total), _ = jax.lax.scan(add, zero, parts)
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
    everywhere = NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(train_step, in_shardings=(shardings, rows), out_shardings=(shardings, everywhere), donate_argnums=0)


def make_eval_step(loss_fn: LossFn, state: State, seed: int, mesh: jax.sharding.Mesh):
    """(params, batch, first row number) -> Sums. The key depends on the seed alone: the same masks at every evaluation."""

    def eval_step(params: dict, batch, first):
        key = jax.random.fold_in(jax.random.key(seed), 2)
        size = jax.tree.leaves(batch)[0].shape[0]
        return loss_fn(params, batch, first + jnp.arange(size, dtype=jnp.uint32), key, False)

    everywhere = NamedSharding(mesh, jax.sharding.PartitionSpec())
    rows = NamedSharding(mesh, sharding.BATCH)
    return jax.jit(eval_step, in_shardings=(sharding.tree(state.params, mesh), rows, everywhere), out_shardings=everywhere)
