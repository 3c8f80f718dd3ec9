"""Saves and restores checkpoints with Orbax.

Saving is asynchronous and atomic: the folder of a step gets its name when all its files are
written, checksums included. Restoring verifies the checksums and works on any device mesh. A
damaged checkpoint is skipped, and the one before it is restored.
"""

import errno
import logging
import os
import shutil
import typing

import jax
import orbax.checkpoint as ocp

from maelm_jax import storage
from maelm_jax.config import ConfigError
from maelm_jax.training import (
    checkpoint_reading,
    checksums,
    coordination,
    metrics,
    older_checkpoints,
    sharding,
)

log = logging.getLogger(__name__)


class Restored(typing.NamedTuple):
    """A restored step number and its state (or its parameters)."""

    step: int
    state: typing.Any


class Checkpoints:
    """Reads and writes the folder `checkpoints/` of a workdir, or of its subfolder `inside`.

    Args:
        workdir: The folder of the run, on this machine or in a bucket.
        keep: Number of newest checkpoints to keep.
        keep_every: Checkpoints whose step is a multiple of this are always kept.
        inside: Name of a subfolder of `workdir`.
    """

    def __init__(
        self, workdir: str, keep: int = 3, keep_every: int | None = None, inside: str = ""
    ):
        self.workdir = workdir
        parent = f"{workdir.rstrip('/')}/{inside}" if inside else workdir
        self.directory = checkpoint_reading.checkpoints_folder(parent)
        self._remedy = (  # if all checkpoints are damaged
            f"Remove {parent} to start this run again"
            if inside
            else "Copy an undamaged one to that folder, or give another --workdir to start from "
            "step 0"
        )
        self._saving = None  # the step that is being written now
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            keep_period=keep_every,
            create=True,
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
        )
        self._manager = ocp.CheckpointManager(
            self.directory, options=options, item_handlers=ocp.StandardCheckpointHandler()
        )

    def steps(self) -> list[int]:
        """Returns the steps that have a complete checkpoint, ascending."""
        # The manager's own list lacks the oldest one as soon as it begins to write the next.
        return sorted(ocp.utils.checkpoint_steps(self.directory))

    def save(self, step: int, state: typing.Any):
        """Starts to write `state` in the background. Does nothing if the step has a checkpoint.

        Raises:
            OSError: ENOSPC if the disk has too little space. The check comes before the write,
                because Orbax prints a traceback for each array. Also errors of the write before.
        """
        if step not in self._manager.all_steps():
            self.wait()
            if not storage.in_bucket(self.directory):
                self._check_free_space(state)
            self._saving = step
            self._manager.save(step, args=ocp.args.StandardSave(state), force=True)

    def _check_free_space(self, state: typing.Any):
        # All processes write to this disk, each a part of the state.
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise OSError(
                errno.ENOSPC,
                f"{os.strerror(errno.ENOSPC)}: it takes {needed / 1e6:.1f} MB, "
                f"{free / 1e6:.1f} MB are free",
            )

    def _write_checksums(self):
        """Orbax calls this on process 0 after the data and before it marks the step as complete."""
        # On a disk Orbax renames a temporary folder. In a bucket it adds a marker file instead.
        unnamed = self.directory / f"{self._saving}{ocp.path.atomicity_types.TMP_DIR_SUFFIX}"
        checksums.write(str(unnamed if unnamed.exists() else self.directory / str(self._saving)))

    def wait(self):
        """Waits until the write has ended. Raises the error of a write that failed."""
        self._manager.wait_until_finished()

    def restore(self, like: typing.Any) -> Restored | None:
        """Restores the newest checkpoint that is not damaged.

        Once an older one is read, each damaged folder is renamed `damaged-STEP` and metrics.jsonl
        is copied to metrics-before-rollback-STEP.jsonl. Any other failure changes nothing on disk.
        After an exception this object is closed and cannot save.

        Args:
            like: Tree of arrays or ShapeDtypeStructs with shardings. The result has its layout.

        Returns:
            The step and its state. None if there is no checkpoint.

        Raises:
            ConfigError: The newest checkpoint does not fit `like`, or all are damaged.
            RunError: The newest checkpoint cannot be read for another reason.
        """
        try:
            return self._restore(like)
        except Exception:
            self.close()
            raise

    def _restore(self, like: typing.Any) -> Restored | None:
        damaged: dict[int, str] = {}  # step -> what is damaged, newest first
        for step in reversed(self.steps()):
            try:
                state = self._load(step, like)
            except checksums.Damaged as error:
                log.warning("checkpoint %d cannot be read, trying the one before: %s", step, error)
                damaged[step] = str(error)
                continue
            if damaged:
                self._set_aside(list(damaged))
            return Restored(step, state)
        if damaged:
            newest, reason = next(iter(damaged.items()))
            raise ConfigError(
                f"every checkpoint in {self.directory} is damaged (step {newest}: {reason}). "
                f"Nothing was changed. {self._remedy}"
            )
        return None

    def _load(self, step: int, like: typing.Any) -> typing.Any:
        folder = self.directory / str(step)
        shapes = sharding.shapes_of(like)

        def verified_target():
            checkpoint_reading.verify(folder, jax.process_index(), jax.process_count())
            saved = self._manager.item_metadata(step).tree
            checkpoint_reading.check_shapes(saved, like, extra_allowed=False)
            return older_checkpoints.with_structure_of(saved, shapes)

        target = checkpoint_reading.read(verified_target, folder, collective=True)

        def restore():
            return self._manager.restore(step, args=ocp.args.StandardRestore(target))

        # Orbax's restore has a barrier for all processes. One process cannot retry it alone.
        pauses = () if coordination.is_multi_process() else None
        state = checkpoint_reading.read(restore, folder, collective=True, pauses=pauses)
        return older_checkpoints.with_structure_of(like, state)

    def _set_aside(self, steps: list[int]):
        """Renames damaged checkpoints, so that the run can write their steps again."""
        with coordination.process_zero_first("damaged checkpoints"):
            if not jax.process_index():
                metrics.copy_before_rollback(self.workdir, steps[0])
                for step in steps:
                    (self.directory / str(step)).rename(
                        storage.unused(self.directory / f"damaged-{step}")
                    )
        self._manager.reload()

    def close(self):
        """Waits for the write in progress and frees Orbax's threads."""
        self._manager.close()
