"""How the settings of two starts of a run differ, and which settings may differ."""

import pathlib

from maelm_jax import config, gin_files, storage
from maelm_jax.config import Experiment

# Settings that may differ when a workdir is resumed. They change no past step. `train_steps`
# changes the schedule of the coming steps. The settings of mesh, memory and microbatches change
# the rounding of the coming steps. training/resume.py describes and records the differences.
FREE_ON_RESUME = (
    "Mesh.",
    "Model.attention_backend",
    "Model.rematerialise",
    "Model.scan_layers",
    "Model.logit_tile",
    "Run.train_steps",
    "Run.accumulate",
    "Run.log_every",
    "Run.eval_every",
    "Run.rank_every",
    "Run.checkpoint_",
    "Run.keep_",
    "Corpus.processes",
    "Corpus.rows_dir",
    "Corpus.cache_gb",
    "Corpus.tfds_data_dir",
    "Run.init_from",
    "Run.deterministic",
    "Finetune.data_dir",
    "CustomTask.train_file",
    "CustomTask.dev_file",
    "Conll.train_file",
    "Conll.dev_file",
    "Finetune.eval_batch_size",
)


def is_listed(name: str, listed: tuple[str, ...]) -> bool:
    """Returns whether a list of settings has `name`.

    Args:
        name: Section.field.
        listed: Whole names, and beginnings of names, which end in "." or "_".
    """
    return any(name.startswith(one) if one.endswith((".", "_")) else name == one for one in listed)


def differences(
    old: Experiment, new: Experiment, free: tuple[str, ...] = FREE_ON_RESUME
) -> list[str]:
    """Returns the settings that differ, as lines `Section.field: old -> new`.

    Args:
        old: The recorded settings.
        new: The current settings.
        free: Names that are left out (see `is_listed`).
    """
    lines = []
    if (old.finetune is None) != (new.finetune is None):
        words = ["absent" if one.finetune is None else "set" for one in (old, new)]
        lines.append(f"finetune: {' -> '.join(words)}")
    before, after = config.values(old), config.values(new)
    for name, value in before.items():
        if name in after and value != after[name] and not is_listed(name, free):
            lines.append(f"{name}: {value!r} -> {after[name]!r}")
    return lines


def check_workdir(
    workdir: str | pathlib.Path, experiment: Experiment, free: tuple[str, ...] = FREE_ON_RESUME
) -> Experiment | None:
    """Returns the settings of the run in a workdir, or None if there is no run.

    Raises:
        ConfigError: They differ from `experiment`. The message has the differences, apart from
            those of names in `free` (see `is_listed`).
    """
    saved = storage.local_path(str(workdir)) / "config.gin"
    if not saved.exists():
        return None
    recorded = gin_files.load([str(saved)])
    changes = differences(recorded, experiment, free)
    if changes:
        checkpoints = saved.with_name("checkpoints")
        is_empty = not storage.in_bucket(str(workdir)) and not any(checkpoints.glob("[0-9]*"))
        remedy = "it has no checkpoint yet: remove it, or " if is_empty else ""
        raise config.ConfigError(
            f"{workdir} holds a run with other settings ({'; '.join(changes)}): {remedy}"
            "give another --workdir, or the same settings"
        )
    return recorded
