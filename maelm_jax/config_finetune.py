"""Settings of fine-tuning, one frozen dataclass for each concern. config.py has all others."""

import math
import typing

import pydantic

from maelm_jax.settings import (
    LearningRate,
    Positive,
    Rows,
    Seed,
    Settings,
    ShareBelowOne,
    Text,
    declare,
    section,
    setting,
)

Task = typing.Literal[
    "cola",
    "sst2",
    "mrpc",
    "stsb",
    "qqp",
    "mnli",
    "qnli",
    "rte",
    "wnli",
    "squad1",
    "squad2",
    "own",
    "conll",
]
# Prefix of a name in --init_from: the model and vocabulary of that run with fresh weights. This is
# the control of an experiment.
RANDOM = "random:"
Column = typing.Annotated[int, pydantic.Field(ge=-1, le=1000)]


class FileSettings(Settings):
    """Base class of settings that name a training file and a dev file."""

    def require_files(self, gin_file: str):
        """Raises ConfigError when a file is not named. `gin_file` has the macros for both."""
        for name, macro in (("train_file", "TRAIN_FILE"), ("dev_file", "DEV_FILE")):
            is_named = getattr(self, name) is not None
            remedy = f"Give --gin_file={gin_file} --gin.{macro}=FILE"
            self.require(is_named, f"{name} is missing. {remedy}")


@declare
class Grid(Settings):
    """Hyper-parameters of fine-tuning. A field with a list makes a grid of every combination.

    `Optimizer` has the other settings of the optimiser. `Run` has the cadence.
    """

    seeds: Seed | tuple[Seed, ...] = setting(1, "Seeds of the runs.")
    batch_size: Rows | tuple[Rows, ...] = setting(32, "Examples of a step.", "examples")
    learning_rate: LearningRate | tuple[LearningRate, ...] = setting(3e-5, "Its peak.")
    epochs: Positive | tuple[Positive, ...] = setting(3, "Passes over the data.", "epochs")
    small_task_epochs: Positive | tuple[Positive, ...] = setting(
        (), "Tried as well below 10,000 training examples.", "epochs"
    )
    warmup: ShareBelowOne | tuple[ShareBelowOne, ...] = setting(
        0.06, "Share of all steps until the peak."
    )

    def check(self):
        for name in ("seeds", "batch_size", "learning_rate", "epochs", "warmup"):
            self.require_distinct(name)
            self.require(bool(self.listed(name)), f"{name} must hold a value")
        self.require_distinct("small_task_epochs")


@declare
class Squad(Settings):
    """SQuAD 1.1 and 2.0."""

    question_length: Positive = setting(64, "Longest question, cut off there.", "tokens")
    stride: Positive = setting(
        128, "Distance of two windows' starts, at most half a window.", "tokens"
    )
    answer_length: Positive = setting(30, "Longest answer.", "tokens")
    dev_share: ShareBelowOne = setting(
        0.0, "Without a training file: share of the dev file's articles that is evaluated."
    )


