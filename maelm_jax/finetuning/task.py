"""What a kind of task is: its data, head, loss, scores and files.

sentence.py, question.py and token.py hold one kind each. A new kind is a subclass of `Task` in a
file of its own, an entry in `grid.KINDS`, and the name of its task in `config.Task`.
"""

import abc
import hashlib
import pathlib
import typing

import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from maelm_jax import config, progress
from maelm_jax.data.vocabularies import Vocabulary
from maelm_jax.encoders import families
from maelm_jax.encoders.family import PairFormat
from maelm_jax.encoders.results import ClassReport, Results
from maelm_jax.finetuning.batches import Batch, Features
from maelm_jax.model import loss

SAMPLE_SEED = 0  # of samples, which are the same for every seed of a run
PREDICTION, PROBABILITY = "prediction", "probability"  # columns of a file of predictions
MOST_SHOWN = 12  # labels in a line
TEXTS_AT_ONCE = 10_000  # texts that are tokenised between two steps of the progress bar


class InputFormat(typing.NamedTuple):
    """How an encoder reads the examples of a task."""

    vocabulary: Vocabulary
    length: int  # largest number of tokens of an example
    pair: PairFormat  # of two sentences, or of question and context

    @classmethod
    def of_run(cls, experiment: config.Experiment, vocabulary: Vocabulary) -> "InputFormat":
        """Returns the format of a run whose encoder has this vocabulary."""
        length = min(experiment.finetune.max_length, experiment.encoder.max_positions)
        return cls(vocabulary, length, families.choose_pair_format(experiment.encoder))

    def prefix(self, first: list[int]) -> list[int]:
        """Returns the tokens before the second of two texts. `first` are those of the first."""
        separators = [self.vocabulary.eos] * self.pair.separators
        return [self.vocabulary.bos, *first, *separators]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Returns the token ids of each text. Shows a progress bar if it takes long."""
        rows: list[list[int]] = []
        starts = range(0, len(texts), TEXTS_AT_ONCE)
        for start in progress.Bar(starts, desc="tokenising", leave=False, delay=2.0):
            rows += self.vocabulary.encode_batch(texts[start : start + TEXTS_AT_ONCE])
        return rows


class Splits(typing.NamedTuple):
    """The examples of a task as they are read."""

    train: list
    dev: dict[str, list]  # by name; the name is "" in tasks with one dev set


class Encoded(typing.NamedTuple):
    """Examples as token ids."""

    features: Features
    layout: typing.Any = None  # what a kind needs to read outputs of the model, if anything


class EvaluationSet(typing.NamedTuple):
    """Examples to predict."""

    examples: list
    features: Features
    layout: typing.Any
    size: str  # in words: "a sample of 150 of 872 examples"


class TaskData(typing.NamedTuple):
    """The tokenised data of a task."""

    train: Features
    dev: dict[str, EvaluationSet]

    def fingerprint(self) -> str:
        """Returns a hash of what a run is trained and scored on."""
        digest = hashlib.sha256()
        for features in (self.train, *(dev.features for dev in self.dev.values())):
            for part in (features.lengths, np.concatenate(features.ids), features.targets):
                digest.update(part.tobytes())
        digest.update(repr([dev.examples for dev in self.dev.values()]).encode())
        return digest.hexdigest()[:16]


class Column(typing.NamedTuple):
    """A column of the table of results."""

    title: str
    metric: str
    factor: float = 100.0  # to percent


def require_metric(task: str, metric: str, known: typing.Iterable[str]):
    """Raises ConfigError if Finetune.metric is none of the metrics of a task."""
    known = tuple(known)
    if metric not in known:
        raise config.ConfigError(
            f"Finetune.metric = {metric!r}: {task} has {', '.join(known)}. Name one of them"
        )


class Task(abc.ABC):
    """One task of a kind. The subclasses are the kinds.

    Attributes:
        names: The names of the tasks of this kind.
        module: The first name of the head's parameter paths.
        unit: What an example is, in the plural.
        ending: The ending of the file of predictions of a dev set.
        main_metric: The score.
        selected_by: The best evaluation has the highest mean of these metrics. Empty: the score.
        columns: The columns of the table of results.
        labels: Names of the classes; empty without classes. `read` may find them.
        has_stock_class: Whether a class of transformers predicts what the task predicts.
        notes: Lines about the data that was read, for the user.
    """

    names: typing.ClassVar[tuple[str, ...]]
    module: typing.ClassVar[str]
    unit: typing.ClassVar[str] = "examples"
    ending: typing.ClassVar[str]
    main_metric: str
    selected_by: tuple[str, ...] = ()
    columns: tuple[Column, ...]
    has_stock_class: bool = True

    def __init__(self, name: str, settings: config.Finetune, results: Results | None = None):
        """Makes a task. `results` are those of the finished run whose model is used, if any."""
        self.name, self.settings = name, settings
        self.labels: tuple[str, ...] = tuple(results.labels if results else ())
        self.notes: list[str] = []

    # Data.

    @abc.abstractmethod
    def check_files(self):
        """Raises ConfigError if a file is missing. Reads no file and no TFDS."""

    @abc.abstractmethod
    def read(self) -> Splits:
        """Reads all examples. Raises ConfigError if data is missing or malformed."""

    @abc.abstractmethod
    def read_file(self, path: str, labelled: bool) -> list:
        """Reads the examples of a file to predict. Without `labelled`, labels can be missing."""

    @abc.abstractmethod
    def encode(self, examples: list, input_format: InputFormat, which: str) -> Encoded:
        """Tokenises examples, which `which` names in notes."""

    def encode_training(self, examples: list, input_format: InputFormat) -> Features:
        """Tokenises training examples."""
        return self.encode(examples, input_format, "training").features

    def load(self, input_format: InputFormat) -> TaskData:
        """Reads the data, draws the samples that the settings ask for, and tokenises them."""
        splits = self.read()
        train = _sample(splits.train, self.settings.train_examples)
        if len(train) < len(splits.train):
            self.notes.append(f"trained on {len(train):,} of {len(splits.train):,} {self.unit}")
        dev = {}
        for name, examples in splits.dev.items():
            chosen = _sample(examples, self.settings.dev_examples)
            size = f"{len(examples):,} {self.unit}"
            if len(chosen) < len(examples):
                size = f"a sample of {len(chosen):,} of {size}"
                self.notes.append(f"{name or 'dev'}: scored on {size}")
            encoded = self.encode(chosen, input_format, name or "dev")
            dev[name] = EvaluationSet(chosen, *encoded, size)
        return TaskData(self.encode_training(train, input_format), dev)

    # Model. Axis letters: B rows, T slots, D width.

    @abc.abstractmethod
    def create_head(self, model: config.Model, rngs: nnx.Rngs) -> nnx.Module:
        """Creates the head. Its parameters are those of the stock class."""

    @abc.abstractmethod
    def scores(
        self,
        head: nnx.Module,
        states: Float[Array, "B T D"],
        batch: Batch,
        keys: Key[Array, " B"] | None,
    ) -> Array:
        """Computes the scores of the head. `keys` are of dropout; None without dropout."""

    @abc.abstractmethod
    def loss(self, scores: Array, batch: Batch) -> loss.Sums:
        """Returns sums of loss and right predictions over rows or slots, with their weights."""

    def predict(self, scores: Array) -> typing.Any:
        """Returns the output of the model: arrays [B, ...] made of the scores on the device."""
        return scores

    # Results. `outputs` are those of `predict` for all examples of a set, in order.

    @abc.abstractmethod
    def constant_outputs(self, train: Features, dev: EvaluationSet) -> typing.Any:
        """Returns outputs that always say what is most frequent in training, as a baseline."""

    @abc.abstractmethod
    def score(self, dev: EvaluationSet, outputs: typing.Any) -> dict[str, float]:
        """Returns {metric: value} of the outputs."""

    def describe_training(self, train: Features) -> list[str]:
        """Returns lines about the labels of the training examples, for the user."""
        return []

    def class_report(self, dev: EvaluationSet, outputs: typing.Any) -> ClassReport | None:
        """Returns the scores of each class; None without classes."""
        return None

    @abc.abstractmethod
    def write(
        self, dev: EvaluationSet, outputs: typing.Any, folder: pathlib.Path, stem: str
    ) -> pathlib.Path:
        """Writes FOLDER/STEM + `ending`, perhaps files beside it, and returns the path.

        These are the predictions of a dev set, which may have no file.
        """

    @abc.abstractmethod
    def endings(self, input_file: str) -> tuple[str, ...]:
        """Returns the endings that predictions of `input_file` can have, the default first."""

    def check_columns(self, input_file: str, with_all: bool):
        """Raises ConfigError if a file has the columns of predictions already, or names one twice.

        `with_all` adds the probabilities of all classes.
        """
        if with_all:
            raise config.ConfigError(f"--probabilities: {self.name} has no classes of texts")

    @abc.abstractmethod
    def write_predictions(
        self,
        input_file: str,
        dev: EvaluationSet,
        outputs: typing.Any,
        path: pathlib.Path,
        with_all: bool,
    ):
        """Writes what the input file holds with the predictions of its examples."""


def describe_counts(names: typing.Sequence[str], counts: np.ndarray, total: int, of: str) -> str:
    """Returns the labels with their counts and shares of `total`, the commonest first."""
    order = np.argsort(-counts, kind="stable")
    parts = [f"{names[label]} {counts[label]:,} ({counts[label] / total:.1%})" for label in order]
    if len(parts) > MOST_SHOWN:
        parts[MOST_SHOWN - 1 : -1] = [f"{len(parts) - MOST_SHOWN} others"]
    return f"{len(names)} labels of {total:,} {of}: {', '.join(parts)}"


def _sample(examples: list, count: int | None) -> list:
    """Returns a random sample in the order of the examples. `count` None: all of them."""
    if count is None or count >= len(examples):
        return examples
    order = np.random.default_rng(SAMPLE_SEED).permutation(len(examples))
    return [examples[number] for number in np.sort(order[:count])]
