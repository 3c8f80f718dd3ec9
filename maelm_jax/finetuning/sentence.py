"""Sentence tasks: one or two texts with a class, several labels, or a score."""

import pathlib
import typing

import numpy as np

from maelm_jax import config
from maelm_jax.finetuning import glue, heads, labelled_data, metrics
from maelm_jax.finetuning.batches import Features
from maelm_jax.finetuning.task import (
    PREDICTION,
    PROBABILITY,
    Column,
    Encoded,
    EvaluationSet,
    InputFormat,
    Splits,
    Task,
    describe_counts,
    require_metric,
)


class SentenceTask(Task):
    """A task of GLUE, or the task `own`. `glue.Spec` says which.

    Its kind of labels (labels.py) has the loss, and says when a row is right.
    """

    names = (*glue.SPECS, glue.OWN)
    module = "classifier"
    ending = ".tsv"

    def __init__(self, name, settings, results=None, spec=None):
        """Makes a task as `Task`. `spec` is given for a task that has no settings."""
        super().__init__(name, settings, results)
        self.spec = spec = spec or glue.spec_of(name, settings.custom)
        self.kind, self.labels = spec.kind, spec.kind.names
        self.has_stock_class = spec.kind.has_stock_class
        self.selected_by = () if self.labels else spec.metrics
        self.main_metric = spec.metrics[0]
        # GLUE's columns are the paper's.
        shown = spec.metrics if name == glue.OWN else spec.metrics[:1]
        self.columns = tuple(
            Column(f"{spec.submission(part)} {metric}", f"{part}_{metric}" if part else metric)
            for part in spec.parts
            for metric in shown
        )

        if name == glue.OWN:  # what was found, or named
            labels = f"labels {', '.join(map(repr, self.labels))}" if self.labels else "scores"
            found = f"text in {' and '.join(map(repr, spec.texts))}, {labels} in {spec.label!r}"
            f1 = f"; f1 is that of {self.labels[1]!r}" if "f1" in spec.metrics else ""
            self.notes.append(found + f1)

    # Data.

    def check_files(self):
        if self.name == glue.OWN or self.settings.data_dir is not None:
            glue.find_files(self.spec, self.settings)
        if self.settings.metric:
            names = self.spec.metrics
            parts = [f"{part}_{name}" for part in self.spec.parts if part for name in names]
            require_metric(self.name, self.settings.metric, (*names, *parts))

    def read(self) -> Splits:
        return glue.read(self.spec, self.settings, self.notes)

    def read_file(self, path, labelled):
        return glue.read_table(self.spec, path, labelled, self.notes)

    def encode(self, examples, input_format, which) -> Encoded:
        """Encodes examples as `<s> A </s>`, those of two texts as `<s> A </s> B </s>`."""
        columns = zip(*(example.texts for example in examples), strict=True)
        encoded = [input_format.encode(list(texts)) for texts in columns]
        rows = [_make_row(texts, input_format) for texts in zip(*encoded, strict=True)]
        if cut := sum(row.is_cut for row in rows):
            length = input_format.length
            self.notes.append(f"{which}: {cut} of {len(rows)} examples cut to {length} tokens")
        targets = self.kind.targets([example.label for example in examples])
        starts = np.asarray([row.second for row in rows], np.int32)
        return Encoded(Features([row.ids for row in rows], targets, starts))

    def encode_training(self, examples, input_format):
        features = super().encode_training(examples, input_format)
        counts = self.kind.count(features.targets)
        if unused := [repr(self.labels[number]) for number in np.flatnonzero(counts == 0)]:
            self.notes.append(f"training: no example has the label {', '.join(unused)}")
        if self.settings.class_weights == "balanced":
            self.kind = self.kind.balanced(features.targets)
        return features

    # Model.

    def create_head(self, model, rngs):
        return heads.Classifier(model, self.kind.outputs, rngs)

    def scores(self, head, states, batch, keys):
        return head(head.pool(states, batch.lengths), keys)

    def loss(self, scores, batch):
        losses, right = self.kind.losses(scores, batch.targets)
        return heads.weighted_sums(losses, right, batch.weights)

    # Results.

    def constant_outputs(self, train, dev):
        row = self.kind.constant_scores(train.targets)
        return np.tile(row, (len(dev.examples), 1))

    def score(self, dev, outputs):
        predicted = self.kind.predict(outputs)
        return metrics.sentences(self.spec.metrics, dev.features.targets, predicted)

    def describe_training(self, train):
        if not self.labels:
            return []
        counts = self.kind.count(train.targets)
        return [describe_counts(self.labels, counts, len(train.ids), "training rows")]

    def class_report(self, dev, outputs):
        if not self.labels:
            return None
        return metrics.by_class(self.labels, dev.features.targets, self.kind.predict(outputs))

    def write(self, dev, outputs, folder, stem):
        """Writes the number, the prediction and the probabilities of each example."""
        path = folder / f"{stem}.tsv"
        numbers = [{"index": str(example.number)} for example in dev.examples]
        labelled_data.write(path, self._predictions(numbers, outputs, path, True))
        return path

    def endings(self, input_file):
        ending = labelled_data.ending_of(input_file)
        return tuple(
            dict.fromkeys((*({ending} & {*labelled_data.TABLES}), ".tsv", *labelled_data.TABLES))
        )

    def check_columns(self, input_file, with_all):
        header = labelled_data.columns_of(input_file)
        if labelled_data.lacks_header(header, self.spec.headless):
            header = list(self.spec.headless)
        added = [PREDICTION, PROBABILITY]
        if with_all:
            added += map(_probability_of, self.labels)
        for name in header:
            if name in added:
                raise config.ConfigError(
                    f"{input_file}: has a column {name!r} already, which predictions would get. "
                    "Rename it"
                )
            if header.count(name) > 1:
                raise config.ConfigError(
                    f"{input_file}: {header.count(name)} columns have the name {name!r}. Rename "
                    "all but one"
                )

    def write_predictions(self, input_file, dev, outputs, path, with_all):
        rows = glue.read_rows(self.spec, input_file, self.spec.texts)
        predictions = self._predictions([row.values for row in rows], outputs, path, with_all)
        labelled_data.write(path, predictions, input_file)

    def _predictions(
        self, rows: list[dict], outputs: np.ndarray, path: pathlib.Path, with_all: bool
    ) -> list[dict]:
        """Returns rows with columns for the prediction and its probability, in the form of `path`.

        `with_all` adds a column for the probability of each class.
        """
        columns = self._prediction_columns(outputs, with_all)
        if path.suffix not in (*labelled_data.JSON_LINES, labelled_data.PARQUET):  # text only
            columns[PREDICTION] = self.kind.texts(self.kind.predict(outputs))
            for name in columns.keys() - {PREDICTION}:
                columns[name] = [self._certainty_as_text(value) for value in columns[name]]
        added = zip(*columns.values(), strict=True)
        return [
            row | dict(zip(columns, of_row, strict=True))
            for row, of_row in zip(rows, added, strict=True)
        ]

    def _prediction_columns(self, outputs: np.ndarray, with_all: bool) -> dict[str, list]:
        """Returns {column: values}: the prediction, and probabilities if there are classes."""
        columns = {PREDICTION: self.kind.values(self.kind.predict(outputs))}
        if self.labels:
            columns[PROBABILITY] = self.kind.certainties(outputs)
        if with_all:
            probabilities = self.kind.probabilities(outputs).T.tolist()
            columns |= zip(map(_probability_of, self.labels), probabilities, strict=True)
        return columns

    def _certainty_as_text(self, certainty: float | list[float] | None) -> str:
        several = certainty if isinstance(certainty, list) else [certainty]
        return (self.kind.separator or "").join(
            f"{value:.6f}" for value in several if value is not None
        )

    def submission_table(self, dev: EvaluationSet, outputs: np.ndarray) -> str:
        """Returns a file of GLUE's submissions: columns `index` and `prediction`."""
        texts = self.kind.texts(self.kind.predict(outputs))
        lines = [f"{dev.examples[row].number}\t{text}" for row, text in enumerate(texts)]
        return "\n".join(["index\tprediction", *lines]) + "\n"


