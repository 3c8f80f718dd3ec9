"""Kinds of labels: one class of several, any number of labels, or a score.

A kind reads the labels of a file, computes the loss of a model's scores, and says what the scores
mean. Axis letters: n examples, C classes.
"""

import abc
import dataclasses
import math
import typing

import jax.numpy as jnp
import numpy as np
import optax
import scipy.special
import sklearn.utils

from maelm_jax import config
from maelm_jax.finetuning import labelled_data

Value = int | float | tuple[int, ...]  # a class, a score, or the classes of a text


class Losses(typing.NamedTuple):
    """Losses of a batch, and which predictions are right. Both have the shape of the classes."""

    losses: jnp.ndarray
    right: jnp.ndarray


@dataclasses.dataclass(frozen=True)
class Labels(abc.ABC):
    """A kind of labels. The subclasses are the kinds.

    Attributes:
        names: The names of the classes; empty without classes.
        weights: A weight of each class in the loss; empty for 1.
        separator: What stands between the labels of a text in a file, and in predictions; None if a
            text has one label.
    """

    names: tuple[str, ...] = ()
    weights: tuple[float, ...] = dataclasses.field(default=(), kw_only=True)
    separator: typing.ClassVar[str | None] = None

    @property
    def outputs(self) -> int:
        """The number of scores that a model computes."""
        return len(self.names)

    @property
    @abc.abstractmethod
    def has_stock_class(self) -> bool:
        """Whether a class of transformers predicts as `predict`. If not, exports are refused."""

    @property
    @abc.abstractmethod
    def metrics(self) -> tuple[str, ...]:
        """Names in `metrics.METRICS` for a task without metrics of its own, the main one first."""

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """What can stand in a file, in words."""

    @abc.abstractmethod
    def parse(self, names: list[str]) -> Value | None:
        """Returns the value of the names of labels in a cell, or None if one is unknown."""

    def read(self, row: labelled_data.Row, column: str) -> Value:
        """Returns the value in a cell. Raises ConfigError if it is none of this kind."""
        names = row.names(column, self.separator)
        value = self.parse(names)
        if value is None:
            unknown = next(name for name in names if name not in self.names)
            raise config.ConfigError(
                f"{row.location}: unknown label {unknown[:50]!r} in column {column}; known are "
                f"{self.description[:200]}"
            )
        return value

    @abc.abstractmethod
    def targets(self, values: list[Value | None]) -> np.ndarray:
        """Returns what a model learns, [n, ...]. A value that was not read becomes any target."""

    @abc.abstractmethod
    def losses(self, scores: jnp.ndarray, targets: jnp.ndarray) -> Losses:
        """Computes the loss of each example from scores [..., C]."""

    @abc.abstractmethod
    def predict(self, scores: np.ndarray) -> np.ndarray:
        """Returns predictions of the form of `targets` from scores [n, C]."""

    @abc.abstractmethod
    def values(self, predicted: np.ndarray) -> list:
        """Returns predictions, or targets, as values: a name, a list of names, or a score."""

    @abc.abstractmethod
    def texts(self, predicted: np.ndarray) -> list[str]:
        """Returns predictions, or targets, as they stand in a file."""

    @abc.abstractmethod
    def certainties(self, scores: np.ndarray) -> list:
        """Returns the probability of each predicted value, or of each of its labels.

        It is None for a score.
        """

    @abc.abstractmethod
    def probabilities(self, scores: np.ndarray) -> np.ndarray:
        """Returns the probability of each class, float64 [n, C]; [n, 0] without classes."""

    @abc.abstractmethod
    def balanced(self, targets: np.ndarray) -> typing.Self:
        """Returns the kind with weights that make the labels of `targets` weigh the same.

        A label without an example has the weight 1. Raises ConfigError without classes.
        """

    @abc.abstractmethod
    def count(self, targets: np.ndarray) -> np.ndarray:
        """Returns the number of examples that have each label, [C]."""

    @abc.abstractmethod
    def constant_scores(self, targets: np.ndarray) -> np.ndarray:
        """Returns scores, float32 [C], that always predict what is most frequent in `targets`."""


