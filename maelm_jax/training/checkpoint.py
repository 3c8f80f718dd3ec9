"""Checkpoints with Orbax: asynchronous, atomic, checked when they are read, restored onto any mesh.

A step's folder appears under its name only when it is whole, its checksums included. One that was damaged later is passed over for the one before.
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

PAUSES = (1, 2, 4, 8, 15, 30)  # seconds between the attempts at reading what cannot be read


class Restored(typing.NamedTuple):
    """What a run goes on from."""

    step: int
    state: typing.Any


class Outcome(enum.IntEnum):
    """Of one attempt at reading a checkpoint. Of several processes the highest counts, so that all do the same."""

    READ = 0
    FAILED = 1  # nothing is proven: the next attempt may succeed
    MISFIT = 2
    DAMAGED = 3


class Misfit(Exception):
    """A checkpoint holds other parameters than the model."""


def _directory(workdir: str) -> epath.Path:
    folder = storage.local_path(workdir).resolve()  # asked for a bucket too: it says through what Orbax reaches one
    directory = epath.Path(workdir if storage.in_bucket(workdir) else folder) / "checkpoints"
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory} is a file, where a run keeps the folder of its checkpoints: move it away, or give another --workdir")
    return directory


class Checkpoints:
    """The folder `checkpoints/` of a workdir, or of the folder `inside` it."""

    def __init__(self, workdir: str, keep: int = 3, keep_every: int | None = None, inside: str = ""):
        self.workdir = workdir
        self.directory = _directory(f"{workdir.rstrip('/')}/{inside}" if inside else workdir)
        self._saving = None  # the step that is being written
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, keep_period=keep_every, create=True, enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
        )  # fmt: skip
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=ocp.StandardCheckpointHandler())

    def steps(self) -> list[int]:
        """Steps with a checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: typing.Any):
        """Starts writing `state` in the background. An error of the write before is raised here; the same step is not written twice.

        Raises OSError (ENOSPC) before anything is written when the device has no room for it: Orbax would print a traceback for each array.
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
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: it takes {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free")

    def _write_checksums(self):
        """Called by Orbax, on process 0, when all data of a step is written and before the step counts as whole."""
        unnamed = self.directory / f"{self._saving}{ocp.path.atomicity_types.TMP_DIR_SUFFIX}"  # in a bucket a file says that it is whole
        checksums.write(str(unnamed if unnamed.exists() else self.directory / str(self._saving)))

    def wait(self):
        """Returns when everything is on disk; raises what a background write ran into."""
        self._manager.wait_until_finished()

    def restore(self, like: typing.Any) -> Restored | None:
        """The newest checkpoint that is whole, laid out as `like` (arrays or ShapeDtypeStructs with shardings); None when there is none at all.

        One that is proven damaged is passed over; its folder becomes `damaged-STEP`, once the one before has been read, and metrics.jsonl is
        copied to metrics-before-rollback-STEP.jsonl. Any other failure changes nothing on disk.

        Raises ConfigError when the newest does not fit `like` or all are damaged, RunError when it cannot be read for another reason; then
        nothing can be saved here any more.
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
                log.warning("checkpoint %d cannot be read, trying the one before: %s", step, error)
                damaged.append((step, str(error)))
                continue
            if damaged:
                self._set_aside([number for number, _ in damaged])
            return Restored(step, state)
        if damaged:
            raise ConfigError(
                f"no checkpoint under {self.directory} is whole; of the newest, {damaged[0][0]}, {damaged[0][1]}. Nothing was changed. Copy one "
                "from elsewhere to that folder, or give another --workdir to start from step 0"
            )
        return None

    def _load(self, step: int, like: typing.Any) -> typing.Any:
        folder = self.directory / str(step)
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)

        def check():
            _verify(folder, jax.process_index(), jax.process_count())
            _check_shapes(self._manager.item_metadata(step).tree, like, whole=True)

        _read(check, folder, together=True)
        # Orbax's own restore meets the other processes at a barrier: where there are any, it is tried once.
        pauses = () if distributed.several() else PAUSES
        return _read(lambda: self._manager.restore(step, args=ocp.args.StandardRestore(target)), folder, together=True, pauses=pauses)

    def _set_aside(self, steps: list[int]):
        """Renames damaged checkpoints, so that the run can write these steps again, and copies the metrics that it will write again."""
        with distributed.first("damaged checkpoints"):
            if not jax.process_index():
                metrics.copy_before_rollback(self.workdir, steps[0])
                for step in steps:
                    (self.directory / str(step)).rename(storage.unused(self.directory / f"damaged-{step}"))
        self._manager.reload()

    def close(self):
        self._manager.close()


def _verify(folder: epath.Path, part: int = 0, parts: int = 1):
    """Raises Damaged unless a checkpoint's files agree with their checksums."""
    if not checksums.verify(str(folder), part, parts):
        log.warning("%s was written before checksums were kept: it is used without being checked", folder)


