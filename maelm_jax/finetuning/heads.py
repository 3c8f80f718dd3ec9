"""The model of fine-tuning: an encoder with a head, and the parts that heads are made of.

Axis letters: B rows, T slots, D width, C classes.
"""

import collections.abc
import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key, UInt32

from maelm_jax import config
from maelm_jax.encoders import families
from maelm_jax.finetuning.batches import Batch
from maelm_jax.finetuning.task import Task
from maelm_jax.model import keys, layers, loss, maelm, ops
from maelm_jax.model.kernels.backends import Target


class Classifier(nnx.Module):
    """Scores of C classes or labels from states. C = 1 is a regression.

    The layers are those of the family: dropout (in some), linear D to D, an activation, LayerNorm
    (in some), dropout, linear D to C.
    """

    def __init__(self, model: config.Model, classes: int, rngs: nnx.Rngs):
        self.style = families.choose_family(model.encoder).classifier
        settings, width = model.encoder_settings, model.encoder.width
        self.dense = layers.Linear(width, width, settings, rngs, self.style.has_bias)
        if self.style.has_norm:
            self.norm = layers.LayerNorm(settings)
        self.out = layers.Linear(width, classes, settings, rngs)
        self.rate = model.dropout.hidden

    def pool(self, states: Float[Array, "B T D"], lengths: Int[Array, " B"]) -> Float[Array, "B D"]:
        """Returns the first state of each text, or the mean of its states, as the family has it."""
        if not self.style.pools_mean:
            return states[:, 0]
        slots = jnp.arange(states.shape[1], dtype=jnp.int32)
        present = (slots[None] < lengths[:, None]).astype(jnp.float32)[:, :, None]
        mean = (states.astype(jnp.float32) * present).sum(axis=1) / present.sum(axis=1)
        return mean.astype(states.dtype)

    def __call__(
        self, states: Float[Array, "B *T D"], keys: Key[Array, " B"] | None
    ) -> Float[Array, "B *T C"]:
        keys = ops.split_keys(keys, 2)
        x = states
        if self.style.has_input_dropout:
            x = ops.dropout(x, self.rate, keys[0])
        x = ops.ACTIVATIONS[self.style.activation](self.dense(x))
        if self.style.has_norm:
            x = self.norm(x.reshape(x.shape[0], -1, x.shape[-1])).reshape(x.shape)
        return self.out(ops.dropout(x, self.rate, keys[1])).astype(jnp.float32)


class FineTuned(nnx.Module):
    """An encoder with the head of a task."""

    def __init__(
        self,
        model: config.Model,
        vocabulary_size: int,
        pad_id: int,
        task: Task,
        rngs: nnx.Rngs,
        target: Target | None = None,
    ):
        self.encoder = maelm.Encoder(model, vocabulary_size, pad_id, rngs, target)
        setattr(self, task.module, task.create_head(model, rngs))
        self.task = task
        self.has_pair_types = families.choose_pair_format(model.encoder).has_types

    def __call__(self, batch: Batch, keys: Key[Array, " B"] | None = None) -> Float[Array, "B ..."]:
        """Computes the scores of the head. `keys` are of dropout; None without dropout."""
        slots = jnp.broadcast_to(jnp.arange(batch.ids.shape[1], dtype=jnp.int32), batch.ids.shape)
        keys = ops.split_keys(keys, 2)
        present = slots < batch.lengths[:, None]
        types = None
        if self.has_pair_types:
            begin = batch.context[:, None]
            types = ((begin > 0) & (slots >= begin) & present).astype(jnp.int32)
        states = self.encoder(batch.ids, slots, present.astype(jnp.int32), keys[0], types=types)
        return self.task.scores(getattr(self, self.task.module), states, batch, keys[1])


def define(
    model: config.Model,
    vocabulary_size: int,
    pad_id: int,
    task: Task,
    target: Target | None = None,
) -> maelm.Definition:
    """Returns the definition of a `FineTuned`. `target` is that of `maelm.create`."""
    return maelm.define(lambda rngs: FineTuned(model, vocabulary_size, pad_id, task, rngs, target))


def weighted_sums(losses, right, weights: Float[Array, "..."]) -> loss.Sums:
    """Returns the sums of losses and of right predictions, both [...], with their weights."""
    return loss.Sums(
        (losses * weights).sum(), (right.astype(jnp.float32) * weights).sum(), weights.sum()
    )


def loss_function(graph: nnx.GraphDef, task: Task) -> collections.abc.Callable[..., loss.Sums]:
    """Returns the loss function for training.step.make_train_step."""

    def loss_fn(
        params: dict, batch: Batch, numbers: UInt32[Array, " B"], key: Key[Array, ""], train: bool
    ) -> loss.Sums:
        run_key = jax.random.fold_in(key, batch.seed[0])
        dropout_keys = keys.make_row_keys(run_key, numbers) if train else None
        return task.loss(maelm.apply(graph, params)(batch, dropout_keys), batch)

    return loss_fn


def predict_function(graph: nnx.GraphDef, task: Task) -> collections.abc.Callable[..., typing.Any]:
    """Returns the function (params, batch) -> output of `Task.predict`."""

    def predict(params: dict, batch: Batch) -> typing.Any:
        return task.predict(maelm.apply(graph, params)(batch))

    return predict
