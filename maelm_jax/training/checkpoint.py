"""Checkpoints with Orbax: asynchronous, atomic, restored onto any mesh.

A step's folder appears under its name only when it is whole; one that was damaged later is passed over for the one before.
"""

import errno
import logging
import os
import shutil
import typing

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from maelm_jax import storage
from maelm_jax.config import ConfigError
from maelm_jax.training import distributed

log = logging.getLogger(__name__)


def _directory(workdir: str) -> epath.Path:
    folder = storage.here(workdir).resolve()  # asked for a bucket too: it says through what Orbax reaches one
    return epath.Path(workdir if storage.in_bucket(workdir) else folder) / "checkpoints"


class Checkpoints:
    """The folder `checkpoints/` of a workdir."""

    def __init__(self, workdir: str, keep: int = 3, keep_every: int | None = None):
        self.directory = _directory(workdir)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, keep_period=keep_every, create=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self.directory, options=options)

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
            self._manager.save(step, args=ocp.args.StandardSave(state), force=True)

    def _check_room(self, state: typing.Any):
        needed = sum(map(_bytes_written_here, jax.tree.leaves(state)))
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: it takes {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free")

    def wait(self):
        """Returns when everything is on disk; raises what a background write ran into."""
        self._manager.wait_until_finished()

    def restore(self, like: typing.Any) -> tuple[int, typing.Any] | None:
        """(step, state) of the newest checkpoint that can be read, laid out as `like` (arrays or ShapeDtypeStructs with shardings).

        None when there is no checkpoint at all; ConfigError when there are some and none can be read.
        """
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        failures = []
        for step in reversed(self.steps()):
            state, reason = None, "another process cannot read it"
            try:
                state = self._manager.restore(step, args=ocp.args.StandardRestore(target))
            except Exception as error:  # whatever the storage layers raise for a file that is cut short or gone
                reason = " ".join(str(error).split())[:200]
            if not distributed.everywhere(state is not None):
                log.warning("checkpoint %d cannot be read, trying the one before: %s", step, reason)
                failures.append((step, reason))
                continue
            with distributed.first("damaged checkpoints"):
                for broken, _ in failures if jax.process_index() == 0 else ():  # so that the run can write these steps again
                    (self.directory / str(broken)).rename(self.directory / f"damaged-{broken}")
            if failures:
                self._manager.reload()
            return step, state
        if failures:
            raise ConfigError(f"no checkpoint under {self.directory} can be read; the newest, {failures[0][0]}, says: {failures[0][1]}")
        return None

    def close(self):
        self._manager.close()


def restore_params(workdir: str, like: dict) -> tuple[int, dict]:
    """(step, parameters) of a workdir's newest checkpoint, laid out as `like`. Raises ConfigError when there is none or it does not fit."""
    directory = _directory(workdir)
    if not directory.is_dir():
        raise ConfigError(f"{workdir} holds no checkpoints/ folder; is it a workdir of maelm_jax.train?")
    with ocp.CheckpointManager(directory, item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
        step = manager.latest_step()
        if step is None:
            raise ConfigError(f"{directory} holds no checkpoint")
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), {"params": like})
        how = ocp.checkpoint_utils.construct_restore_args(target)
        try:
            _check_shapes(manager.item_metadata(step).tree["params"], like)  # before Orbax finds out, which prints a traceback for each array
            return step, manager.restore(step, args=ocp.args.PyTreeRestore(item=target, partial_restore=True, restore_args=how))["params"]
        except Exception as error:
            raise ConfigError(f"the checkpoint {directory / str(step)} does not fit this model: {' '.join(str(error).split())[:300]}") from error


def _check_shapes(saved: dict, like: dict):
    """Raises ValueError that names what of `like` is missing in `saved`, or has another shape there."""
    shapes = {keys: tuple(leaf.shape) for keys, leaf in jax.tree_util.tree_leaves_with_path(saved)}
    wrong = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(like):
        path = "/".join(str(key.key) for key in keys)
        if keys not in shapes:
            wrong.append(f"it holds no {path}")
        elif shapes[keys] != leaf.shape:
            wrong.append(f"{path} has shape {shapes[keys]} there, {leaf.shape} here")
    if wrong:
        raise ValueError("; ".join(wrong[:3]))


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
    """All parameters of a checkpoint, whatever their names and shapes, as numpy arrays. Raises ConfigError when it cannot be read."""
    directory = _directory(workdir)
    with ocp.CheckpointManager(directory, item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
        try:
            like = {"params": jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), manager.item_metadata(step).tree["params"])}
            how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
            return manager.restore(step, args=ocp.args.PyTreeRestore(item=like, partial_restore=True, restore_args=how))["params"]
        except Exception as error:  # whatever the storage layers raise for a file that is cut short or gone
            raise ConfigError(f"the checkpoint {directory / str(step)} cannot be read: {' '.join(str(error).split())[:300]}") from error


def _bytes_written_here(leaf: jax.Array | np.ndarray) -> int:
    """What this process writes of a leaf: of several copies on devices the first."""
    if isinstance(leaf, np.ndarray):
        return leaf.nbytes
    return sum(shard.data.nbytes for shard in leaf.addressable_shards if shard.replica_id == 0)