def _read(
    action: collections.abc.Callable[[], typing.Any], folder: epath.Path, together: bool = False, pauses: tuple[int, ...] | None = None
) -> typing.Any:
    """What `action` returns, which reads the checkpoint in `folder`; tried again after `pauses` (PAUSES) while it fails for no proven reason.

    With `together`, all processes call this, and come to the same end. Raises Damaged; ConfigError for Misfit; RunError for anything else.
    """
    for pause in (*(PAUSES if pauses is None else pauses), None):
        outcome, result, reason = Outcome.READ, None, "another process cannot read it"
        try:
            result = action()
        except ConfigError:
            raise
        except Exception as error:  # whatever the storage layers raise
            kinds = {Misfit: Outcome.MISFIT, checksums.Damaged: Outcome.DAMAGED}
            outcome, reason = kinds.get(type(error), Outcome.FAILED), " ".join(str(error).split())[:300]
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
        f"the checkpoint {folder} cannot be read: {reason}. It is not proven to be damaged, so nothing was changed. Start again when the storage "
        "answers; to do without this checkpoint, rename its folder"
    )


def _verified_params(directory: epath.Path, step: int, load: collections.abc.Callable[[ocp.CheckpointManager], dict]) -> dict:
    """What `load` makes of a step, once its checksums agree. Raises ConfigError when it is damaged or does not fit."""
    folder = directory / str(step)
    options = ocp.CheckpointManagerOptions(create=False)

    def action():
        _verify(folder)
        with ocp.CheckpointManager(directory, options=options, item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
            return load(manager)

    try:
        return _read(action, folder)
    except checksums.Damaged as error:
        raise ConfigError(f"the checkpoint {folder} is damaged: {error}. Rename the folder to use the checkpoint before it") from error


def restore_params(workdir: str, like: dict) -> Restored:
    """The parameters of a workdir's newest checkpoint, laid out as `like`. Raises ConfigError when there is none or it does not fit."""
    step = pick_step(workdir)

    def load(manager: ocp.CheckpointManager) -> dict:
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), {"params": like})
        how = ocp.checkpoint_utils.construct_restore_args(target)
        _check_shapes(_saved_params(manager, step), like)  # before Orbax finds out, which prints a traceback for each array
        return manager.restore(step, args=ocp.args.PyTreeRestore(item=target, partial_restore=True, restore_args=how))["params"]

    return Restored(step, _verified_params(_directory(workdir), step, load))


def _saved_params(manager: ocp.CheckpointManager, step: int) -> dict:
    """Shapes and types of a checkpoint's parameters."""
    tree = manager.item_metadata(step).tree
    if "params" not in tree:
        raise Misfit(f"it holds no params, but {', '.join(map(str, tree)) or 'nothing'}")
    return tree["params"]


def _check_shapes(saved: typing.Any, like: typing.Any, whole: bool = False):
    """Raises Misfit that names what of `like` is missing in `saved`, or has another shape there; if `whole`, also what only `saved` has."""
    there, here = ({name: tuple(leaf.shape) for name, leaf in _named(tree).items()} for tree in (saved, like))
    wrong = []
    for name, shape in here.items():
        if name not in there:
            wrong.append(f"it holds no {name}")
        elif there[name] != shape:
            wrong.append(f"{name} has shape {there[name]} there, {shape} here")
    if whole:
        wrong += [f"it holds {name}, which this model does not have" for name in there if name not in here]
    if wrong:
        raise Misfit("; ".join(wrong[:3]))


def _named(tree: typing.Any) -> dict[str, typing.Any]:
    """The leaves by their paths. Orbax's metadata has dictionaries and lists where the state has named tuples."""
    parts = ("key", "name", "idx")
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(str(next(getattr(key, part) for part in parts if hasattr(key, part))) for key in keys): leaf for keys, leaf in leaves}


def pick_step(workdir: str, step: int | None = None) -> int:
    """`step`, or the newest of a workdir's checkpoints. Raises ConfigError when there is none, or not that one (naming those that there are)."""
    directory = _directory(workdir)
    if not directory.is_dir():
        raise ConfigError(f"{workdir} holds no checkpoints/ folder; has it been trained?")
    steps = sorted(ocp.utils.checkpoint_steps(directory))  # not by a manager, which uses JAX's devices: processes have still to meet
    if not steps:
        raise ConfigError(f"{directory} holds no checkpoint; has the run come to its first?")
    if step is not None and step not in steps:
        raise ConfigError(f"{directory} holds no checkpoint of step {step}; it holds {', '.join(map(str, steps))}")
    return steps[-1] if step is None else step


def read_params(workdir: str, step: int) -> dict:
    """All parameters of a checkpoint, whatever their names and shapes, as numpy arrays. Raises ConfigError when it is damaged."""

    def load(manager: ocp.CheckpointManager) -> dict:
        like = {"params": jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), _saved_params(manager, step))}
        how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
        return manager.restore(step, args=ocp.args.PyTreeRestore(item=like, partial_restore=True, restore_args=how))["params"]

    return _verified_params(_directory(workdir), step, load)


def _bytes_written_here(leaf: jax.Array | np.ndarray) -> int:
    """What this process writes of a leaf: of several copies on devices the first."""
    if isinstance(leaf, np.ndarray):
        return leaf.nbytes
    return sum(shard.data.nbytes for shard in leaf.addressable_shards if shard.replica_id == 0)
