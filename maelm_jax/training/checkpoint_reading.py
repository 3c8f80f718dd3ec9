"""Reads a checkpoint safely: checks its files and shapes, and tries again if the storage fails.

A damaged file, arrays that do not fit, and wrong input end the read. Any other failure can be
temporary, so the read is repeated.
"""

import collections.abc
import enum
import logging
import time
import typing

from etils import epath

from maelm_jax import storage
from maelm_jax.config import ConfigError, RunError
from maelm_jax.training import checksums, coordination, older_checkpoints

log = logging.getLogger(__name__)

FOLDER = "checkpoints"  # in a workdir; it has a folder for each step
PAUSES = (1, 2, 4, 8, 15, 30)  # seconds between the attempts to read a checkpoint


class Outcome(enum.IntEnum):
    """Outcome of one attempt to read a checkpoint. The processes agree on the highest value."""

    SUCCESS = 0
    FAILURE = 1  # the cause is unknown: the next attempt may succeed
    MISMATCH = 2
    DAMAGE = 3
    WRONG_INPUT = 4  # a ConfigError, as of a bucket whose package is not installed


class Attempt(typing.NamedTuple):
    """One attempt to read a checkpoint."""

    outcome: Outcome
    value: typing.Any = None  # what was read
    reason: str = ""  # why nothing was read


class Mismatch(Exception):
    """The arrays of a checkpoint differ from those of the model."""


OUTCOMES = {
    Mismatch: Outcome.MISMATCH,
    checksums.Damaged: Outcome.DAMAGE,
    ConfigError: Outcome.WRONG_INPUT,
}
LONGEST_REASON = 300  # characters of an error of a storage library


def checkpoints_folder(workdir: str) -> epath.Path:
    """Returns the folder of a workdir's checkpoints. Raises ConfigError if it is a file."""
    # The call also sets EPATH_USE_TF for buckets, which `epath.Path` needs below.
    local = storage.local_path(workdir).resolve()
    folder = epath.Path(workdir if storage.in_bucket(workdir) else local) / FOLDER
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{folder} is a file, where a run keeps the folder of its checkpoints: "
            "move it away, or give another --workdir"
        )
    return folder


def verify(folder: epath.Path, part: int = 0, parts: int = 1):
    """Compares the files of a checkpoint with their checksums.

    Args:
        folder: The folder of one step.
        part: Number of this process, from 0. Each process checks its share of the files.
        parts: Number of processes.

    Raises:
        Damaged: A file is missing or differs.
    """
    if not checksums.verify(str(folder), part, parts):
        log.warning(
            "%s was written before checksums were kept: it is used without being checked", folder
        )


def check_shapes(saved: typing.Any, like: typing.Any, extra_allowed: bool = True):
    """Compares the arrays of a checkpoint with those of the model.

    Args:
        saved: Tree of shapes in the checkpoint.
        like: Tree of arrays of the model.
        extra_allowed: Whether `saved` may have arrays that `like` does not have.

    Raises:
        Mismatch: `saved` lacks an array or has one that is not allowed, or shapes differ.
    """
    saved_shapes, model_shapes = (
        {path: tuple(leaf.shape) for path, leaf in older_checkpoints.by_current_path(tree).items()}
        for tree in (saved, like)
    )
    problems = []
    for path, shape in model_shapes.items():
        if path not in saved_shapes:
            problems.append(f"it holds no {path}")
        elif saved_shapes[path] != shape:
            problems.append(f"{path} has shape {saved_shapes[path]} there, {shape} here")
    if not extra_allowed:
        extra = [path for path in saved_shapes if path not in model_shapes]
        problems += [f"it holds {path}, which this model does not have" for path in extra]
    if problems:
        raise Mismatch("; ".join(problems[:3]))


def read(
    action: collections.abc.Callable[[], typing.Any],
    folder: epath.Path,
    collective: bool = False,
    pauses: tuple[int, ...] | None = None,
) -> typing.Any:
    """Returns what `action` returns, and calls it again if it fails for an unknown reason.

    Args:
        action: Reads the checkpoint in `folder`.
        folder: The folder of one step.
        collective: Whether all processes call this function. All then have the same outcome.
        pauses: Seconds between the attempts. None: `PAUSES`.

    Raises:
        Damaged: A file differs from its checksum.
        ConfigError: The checkpoint does not fit the model, or `action` raised it.
        RunError: The last attempt failed.
    """
    attempt = _attempt(action, collective)
    for pause in PAUSES if pauses is None else pauses:
        if attempt.outcome != Outcome.FAILURE:
            break
        log.warning("%s cannot be read, trying again in %g s: %s", folder, pause, attempt.reason)
        time.sleep(pause)
        attempt = _attempt(action, collective)
    if attempt.outcome == Outcome.SUCCESS:
        return attempt.value
    if attempt.outcome == Outcome.WRONG_INPUT:
        raise ConfigError(f"the checkpoint {folder} cannot be read: {attempt.reason}")
    if attempt.outcome == Outcome.DAMAGE:
        raise checksums.Damaged(attempt.reason)
    if attempt.outcome == Outcome.MISMATCH:
        raise ConfigError(f"the checkpoint {folder} does not fit this model: {attempt.reason}")
    raise RunError(
        f"the checkpoint {folder} cannot be read: {attempt.reason}. It is not proven to be "
        "damaged, so nothing was changed. Start again when the storage answers; to do without "
        "this checkpoint, rename its folder"
    )


def _attempt(action: collections.abc.Callable[[], typing.Any], collective: bool) -> Attempt:
    """Calls `action` once. With `collective`, the outcome is the worst one of all processes."""
    try:
        attempt = Attempt(Outcome.SUCCESS, value=action())
    except Exception as error:  # storage libraries raise many types
        outcome = OUTCOMES.get(type(error), Outcome.FAILURE)
        reason = " ".join(str(error).split())
        if outcome != Outcome.WRONG_INPUT:
            reason = reason[:LONGEST_REASON]
        attempt = Attempt(outcome, reason=reason)
    if collective:
        worst = Outcome(coordination.highest(attempt.outcome))
        if worst != attempt.outcome:
            return Attempt(worst, reason="another process failed; its log says why")
    return attempt
