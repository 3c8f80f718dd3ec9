"""The results of a fine-tuned run: results.json."""

import dataclasses
import json
import os
import typing

import pydantic

from maelm_jax import storage

Values = dict[str, int | float]  # of metrics; those of an evaluation also have "step" and "epoch"


@pydantic.dataclasses.dataclass(kw_only=True)
class Results:
    """What a run measured. A run that diverged has no score and `diverged` instead.

    Attributes:
        task: The name of the task.
        labels: The names of the classes; empty without classes.
        label_separator: The separator of the labels of a text that can have several.
        init_from: The encoder, as in --init_from.
        seed: The seed.
        cell: The hyper-parameters, {name: value}.
        main_metric: The name of the score in the evaluations.
        score: The score of the best evaluation.
        diverged: Why the run has no score.
        baseline: The metrics of constant predictions, as the best, the last and all evaluations
            have them.
        best, last: Two of the evaluations.
        evaluations: All evaluations.
        evaluated_on: {name of a dev set: its size in words}.
        train_examples: The number of training rows.
        max_length: The longest input in tokens.
        padded_lengths: The lengths that batches were padded to.
        steps: The number of steps.
        predictions: The names of the files of predictions.
        notes: Lines about the data, for the user.
        seconds: The duration of the last start of the run.
    """

    task: str | None = None
    labels: list[str] = dataclasses.field(default_factory=list)
    label_separator: str | None = None
    init_from: str | None = None
    seed: int | None = None
    cell: Values = dataclasses.field(default_factory=dict)
    main_metric: str | None = None
    score: float | None = None
    diverged: str | None = None
    baseline: Values = dataclasses.field(default_factory=dict)
    best: Values = dataclasses.field(default_factory=dict)
    last: Values = dataclasses.field(default_factory=dict)
    evaluations: list[Values] = dataclasses.field(default_factory=list)
    evaluated_on: dict[str, str] = dataclasses.field(default_factory=dict)
    train_examples: int | None = None
    max_length: int | None = None
    padded_lengths: list[int] = dataclasses.field(default_factory=list)
    steps: int | None = None
    predictions: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    seconds: float | None = None

    @classmethod
    def read(cls, path: str | os.PathLike) -> typing.Self:
        """Reads a file. Raises ConfigError if it does not hold results."""
        content = storage.read_json(path)
        with storage.reading(path):
            return pydantic.TypeAdapter(cls).validate_python(content)

    def write(self, path: str | os.PathLike):
        """Writes a file. Under its name it is always complete."""
        storage.write(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")
