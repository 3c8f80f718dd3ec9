"""The sentence tasks as training sees them: tokenised examples, scores, files of predictions."""

import functools
import pathlib

import numpy as np
import scipy.special

from maelm_jax import config, storage
from maelm_jax.finetuning import features, glue, metrics, sentence_data, sentence_files
from maelm_jax.finetuning.input_format import InputFormat
from maelm_jax.finetuning.sentence_files import Examples
from maelm_jax.finetuning.task_data import DevSet, Head, TaskData


def load(
    name: str, settings: config.Finetune, corpus: config.Corpus, input_format: InputFormat
) -> TaskData:
    """Reads and tokenises the data of a sentence task. See tasks.load."""
    task = glue.task_of(name, settings.custom)
    data = sentence_data.load(task, settings, corpus)
    train = encode(task, data.train, input_format, "training")
    dev = {
        part: examples.sample(settings.dev_examples, part or "dev")
        for part, examples in data.dev.items()
    }
    dev_sets = {
        part: dev_set(task, examples, input_format, part or "dev") for part, examples in dev.items()
    }
    unscored = {}
    if name == "mnli" and (examples := sentence_data.diagnostic(settings, corpus)):
        unscored["ax"] = dev_set(task, examples, input_format, "diagnostic")
    notes = [note for examples in (data.train, *dev.values()) for note in examples.notes]
    notes += _note_on_metrics(task)
    first = next(iter(dev))
    main = f"{first}_{task.metrics[0]}" if first else task.metrics[0]
    return TaskData(
        name,
        head_of(task),
        task.labels,
        main,
        train,
        dev_sets,
        unscored,
        notes,
        task.selected_by,
        task.label_separator,
    )


def head_of(task: glue.Task) -> Head:
    """The head of a sentence task."""
    return Head("sentence", max(len(task.labels), 1))


def _note_on_metrics(task: glue.Task) -> list[str]:
    """Says which class the F1 of the user's task is of."""
    if task.name == glue.OWN and "f1" in task.metrics:
        return [f"f1 is that of the label {task.labels[1]!r}"]
    return []


def read_file(
    name: str,
    path: str,
    settings: config.Finetune,
    input_format: InputFormat,
    labelled: bool = False,
) -> DevSet:
    """Reads a file to predict. See tasks.read_file."""
    task = glue.task_of(name, settings.custom)
    examples = sentence_files.read(task, path, labelled)
    if labelled:
        examples.notes += _note_on_metrics(task)
    return dev_set(task, examples, input_format, path)


def encode(
    task: glue.Task, examples: Examples, input_format: InputFormat, which: str
) -> features.Features:
    """Encodes examples, and adds a note to them that says how many were cut.

    `which` names them in the note. Scores become numbers from 0 to 1. Missing labels are class 0.
    """
    ids, second, cut = features.sentences(examples.sentences, input_format)
    if cut:
        examples.notes.append(
            f"{which}: {cut} of {len(ids)} examples cut to {input_format.length} tokens"
        )
    targets = np.zeros(len(ids), np.int32) if examples.labels is None else examples.labels
    if targets.dtype == np.float64:  # scores
        targets = task.normalise_scores(targets)
    return features.Features(ids, targets, second)


def dev_set(task: glue.Task, examples: Examples, input_format: InputFormat, which: str) -> DevSet:
    """Examples to predict. `which` names them in notes."""
    encoded = encode(task, examples, input_format, which)
    return DevSet(
        encoded,
        functools.partial(metrics.glue, task.metrics, encoded.targets),
        functools.partial(_write, task, examples.numbers),
        (".tsv", "_probabilities.tsv") if task.labels else (".tsv",),
        examples.notes,
        f"{len(encoded.ids):,} examples",
    )


def _write(
    task: glue.Task, numbers: np.ndarray | None, logits: np.ndarray, folder: pathlib.Path, stem: str
) -> pathlib.Path:
    """Writes the predictions, and in a task with labels their probabilities."""
    path = folder / f"{stem}.tsv"
    write_predictions(task, logits, path, numbers)
    if task.labels:
        write_probabilities(task, logits, folder / f"{stem}_probabilities.tsv", numbers)
    return path


def write_predictions(
    task: glue.Task, logits: np.ndarray, path: pathlib.Path, numbers: np.ndarray | None = None
):
    """Writes predictions in the format of GLUE's submissions: columns `index` and `prediction`.

    Args:
        task: The task.
        logits: [n, classes], written as names of labels, or [n, 1], written as scores. If a text
            can have several labels, those above 0 are written, with the separator between them.
        path: The file.
        numbers: The index of each row. None: 0 to n - 1.
    """
    if task.label_separator is not None:
        names = np.asarray(task.labels, object)
        predictions = [task.label_separator.join(names[row > 0]) for row in logits]
    elif task.labels:
        predictions = [task.labels[label] for label in logits.argmax(axis=1)]
    else:
        predictions = [f"{score:.7g}" for score in task.denormalise_scores(logits[:, 0])]
    numbers = range(len(logits)) if numbers is None else numbers
    pairs = zip(numbers, predictions, strict=True)
    lines = [f"{index}\t{prediction}\n" for index, prediction in pairs]
    storage.write(path, "index\tprediction\n" + "".join(lines))


def write_probabilities(
    task: glue.Task, logits: np.ndarray, path: pathlib.Path, numbers: np.ndarray | None = None
):
    """Writes probabilities from `logits` [n, classes]: a column `index` and one for each label.

    They are the softmax, or the sigmoid of each logit if a text can have several labels.
    `numbers` are those of `write_predictions`.
    """
    numbers = range(len(logits)) if numbers is None else numbers
    logits = logits.astype(np.float64)
    if task.label_separator is None:
        rows = scipy.special.softmax(logits, axis=1)
    else:
        rows = scipy.special.expit(logits)
    lines = ["\t".join(("index", *task.labels))]
    for index, row in zip(numbers, rows, strict=True):
        lines.append("\t".join((str(index), *(f"{value:.6f}" for value in row))))
    storage.write(path, "\n".join(lines) + "\n")
