"""Heads for fine-tuning, their losses and predictions. A classifier is that of the family.

Axis letters: B rows, T slots, D width, C classes.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key, UInt32

from maelm_jax import config
from maelm_jax.encoders import families
from maelm_jax.finetuning.batches import Batch
from maelm_jax.finetuning.windows import BEST, Spans
from maelm_jax.model import keys, layers, loss, maelm, ops
from maelm_jax.model.positions import MASKED_OUT


class Classifier(nnx.Module):
    """Scores of C classes from the last state of the first token. C = 1 is a regression.

    The layers are dropout (in some families), linear D to D, an activation, dropout, linear D to C.
    """

    def __init__(self, settings: config.Model, classes: int, rngs: nnx.Rngs):
        self.dense = layers.Linear(settings.width, settings.width, settings, rngs)
        self.out = layers.Linear(settings.width, classes, settings, rngs)
        self.rate = settings.dropout
        self.style = families.closest(settings).classifier

    def __call__(
        self, states: Float[Array, "B T D"], keys: Key[Array, " B"] | None
    ) -> Float[Array, "B C"]:
        keys = ops.split_keys(keys, 2)
        x = states[:, 0]
        if self.style.has_input_dropout:
            x = ops.dropout(x, self.rate, keys[0])
        x = ops.ACTIVATIONS[self.style.activation](self.dense(x))
        return self.out(ops.dropout(x, self.rate, keys[1])).astype(jnp.float32)


class FineTuned(nnx.Module):
    """The encoder with one head: `classifier` with `classes` outputs, or `span` if `classes` is 0.

    `span` scores each slot as the start and as the end of an answer.
    """

    def __init__(
        self, settings: config.Model, vocabulary_size: int, pad_id: int, classes: int,
        rngs: nnx.Rngs,
    ):  # fmt: skip
        self.encoder = maelm.Encoder(settings, vocabulary_size, pad_id, rngs)
        if classes:
            self.classifier = Classifier(settings, classes, rngs)
        else:
            self.span = layers.Linear(settings.width, 2, settings, rngs)
        self.classes = classes
        pair = families.closest(settings).pair
        self.has_pair_types = pair.has_types and settings.token_types > 1

    def __call__(self, batch: Batch, keys: Key[Array, " B"] | None = None) -> Float[Array, "B ..."]:
        """Scores of the head.

        Args:
            batch: The rows.
            keys: Keys of dropout, one a row; None without dropout.

        Returns:
            float32 [B, C] of `classifier`, or [B, T, 2] of `span`. The latter is MASKED_OUT at the
            slots where no answer can start or end.
        """
        slots = jnp.broadcast_to(jnp.arange(batch.ids.shape[1], dtype=jnp.int32), batch.ids.shape)
        keys = ops.split_keys(keys, 2)
        present = slots < batch.lengths[:, None]
        types = None
        if self.has_pair_types:
            begin = batch.context[:, None]
            types = ((begin > 0) & (slots >= begin) & present).astype(jnp.int32)
        states = self.encoder(batch.ids, slots, present.astype(jnp.int32), keys[0], types=types)
        if self.classes:
            return self.classifier(states, keys[1])
        # An answer lies in the context: not in the question, the separators or the padding. Slot 0
        # stands for "no answer".
        allowed = (slots == 0) | (
            (slots >= batch.context[:, None]) & (slots < batch.lengths[:, None] - 1)
        )
        return jnp.where(allowed[:, :, None], self.span(states).astype(jnp.float32), MASKED_OUT)


def create(settings: config.Model, vocabulary_size: int, pad_id: int, classes: int):
    """Returns the graph of FineTuned, and `init`, which draws its parameters from a key.

    See maelm.create.
    """

    def init(key):
        return nnx.to_pure_dict(
            nnx.state(
                FineTuned(settings, vocabulary_size, pad_id, classes, nnx.Rngs(key)), nnx.Param
            )
        )

    return nnx.graphdef(
        nnx.eval_shape(lambda: FineTuned(settings, vocabulary_size, pad_id, classes, nnx.Rngs(0)))
    ), init


def _nats(scores: Float[Array, "B C"], target: Int[Array, " B"]) -> Float[Array, " B"]:
    """Cross-entropy of each row, in nats."""
    return (
        jax.nn.logsumexp(scores, axis=1)
        - jnp.take_along_axis(scores, target[:, None], axis=1)[:, 0]
    )


def loss_of(graph: nnx.GraphDef):
    """Returns the loss function for training.step.make_train_step.

    The loss of a row is the cross-entropy of its class; the mean of the cross-entropies of start
    and end slot; or, in a regression, the squared error of the score, which is from 0 to 1. The
    sums count a row as correct when its class is right; when both slots are right; or when its
    score is less than 0.1 away.
    """

    def loss_fn(
        params: dict, batch: Batch, numbers: UInt32[Array, " B"], key: Key[Array, ""], train: bool
    ) -> loss.Sums:
        run_key = jax.random.fold_in(key, batch.seed[0])
        dropout_keys = keys.of_rows(run_key, numbers) if train else None
        scores, target = maelm.apply(graph, params)(batch, dropout_keys), batch.targets
        if scores.ndim == 3:
            each = 0.5 * (
                _nats(scores[:, :, 0], target[:, 0]) + _nats(scores[:, :, 1], target[:, 1])
            )
            correct = (jnp.argmax(scores, axis=1).astype(target.dtype) == target).all(axis=1)
        elif target.dtype == jnp.float32:
            each = (scores[:, 0] - target) ** 2
            correct = jnp.abs(scores[:, 0] - target) < 0.1
        else:
            each = _nats(scores, target)
            correct = jnp.argmax(scores, axis=1).astype(target.dtype) == target
        weights = batch.weights
        return loss.Sums(
            (each * weights).sum(), (correct.astype(jnp.float32) * weights).sum(), weights.sum()
        )

    return loss_fn


def predict_of(graph: nnx.GraphDef):
    """Returns a function (params, batch) -> float32 [B, C] scores, or Spans of the B windows."""

    def predict(params: dict, batch: Batch):
        scores = maelm.apply(graph, params)(batch)
        if scores.ndim == 2:
            return scores
        null = scores[:, 0].sum(axis=1)
        short = max(BEST - scores.shape[1], 0)
        padded = jnp.pad(scores, ((0, 0), (0, short), (0, 0)), constant_values=MASKED_OUT)
        start, start_slot = jax.lax.top_k(padded[:, :, 0], BEST)
        end, end_slot = jax.lax.top_k(padded[:, :, 1], BEST)
        return Spans(start, start_slot, end, end_slot, null)

    return predict
