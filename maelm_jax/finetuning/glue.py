"""The tasks of GLUE, and a task of the user in the same format (`own`)."""

import collections.abc
import dataclasses
import os
import pathlib

import numpy as np
import scipy.special

from maelm_jax import config, storage
from maelm_jax.finetuning import files

OWN = "own"
YES_NO = ("0", "1")
ENTAILED = ("entailment", "not_entailment")


@dataclasses.dataclass(frozen=True)
class Task:
    """One task. A task without labels is a regression from 0 to 5 (STS-B)."""

    name: str
    folder: str  # in GLUE's distribution
    sentences: tuple[str, ...]  # columns of the text, one or two
    label: str  # column of the label
    labels: tuple[str, ...] = YES_NO  # class i is labels[i] in the files, and i in TFDS
    metrics: tuple[str, ...] = ("accuracy",)  # the first one selects the best evaluation
    fields: tuple[str, ...] = ()  # fields of the text in TFDS, where they differ from `sentences`
    dev: tuple[str, ...] = ("",)  # names of the dev sets: the X of dev_X.tsv, "" for dev.tsv
    headless: tuple[str, ...] = ()  # columns of the published files, if these have no header line
    signature: str | None = None  # a column that the published files of no other task have
    broken_rows: bool = False  # the published training file has rows cut in two; they are left out

    @property
    def tfds(self) -> str:
        return f"glue/{self.name}"


TASKS = {
    task.name: task
    for task in (
        Task("cola", "CoLA", ("sentence",), "label", metrics=("mcc", "accuracy"),
             headless=("source", "label", "mark", "sentence")),
        Task("sst2", "SST-2", ("sentence",), "label"),
        Task("mrpc", "MRPC", ("#1 String", "#2 String"), "Quality", metrics=("accuracy", "f1"),
             fields=("sentence1", "sentence2"), signature="#1 String"),
        Task("stsb", "STS-B", ("sentence1", "sentence2"), "score", labels=(),
             metrics=("spearman", "pearson"), signature="old_index"),
        Task("qqp", "QQP", ("question1", "question2"), "is_duplicate", metrics=("accuracy", "f1"),
             signature="question1", broken_rows=True),
        Task("mnli", "MNLI", ("sentence1", "sentence2"), "gold_label",
             ("entailment", "neutral", "contradiction"), fields=("premise", "hypothesis"),
             dev=("matched", "mismatched"), signature="pairID"),
        Task("qnli", "QNLI", ("question", "sentence"), "label", ENTAILED, signature="question"),
        Task("rte", "RTE", ("sentence1", "sentence2"), "label", ENTAILED),
        Task("wnli", "WNLI", ("sentence1", "sentence2"), "label"),
    )
}  # fmt: skip


def task_of(name: str, settings: config.Finetune) -> Task:
    """The task of this name. The settings define the task `own`."""
    if name != OWN:
        return TASKS[name]
    return Task(OWN, "", settings.columns, settings.label, settings.labels,
                ("accuracy", "f1") if len(settings.labels) == 2 else ("accuracy",))


@dataclasses.dataclass
class Examples:
    """The n examples of one file or split."""

    sentences: list[tuple[str, ...]]  # one or two an example
    labels: np.ndarray | None  # int32 [n] classes or float32 [n] scores from 0 to 5; None: not read
    notes: list[str] = dataclasses.field(default_factory=list)  # for the user


def load(
    task: Task, settings: config.Finetune, corpus: config.Corpus
) -> tuple[Examples, dict[str, Examples]]:
    """Reads the data of a task from the files in `settings.data_dir`, or from TFDS if it is None.

    Returns:
        Training examples, and dev sets by name. A note of the training examples names a dev set
        that is missing while there is another.

    Raises:
        ConfigError: The training data or every dev set is missing, or a file is not as expected.
    """
    parts = _parts(task)
    if task.name != OWN and settings.data_dir is None:
        where = f"TFDS dataset {task.tfds}"
        found = {name: _from_tfds(task, part.replace("dev", "validation"), corpus)
                 for name, part in parts.items()}
        _require(task, found, where)
    else:
        where = _folder(task, settings)
        found = {name: path and read_file(task, path, labelled=True)
                 for name, path in locate(task, settings).items()}
    train = found.pop("train")
    train.notes += [f"no {parts[name]} in {where}" for name, dev in found.items() if dev is None]
    return train, {name: dev for name, dev in found.items() if dev is not None}


