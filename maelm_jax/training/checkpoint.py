"""Saves and restores checkpoints with Orbax.

Saving is asynchronous and atomic: the folder of a step gets its name when all its files are
written, checksums included. Restoring verifies the checksums and works on any device mesh. A
damaged checkpoint is skipped, and the one before it is restored.
"""

import collections.abc
import enum
import errno
import logging
import os
import shutil
import time
import typing

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from maelm_jax import storage
from maelm_jax.config import ConfigError, RunError
from maelm_jax.training import checksums, distributed, metrics

log = logging.getLogger(__name__)

PAUSES = (1, 2, 4, 8, 15, 30)  # seconds between the attempts to read a checkpoint


class Restored(typing.NamedTuple):
    """A restored step number and its state (or its parameters)."""

    step: int
    state: typing.Any


class Outcome(enum.IntEnum):
    """Result of one attempt to read a checkpoint. The processes agree on the highest value."""

    READ = 0
    FAILED = 1  # the cause is unknown: the next attempt may succeed
    MISFIT = 2
    DAMAGED = 3


class Misfit(Exception):
    """The parameters of a checkpoint differ from those of the model."""


def _directory(workdir: str) -> epath.Path:
    # The call also sets EPATH_USE_TF for buckets, which `epath.Path` needs below.
    folder = storage.local_path(workdir).resolve()
    directory = epath.Path(workdir if storage.in_bucket(workdir) else folder) / "checkpoints"
    if directory.exists() and not directory.is_dir():
        raise ConfigError(
            f"{directory} is a file, where a run keeps the folder of its checkpoints: "
            "move it away, or give another --workdir"
        )
    return directory


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
        self.directory = _directory(f"{workdir.rstrip('/')}/{inside}" if inside else workdir)
        self._saving = None  # the step that is being written now
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, keep_period=keep_every, create=True,
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
        )  # fmt: skip
        self._manager = ocp.CheckpointManager(
            self.directory, options=options, item_handlers=ocp.StandardCheckpointHandler()
        )

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: typing.Any):
        """Starts to write `state` in the background. Does nothing if the step has a checkpoint.

        Raises:
            OSError: ENOSPC if the disk has too little space. The check comes before the write,
                because Orbax prints a traceback for each array. Also errors of the write before.
        """
        if step not in self._manager.all_steps():
            self.wait()
            if not storage.in_bucket(self.directory):
                self._check_room(state)
            self._saving = step
            self._manager.save(step, args=ocp.args.StandardSave(state), force=True)

    def _check_room(self, state: typing.Any):
        needed = sum(map(_bytes_written_here, jax.tree.leaves(state)))
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
        damaged = []
        for step in reversed(self.steps()):
            try:
                state = self._load(step, like)
            except checksums.Damaged as error:
                log.warning(
                    "checkpoint %d cannot be read, trying the one before: %s", step, error
                )
                damaged.append((step, str(error)))
                continue
            if damaged:
                self._set_aside([number for number, _ in damaged])
            return Restored(step, state)
        if damaged:
            raise ConfigError(
                f"no checkpoint under {self.directory} is whole; of the newest, {damaged[0][0]}, "
                f"{damaged[0][1]}. Nothing was changed. Copy one from elsewhere to that folder, "
                "or give another --workdir to start from step 0"
            )
        return None

    def _load(self, step: int, like: typing.Any) -> typing.Any:
        folder = self.directory / str(step)
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
        )

        def check():
            _verify(folder, jax.process_index(), jax.process_count())
            _check_shapes(self._manager.item_metadata(step).tree, like, whole=True)

        _read(check, folder, together=True)
        # Orbax's restore has a barrier for all processes. One process cannot retry it alone.
        pauses = () if distributed.several() else PAUSES
        return _read(
            lambda: self._manager.restore(step, args=ocp.args.StandardRestore(target)),
            folder, together=True, pauses=pauses,
        )  # fmt: skip

    def _set_aside(self, steps: list[int]):
        """Renames damaged checkpoints, so that the run can write their steps again."""
        with distributed.first("damaged checkpoints"):
            if not jax.process_index():
                metrics.copy_before_rollback(self.workdir, steps[0])
                for step in steps:
                    (self.directory / str(step)).rename(
                        storage.unused(self.directory / f"damaged-{step}")
                    )
        self._manager.reload()

    def close(self):
        self._manager.close()


def _verify(folder: epath.Path, part: int = 0, parts: int = 1):
    """Raises Damaged if files of a checkpoint differ from their checksums."""
    if not checksums.verify(str(folder), part, parts):
        log.warning(
            "%s was written before checksums were kept: it is used without being checked", folder
        )


def _read(
    action: collections.abc.Callable[[], typing.Any], folder: epath.Path,
    together: bool = False, pauses: tuple[int, ...] | None = None,
) -> typing.Any:  # fmt: skip
    """Returns what `action` returns. `action` reads the checkpoint in `folder`.

    Tries again after `pauses` (default PAUSES) while it fails for an unknown reason. With
    `together` all processes call this function and get the same outcome. Raises Damaged if a
    checksum differs, ConfigError instead of Misfit, and RunError when the last attempt fails.
    """
    for pause in (*(PAUSES if pauses is None else pauses), None):
        outcome, result, reason = Outcome.READ, None, "another process cannot read it"
        try:
            result = action()
        except ConfigError:
            raise
        except Exception as error:  # storage libraries raise many types
            kinds = {Misfit: Outcome.MISFIT, checksums.Damaged: Outcome.DAMAGED}
            outcome, reason = (
                kinds.get(type(error), Outcome.FAILED), " ".join(str(error).split())[:300]
            )  # fmt: skip
        if together:
            outcome = Outcome(distributed.highest(outcome))
        if outcome == Outcome.READ:
            return result
        if outcome == Outcome.DAMAGED:
            raise checksums.Damaged(reason)
        if outcome == Outcome.MISFIT:
            raise ConfigError(f"the checkpoint {folder} does not fit this model: {reason}")
        if pause is not None:
            log.warning("%s cannot be read, trying again in %g s: %s", folder, pause, reason)
            time.sleep(pause)
    raise RunError(
        f"the checkpoint {folder} cannot be read: {reason}. It is not proven to be damaged, so "
        "nothing was changed. Start again when the storage answers; to do without this "
        "checkpoint, rename its folder"
    )


