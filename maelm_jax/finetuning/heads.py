"""Heads for fine-tuning, their losses and predictions. A classifier is that of the family.

Axis letters: B rows, T slots, D width, C classes.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key, UInt32

from maelm_jax import config
from maelm_jax.encoders import families
from maelm_jax.finetuning.batches import Batch
from maelm_jax.finetuning.features import NO_LABEL
from maelm_jax.finetuning.task_data import Head
from maelm_jax.finetuning.windows import BEST, Spans
from maelm_jax.model import keys, layers, loss, maelm, ops
from maelm_jax.model.positions import MASKED_OUT


class Classifier(nnx.Module):
    """Scores of C classes or labels from states. C = 1 is a regression.

    The layers are those of the family: dropout (in some), linear D to D, an activation, LayerNorm
    (in some), dropout, linear D to C.
    """

    def __init__(self, settings: config.Model, classes: int, rngs: nnx.Rngs):
        self.style = families.choose_family(settings).classifier
        width = settings.width
        self.dense = layers.Linear(width, width, settings, rngs, self.style.has_bias)
        if self.style.has_norm:
            self.norm = layers.LayerNorm(settings)
        self.out = layers.Linear(width, classes, settings, rngs)
        self.rate = settings.dropout

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


class TokenClassifier(nnx.Module):
    """Scores of C classes of each slot: dropout, linear D to C. It is that of stock models."""

    def __init__(self, settings: config.Model, classes: int, rngs: nnx.Rngs):
        self.out = layers.Linear(settings.width, classes, settings, rngs)
        self.rate = settings.dropout

    def __call__(
        self, states: Float[Array, "B T D"], keys: Key[Array, " B"] | None
    ) -> Float[Array, "B T C"]:
        return self.out(ops.dropout(states, self.rate, keys)).astype(jnp.float32)


class FineTuned(nnx.Module):
    """The encoder with one head: `classifier`, `span` or `token`, by the kind of head.

    `classifier` scores the row, `span` each slot as the start and as the end of an answer, `token`
    the class of each slot.
    """

    def __init__(
        self,
        settings: config.Model,
        vocabulary_size: int,
        pad_id: int,
        head: Head,
        rngs: nnx.Rngs,
    ):
        self.encoder = maelm.Encoder(settings, vocabulary_size, pad_id, rngs)
        self.kind = head.kind
        self.transforms_tokens = families.choose_family(settings).classifier.transforms_tokens
        if head.kind == "sentence":
            self.classifier = Classifier(settings, head.classes, rngs)
        elif head.kind == "span" and self.transforms_tokens:
            self.span = Classifier(settings, head.classes, rngs)
        elif head.kind == "span":
            self.span = layers.Linear(settings.width, head.classes, settings, rngs)
        elif self.transforms_tokens:
            self.token = Classifier(settings, head.classes, rngs)
        else:
            self.token = TokenClassifier(settings, head.classes, rngs)
        self.has_pair_types = families.choose_pair_format(settings).has_types

    def __call__(self, batch: Batch, keys: Key[Array, " B"] | None = None) -> Float[Array, "B ..."]:
        """Scores of the head.

        Args:
            batch: The rows.
            keys: Keys of dropout, one a row; None without dropout.

        Returns:
            float32 [B, C] of `classifier`, [B, T, C] of `token`, or [B, T, 2] of `span`. The last
            is MASKED_OUT at the slots where no answer can start or end.
        """
        slots = jnp.broadcast_to(jnp.arange(batch.ids.shape[1], dtype=jnp.int32), batch.ids.shape)
        keys = ops.split_keys(keys, 2)
        present = slots < batch.lengths[:, None]
        types = None
        if self.has_pair_types:
            begin = batch.context[:, None]
            types = ((begin > 0) & (slots >= begin) & present).astype(jnp.int32)
        states = self.encoder(batch.ids, slots, present.astype(jnp.int32), keys[0], types=types)
        if self.kind == "sentence":
            return self.classifier(states[:, 0], keys[1])
        if self.kind == "token":
            return self.token(states, keys[1])
        # An answer lies in the context: not in the question, the separators or the padding. Slot 0
        # stands for "no answer".
        allowed = (slots == 0) | (
            (slots >= batch.context[:, None]) & (slots < batch.lengths[:, None] - 1)
        )
        scores = self.span(states, keys[1]) if self.transforms_tokens else self.span(states)
        return jnp.where(allowed[:, :, None], scores.astype(jnp.float32), MASKED_OUT)


def create(
    settings: config.Model, vocabulary_size: int, pad_id: int, head: Head
) -> maelm.Definition:
    """Returns the definition of a `FineTuned`."""
    return maelm.define(lambda rngs: FineTuned(settings, vocabulary_size, pad_id, head, rngs))


def _cross_entropy(scores: Float[Array, "... C"], target: Int[Array, "..."]) -> Float[Array, "..."]:
    """Cross-entropy of each target, in nats."""
    of_target = jnp.take_along_axis(scores, target[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(scores, axis=-1) - of_target


def _row_sums(losses, correct, weights: Float[Array, "..."]) -> loss.Sums:
    """Sums of losses and of right predictions, both [...], with their weights."""
    return loss.Sums(
        (losses * weights).sum(), (correct.astype(jnp.float32) * weights).sum(), weights.sum()
    )


def _sentence_sums(scores: Float[Array, "B C"], batch: Batch) -> loss.Sums:
    target = batch.targets
    if target.ndim == 2:  # several labels
        losses = optax.sigmoid_binary_cross_entropy(scores, target).mean(axis=1)
        return _row_sums(losses, ((scores > 0) == (target > 0)).all(axis=1), batch.weights)
    if target.dtype == jnp.float32:  # a regression
        error = scores[:, 0] - target
        return _row_sums(error**2, jnp.abs(error) < 0.1, batch.weights)
    correct = jnp.argmax(scores, axis=1).astype(target.dtype) == target
    return _row_sums(_cross_entropy(scores, target), correct, batch.weights)


def _span_sums(scores: Float[Array, "B T 2"], batch: Batch) -> loss.Sums:
    by_end = jnp.moveaxis(scores, 2, 1)  # [B, 2, T]
    correct = jnp.argmax(by_end, axis=2).astype(batch.targets.dtype) == batch.targets
    losses = _cross_entropy(by_end, batch.targets).mean(axis=1)
    return _row_sums(losses, correct.all(axis=1), batch.weights)


def _token_sums(scores: Float[Array, "B T C"], batch: Batch) -> loss.Sums:
    target = batch.targets
    labelled = (target != NO_LABEL).astype(jnp.float32) * batch.weights[:, None]
    correct = jnp.argmax(scores, axis=2).astype(target.dtype) == target
    return _row_sums(_cross_entropy(scores, jnp.maximum(target, 0)), correct, labelled)


SUMS = {"sentence": _sentence_sums, "span": _span_sums, "token": _token_sums}


def loss_of(graph: nnx.GraphDef, head: Head):
    """Returns the loss function for training.step.make_train_step.

    The loss of a row is the cross-entropy of its class; if a text can have several labels, the mean
    of the binary cross-entropies of all labels; the mean of the cross-entropies of start and end
    slot; or, in a regression, the squared error of the score, which is from 0 to 1. The sums count
    a row as correct when its class is right; when all labels are; when both slots are; or when its
    score is less than 0.1 away. With a head for tokens, the sums are of labelled slots, not rows.
    """

    def loss_fn(
        params: dict, batch: Batch, numbers: UInt32[Array, " B"], key: Key[Array, ""], train: bool
    ) -> loss.Sums:
        run_key = jax.random.fold_in(key, batch.seed[0])
        dropout_keys = keys.make_row_keys(run_key, numbers) if train else None
        return SUMS[head.kind](maelm.apply(graph, params)(batch, dropout_keys), batch)

    return loss_fn


def predict_of(graph: nnx.GraphDef, head: Head):
    """Returns a function (params, batch) -> predictions.

    They are float32 [B, C] scores of sentences, Spans of the B windows, or int32 [B, T] classes of
    tokens.
    """

    def predict(params: dict, batch: Batch):
        scores = maelm.apply(graph, params)(batch)
        if head.kind == "sentence":
            return scores
        if head.kind == "token":
            return jnp.argmax(scores, axis=2).astype(jnp.int32)
        return _spans(scores)

    return predict


def _spans(scores: Float[Array, "B T 2"]) -> Spans:
    """The highest scores of starts and ends."""
    null = scores[:, 0].sum(axis=1)
    short = max(BEST - scores.shape[1], 0)
    padded = jnp.pad(scores, ((0, 0), (0, short), (0, 0)), constant_values=MASKED_OUT)
    start, start_slot = jax.lax.top_k(padded[:, :, 0], BEST)
    end, end_slot = jax.lax.top_k(padded[:, :, 1], BEST)
    return Spans(start, start_slot, end, end_slot, null)