@declare
class CustomTask(FileSettings):
    """The task `own`: one or two columns of text, and labels or a score, in your own files."""

    train_file: Text | None = setting(
        None, "Table with a header line: tab-separated, .csv, .jsonl or .ndjson."
    )
    dev_file: Text | None = setting(None, "File to evaluate on, as `train_file`.")
    columns: tuple[Text, ...] = setting(("sentence",), "One or two columns of text.")
    label: Text = setting("label", "Column of the label, labels or score.")
    labels: tuple[Text, ...] = setting((), "Every label that occurs. Empty in a regression.")
    label_separator: Text | None = setting(
        None, "Separator of the labels in a cell. Set it if a text can have several, or none."
    )
    score_range: tuple[float, ...] = setting(
        (), "In a regression: the lowest score that can occur, and the highest."
    )

    def check_complete(self):
        """Raises ConfigError when a setting that the task `own` needs is missing."""
        self.require_files("finetune/own.gin")
        count = len(self.columns)
        self.require(count in (1, 2), f"columns must name one or two columns, got {self.columns}")
        self.require(
            len({*self.columns, self.label}) == count + 1,
            f"columns and label must be different columns, got {self.columns} and {self.label!r}",
        )
        if self.score_range:
            self.require(
                not self.labels, "labels and score_range are both given. Leave one of them out"
            )
            self.require(
                self.label_separator is None,
                "label_separator and score_range are both given. Leave one of them out",
            )
            low, high = self.score_range if len(self.score_range) == 2 else (0.0, 0.0)
            self.require(
                0 < high - low < math.inf,
                f"score_range must be the lowest and the highest score, got {self.score_range}",
            )
            return
        self.require(
            len(set(self.labels)) == len(self.labels) > 1,
            f"labels must name two classes or more, each once, got {self.labels}. "
            "In a regression, give CustomTask.score_range=(LOWEST, HIGHEST) instead",
        )
        if self.label_separator is not None:
            self.require(
                self.label_separator == " " or not self.label_separator.isspace(),
                f"label_separator={self.label_separator!r} separates cells or lines. "
                "Choose another separator, as ','",
            )
            unclear = [label for label in self.labels if self.label_separator in label]
            self.require(
                not unclear,
                f"labels: {unclear} contain the label_separator {self.label_separator!r}. "
                "Choose another separator",
            )


@declare
class Conll(FileSettings):
    """The task `conll`: a label for each word, in your own files with a line for each word."""

    train_file: Text | None = setting(
        None, "Columns between spaces or tabs, a blank line between sentences. It has all labels."
    )
    dev_file: Text | None = setting(None, "File to evaluate on, as `train_file`.")
    word_column: Column = setting(0, "Column of the word, from 0. -1 is the last.")
    label_column: Column = setting(-1, "Column of the label, from 0. -1 is the last.")

    def check_complete(self):
        """Raises ConfigError when a setting that the task `conll` needs is missing."""
        self.require_files("finetune/conll.gin")


@declare
class Finetune(Settings):
    """Fine-tuning on labelled tasks. The sections below have its other settings."""

    tasks: Task | tuple[Task, ...] = setting((), "One task makes a run, a list makes a table.")
    init_from: Text | None = setting(None, "The encoder, from --init_from.")
    data_dir: Text | None = setting(
        None, "Folder of GLUE's folders or of SQuAD's files, or the one above. None reads TFDS."
    )
    evaluations: Positive = setting(
        2, "Evaluations in an epoch, fewer if they do not divide its steps.", "evaluations"
    )
    eval_batch_size: Rows = setting(64, "Examples of an evaluation step.", "examples")
    max_length: int = setting(
        512, "Longest input, at most the encoder's positions.", "tokens", ge=8, le=2**20
    )
    train_examples: Positive | None = setting(
        None, "Size of the sample to train on, the same for every seed. None is all.", "examples"
    )
    dev_examples: Positive | None = setting(
        None, "Size of the sample of each dev set to evaluate on. None is all.", "examples"
    )
    grid: Grid = section(Grid)
    squad: Squad = section(Squad)
    custom: CustomTask = section(CustomTask)
    conll: Conll = section(Conll)

    def check(self):
        self.require_distinct("tasks")
        if "own" in self.listed("tasks"):
            self.custom.check_complete()
        if "conll" in self.listed("tasks"):
            self.conll.check_complete()


SECTIONS = (Finetune, Grid, Squad, CustomTask, Conll)
# Older names of settings. The config.gin of a workdir may have them, and gin files of users.
OLDER_NAMES = {
    f"Finetune.{name}": f"{owner.__name__}.{name}"
    for owner, names in {
        Grid: ("seeds", "batch_size", "learning_rate", "epochs", "small_task_epochs", "warmup"),
        Squad: ("question_length", "stride", "answer_length", "dev_share"),
        CustomTask: ("train_file", "dev_file", "columns", "label", "labels"),
    }.items()
    for name in names
}