def locate(task: Task, settings: config.Finetune) -> dict[str, pathlib.Path | None]:
    """{"train" or dev set: file or None}. Raises ConfigError when data is missing (see `load`)."""
    if task.name == OWN:
        found = {"train": pathlib.Path(settings.train_file), "": pathlib.Path(settings.dev_file)}
        if absent := [str(path) for path in found.values() if not os.path.isfile(path)]:
            raise config.ConfigError(f"own: no file {' or '.join(absent)} "
                                     "(Finetune.train_file, Finetune.dev_file)")
        return found
    found = {name: files.locate(settings.data_dir, f"{task.folder}/{part}.tsv")
             for name, part in _parts(task).items()}
    _require(task, found, _folder(task, settings))
    return found


def _parts(task: Task) -> dict[str, str]:
    """{"train" or name of a dev set: name of its file, without ending}."""
    return {"train": "train"} | {name: "dev" + (f"_{name}" if name else "") for name in task.dev}


def _folder(task: Task, settings: config.Finetune) -> str:
    return f"{settings.data_dir} ({task.folder}/, also in its glue/; .tsv, .tsv.xz or .tsv.gz)"


def _require(task: Task, found: dict, where: str):
    """Raises ConfigError when the training data or every dev set in `found` is missing."""
    parts = _parts(task)
    absent = "train" if found["train"] is None else " or ".join(
        part for part in parts.values() if part != "train")
    if found["train"] is None or not any(found[name] for name in parts if name != "train"):
        raise config.ConfigError(f"{task.name}: no {absent} in {where}")


def read_file(task: Task, path: str | pathlib.Path, labelled: bool) -> Examples:
    """Reads one file of a task. Without `labelled`, the label column can be missing.

    Raises:
        ConfigError: The file belongs to another task, has no example, or a line does not match the
            header. The message names file and line, and says what was expected.
    """
    lines = files.rows(path)
    number, header = next(lines)
    headless = bool(task.headless) and task.sentences[0] not in header
    if headless:  # the first line is an example
        lines, header = _chain((number, header), lines), list(task.headless)
    wanted = (*task.sentences, task.label) if labelled or headless else task.sentences
    _check_header(task, header, wanted, path)
    columns = [header.index(name) for name in wanted]
    hint = header.index(task.label) if task.label in header else None
    exact = headless or task.name == OWN  # rows of GLUE's other files can have extra cells
    sentences, labels, hints, broken = [], [], set(), 0
    for number, cells in lines:
        if len(cells) <= max(columns) or (exact and len(cells) != len(header)):
            if task.broken_rows and labelled:
                broken += 1
                continue
            raise config.ConfigError(
                f"{path}:{number}: {len(cells)} columns, expected {len(header)} "
                f"({_shown(header)}), separated by tabs. Is it a file of {task.name}?")
        sentences.append(tuple(cells[column].strip() for column in columns[: len(task.sentences)]))
        if labelled or headless:
            labels.append(_label(task, cells[columns[-1]].strip(), path, number))
        elif hint is not None and hint < len(cells):
            hints.add(cells[hint].strip())
    if not sentences:
        raise config.ConfigError(f"{path}: holds no example, only a header line")
    _check_hints(task, hints, path)
    found = Examples(sentences, _array(task, labels) if labelled else None)
    if broken:
        found.notes.append(f"{path}: {broken} rows with missing columns left out")
    return _note_empty(found, str(path))


def _check_header(task: Task, header: list[str], wanted: tuple[str, ...], path):
    """Raises ConfigError when a column is missing or repeated, or belongs to another task."""
    needs = f"{task.name} needs {', '.join(wanted)}, the header has {_shown(header)}"
    if absent := [name for name in wanted if name not in header]:
        raise config.ConfigError(f"{path}:1: no column {', '.join(map(repr, absent))}; {needs}")
    if twice := [name for name in wanted if header.count(name) > 1]:
        names = ", ".join(map(repr, twice))
        raise config.ConfigError(f"{path}:1: more than one column {names}; {needs}")
    if task.name == OWN:
        return
    for other in TASKS.values():
        if other.name != task.name and other.signature in header:
            raise config.ConfigError(
                f"{path}:1: this is a file of {other.name}, for it has the column "
                f"{other.signature!r}; {task.name} needs {', '.join(wanted)}. "
                f"Give a file of {task.name}, or rename the column.")


