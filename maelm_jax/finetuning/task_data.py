"""The data of a task, in a form that is the same for all kinds of tasks."""

import collections.abc
import dataclasses
import functools
import hashlib
import pathlib
import typing

import numpy as np

from maelm_jax.finetuning import features


class Head(typing.NamedTuple):
    """The head that a task needs. See heads.FineTuned."""

    kind: typing.Literal["sentence", "span", "token"]
    classes: int  # 1 with "sentence" is a regression; "span" scores a start and an end


SPAN = Head("span", 2)


@dataclasses.dataclass(frozen=True)
class DevSet:
    """Examples to predict. `outputs` are those of heads.predict_of for all examples, in order.

    Attributes:
        features: The examples.
        score: outputs -> {metric: value}.
        write: (outputs, folder, stem) -> path of the predictions. Writes FOLDER/STEM + each ending.
        endings: Endings of the files that `write` writes. The first one is of the predictions.
        notes: For the user, about these examples.
        count: How many there are, in words: "25 questions".
        answers: What `score` compares with, if `features` lacks it. For the fingerprint.
    """

    features: features.Features
    score: collections.abc.Callable[..., dict[str, float]]
    write: collections.abc.Callable[..., pathlib.Path]
    endings: tuple[str, ...]
    notes: list[str]
    count: str
    answers: collections.abc.Sequence = ()


@dataclasses.dataclass(frozen=True)
class TaskData:
    """A task with its data."""

    name: str
    head: Head
    labels: tuple[str, ...]  # names of the classes; empty without classes
    main: str  # the metric of the score
    train: features.Features
    dev: dict[str, DevSet]  # by name; the name is "" in tasks with one dev set
    unscored: dict[str, DevSet]  # predicted at the end of a run and not scored
    notes: list[str]  # for the user
    # The best evaluation has the highest mean of these metrics. Empty: of `main`.
    selected_by: tuple[str, ...] = ()
    label_separator: str | None = None  # between the labels of a text; None: each text has one

    @property
    def unit(self) -> str:
        """What the examples of `train` are, in words."""
        return "windows" if self.head == SPAN else "examples"

    def selection_score(self, values: dict[str, float]) -> np.float32:
        """The value by which the best evaluation is selected, from the metrics of an evaluation."""
        return np.float32(np.mean([values[name] for name in self.selected_by or (self.main,)]))

    @functools.cached_property
    def fingerprint(self) -> dict[str, typing.Any]:
        """Number of training examples, and hashes of what the runs are trained and scored on.

        Returns:
            "data": hash of the tokenised training and dev data. "answers": hash of the labels'
            names and of the right answers that the tokenised data lacks. Earlier versions had no
            "answers".
        """
        digest = hashlib.sha256()
        for rows in (self.train, *(dev.features for dev in self.dev.values())):
            for part in (rows.lengths, np.concatenate(rows.ids), rows.targets):
                digest.update(part.tobytes())
        answers = repr((self.labels, [dev.answers for dev in self.dev.values()]))
        return {
            "train_examples": len(self.train.ids),
            "data": digest.hexdigest()[:16],
            "answers": hashlib.sha256(answers.encode("utf-8", "surrogatepass")).hexdigest()[:16],
        }
