"""Which runs a command asks for: tasks by encoders, each with its settings."""

import collections
import dataclasses
import itertools
import typing

from maelm_jax import config, gin_files
from maelm_jax.finetuning import initial_encoder, tasks
from maelm_jax.finetuning.initial_encoder import InitialEncoder

BASE = "finetune/base.gin"


class Planned(typing.NamedTuple):
    """One task with one encoder. It is a single run or a grid."""

    task: str
    encoder: InitialEncoder
    label: str  # name of the encoder, unique among the encoders of the command
    experiment: config.Experiment


class Plan(typing.NamedTuple):
    """All runs of a command."""

    planned: list[Planned]  # task by task, so that encoders share data and compiled steps
    as_table: bool  # the results make a table, even if there is a single run


def plan(
    init_from: str,
    files: list[str],
    bindings: list[str],
    step: int | None = None,
    known: dict[str, str] | None = None,
) -> Plan:
    """Reads and checks all settings before the first run starts.

    Args:
        init_from: Names of encoders, separated by commas.
        files: The gin files of the command line.
        bindings: The settings of the command line.
        step: Step of the checkpoint of each encoder. None: the newest.
        known: {name of an encoder: its label} of the table in the workdir.

    Raises:
        ConfigError: A setting is wrong, or an encoder or a file of a task is missing.
    """
    names = init_from.split(",")
    if "" in names:
        raise config.ConfigError(f"--init_from={init_from} has a comma too many")
    names = [initial_encoder.normalised(name) for name in names]
    if len(set(names)) < len(names):
        raise config.ConfigError(f"--init_from={init_from} names a run twice. Name each run once.")
    encoders = [initial_encoder.load(name, step) for name in names]
    settings = [of_encoder(encoder, files, bindings) for encoder in encoders]
    labels = _unique_labels(encoders, known or {})
    planned = [
        Planned(task, encoder, label, by_task[task])
        for task in settings[0]
        for encoder, label, by_task in zip(encoders, labels, settings, strict=True)
    ]
    for one in planned:
        tasks.check(one.task, one.experiment.finetune)
    # A list of tasks makes a table, even a list of one. A task given as a string does not.
    listed = not isinstance(_load(encoders[0], [BASE, *files], bindings).finetune.tasks, str)
    return Plan(planned, listed or len(planned) > 1)


def _unique_labels(encoders: list[InitialEncoder], known: dict[str, str]) -> list[str]:
    """Short names of the encoders. Two that would be the same get the whole path instead.

    Args:
        encoders: The encoders.
        known: {name of an encoder: label that it keeps}.
    """
    new = [encoder for encoder in encoders if encoder.name not in known]
    counts = collections.Counter([*known.values(), *(encoder.label for encoder in new)])
    labels = dict(known)
    for encoder in new:
        label = encoder.label
        if counts[label] > 1:
            label = encoder.name.strip("/").replace("/", "-")
        numbered = (f"{label}-{number}" for number in itertools.count(2))
        labels[encoder.name] = (
            label
            if label not in labels.values()
            else next(other for other in numbered if other not in labels.values())
        )
    return [labels[encoder.name] for encoder in encoders]


def of_encoder(
    encoder: InitialEncoder, files: list[str], bindings: list[str]
) -> dict[str, config.Experiment]:
    """Returns {task: settings} for one encoder.

    Later sources win: the encoder's own settings, finetune/base.gin, the task's file, the gin files
    and the settings of the command line. The shape of an encoder that is not a workdir comes from
    the encoder and wins over all of them. Raises ConfigError when there is no task or a value is
    wrong.
    """
    names = _load(encoder, [BASE, *files], bindings).finetune.listed("tasks")
    if not names:
        raise config.ConfigError(
            "Finetune.tasks names no task; stack a task's file, as in "
            f"--gin_file=finetune/rte.gin, on {', '.join(files)}"
        )
    _check_shape(encoder, files, bindings)
    return {task: _of_task(task, encoder, files, bindings) for task in names}


def _check_shape(encoder: InitialEncoder, files: list[str], bindings: list[str]):
    """Raises ConfigError for a setting of the encoder's shape that differs from the encoder."""
    plain = _load(encoder, [BASE], [])
    shape, wanted = encoder.fit(plain).model, _load(encoder, [BASE, *files], bindings).model
    for name in config.field_names(config.Model, part="encoder"):
        value, of_shape = getattr(wanted, name), getattr(shape, name)
        if value not in (of_shape, getattr(plain.model, name)):
            raise config.ConfigError(
                f"Model.{name}={value!r}: {encoder.name} has {of_shape!r}, and fine-tuning keeps "
                "the shape of its encoder. Leave the setting out"
            )


def _of_task(
    task: str, encoder: InitialEncoder, files: list[str], bindings: list[str]
) -> config.Experiment:
    """The settings of one task with one encoder."""
    task_files = [f"finetune/{task}.gin"]
    bindings = [*bindings, f"Finetune.tasks={task}"]
    experiment = encoder.fit(_load(encoder, [BASE, *task_files, *files], bindings))
    finetune = dataclasses.replace(experiment.finetune, init_from=encoder.name)
    return dataclasses.replace(experiment, finetune=finetune)


def _load(encoder: InitialEncoder, names: list[str], bindings: list[str]) -> config.Experiment:
    """Settings from gin files and bindings, above those of the encoder's own pretraining."""
    pretraining = dataclasses.replace(gin_files.load([encoder.gin_file]), finetune=None)
    return gin_files.load(names, bindings, base=pretraining)
