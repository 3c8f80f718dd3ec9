"""The results of a fine-tuned run: results.json, and the scores of its classes."""

import dataclasses
import json
import os
import pathlib
import typing

import pydantic

from maelm_jax import plotting, storage, tables
from maelm_jax.training.workdir import Workdir

CONFUSION = "confusion.png"
MOST_SHOWN = 20  # classes of a confusion matrix that is printed or drawn
WIDEST_NAMES = 60  # characters of all classes; columns of longer names are numbered
Values = dict[str, int | float]  # of metrics; those of an evaluation also have "step" and "epoch"


@pydantic.dataclasses.dataclass
class ClassScore:
    """The scores of one class, from 0 to 1."""

    name: str
    examples: int
    recall: float
    precision: float
    f1: float


@pydantic.dataclasses.dataclass
class ClassReport:
    """The scores of all classes on one set.

    Attributes:
        classes: The scores of each class.
        confusion: The number of examples by class, then by predicted class. Empty where a text can
            have several labels, and for entities.
    """

    classes: list[ClassScore]
    confusion: list[list[int]] = dataclasses.field(default_factory=list)

    @property
    def shows_confusion(self) -> bool:
        return 0 < len(self.confusion) <= MOST_SHOWN

    def tables(self, layout=tables.plain) -> str:
        """Returns the scores and the confusion matrix as text. `layout` is a function of tables."""
        header = ("class", "examples", "precision", "recall", "F1")
        lines = [
            (
                one.name,
                f"{one.examples:,}",
                *map("{:.4f}".format, (one.precision, one.recall, one.f1)),
            )
            for one in self.classes
        ]
        text = layout(header, lines)
        if not self.shows_confusion:
            return text
        names = [one.name for one in self.classes]
        columns = names
        if sum(map(len, names)) > WIDEST_NAMES:
            columns = [str(number + 1) for number in range(len(names))]
            names = [f"{number}. {name}" for number, name in zip(columns, names, strict=True)]
        rows = [(name, *row) for name, row in zip(names, self.confusion, strict=True)]
        return "\n\n".join([text, layout(("class, by prediction", *columns), rows)])

    def draw(self, path: pathlib.Path, title: str):
        """Writes a figure of the confusion matrix, in shares of each class, as .png and .pdf."""
        pyplot = plotting.pyplot()
        names, size = [one.name for one in self.classes], 2.5 + 0.45 * len(self.classes)
        figure, axes = pyplot.subplots(figsize=(size + 1, size), layout="constrained")
        shares = [[count / max(sum(row), 1) for count in row] for row in self.confusion]
        image = axes.imshow(shares, cmap="cividis", vmin=0, vmax=1)
        for row, counts in enumerate(self.confusion):
            for column, count in enumerate(counts):
                colour = "black" if shares[row][column] > 0.5 else "white"
                axes.text(column, row, count, ha="center", va="center", color=colour, size="small")
        # A "$" in a name begins no formula.
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right", parse_math=False)
        axes.set_yticks(range(len(names)), names, parse_math=False)
        axes.set(xlabel="predicted", ylabel="class")
        axes.set_title(title, fontsize="medium", wrap=True)
        figure.colorbar(image, label="share of the class", shrink=0.8)
        figure.savefig(path, dpi=120)
        figure.savefig(path.with_suffix(".pdf"))
        pyplot.close(figure)


@pydantic.dataclasses.dataclass(kw_only=True)
class Results:
    """What a run measured. A run that diverged has no score and `diverged` instead.

    Attributes:
        task: The name of the task.
        labels: The names of the classes; empty without classes.
        label_separator: The separator of the labels of a text that can have several.
        has_stock_class: Whether a class of transformers predicts what the task predicts.
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
        classes: The scores of the classes in the best evaluation, on the first dev set; None
            without classes.
        evaluated_on: {name of a dev set: its size in words}.
        train_examples: The number of training rows.
        max_length: The longest input in tokens.
        padded_lengths: The lengths that batches were padded to.
        steps: The number of steps that were done.
        planned_steps: The number of steps without an early end.
        predictions: The names of the files of predictions.
        notes: Lines about the data, for the user.
        seconds: The duration of the last start of the run.
    """

    task: str | None = None
    labels: list[str] = dataclasses.field(default_factory=list)
    label_separator: str | None = None
    has_stock_class: bool = True
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
    classes: ClassReport | None = None
    evaluated_on: dict[str, str] = dataclasses.field(default_factory=dict)
    train_examples: int | None = None
    max_length: int | None = None
    padded_lengths: list[int] = dataclasses.field(default_factory=list)
    steps: int = 0
    planned_steps: int = 0
    predictions: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    seconds: float | None = None

    @property
    def scores(self) -> Values:
        """The score and the other metrics of the best evaluation, {} of a run that diverged."""
        if self.score is None:
            return {}
        others = {name: self.best[name] for name in self.baseline if name in self.best}
        others = {name: x for name, x in others.items() if not name.endswith("threshold")}
        return {self.main_metric: self.score} | others

    @classmethod
    def read(cls, path: str | os.PathLike) -> typing.Self:
        """Reads a file. Raises ConfigError if it does not hold results."""
        content = storage.read_json(path)
        with storage.reading(path, errors=pydantic.ValidationError):
            return pydantic.TypeAdapter(cls).validate_python(content)

    @classmethod
    def of_run(cls, workdir: Workdir) -> "Results | None":
        """Reads the results of a run. Returns None if it has none yet."""
        return cls.read(workdir.results_file) if workdir.results_file.is_file() else None

    def write(self, path: str | os.PathLike):
        """Writes a file. Under its name it is always complete."""
        storage.write(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")
