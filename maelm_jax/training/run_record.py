"""The records of a workdir: lock, settings, vocabulary, starts, and the run that it goes on from.

config.gin has the settings of the last start, environment.txt a block for each start, and
parent.json the run of `Run.continue_from`.
"""

import collections.abc
import contextlib
import datetime
import difflib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
import typing

import jax

from maelm_jax import config, gin_files, storage
from maelm_jax.data import vocabularies, workers
from maelm_jax.training import checkpoint, distributed, metrics, run_rows
from maelm_jax.training.workdir import PUBLISHED_WEIGHTS, STOCK_CONFIG, Kind, kind_of

LOCK = "run.lock"
ENVIRONMENT = "environment.txt"
PARENT = "parent.json"
VOCABULARY = "vocabulary"
# Files that a run reads at its start. `fetch` copies those of a workdir in a bucket.
RECORDS = (
    gin_files.RECORD,
    ENVIRONMENT,
    PARENT,
    "metrics.jsonl",
    "origin.json",
    "rows.json",
    f"{VOCABULARY}/sentencepiece.model",
    f"{VOCABULARY}/tokenizer.json",
    f"{VOCABULARY}/{vocabularies.CHECKSUMS}",
)
# Messages name the folders with one of these files, which a run can start from.
RUN_FILES = (gin_files.RECORD, STOCK_CONFIG, PUBLISHED_WEIGHTS)
MOST_LISTED = 6  # largest number of runs that a message lists
PATIENCE = 5.0  # seconds; the kernel frees the lock of a killed process after its memory
UNCHANGED = "packages as in the block above"  # instead of the list of packages


def fetch(workdir: str, holds_lock: bool = False) -> pathlib.Path:
    """Returns the folder on this machine with the records of a run.

    Those of a workdir in a bucket are copied here, unless another process of this machine, which
    writes them, runs it. `holds_lock` says that the caller does. No run is on s3://, where Orbax
    writes no checkpoints. Raises ConfigError if the folder, which may be a stranger's, has links
    that lead out of it.
    """
    folder = storage.local_path(workdir)
    if workdir.startswith("gs://") and (holds_lock or not is_running(workdir)):
        storage.fetch_files(workdir, RECORDS)
    storage.require_own_files(folder)
    return folder


def no_run(path: str) -> str:
    """Returns a line that says that `path` holds no run, and names runs near it."""
    kind = kind_of(path)
    problem = {
        Kind.ABSENT: f"there is no run {path}",
        Kind.OTHER: f"{path} holds no run (no config.gin)",
    }.get(kind, f"{path} is {kind.value}, no run")
    return f"{problem}{near(path)}"


def near(path: str) -> str:
    """Returns "; did you mean runs/tiny?", or the runs in or beside `path`, or ""."""
    folder = pathlib.Path(path)
    if inside := _runs_in(folder):
        return f"; it holds the runs {', '.join(inside[:MOST_LISTED])}"
    beside = [name for name in _runs_in(folder.parent) if name != folder.name]
    if close := difflib.get_close_matches(folder.name, beside, n=1):
        return f"; did you mean {folder.parent / close[0]}?"
    return f"; {folder.parent} holds the runs {', '.join(beside[:MOST_LISTED])}" if beside else ""


def _runs_in(folder: pathlib.Path) -> list[str]:
    """Returns the sorted names of the runs in a folder."""
    files = [path for name in RUN_FILES for path in folder.glob(f"*/{name}")]
    return sorted({path.parent.name for path in files})


@contextlib.contextmanager
def locked(workdir: str) -> collections.abc.Iterator[None]:
    """Context manager that holds the lock of a workdir, which is created if necessary.

    The lock is flock(2) on a file in the folder. The kernel releases it when the process ends, even
    after SIGKILL. In a multi-process run, process 0 holds it for all. A bucket has no locks: there
    it covers this machine only. A workdir that is still empty at the end is removed.

    Raises:
        ConfigError: Another process holds the lock, or the workdir has links that lead out of it.
        OSError: The folder cannot be written to.
    """
    with contextlib.ExitStack() as stack:
        with distributed.process_zero_first(f"lock of {workdir}"):
            if not jax.process_index():
                stack.enter_context(_locked(workdir))
        yield


