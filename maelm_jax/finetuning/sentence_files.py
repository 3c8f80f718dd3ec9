"""Reads one file of a sentence task: a table, usually with a header line."""

import dataclasses
import itertools
import math
import pathlib
import typing

import numpy as np

from maelm_jax import config
from maelm_jax.finetuning import glue, samples, table_rows

LONGEST_SHOWN = 200  # characters of a header in a message


@dataclasses.dataclass
class Examples:
    """The n examples of one file or split."""

    sentences: list[tuple[str, ...]]  # one or two an example
    # int32 [n] classes, float64 [n] scores, or float32 [n, classes]: 1 where a text has the label.
    labels: np.ndarray | None  # None: not read
    notes: list[str] = dataclasses.field(default_factory=list)  # for the user
    numbers: np.ndarray | None = None  # of a sample: int [n], the number of each in its file

    def sample(self, count: int | None, which: str) -> "Examples":
        """Returns a sample as a dev set, which `which` names in a note. None: all examples."""
        numbers = samples.numbers(count, len(self.sentences))
        if numbers is None:
            return self
        note = samples.dev_note(len(numbers), len(self.sentences), "examples", which)
        chosen = [self.sentences[number] for number in numbers]
        labels = None if self.labels is None else self.labels[numbers]
        return Examples(chosen, labels, [*self.notes, note], numbers)


def read(
    task: glue.Task, path: str | pathlib.Path, labelled: bool, skip_broken_rows: bool = False
) -> Examples:
    """Reads one file of a task.

    Args:
        task: The task.
        path: The file.
        labelled: Whether to read labels. If not, the label column can be missing.
        skip_broken_rows: Whether a line with too few columns is left out, and noted.

    Raises:
        ConfigError: The file belongs to another task, has no example, or a line does not match the
            header. The message names file and line, and says what was expected.
    """
    needed = (*task.sentences, task.label) if labelled else task.sentences
    has_lists = labelled and task.label_separator is not None
    joined = {task.label: task.label_separator} if has_lists else {}
    lines = table_rows.rows(path, needed, joined)
    first = next(lines)
    header, headless = [cell.strip() for cell in first.cells], False
    if task.headless and task.sentences[0] not in header:  # the first line is an example
        lines, header, headless = itertools.chain([first], lines), list(task.headless), True
    checks_label = labelled or headless
    columns = (*task.sentences, task.label) if checks_label else task.sentences
    _check_header(task, header, columns, path)
    layout = _Layout(
        header,
        text_columns=[header.index(name) for name in task.sentences],
        label_column=header.index(task.label) if task.label in header else None,
        checks_label=checks_label,
        # Rows of GLUE's other files can have extra cells.
        cells=len(header) if headless or task.name == glue.OWN else None,
    )
    reader = _Reader(task, path, layout, labelled, skip_broken_rows)
    for line in lines:
        reader.add(line)
    return reader.examples()


class _Layout(typing.NamedTuple):
    """What the columns of a file hold."""

    header: list[str]
    text_columns: list[int]
    label_column: int | None  # None: the file has no labels
    checks_label: bool  # each line must have a label of the task
    cells: int | None  # of each line; None: a line can have more or fewer

    def fits(self, cells: list[str]) -> bool:
        """Whether a line has the columns that are read."""
        last_read = max(self.text_columns)
        if self.checks_label:
            last_read = max(last_read, self.label_column)
        return last_read < len(cells) and self.cells in (None, len(cells))


class _Reader:
    """Collects the examples of a file line by line."""

    def __init__(
        self, task: glue.Task, path, layout: _Layout, labelled: bool, skip_broken_rows: bool
    ):
        self.task, self.path, self.layout, self.labelled = task, path, layout, labelled
        self.skip_broken_rows = skip_broken_rows
        self.sentences: list[tuple[str, ...]] = []
        self.labels: list[int | float | list[int]] = []
        self.unread_labels: set[str] = set()  # in a file whose labels are not read
        self.broken = 0

    def add(self, line: table_rows.Row):
        """Reads one line. Raises ConfigError when its columns or its label are wrong."""
        cells, layout, task = line.cells, self.layout, self.task
        if cells == [""] and len(layout.header) > 1:
            return  # an empty line
        if not layout.fits(cells):
            if self.skip_broken_rows:
                self.broken += 1
                return
            raise config.ConfigError(
                f"{self.path}:{line.number}: {len(cells)} columns, expected {len(layout.header)} "
                f"({_shortened(layout.header)}), separated by {table_rows.separator(self.path)}. "
                f"{self._remedy()}"
            )
        self.sentences.append(tuple(cells[column].strip() for column in layout.text_columns))
        if layout.checks_label:
            label = cells[layout.label_column].strip()
            self.labels.append(_label(task, label, f"{self.path}:{line.number}"))
        elif layout.label_column is not None and layout.label_column < len(cells):
            self.unread_labels.add(cells[layout.label_column].strip())

    def _remedy(self) -> str:
        if self.task.name != glue.OWN:
            return f"Is it a file of {self.task.name}?"
        if table_rows.separator(self.path) == "tabs":
            return "If cells have quotes around them, name the file .csv"
        return "Correct the line"

    def examples(self) -> Examples:
        """All examples. Raises ConfigError when there is none, or labels are of another task."""
        if not self.sentences:
            raise config.ConfigError(
                f"{self.path}: holds no example, only a header line. Give a file with examples."
            )
        _check_unread_labels(self.task, self.unread_labels, self.path)
        labels = label_array(self.task, self.labels) if self.labelled else None
        examples = Examples(self.sentences, labels)
        if self.broken:
            examples.notes.append(f"{self.path}: {self.broken} lines with missing columns left out")
        return note_empty(examples, str(self.path))


