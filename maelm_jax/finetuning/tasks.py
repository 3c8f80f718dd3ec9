"""The tasks by name: checks that their data is there, and reads it."""

import dataclasses
import typing

import numpy as np

from maelm_jax import config
from maelm_jax.data.vocabulary import Vocabulary
from maelm_jax.encoders.family import REPEATED_SEPARATOR, PairFormat
from maelm_jax.finetuning import glue, question_task, sentence_data, sentence_task, squad
from maelm_jax.finetuning.task_data import DevSet, TaskData

NAMES = (*glue.TASKS, *squad.FILES, glue.OWN)
SAMPLE_SEED = 0  # draws the sample of Finetune.train_examples; runs of all seeds share it


class Classes(typing.NamedTuple):
    """The outputs of the classifier of a task."""

    count: int  # 1 is a regression; 0: the head finds the start and the end of an answer
    labels: tuple[str, ...]  # their names; empty without classes


def classes_of(name: str, settings: config.Finetune) -> Classes:
    """The classes of a task. Raises ConfigError when the task is unknown."""
    if name in squad.FILES:
        return Classes(0, ())
    if name not in NAMES:
        raise config.ConfigError(f"Finetune.tasks: no task {name!r}; there are {', '.join(NAMES)}")
    labels = glue.task_of(name, settings.custom).labels
    return Classes(max(len(labels), 1), labels)


def check(name: str, settings: config.Finetune):
    """Checks that a task and its files exist. Does not read them, and does not check TFDS.

    Raises:
        ConfigError: The task is unknown, or a file is missing.
    """
    classes = classes_of(name, settings)
    if settings.data_dir is None and name != glue.OWN:
        return
    if classes.count == 0:
        squad.locate(name, settings)
    else:
        sentence_data.locate(glue.task_of(name, settings.custom), settings)


def load(
    name: str, settings: config.Finetune, corpus: config.Corpus, vocabulary: Vocabulary,
    length: int, pair: PairFormat = REPEATED_SEPARATOR,
) -> TaskData:  # fmt: skip
    """Reads and tokenises the data of a task.

    Args:
        name: One of NAMES.
        settings: Settings of fine-tuning.
        corpus: Settings of TFDS.
        vocabulary: Encodes the text.
        length: Largest number of tokens of an example.
        pair: How the encoder reads two sentences.

    Raises:
        ConfigError: The task is unknown, or data is missing or malformed.
    """
    kind = question_task if name in squad.FILES else sentence_task
    data = kind.load(name, settings, corpus, vocabulary, length, pair)
    count, available = settings.train_examples, len(data.train.ids)
    if count is None or count >= available:
        return data
    order = np.random.default_rng(SAMPLE_SEED).permutation(available)
    sample = data.train.select(np.sort(order[:count]))
    unit = "windows" if name in squad.FILES else "examples"
    notes = [*data.notes, f"trained on {count} of {available} {unit}"]
    return dataclasses.replace(data, train=sample, notes=notes)


def read_unlabelled(
    name: str, path: str, settings: config.Finetune, vocabulary: Vocabulary, length: int,
    best: dict[str, float], pair: PairFormat = REPEATED_SEPARATOR,
) -> DevSet:  # fmt: skip
    """Reads a file to predict. Its labels can be missing.

    Args:
        name: The task.
        path: The file.
        settings: Settings of the fine-tuning run.
        vocabulary: Encodes the text.
        length: Largest number of tokens of an example.
        best: Metrics of the run's best evaluation. In SQuAD 2.0 they include the null threshold.
        pair: How the encoder reads two sentences.

    Raises:
        ConfigError: The file is malformed or belongs to another task.
    """
    if name in squad.FILES:
        return question_task.read_unlabelled(
            name, path, settings, vocabulary, length, best, pair
        )
    return sentence_task.read_unlabelled(name, path, settings, vocabulary, length, pair)