@contextlib.contextmanager
def _locked(workdir: str) -> collections.abc.Iterator[None]:
    folder = storage.local_path(workdir)
    storage.require_own_files(folder)
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(workdir, folder / LOCK) as file:
        now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}\n".encode())
        file.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the folder may be gone, or hold something
                (folder / LOCK).unlink()
                for path in created:
                    path.rmdir()


@contextlib.contextmanager
def _lock(workdir: str, path: pathlib.Path) -> collections.abc.Iterator[typing.BinaryIO]:
    """Holds the lock of a file and yields the file. Raises ConfigError after PATIENCE seconds."""
    end = time.monotonic() + PATIENCE
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = storage.open_lock(path)
        except FileNotFoundError:  # the holder before removed the folder at its end
            continue
        with file:
            if storage.try_lock(file) and _is_at(file, path):
                yield file
                return
        if time.monotonic() >= end:
            raise config.ConfigError(
                f"{workdir} is in use by {path.read_text().strip() or 'another process'}. "
                "Wait until that ends, or stop it. To run both, give another --workdir"
            )
        time.sleep(0.1)


def _is_at(file: typing.BinaryIO, path: pathlib.Path) -> bool:
    """Returns whether the path still names this file, which the holder before may have removed."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def is_running(workdir: str) -> bool:
    """Returns whether a process of this machine or on the same storage holds the lock."""
    path = storage.local_path(workdir) / LOCK
    if not path.exists():
        return False
    with path.open("rb") as file:
        return not storage.try_lock(file, shared=True)


def read_settings(workdir: str) -> config.Experiment | None:
    """Reads config.gin. Returns None if there is none."""
    path = storage.local_path(workdir) / gin_files.RECORD
    return gin_files.load([str(path)]) if path.is_file() else None


def check_settings(workdir: str, experiment: config.Experiment):
    """Raises ConfigError if a run in the workdir has other settings than `experiment`.

    The message has the differences, apart from those of free settings (see `config.differences`).
    """
    recorded = read_settings(workdir)
    if changes := recorded and config.differences(recorded, experiment):
        remedy = "" if checkpoint.complete_steps(workdir) else "remove it if it is not needed, "
        raise config.ConfigError(
            f"{workdir} holds a run with other settings ({'; '.join(changes)}): {remedy}"
            "give another --workdir, or the same settings"
        )


def check_checkpoints(workdir: str):
    """Raises ConfigError if the run had checkpoints or steps, and none of them is there.

    A run makes metrics.jsonl before config.gin. A copy of it in part may lack both checkpoints and
    metrics.jsonl, and would begin anew.
    """
    folder = storage.local_path(workdir)
    is_whole = metrics.path_of(workdir).exists() or not (folder / gin_files.RECORD).exists()
    if not is_whole and not checkpoint.complete_steps(workdir):
        raise config.ConfigError(
            f"{workdir} has the settings of a run, but neither metrics.jsonl nor a checkpoint: was "
            "it copied in part? Copy all of it, or give another --workdir to begin again"
        )
    saved = [line["checkpoint"] for line in metrics.read(workdir) if line.get("checkpoint")]
    if saved and not checkpoint.complete_steps(workdir):
        raise config.ConfigError(
            f"{checkpoint.folder_of(workdir)} has no checkpoint any more, and the run had one of "
            f"step {saved[-1]}. Put it back (is its disk mounted?), or give another --workdir to "
            "begin again"
        )


def load_vocabulary(workdir: str | os.PathLike) -> vocabularies.Vocabulary:
    """Loads the vocabulary of a run.

    Raises ConfigError if it is damaged, or not the vocabulary that the run began with.
    """
    vocabulary = vocabularies.load(storage.local_path(str(workdir)) / VOCABULARY)
    run_rows.check_vocabulary(str(workdir), vocabulary)
    return vocabulary


def changes_since_last_start(workdir: str, experiment: config.Experiment) -> list[str]:
    """Returns what changed since the last start, one line each: settings, and CPU cores.

    Call it before this start is recorded.
    """
    recorded = read_settings(workdir)
    if recorded is None:
        return []
    before = config.values(recorded)
    lines = [
        f"{name}: {before[name]!r} -> {value!r}"
        for name, value in config.values(experiment).items()
        if before[name] != value
    ]
    environment = storage.local_path(workdir) / ENVIRONMENT
    starts = environment.read_text(errors="replace") if environment.exists() else ""
    cores = re.findall(r"^cores (\d+)$", starts, re.MULTILINE)
    if cores and int(cores[-1]) != workers.usable_cores():
        change = f"CPU cores: {cores[-1]} -> {workers.usable_cores()}"
        lines.append(f"{change}. On CPU, losses may differ by rounding")
    return lines


def write_start(
    folder: pathlib.Path,
    experiment: config.Experiment,
    vocabulary: vocabularies.Vocabulary,
    step: int = 0,
    changes: collections.abc.Sequence[str] = (),
):
    """Writes config.gin and vocabulary/, and appends a block for this start to environment.txt.

    `folder` is the workdir, or its local copy if it is in a bucket. `step` steps were done before.
    `changes` is the result of `changes_since_last_start`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ENVIRONMENT
    before = path.read_text(errors="replace").rstrip("\n") if path.exists() else ""
    block = [f"after step {step}: {change}" for change in changes]
    block = [*_describe_start(), *block, *_packages(before)]
    storage.write(path, "\n\n".join(filter(None, (before, "\n".join(block)))) + "\n")
    storage.write(folder / gin_files.RECORD, gin_files.render(experiment))
    vocabulary.save(folder / VOCABULARY)


