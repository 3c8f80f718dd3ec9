"""Compares a resumed run with its last start, and records changed settings in changes.txt.

Some settings may change when a run resumes, because they affect only the steps to come. The number
of CPU cores may change too.
"""

import datetime
import re
import typing

import jax
import numpy as np

from maelm_jax import config, gin_files, storage
from maelm_jax.data import workers
from maelm_jax.training import optimizers, phases

HISTORY = "changes.txt"


class Before(typing.NamedTuple):
    """Settings and CPU cores of the last start in a workdir."""

    experiment: config.Experiment
    cores: int | None  # None: not recorded


def read(workdir: str) -> Before | None:
    """Reads the record of the last start. Call it before this start is recorded.

    Returns:
        The settings and cores, or None for a new workdir.
    """
    folder = storage.local_path(workdir)
    if not (folder / "config.gin").exists():
        return None
    environment = folder / "environment.txt"
    text = environment.read_text(errors="replace") if environment.exists() else ""
    cores = re.findall(r"^cores (\d+)$", text, re.MULTILINE)
    return Before(gin_files.load([str(folder / "config.gin")]), int(cores[-1]) if cores else None)


def check_length(workdir: str, done: int, train_steps: int):
    """Raises ConfigError if the run has done more steps (`done`) than `train_steps`."""
    if train_steps < done:
        raise config.ConfigError(
            f"Run.train_steps={train_steps} is below the {done} steps that {workdir} has done. "
            f"Use {done} or more"
        )


def effects(before: Before, now: config.Experiment, step: int) -> list[str]:
    """Returns what the differences change in the steps after `step`, one line each."""
    lines = []
    old, new = before.experiment.run, now.run
    if old.train_steps != new.train_steps:
        old_rate, new_rate = (learning_rate(run, now.optimizer, step) for run in (old, new))
        lines.append(
            f"Run.train_steps: {old.train_steps} -> {new.train_steps}. The schedule is now that of "
            f"{new.train_steps} steps"
            + (
                f": the learning rate of step {step + 1} is {new_rate:.4g}, "
                f"it would have been {old_rate:.4g}"
                if step < new.train_steps
                else ""
            )
        )
    if old.init_from != new.init_from:
        lines.append(
            f"Run.init_from: {old.init_from} -> {new.init_from}. It is not read: the weights are "
            "those of the checkpoint"
        )
    old_mask, new_mask = (
        phases.of_step(phases.of_run(one), step).experiment.masking.rate
        for one in (before.experiment, now)
    )
    if old_mask != new_mask and step < new.train_steps:
        lines.append(
            f"The mask rate of step {step + 1} is {new_mask:g}, it would have been {old_mask:g}"
        )
    if old.accumulate != new.accumulate:
        lines.append(
            f"Run.accumulate: {old.accumulate} -> {new.accumulate}. "
            "Rows and masks stay the same, losses differ by rounding"
        )
    if before.cores not in (None, workers.usable_cores()) and jax.default_backend() == "cpu":
        lines.append(
            f"This start has {workers.usable_cores()} CPU cores, the last one had {before.cores}. "
            "Losses may differ by rounding"
        )
    return lines


def learning_rate(run: config.Run, settings: config.Optimizer, step: int) -> float:
    """Returns the learning rate of the first step after `step`."""
    return float(np.asarray(optimizers.schedule(settings, run.train_steps)(step)))


def record(workdir: str, step: int, lines: list[str]):
    """Appends changed settings to changes.txt, with the last step before the change."""
    if not lines:
        return
    path = storage.local_path(workdir) / HISTORY
    before = path.read_text() if path.exists() else ""
    when = datetime.datetime.now(datetime.UTC)
    storage.write(
        path,
        before
        + "".join(f"{when:%Y-%m-%d %H:%M:%S} UTC, after step {step}: {line}\n" for line in lines),
    )
