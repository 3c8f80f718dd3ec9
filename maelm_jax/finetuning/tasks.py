"""The tasks by name: checks that their data is there, and reads it."""

import dataclasses

import numpy as np

from maelm_jax import config
from maelm_jax.finetuning import (
    glue,
    question_task,
    samples,
    sentence_data,
    sentence_task,
    squad,
    token_task,
)
from maelm_jax.finetuning.input_format import InputFormat
from maelm_jax.finetuning.task_data import SPAN, DevSet, Head, TaskData

NAMES = (*glue.TASKS, *squad.FILES, glue.OWN, token_task.NAME)


def head_of(name: str, settings: config.Finetune, labels: tuple[str, ...]) -> Head:
    """The head of a finished run. `labels` are those of its results.

    Raises:
        ConfigError: The task is unknown.
    """
    if name not in NAMES:
        raise config.ConfigError(f"Finetune.tasks: no task {name!r}; there are {', '.join(NAMES)}")
    if name == token_task.NAME:
        return Head("token", len(labels))
    if name in squad.FILES:
        return SPAN
    return sentence_task.head_of(glue.task_of(name, settings.custom))


def check(name: str, settings: config.Finetune):
    """Checks that the files of a task exist. Does not read them, and does not check TFDS.

    Raises:
        ConfigError: A file is missing.
    """
    if name == token_task.NAME:
        token_task.locate(settings.conll)
    elif settings.data_dir is None and name != glue.OWN:
        return
    elif name in squad.FILES:
        squad.locate(name, settings)
    else:
        sentence_data.locate(glue.task_of(name, settings.custom), settings)


def load(
    name: str, settings: config.Finetune, corpus: config.Corpus, input_format: InputFormat
) -> TaskData:
    """Reads and tokenises the data of a task.

    Args:
        name: One of NAMES.
        settings: Settings of fine-tuning.
        corpus: Settings of TFDS.
        input_format: How the encoder reads the examples.

    Raises:
        ConfigError: The task is unknown, or data is missing or malformed.
    """
    if name == token_task.NAME:
        data = token_task.load(settings, input_format)
    elif name in squad.FILES:
        data = question_task.load(name, settings, corpus, input_format)
    else:
        data = sentence_task.load(name, settings, corpus, input_format)
    available = len(data.train.ids)
    numbers = samples.numbers(settings.train_examples, available)
    if numbers is not None:
        notes = [*data.notes, f"trained on {len(numbers)} of {available} {data.unit}"]
        data = dataclasses.replace(data, train=data.train.select(numbers), notes=notes)
    return dataclasses.replace(data, notes=data.notes + _note_on_unused(data))


def _note_on_unused(data: TaskData) -> list[str]:
    """Names the labels that no training example has."""
    targets, classes = data.train.targets, np.arange(len(data.labels))
    used = np.isin(classes, targets) if data.label_separator is None else targets.any(axis=0)
    unused = [repr(label) for label, is_used in zip(data.labels, used, strict=True) if not is_used]
    return [f"training: no example has the label {', '.join(unused)}"] if unused else []


def read_file(
    name: str,
    path: str,
    settings: config.Finetune,
    input_format: InputFormat,
    results: dict,
    labelled: bool = False,
) -> DevSet:
    """Reads a file to predict.

    Args:
        name: The task.
        path: The file.
        settings: Settings of the fine-tuning run.
        input_format: How the encoder reads the examples.
        results: Results of the run. Those of SQuAD 2.0 have the null threshold, those of `conll`
            the labels.
        labelled: Whether its labels are read, for `DevSet.score`. If not, they can be missing.

    Raises:
        ConfigError: The file is malformed, belongs to another task, or lacks the labels.
    """
    if name == token_task.NAME:
        labels = tuple(results["labels"])
        return token_task.read_file(path, settings, input_format, labels, labelled)
    if name in squad.FILES:
        best = results.get("best", {})
        return question_task.read_file(name, path, settings, input_format, best, labelled)
    return sentence_task.read_file(name, path, settings, input_format, labelled)