def _describe_start() -> list[str]:
    return [
        f"started {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC",
        f"commit {_commit()}",
        f"command {shlex.join(sys.argv)}",
        f"python {platform.python_version()} on {platform.platform()}",
        f"cores {workers.usable_cores()}",
        *(f"{device.id}: {device.device_kind}" for device in jax.devices()),
    ]


def _packages(before: str) -> list[str]:
    """Returns the installed packages, or UNCHANGED if `before`, the earlier blocks, lists them."""
    packages = sorted(
        {f"{item.metadata['Name']}=={item.version}" for item in importlib.metadata.distributions()}
    )
    listed = [line for line in before.splitlines() if "==" in line and " " not in line]
    return [UNCHANGED] if listed[-len(packages) :] == packages else packages


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


class Parent(typing.NamedTuple):
    """The run that a run goes on from (`Run.continue_from`), as parent.json records it."""

    workdir: str
    step: int  # of its checkpoint
    tokens: int  # that it and the runs before it had trained on
    learning_rate: float  # after that step
    # Rows of the training data that are read already: 0 if this run has other rows, or another
    # order of rows.
    rows_read: int
    changes: list[str]  # settings in which this run differs


def read_parent(workdir: str) -> Parent | None:
    """Reads parent.json. Returns None if the run goes on from no other."""
    path = storage.local_path(workdir) / PARENT
    if not path.exists():
        return None
    with storage.reading(path):
        return Parent(**storage.read_json(path))


def write_parent(workdir: str, parent: Parent):
    """Writes parent.json."""
    path = storage.local_path(workdir) / PARENT
    storage.write(path, json.dumps(parent._asdict(), indent=1) + "\n")


def trained_tokens(workdir: str, step: int) -> int:
    """Returns the tokens that a run and those before it have trained on until a step."""
    recorded, parent = read_settings(workdir), read_parent(workdir)
    return (parent.tokens if parent else 0) + step * _tokens_per_step(recorded)


def _tokens_per_step(experiment: config.Experiment) -> int:
    return experiment.run.batch_size * experiment.corpus.sequence_length


def loss_curves(workdir: str, last_step: int | None = None) -> list[metrics.Curve]:
    """Returns the logged losses of a run, after those of the runs that it goes on from.

    Lines after `last_step` of the run are left out. A run before it whose workdir is gone is left
    out, with those before that.
    """
    curves: list[metrics.Curve] = []
    while workdir and (recorded := read_settings(workdir)):
        parent = read_parent(workdir)
        words_per_row = run_rows.words_per_row(workdir)
        curve = metrics.Curve(
            words_per_step=words_per_row and words_per_row * recorded.run.batch_size,
            name=pathlib.PurePath(workdir).name,
            lines=[
                line
                for line in metrics.read(workdir)
                if last_step is None or line["step"] <= last_step
            ],
            first_token=parent.tokens if parent else 0,
            tokens_per_step=_tokens_per_step(recorded),
            evaluated=(recorded.evaluated.objective,),
        )
        curves.insert(0, curve)
        workdir, last_step = (parent.workdir, parent.step) if parent else ("", None)
    return curves
