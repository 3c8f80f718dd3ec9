"""Sentence tasks: one or two texts with a class, several labels, or a score."""

import jax.numpy as jnp
import numpy as np
import optax
import scipy.special

from maelm_jax import storage
from maelm_jax.finetuning import glue, heads, metrics
from maelm_jax.finetuning.batches import Features
from maelm_jax.finetuning.task import Column, Encoded, EvaluationSet, Splits, Task


class SentenceTask(Task):
    """A task of GLUE, or the task `own`. `glue.Spec` says which.

    The loss of a row is the cross-entropy of its class; the mean of the binary cross-entropies of
    all labels, if a text can have several; or the squared error of the score, from 0 to 1. A row is
    right when its class is; when all labels are; or when its score is less than 0.1 away.
    """

    names = (*glue.SPECS, glue.OWN)
    module = "classifier"
    ending = ".tsv"

    def __init__(self, name, settings, results=None):
        super().__init__(name, settings, results)
        self.spec = spec = glue.spec_of(name, settings.custom)
        self.labels = spec.labels
        self.selected_by = () if spec.labels else spec.metrics
        self.main_metric = spec.metrics[0]
        # GLUE's columns are the paper's.
        shown = spec.metrics if name == glue.OWN else spec.metrics[:1]
        self.columns = tuple(
            Column(f"{spec.submission(part)} {metric}", f"{part}_{metric}" if part else metric)
            for part in spec.parts
            for metric in shown
        )

        if name == glue.OWN:  # what was found, or named
            labels = f"labels {', '.join(map(repr, spec.labels))}" if spec.labels else "scores"
            found = f"text in {' and '.join(map(repr, spec.texts))}, {labels} in {spec.label!r}"
            f1 = f"; f1 is that of {spec.labels[1]!r}" if "f1" in spec.metrics else ""
            self.notes.append(found + f1)

    # Data.

    def check_files(self):
        if self.name == glue.OWN or self.settings.data_dir is not None:
            glue.find_files(self.spec, self.settings)

    def read(self) -> Splits:
        return glue.read(self.spec, self.settings, self.notes)

    def read_file(self, path, labelled):
        return glue.read_table(self.spec, path, labelled, self.notes)

    def encode(self, examples, input_format, which) -> Encoded:
        """Encodes examples as `<s> A </s>`, those of two texts as `<s> A </s> B </s>`."""
        vocabulary, length, pair = input_format
        columns = zip(*(example.texts for example in examples), strict=True)
        encoded = [input_format.encode(list(texts)) for texts in columns]
        special_tokens = 2 if len(encoded) == 1 else 2 + pair.separators
        cut, rows, starts = 0, [], []
        for parts in zip(*encoded, strict=True):
            sizes = tuple(map(len, parts))
            kept = kept_sizes(sizes, length - special_tokens)
            cut += kept != sizes
            first, *second = (part[:size] for part, size in zip(parts, kept, strict=True))
            if second:
                prefix = input_format.prefix(first)
                row, start = [*prefix, *second[0], vocabulary.eos], len(prefix)
            else:
                row, start = [vocabulary.bos, *first, vocabulary.eos], 0
            rows.append(np.asarray(row, np.int32))
            starts.append(start)
        if cut:
            self.notes.append(f"{which}: {cut} of {len(rows)} examples cut to {length} tokens")
        return Encoded(Features(rows, self._targets(examples), np.asarray(starts, np.int32)))

    def encode_training(self, examples, input_format):
        features = super().encode_training(examples, input_format)
        counts = self._counts(features)
        if unused := [repr(self.labels[number]) for number in np.flatnonzero(counts == 0)]:
            self.notes.append(f"training: no example has the label {', '.join(unused)}")
        return features

    def _targets(self, examples: list[glue.Example]) -> np.ndarray:
        """Returns classes, int32 [n]; 1 for each label of a text, float32 [n, labels]; or scores.

        Scores are float32 [n], from 0 to 1. This changes no correlation. Missing labels are 0.
        """
        labels = [example.label for example in examples]
        if self.spec.label_separator is not None:
            has_label = np.zeros((len(labels), len(self.labels)), np.float32)
            for row, classes in zip(has_label, labels, strict=True):
                row[list(classes or ())] = 1
            return has_label
        if self.labels:
            return np.asarray([label or 0 for label in labels], np.int32)
        low, high = self.spec.score_range
        scores = [low if label is None else label for label in labels]
        return ((np.asarray(scores) - low) / (high - low)).astype(np.float32)

    def _counts(self, features: Features) -> np.ndarray:
        """Returns the number of examples that have each label."""
        if features.targets.ndim == 2:
            return features.targets.sum(axis=0)
        return (features.targets[:, None] == np.arange(len(self.labels))).sum(axis=0)

    # Model.

    def create_head(self, model, rngs):
        return heads.Classifier(model, max(len(self.labels), 1), rngs)

    def scores(self, head, states, batch, keys):
        return head(head.pool(states, batch.lengths), keys)

    def loss(self, scores, batch):
        target = batch.targets
        if target.ndim == 2:
            losses = optax.sigmoid_binary_cross_entropy(scores, target).mean(axis=1)
            right = ((scores > 0) == (target > 0)).all(axis=1)
        elif target.dtype == jnp.float32:
            losses = (scores[:, 0] - target) ** 2
            right = jnp.abs(scores[:, 0] - target) < 0.1
        else:
            losses = optax.softmax_cross_entropy_with_integer_labels(scores, target)
            right = jnp.argmax(scores, axis=1).astype(target.dtype) == target
        return heads.weighted_sums(losses, right, batch.weights)

    # Results.

    def constant_outputs(self, train, dev):
        if not self.labels:
            row = train.targets.mean(keepdims=True)
        elif self.spec.label_separator is not None:
            row = self._counts(train) / len(train.ids) - 0.5
        else:
            row = self._counts(train)
        return np.tile(row.astype(np.float32), (len(dev.examples), 1))

    def score(self, dev, outputs):
        return metrics.sentences(self.spec.metrics, dev.features.targets, outputs)

    def write(self, dev, outputs, folder, stem):
        """Writes predictions, as GLUE's server takes them, and the probabilities of labels."""
        path = folder / f"{stem}.tsv"
        storage.write(path, self.predictions_table(dev, outputs))
        if self.labels:
            logits = outputs.astype(np.float64)
            if self.spec.label_separator is None:
                probabilities = scipy.special.softmax(logits, axis=1)
            else:
                probabilities = scipy.special.expit(logits)
            rows = [[f"{value:.6f}" for value in row] for row in probabilities]
            table = _numbered_table(dev, self.labels, rows)
            storage.write(folder / f"{stem}_probabilities.tsv", table)
        return path

    def predictions_table(self, dev: EvaluationSet, outputs: np.ndarray) -> str:
        """Returns a file of GLUE's submissions: columns `index` and `prediction`."""
        return _numbered_table(dev, ["prediction"], [[text] for text in self.predictions(outputs)])

    def predictions(self, outputs: np.ndarray) -> list[str]:
        """Returns the predicted label, labels or score of each row of scores [n, C], as text."""
        separator = self.spec.label_separator
        if separator is not None:
            names = np.asarray(self.labels, object)
            return [separator.join(names[row > 0]) for row in outputs]
        if self.labels:
            return [self.labels[label] for label in outputs.argmax(axis=1)]
        low, high = self.spec.score_range
        scores = np.clip(low + outputs[:, 0].astype(np.float64) * (high - low), low, high)
        return [f"{score:.7g}" for score in scores]


def _numbered_table(dev: EvaluationSet, columns, rows: list[list[str]]) -> str:
    """Returns a tab-separated table that begins with the number of each example in its file."""
    lines = ["\t".join(("index", *columns))]
    for example, row in zip(dev.examples, rows, strict=True):
        lines.append("\t".join((str(example.number), *row)))
    return "\n".join(lines) + "\n"


def kept_sizes(sizes: tuple[int, ...], budget: int) -> tuple[int, ...]:
    """Returns how many tokens of each text are kept, at most `budget` in all.

    Each of two texts has half of the budget, and what the other one leaves of its half. This is
    the same as to take tokens from the longer text, or from the second, until both fit.
    """
    if len(sizes) == 1:
        return (min(sizes[0], budget),)
    first = min(sizes[0], max(budget - budget // 2, budget - sizes[1]))
    return first, min(sizes[1], budget - first)
