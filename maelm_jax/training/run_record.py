"""Record of a run's settings and machine: config.gin, vocabulary/ and environment.txt."""

import datetime
import importlib.metadata
import pathlib
import platform
import shlex
import subprocess
import sys

import jax

from maelm_jax import config, gin_files, storage
from maelm_jax.data import workers
from maelm_jax.data.vocabularies import Vocabulary
from maelm_jax.training import coordination, metrics

FOLDERS = ("checkpoints", "tensorboard", "vocabulary")
FILES = (
    "config.gin",
    "environment.txt",
    "metrics.jsonl",
    "rows.json",
    "origin.json",
    "loss_curve.png",
)
UNCHANGED = "packages as in the block above"  # instead of the list of packages


def check(workdir: str):
    """Checks that a run can use the workdir. Changes nothing in it.

    The metrics of a workdir in a bucket are copied to this machine. The lock of the workdir
    (`workdir_lock.held`) must be held.

    Raises:
        ConfigError: A file is in the place of a folder or the other way round, or the metrics
            cannot be read. All processes raise it.
    """
    coordination.run_on_process_zero(f"check of {workdir}", lambda: _check(workdir))


def _check(workdir: str):
    if storage.in_bucket(workdir):
        storage.fetch_files(workdir, ("metrics.jsonl",))
    folder = storage.local_path(workdir)
    for name in (*FOLDERS, *FILES):
        path = folder / name
        if path.exists() and path.is_dir() != (name in FOLDERS):
            kinds = ("a file", "a folder") if name in FOLDERS else ("a folder", "a file")
            raise config.ConfigError(
                f"{path} is {kinds[0]}, where a run keeps {kinds[1]}: "
                "move it away, or give another --workdir"
            )
    metrics.read(workdir)


def write(folder: pathlib.Path, experiment: config.Experiment, vocabulary: Vocabulary):
    """Writes config.gin and vocabulary/, and appends a block for this start to environment.txt.

    Args:
        folder: The workdir, or its local copy if the workdir is in a bucket.
        experiment: The settings of the run.
        vocabulary: The vocabulary of the run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    storage.write(folder / "config.gin", gin_files.render(experiment))
    path = folder / "environment.txt"
    before = path.read_text(errors="replace").rstrip("\n") if path.exists() else ""
    storage.write(path, "\n\n".join(filter(None, (before, _this_start(before)))) + "\n")
    vocabulary.save(folder / "vocabulary")


def _this_start(before: str) -> str:
    """Returns a block of environment.txt. Lists the packages if they differ from those before."""
    packages = sorted(
        {f"{item.metadata['Name']}=={item.version}" for item in importlib.metadata.distributions()}
    )
    listed = [
        [line for line in block.splitlines() if "==" in line and " " not in line]
        for block in before.split("\n\n")
    ]
    last = next((lines for lines in reversed(listed) if lines), None)
    lines = [
        f"started {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC",
        f"commit {_commit()}",
        f"command {shlex.join(sys.argv)}",
        f"python {platform.python_version()} on {platform.platform()}",
        f"cores {workers.usable_cores()}",
        *(f"{device.id}: {device.device_kind}" for device in jax.devices()),
        *([UNCHANGED] if last == packages else packages),
    ]
    return "\n".join(lines)


def _commit() -> str:
    """Returns the commit of this repository, or "unknown" outside one or without git."""
    this = pathlib.Path(__file__)
    git = ["git", "-C", str(this.parent)]
    try:
        # In another repository, the package can lie in a virtual environment.
        is_here = [*git, "ls-files", "--error-unmatch", this.name]
        subprocess.run(is_here, check=True, capture_output=True)
        line = [*git, "describe", "--always", "--dirty"]
        return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # git is not installed, or no repository
        return "unknown"