def _verified_params(
    directory: epath.Path, step: int, load: collections.abc.Callable[[ocp.CheckpointManager], dict]
) -> dict:
    """Verifies a step and returns what `load` reads. Raises ConfigError on damage or misfit."""
    folder = directory / str(step)
    options = ocp.CheckpointManagerOptions(create=False)

    def action():
        _verify(folder)
        with ocp.CheckpointManager(
            directory, options=options, item_handlers=ocp.PyTreeCheckpointHandler()
        ) as manager:
            return load(manager)

    try:
        return _read(action, folder)
    except checksums.Damaged as error:
        raise ConfigError(
            f"the checkpoint {folder} is damaged: {error}. "
            "Rename the folder to use the checkpoint before it"
        ) from error


def restore_params(workdir: str, like: dict) -> Restored:
    """Restores the parameters of the newest checkpoint of a workdir.

    Args:
        like: Tree of arrays or ShapeDtypeStructs with shardings. The result has its layout.

    Raises:
        ConfigError: There is no checkpoint, it is damaged, or it does not fit `like`.
        RunError: The checkpoint cannot be read for another reason.
    """
    step = pick_step(workdir)

    def load(manager: ocp.CheckpointManager) -> dict:
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), {"params": like}
        )
        how = ocp.checkpoint_utils.construct_restore_args(target)
        _check_shapes(_saved_params(manager, step), like)  # Orbax prints a traceback for each array
        return manager.restore(
            step,
            args=ocp.args.PyTreeRestore(item=target, partial_restore=True, restore_args=how),
        )["params"]

    return Restored(step, _verified_params(_directory(workdir), step, load))


def _saved_params(manager: ocp.CheckpointManager, step: int) -> dict:
    """Returns the shapes and types of the parameters in a checkpoint."""
    tree = manager.item_metadata(step).tree
    if "params" not in tree:
        raise Misfit(f"it holds no params, but {', '.join(map(str, tree)) or 'nothing'}")
    return tree["params"]


def _check_shapes(saved: typing.Any, like: typing.Any, whole: bool = False):
    """Raises Misfit if `saved` lacks an array of `like` or an array has another shape.

    With `whole`, also if `saved` has an array that `like` does not have.
    """
    there, here = (
        {name: tuple(leaf.shape) for name, leaf in _named(tree).items()} for tree in (saved, like)
    )
    wrong = []
    for name, shape in here.items():
        if name not in there:
            wrong.append(f"it holds no {name}")
        elif there[name] != shape:
            wrong.append(f"{name} has shape {there[name]} there, {shape} here")
    if whole:
        wrong += [
            f"it holds {name}, which this model does not have" for name in there if name not in here
        ]
    if wrong:
        raise Misfit("; ".join(wrong[:3]))


def _named(tree: typing.Any) -> dict[str, typing.Any]:
    """Maps paths to leaves. Named tuples of the state are dictionaries and lists in `saved`."""
    parts = ("key", "name", "idx")
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        "/".join(str(next(getattr(key, part) for part in parts if hasattr(key, part)))
                 for key in keys): leaf
        for keys, leaf in leaves
    }  # fmt: skip


def pick_step(workdir: str, step: int | None = None) -> int:
    """Returns `step`, or the newest step of a workdir if `step` is None.

    Raises:
        ConfigError: There is no checkpoint, or none of `step`. The message lists the steps.
    """
    directory = _directory(workdir)
    if not directory.is_dir():
        raise ConfigError(f"{workdir} holds no checkpoints/ folder; has it been trained?")
    # A CheckpointManager would use JAX's devices, which need `distributed.joined` first.
    steps = sorted(ocp.utils.checkpoint_steps(directory))
    if not steps:
        raise ConfigError(f"{directory} holds no checkpoint; has the run come to its first?")
    if step is not None and step not in steps:
        raise ConfigError(
            f"{directory} holds no checkpoint of step {step}; "
            f"it holds {', '.join(map(str, steps))}"
        )
    return steps[-1] if step is None else step


def read_params(workdir: str, step: int) -> dict:
    """Reads all parameters of a checkpoint as numpy arrays, without a model to compare with.

    Raises:
        ConfigError: The checkpoint is damaged, or holds no parameters.
        RunError: The checkpoint cannot be read for another reason.
    """

    def load(manager: ocp.CheckpointManager) -> dict:
        like = {
            "params": jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), _saved_params(manager, step)
            )
        }
        how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
        return manager.restore(
            step, args=ocp.args.PyTreeRestore(item=like, partial_restore=True, restore_args=how)
        )["params"]

    return _verified_params(_directory(workdir), step, load)


def _bytes_written_here(leaf: jax.Array | np.ndarray) -> int:
    """Returns the bytes of a leaf that this process writes: the first replica of each shard."""
    if isinstance(leaf, np.ndarray):
        return leaf.nbytes
    return sum(shard.data.nbytes for shard in leaf.addressable_shards if shard.replica_id == 0)
