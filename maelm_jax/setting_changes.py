"""How the settings of two starts of a run differ."""

import pathlib

from maelm_jax import config, gin_files, storage
from maelm_jax.config import Experiment


def check_workdir(
    workdir: str | pathlib.Path, experiment: Experiment, also_free: tuple[str, ...] = ()
) -> Experiment | None:
    """Returns the settings of the run in a workdir, or None if there is no run.

    Raises:
        ConfigError: They differ from `experiment`. The message has the differences, apart from
            those of free settings and of `also_free` (see `config.differences`).
    """
    saved = storage.local_path(str(workdir)) / gin_files.RECORD
    if not saved.exists():
        return None
    recorded = gin_files.load([str(saved)])
    changes = config.differences(recorded, experiment, also_free)
    if changes:
        checkpoints = saved.with_name("checkpoints")
        is_empty = not storage.in_bucket(str(workdir)) and not any(checkpoints.glob("[0-9]*"))
        remedy = "it has no checkpoint yet: remove it, or " if is_empty else ""
        raise config.ConfigError(
            f"{workdir} holds a run with other settings ({'; '.join(changes)}): {remedy}"
            "give another --workdir, or the same settings"
        )
    return recorded