def _check_hints(task: Task, hints: set[str], path):
    """Raises ConfigError when all labels in a file to predict belong to another task."""
    if task.name == OWN or not hints or hints & set(task.labels):
        return
    others = [other.name for other in TASKS.values() if other.labels and hints <= set(other.labels)]
    if others:
        raise config.ConfigError(
            f"{path}: the column {task.label} holds {', '.join(sorted(hints))}: labels of "
            f"{', '.join(others)}, not of {task.name}. "
            f"Give a file of {task.name}, or remove the column.")


def _shown(names: list[str]) -> str:
    """Names from a file, as printable text of limited length."""
    text = ", ".join(name if name.isprintable() else repr(name)[1:-1] for name in names)
    return text if len(text) <= 200 else text[:200] + " ..."


def _chain(first, rest: collections.abc.Iterator) -> collections.abc.Iterator:
    yield first
    yield from rest


def _label(task: Task, text: str, path, number: int) -> int | float:
    """The class or score that a cell holds. Raises ConfigError when it holds neither."""
    if task.labels:
        if text in task.labels:
            return task.labels.index(text)
        raise config.ConfigError(
            f"{path}:{number}: unknown label {text[:50]!r} in column {task.label}; "
            f"{task.name} has {', '.join(task.labels)}")
    try:
        score = float(text)
    except ValueError:
        score = -1.0
    if 0.0 <= score <= 5.0:
        return score
    raise config.ConfigError(
        f"{path}:{number}: unknown label {text[:50]!r} in column {task.label}; "
        f"{task.name} has numbers from 0 to 5")


def _array(task: Task, labels: list) -> np.ndarray:
    return np.asarray(labels, np.int32 if task.labels else np.float32)


def _note_empty(found: Examples, where: str) -> Examples:
    empty = sum(not all(sentences) for sentences in found.sentences)
    if empty:
        found.notes.append(f"{where}: {empty} examples with an empty sentence, kept")
    return found


def _from_tfds(task: Task, split: str, corpus: config.Corpus) -> Examples | None:
    records = _records(task.tfds, split, corpus)
    if records is None:
        return None
    sentences = [tuple(record[name].strip() for name in task.fields or task.sentences)
                 for record in records]
    return _note_empty(
        Examples(sentences, _array(task, [record["label"] for record in records])),
        f"{task.tfds} {split}")


def _records(name: str, split: str, corpus: config.Corpus) -> list[dict] | None:
    """Records in the order of GLUE's files, which numbers the predictions. TFDS shuffles them."""
    records = files.records(name, split, corpus)
    return records and sorted(records, key=lambda record: int(record["idx"]))


def diagnostic(settings: config.Finetune, corpus: config.Corpus) -> Examples | None:
    """GLUE's diagnostic set, or None when it is missing. A model of MNLI predicts its labels."""
    if settings.data_dir is None:
        try:
            records = _records("glue/ax", "test", corpus)
        except config.ConfigError:  # TFDS cannot give it, and MNLI does not need it
            return None
        return records and Examples(
            [(record["premise"].strip(), record["hypothesis"].strip()) for record in records], None)
    path = files.locate(settings.data_dir, "AX/AX.tsv", "AX/diagnostic.tsv",
                        "diagnostic/diagnostic.tsv", "diagnostic/AX.tsv")
    return read_file(TASKS["mnli"], path, labelled=False) if path else None


def write_predictions(task: Task, logits: np.ndarray, path: pathlib.Path):
    """Writes predictions in the format of GLUE's submissions: columns `index` and `prediction`.

    `logits` are [n, classes], written as names of labels, or [n, 1], written as scores from 0 to 5.
    """
    if task.labels:
        shown = [task.labels[label] for label in logits.argmax(axis=1)]
    else:
        shown = [f"{score:.3f}" for score in np.clip(logits[:, 0] * 5, 0, 5)]
    storage.write(path, "index\tprediction\n" + "".join(
        f"{index}\t{value}\n" for index, value in enumerate(shown)))


def write_probabilities(task: Task, logits: np.ndarray, path: pathlib.Path):
    """Writes the softmax of `logits` [n, classes]: a column `index` and one for each label."""
    rows = scipy.special.softmax(logits.astype(np.float64), axis=1)
    lines = [("index", *task.labels), *(
        (index, *(f"{value:.6f}" for value in row)) for index, row in enumerate(rows))]
    storage.write(path, "".join("\t".join(map(str, line)) + "\n" for line in lines))