def _check_header(task: glue.Task, header: list[str], columns: tuple[str, ...], path):
    """Raises ConfigError when a column is missing or repeated, or belongs to another task."""
    first = "first object" if table_rows.separator(path) == "fields" else "header"
    needs = f"{task.name} needs {', '.join(columns)}, the {first} has {_shortened(header)}"
    if len(header) == 1 and len(columns) > 1:
        _check_separator(header[0], table_rows.separator(path), f"{path}:1: {needs}")
    if absent := [name for name in columns if name not in header]:
        raise config.ConfigError(f"{path}:1: no column {', '.join(map(repr, absent))}; {needs}")
    if repeated := [name for name in columns if header.count(name) > 1]:
        names = ", ".join(map(repr, repeated))
        raise config.ConfigError(f"{path}:1: more than one column {names}; {needs}")
    if task.name == glue.OWN:
        return
    for other in glue.TASKS.values():
        if other.name != task.name and other.signature in header:
            raise config.ConfigError(
                f"{path}:1: this is a file of {other.name}, for it has the column "
                f"{other.signature!r}; {task.name} needs {', '.join(columns)}. "
                f"Give a file of {task.name}, or rename the column."
            )


def _check_separator(header: str, separator: str, message: str):
    """Raises ConfigError if the one cell of a header has what separates cells in another file."""
    if separator == "tabs" and "," in header:
        raise config.ConfigError(
            f"{message}. Separate the columns with tabs, or name the file .csv"
        )
    if separator == "commas" and "\t" in header:
        raise config.ConfigError(
            f"{message}. Separate the columns with commas, or name the file .tsv"
        )
    if separator == "commas" and ";" in header:
        raise config.ConfigError(f"{message}. Separate the columns with commas, not semicolons")


def _check_unread_labels(task: glue.Task, labels: set[str], path):
    """Raises ConfigError when all labels in a file to predict belong to another task."""
    if task.name == glue.OWN or not labels or labels & set(task.labels):
        return
    others = [
        other.name for other in glue.TASKS.values() if other.labels and labels <= set(other.labels)
    ]
    if others:
        raise config.ConfigError(
            f"{path}: the column {task.label} holds {', '.join(sorted(labels))}: labels of "
            f"{', '.join(others)}, not of {task.name}. "
            f"Give a file of {task.name}, or remove the column."
        )


def _shortened(names: list[str]) -> str:
    """Names from a file, as printable text of limited length."""
    text = ", ".join(name if name.isprintable() else repr(name)[1:-1] for name in names)
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + " ..."


def _label(task: glue.Task, text: str, location: str) -> int | float | list[int]:
    """The class, score or classes that a cell holds. Raises ConfigError when it holds none."""
    if task.label_separator is not None:
        names = (name.strip() for name in text.split(task.label_separator))
        return [_class(task, name, location) for name in names if name]
    if task.labels:
        return _class(task, text, location)
    low, high = task.score_range
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if low <= score <= high:
        return score
    raise _unknown_label(task, text, location, f"numbers from {low:.7g} to {high:.7g}")


def _class(task: glue.Task, name: str, location: str) -> int:
    """The number of the class with this name. Raises ConfigError when there is none."""
    if name in task.labels:
        return task.labels.index(name)
    raise _unknown_label(task, name, location, ", ".join(task.labels))


def _unknown_label(task: glue.Task, text: str, location: str, known: str) -> config.ConfigError:
    message = f"{location}: unknown label {text[:50]!r} in column {task.label}; {task.name} has "
    several = task.name == glue.OWN and sum(label in text for label in task.labels) > 1
    if several and task.label_separator is None:
        known += ". If a text can have several labels, set CustomTask.label_separator"
    return config.ConfigError(message + known)


def label_array(task: glue.Task, labels: list) -> np.ndarray:
    """Labels as Examples has them."""
    if task.label_separator is None:
        return np.asarray(labels, np.int32 if task.labels else np.float64)
    has_label = np.zeros((len(labels), len(task.labels)), np.float32)
    for row, classes in zip(has_label, labels, strict=True):
        row[classes] = 1
    return has_label


def note_empty(examples: Examples, source: str) -> Examples:
    """Adds a note if there are empty sentences. `source` is the file or split."""
    empty = sum(not all(sentences) for sentences in examples.sentences)
    if empty:
        examples.notes.append(f"{source}: {empty} examples with an empty sentence, kept")
    return examples
