"""Reads the parameters of a checkpoint, without the state of the optimiser.

Commands that use a trained model read it here: they have no optimiser, and often no model yet. Of a
run with `Optimizer.ema_decay` they read the moving average of the parameters.
"""

import collections.abc
import typing

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from maelm_jax.config import ConfigError
from maelm_jax.training import checkpoint_reading, checksums, older_checkpoints, sharding


class Saved(typing.NamedTuple):
    """The parameters in a checkpoint that its readers use."""

    name: str  # field of the saved state: "params", or "average" if it holds one
    shapes: dict  # shapes and types of the parameters


def all_steps(workdir: str) -> list[int]:
    """Returns the steps of a workdir that have a checkpoint, ascending.

    Raises:
        ConfigError: There is no checkpoint.
    """
    folder = checkpoint_reading.checkpoints_folder(workdir)
    if not folder.is_dir():
        raise ConfigError(f"{workdir} holds no checkpoints/ folder; has it been trained?")
    # A CheckpointManager would use JAX's devices, which need `distributed.joined` first.
    steps = sorted(ocp.utils.checkpoint_steps(folder))
    if not steps:
        raise ConfigError(f"{folder} holds no checkpoint; has the run come to its first?")
    return steps


def pick_step(workdir: str, step: int | None = None) -> int:
    """Returns `step`, or the newest step of a workdir if `step` is None.

    Raises:
        ConfigError: There is no checkpoint, or none of `step`. The message lists the steps.
    """
    steps = all_steps(workdir)
    if step is not None and step not in steps:
        raise ConfigError(
            f"{checkpoint_reading.checkpoints_folder(workdir)} holds no checkpoint of step {step}; "
            f"it holds {', '.join(map(str, steps))}"
        )
    return steps[-1] if step is None else step


def restore_params(workdir: str, like: dict, step: int | None = None) -> dict:
    """Restores the parameters of a checkpoint onto devices.

    Args:
        workdir: The folder of the run.
        like: Tree of arrays or ShapeDtypeStructs with shardings. The result has its layout.
        step: Step of the checkpoint. None: the newest.

    Raises:
        ConfigError: There is no such checkpoint, it is damaged, or it does not fit `like`.
        RunError: The checkpoint cannot be read for another reason.
    """
    step = pick_step(workdir, step)

    def load(manager: ocp.CheckpointManager) -> dict:
        shapes = sharding.shapes_of(like)
        saved = _saved_shapes(manager, step)
        # Orbax itself would print a traceback for each array that does not fit.
        checkpoint_reading.check_shapes(saved.shapes, like)
        paths = older_checkpoints.by_current_path(like)
        needed = older_checkpoints.restricted_to(paths, saved.shapes)
        target = older_checkpoints.with_structure_of(needed, shapes)
        arguments = ocp.checkpoint_utils.construct_restore_args(target)
        values = _restore(manager, step, saved.name, target, arguments)
        return older_checkpoints.with_structure_of(like, values)

    return _verified(workdir, step, load)


def read_params(workdir: str, step: int) -> dict:
    """Reads all parameters of a checkpoint as numpy arrays, without a model to compare with.

    Raises:
        ConfigError: The checkpoint is damaged, or holds no parameters.
        RunError: The checkpoint cannot be read for another reason.
    """

    def load(manager: ocp.CheckpointManager) -> dict:
        saved = _saved_shapes(manager, step)
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), saved.shapes)
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), target)
        return older_checkpoints.renamed(_restore(manager, step, saved.name, target, arguments))

    return _verified(workdir, step, load)


def _saved_shapes(manager: ocp.CheckpointManager, step: int) -> Saved:
    """Returns the name and the shapes of the parameters in a checkpoint."""
    tree = manager.item_metadata(step).tree
    if "params" not in tree:
        contents = ", ".join(map(str, tree)) or "nothing"
        raise checkpoint_reading.Mismatch(f"it holds no params, but {contents}")
    name = "average" if tree.get("average") else "params"
    return Saved(name, tree[name])


def _restore(
    manager: ocp.CheckpointManager, step: int, name: str, target: dict, arguments: dict
) -> dict:
    """Restores the arrays of `target` in one field of the saved state, and no others."""
    selection = ocp.args.PyTreeRestore(
        item={name: target}, partial_restore=True, restore_args={name: arguments}
    )
    return manager.restore(step, args=selection)[name]


def _verified(
    workdir: str, step: int, load: collections.abc.Callable[[ocp.CheckpointManager], dict]
) -> dict:
    """Verifies a step and returns what `load` reads. Raises ConfigError on damage or mismatch."""
    directory = checkpoint_reading.checkpoints_folder(workdir)
    folder: epath.Path = directory / str(step)
    options = ocp.CheckpointManagerOptions(create=False)

    def action():
        checkpoint_reading.verify(folder)
        with ocp.CheckpointManager(
            directory, options=options, item_handlers=ocp.PyTreeCheckpointHandler()
        ) as manager:
            return load(manager)

    try:
        return checkpoint_reading.read(action, folder)
    except checksums.Damaged as error:
        raise ConfigError(
            f"the checkpoint {folder} is damaged: {error}. "
            "Rename the folder to use the checkpoint before it"
        ) from error