@dataclasses.dataclass(frozen=True)
class OneOf(Labels):
    """One class. The loss is the cross-entropy. Targets are int32 [n]."""

    has_stock_class = True

    @property
    def metrics(self):
        return ("accuracy", "macro_f1", "f1") if len(self.names) == 2 else ("accuracy", "macro_f1")

    @property
    def description(self):
        return ", ".join(self.names)

    def parse(self, names):
        (name,) = names
        return self.names.index(name) if name in self.names else None

    def targets(self, values):
        return np.asarray([value or 0 for value in values], np.int32)

    def losses(self, scores, targets):
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, targets)
        if self.weights:
            losses *= jnp.asarray(self.weights, jnp.float32)[targets]
        return Losses(losses, jnp.argmax(scores, axis=-1).astype(targets.dtype) == targets)

    def predict(self, scores):
        return scores.argmax(axis=1)

    def values(self, predicted):
        return [self.names[number] for number in predicted]

    texts = values

    def certainties(self, scores):
        return self.probabilities(scores).max(axis=1).tolist()

    def probabilities(self, scores):
        return scipy.special.softmax(scores.astype(np.float64), axis=1)

    def balanced(self, targets):
        """The mean weight of the examples is 1. A class weighs n / (classes x its examples)."""
        weights, present = np.ones(len(self.names)), np.unique(targets)
        weights[present] = sklearn.utils.compute_class_weight(
            "balanced", classes=present, y=targets
        )
        return dataclasses.replace(self, weights=tuple(weights.tolist()))

    def count(self, targets):
        return np.bincount(targets, minlength=len(self.names))

    def constant_scores(self, targets):
        return self.count(targets).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class AnyOf(Labels):
    """Several labels, or none. Targets are float32 [n, C]: 1 where the text has the label.

    The loss is the mean of the binary cross-entropies of all labels. An example is right when all
    its labels are. A label is predicted where its probability is above 0.5.
    """

    separator: str = ","

    has_stock_class = True

    @property
    def metrics(self):
        return ("micro_f1", "macro_f1", "exact_match")

    @property
    def description(self):
        return ", ".join(self.names)

    def parse(self, names):
        if not set(names) <= set(self.names):
            return None
        return tuple(map(self.names.index, names))

    def targets(self, values):
        has_label = np.zeros((len(values), len(self.names)), np.float32)
        for row, classes in zip(has_label, values, strict=True):
            row[list(classes or ())] = 1
        return has_label

    def losses(self, scores, targets):
        losses = optax.sigmoid_binary_cross_entropy(scores, targets)
        if self.weights:
            weights = jnp.asarray(self.weights, jnp.float32)
            losses *= jnp.where(targets > 0, weights, 1.0)
        return Losses(losses.mean(axis=-1), ((scores > 0) == (targets > 0)).all(axis=-1))

    def predict(self, scores):
        return (scores > 0).astype(np.float32)

    def values(self, predicted):
        names = np.asarray(self.names, object)
        return [names[row > 0].tolist() for row in predicted]

    def texts(self, predicted):
        return list(map(self.separator.join, self.values(predicted)))

    def certainties(self, scores):
        rows = zip(self.probabilities(scores), self.predict(scores), strict=True)
        return [of_text[predicted > 0].tolist() for of_text, predicted in rows]

    def probabilities(self, scores):
        return scipy.special.expit(scores.astype(np.float64))

    def balanced(self, targets):
        """The loss of a label that a text has is multiplied by texts without it / with it."""
        counts = self.count(targets)
        ratios = np.maximum(len(targets) - counts, 1) / np.maximum(counts, 1)
        weights = np.where(counts > 0, ratios, 1.0)
        return dataclasses.replace(self, weights=tuple(weights.tolist()))

    def count(self, targets):
        return targets.sum(axis=0).astype(int)

    def constant_scores(self, targets):
        return (targets.mean(axis=0) - 0.5).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Score(Labels):
    """A score from `low` to `high`. Targets are float32 [n], from 0 to 1.

    The loss is the squared error of the target. An example is right when its target is less than
    0.1 away. With `is_cut`, no prediction is outside of the range.
    """

    low: float = 0.0
    high: float = 1.0
    is_cut: bool = True

    has_stock_class = True

    @property
    def outputs(self):
        return 1

    @property
    def metrics(self):
        return ("spearman", "pearson")

    @property
    def description(self):
        return f"numbers from {self.low:.7g} to {self.high:.7g}"

    def parse(self, names):
        try:
            score = float(names[0])
        except ValueError:
            score = math.nan
        return score if self.low <= score <= self.high else None

    def targets(self, values):
        scores = np.asarray([self.low if value is None else value for value in values])
        return ((scores - self.low) / (self.high - self.low)).astype(np.float32)

    def losses(self, scores, targets):
        errors = scores[:, 0] - targets
        return Losses(errors**2, jnp.abs(errors) < 0.1)

    def predict(self, scores):
        return scores[:, 0]

    def values(self, predicted):
        scores = self.low + predicted.astype(np.float64) * (self.high - self.low)
        return (np.clip(scores, self.low, self.high) if self.is_cut else scores).tolist()

    def texts(self, predicted):
        return [f"{score:.7g}" for score in self.values(predicted)]

    def certainties(self, scores):
        return [None] * len(scores)

    def probabilities(self, scores):
        return np.zeros((len(scores), 0))

    def balanced(self, targets):
        raise config.ConfigError(
            "Finetune.class_weights = 'balanced' needs classes, and the task has scores. "
            "Leave it out"
        )

    def count(self, targets):
        return np.zeros(0, int)

    def constant_scores(self, targets):
        return targets.mean(keepdims=True)