class _Row(typing.NamedTuple):
    """An example as the encoder reads it."""

    ids: np.ndarray  # int32 [tokens]
    second: int  # the first token of the second text; 0 without one
    is_cut: bool


def _make_row(texts: tuple[list[int], ...], input_format: InputFormat) -> _Row:
    """Returns the row of one text or two, which are given as ids."""
    vocabulary, length, pair = input_format
    special_tokens = 2 if len(texts) == 1 else 2 + pair.separators
    sizes = tuple(map(len, texts))
    kept = kept_sizes(sizes, length - special_tokens)
    first, *second = (ids[:size] for ids, size in zip(texts, kept, strict=True))
    if not second:
        ids, start = [vocabulary.bos, *first, vocabulary.eos], 0
    else:
        prefix = input_format.prefix(first)
        ids, start = [*prefix, *second[0], vocabulary.eos], len(prefix)
    return _Row(np.asarray(ids, np.int32), start, kept != sizes)


def _probability_of(label: str) -> str:
    """Returns the name of the column with the probability of a class."""
    return f"{PROBABILITY}_{label}"


def kept_sizes(sizes: tuple[int, ...], budget: int) -> tuple[int, ...]:
    """Returns how many tokens of each text are kept, at most `budget` in all.

    Each of two texts has half of the budget, and what the other one leaves of its half. Of an odd
    budget, the longer text has the larger half, or the second text if both are as long. This is
    "longest_first" of the library tokenizers, so exports cut at the same tokens.
    """
    if len(sizes) == 1:
        return (min(sizes[0], budget),)
    half = budget // 2 + (budget % 2 if sizes[0] > sizes[1] else 0)
    first = min(sizes[0], max(half, budget - sizes[1]))
    return first, min(sizes[1], budget - first)
