"""A run's folder: what it is, the names of its records, its lock, and how records are read.

config.gin has the settings of the last start, environment.txt a block for each start, and
parent.json the run of `Run.continue_from`. Importing this module does not import JAX.
"""

import collections.abc
import contextlib
import dataclasses
import datetime
import difflib
import enum
import importlib.metadata
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

from etils import epath

from maelm_jax import config, gin_files, storage
from maelm_jax.data import rows, vocabularies, workers

STOCK_CONFIG = "config.json"  # of a folder that transformers reads
MODULES = "modules.json"  # of a folder that sentence-transformers reads
PUBLISHED_WEIGHTS = "model.pt"  # in a folder of the published layout
TABLE = "table.json"  # of fine-tuned runs

# Records of a run that are fetched. The names of the others stand in `Workdir`.
SETTINGS = gin_files.RECORD
ENVIRONMENT = "environment.txt"
VOCABULARY = "vocabulary"
ROWS = "rows.json"
PARENT = "parent.json"
ORIGIN = "origin.json"
METRICS = "metrics.jsonl"
# Files that a run reads at its start. `Workdir.fetch` copies those of a workdir in a bucket.
FETCHED = (
    *(SETTINGS, ENVIRONMENT, PARENT, METRICS, ORIGIN, ROWS),
    f"{VOCABULARY}/{vocabularies.SentencePieceVocabulary.FILE}",
    f"{VOCABULARY}/{vocabularies.TokenizerJsonVocabulary.FILE}",
    f"{VOCABULARY}/{vocabularies.CHECKSUMS}",
)
# Messages name the folders with one of these files, which a run can start from.
RUN_FILES = (SETTINGS, STOCK_CONFIG, PUBLISHED_WEIGHTS)
MOST_LISTED = 6  # largest number of runs that a message lists
PATIENCE = 5.0  # seconds; the kernel frees the lock of a killed process after its memory
UNCHANGED = "packages as in the block above"  # instead of the list of packages


class Kind(enum.Enum):
    """What a path names. The value is a description for messages."""

    RUN = "a run of pretraining"
    FINETUNED = "a fine-tuned run"
    TABLE = "a table of fine-tuned runs"
    EXPORT = "an exported folder"
    STOCK = "a folder of stock transformers"
    PUBLISHED = "a checkpoint of the published code"
    ROWS = "a folder of prepared rows"
    OTHER = "no folder that a command here has written"
    ABSENT = "no file or folder"


RUNS = (Kind.RUN, Kind.FINETUNED)
# Into what train, finetune and analyze may write.
PRETRAINING = (Kind.RUN, Kind.OTHER, Kind.ABSENT)
FINETUNING = (Kind.FINETUNED, Kind.TABLE, Kind.OTHER, Kind.ABSENT)
REPORTING = (*RUNS, Kind.TABLE, Kind.OTHER, Kind.ABSENT)


class Parent(typing.NamedTuple):
    """The run that a run goes on from (`Run.continue_from`), as parent.json records it."""

    workdir: "Workdir"
    step: int  # of its checkpoint
    tokens: int  # that it and the runs before it had trained on
    learning_rate: float  # after that step
    # Rows of the training data that are read already: 0 if this run has other rows, or another
    # order of rows.
    rows_read: int
    changes: list[str]  # settings in which this run differs


def _record(name: str, meaning: str) -> property:
    """Returns a property of `Workdir`: the path of a record on this machine."""

    def path(self: "Workdir") -> pathlib.Path:
        return self.folder / name

    return property(path, doc=meaning)


@dataclasses.dataclass(frozen=True)
class Workdir(os.PathLike):
    """A run's folder, on this machine or in a bucket.

    What a command gets as a workdir may be another folder, a file, or nothing: `kind` says what.
    Paths of files are on this machine. For a workdir in a bucket they are those of its local copy,
    between which and the bucket `fetch` and `send` copy.

    Attributes:
        path: The folder as the user names it, a `str`.
    """

    path: str | os.PathLike

    def __post_init__(self):
        object.__setattr__(self, "path", os.fspath(self.path))

    def __str__(self):
        return self.path

    def __fspath__(self):
        return self.path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return pathlib.PurePath(self.path).name

    @property
    def in_bucket(self) -> bool:
        """Whether the folder is in a bucket."""
        return storage.in_bucket(self.path)

    @property
    def folder(self) -> pathlib.Path:
        """The folder on this machine."""
        return storage.local_path(self.path)

    # Records.

    settings_file = _record(SETTINGS, "All settings of the last start.")
    environment_file = _record(ENVIRONMENT, "A block of lines for each start.")
    vocabulary_folder = _record(VOCABULARY, "The files of the vocabulary.")
    rows_file = _record(ROWS, "The rows that the run trains on (run_rows.py).")
    parent_file = _record(PARENT, "The run of `Run.continue_from`.")
    origin_file = _record(ORIGIN, "The encoder that the run started from.")
    metrics_file = _record(METRICS, "A line of JSON for each logged step (metrics.py).")
    tensorboard_folder = _record("tensorboard", "The events of TensorBoard.")
    profile_folder = _record("profile", "The trace of --profile.")
    loss_curve_file = _record("loss_curve.png", "The figure of the losses.")
    lock_file = _record("run.lock", "The file of `locked`.")
    # Of a fine-tuned run.
    inputs_file = _record("inputs.json", "The fingerprint of its data, and the encoder's step.")
    results_file = _record("results.json", "The scores, which are written last.")

    @property
    def unfinished(self) -> "Workdir":
        """Of a fine-tuned run: the folder whose checkpoints it resumes from, removed at its end."""
        return Workdir(self.folder / "unfinished")

    @property
    def checkpoints(self) -> epath.Path:
        """The folder with a folder for each step, which Orbax writes, also in a bucket."""
        return epath.Path(self.path if self.in_bucket else self.folder.resolve()) / "checkpoints"

    # What it is.

    @property
    def kind(self) -> Kind:
        """What the path is. `fetch` must have fetched a workdir in a bucket.

        The first kind that fits counts: a folder with a config.gin is a run, whatever else it
        holds.
        """
        path = self.folder
        if self.settings_file.is_file():
            record = self.settings_file.read_text(encoding="utf-8", errors="replace")
            return Kind.FINETUNED if re.search(r"^Finetune\.", record, re.MULTILINE) else Kind.RUN
        if path.is_file() or (path / PUBLISHED_WEIGHTS).is_file():
            return Kind.PUBLISHED
        if (path / STOCK_CONFIG).is_file() or (path / MODULES).is_file():
            is_ours = (path / vocabularies.CHECKSUMS).is_file()
            return Kind.EXPORT if is_ours else Kind.STOCK
        if (path / TABLE).is_file():
            return Kind.TABLE
        if (path / rows.MANIFEST).is_file() or any(path.glob(f"*/{rows.MANIFEST}")):
            return Kind.ROWS
        return Kind.OTHER if path.exists() else Kind.ABSENT

    @property
    def is_run(self) -> bool:
        """Whether it is a run of pretraining or a fine-tuned run."""
        return self.kind in RUNS

    def require_run(self, prefix: str = "", remedy: str = ""):
        """Raises ConfigError if it is no run. The message names the runs near it.

        It begins with `prefix` and ends with `remedy`.
        """
        kind = self.kind
        if kind in RUNS:
            return
        problem = {
            Kind.ABSENT: f"there is no run {self}",
            Kind.OTHER: f"{self} holds no run (no {SETTINGS})",
        }.get(kind, f"{self} is {kind.value}, no run")
        raise config.ConfigError(f"{prefix}{problem}{self.describe_neighbours()}{remedy}")

    def require_writable_by(self, kinds: tuple[Kind, ...]):
        """Raises ConfigError if a command that may write into `kinds` may not write here."""
        kind = self.kind
        if kind not in kinds:
            raise config.ConfigError(f"--workdir={self} is {kind.value}. Give another --workdir")

    def describe_neighbours(self) -> str:
        """Returns "; did you mean runs/tiny?", or the runs in or beside the folder, or ""."""
        folder = pathlib.Path(self.path)
        if inside := _runs_in(folder):
            return f"; it holds the runs {', '.join(inside[:MOST_LISTED])}"
        beside = [name for name in _runs_in(folder.parent) if name != folder.name]
        if close := difflib.get_close_matches(folder.name, beside, n=1):
            return f"; did you mean {folder.parent / close[0]}?"
        listed = ", ".join(beside[:MOST_LISTED])
        return f"; {folder.parent} holds the runs {listed}" if beside else ""

    # Bucket and lock.

    def fetch(self, holds_lock: bool = False):
        """Copies the records of a workdir in a bucket to this machine.

        Nothing is copied while another process of this machine, which writes them, runs it.
        `holds_lock` says that the caller does. No run is on s3://, where Orbax writes no
        checkpoints. Raises ConfigError if the folder, which may be a stranger's, has links that
        lead out of it.
        """
        if self.path.startswith("gs://") and (holds_lock or not self.is_running):
            storage.fetch_files(self.path, FETCHED)
        storage.require_own_files(self.folder)

    def send(self):
        """Copies the files of this machine to a workdir in a bucket."""
        storage.send(self.path)

    @property
    def is_running(self) -> bool:
        """Whether a process of this machine or on the same storage holds the lock."""
        if not self.lock_file.exists():
            return False
        with self.lock_file.open("rb") as file:
            return not storage.try_lock(file, shared=True)

    @contextlib.contextmanager
    def locked(self) -> collections.abc.Iterator[None]:
        """Context manager that holds the lock of the folder, which is created if necessary.

        The lock is flock(2) on a file in the folder. The kernel releases it when the process ends,
        even after SIGKILL. In a multi-process run, process 0 holds it for all. A bucket has no
        locks: there it covers this machine only. A folder that is still empty at the end is
        removed.

        Raises:
            ConfigError: Another process holds the lock, or the folder has links that lead out of
                it.
            OSError: The folder cannot be written to.
        """
        import jax

        from maelm_jax.training import distributed

        with contextlib.ExitStack() as stack:
            with distributed.process_zero_first(f"lock of {self}"):
                if not jax.process_index():
                    stack.enter_context(self._locked())
            yield

    @contextlib.contextmanager
    def _locked(self) -> collections.abc.Iterator[None]:
        folder = self.folder
        storage.require_own_files(folder)
        created = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with self._lock() as file:
            now = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}\n".encode())
            file.flush()
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # the folder may be gone, or hold something
                    self.lock_file.unlink()
                    for path in created:
                        path.rmdir()

    @contextlib.contextmanager
    def _lock(self) -> collections.abc.Iterator[typing.BinaryIO]:
        """Holds the lock and yields its file. Raises ConfigError after PATIENCE seconds."""
        path, end = self.lock_file, time.monotonic() + PATIENCE
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
                    f"{self} is in use by {path.read_text().strip() or 'another process'}. "
                    "Wait until that ends, or stop it. To run both, give another --workdir"
                )
            time.sleep(0.1)

    # Reading and writing of records.

    def read_settings(self) -> config.Experiment | None:
        """Reads config.gin. Returns None if there is none."""
        file = self.settings_file
        return gin_files.load([str(file)]) if file.is_file() else None

    @property
    def has_vocabulary(self) -> bool:
        """Whether there is a file of a vocabulary."""
        return bool(vocabularies.files_in(self.vocabulary_folder))

    def load_vocabulary(self) -> vocabularies.Vocabulary:
        """Loads the vocabulary of the run.

        Raises ConfigError if it is damaged, or not the vocabulary that the run began with.
        """
        vocabulary = vocabularies.load(self.vocabulary_folder)
        self.check_vocabulary(vocabulary)
        return vocabulary

    def check_vocabulary(self, vocabulary: vocabularies.Vocabulary):
        """Raises ConfigError if rows.json records another vocabulary."""
        recorded = self.read_rows()
        if recorded and recorded["vocabulary"] != vocabulary.fingerprint:
            raise config.ConfigError(
                f"{self}/{VOCABULARY} is not the vocabulary that the run began with (sha256 "
                f"{recorded['vocabulary'][:12]} -> {vocabulary.fingerprint[:12]}). Put that one "
                "back"
            )

    def read_rows(self) -> dict | None:
        """Reads rows.json. Returns None if there is none. Raises ConfigError if it is damaged."""
        return storage.read_json(self.rows_file) if self.rows_file.is_file() else None

    def write_rows(self, record: dict):
        """Writes rows.json."""
        storage.write_json(self.rows_file, record)

    def read_parent(self) -> Parent | None:
        """Reads parent.json. Returns None if the run goes on from no other."""
        file = self.parent_file
        if not file.exists():
            return None
        with storage.reading(file):
            parent = Parent(**storage.read_json(file))
            return parent._replace(workdir=Workdir(parent.workdir))

    def write_parent(self, parent: Parent):
        """Writes parent.json."""
        storage.write_json(self.parent_file, parent._asdict() | {"workdir": str(parent.workdir)})

    def read_origin(self) -> dict[str, typing.Any]:
        """Reads origin.json. Returns {} if the run started from no encoder."""
        return _read_if_present(self.origin_file)

    def read_inputs(self) -> dict[str, typing.Any]:
        """Reads inputs.json. Returns {} if there is none."""
        return _read_if_present(self.inputs_file)

    def trained_tokens(self, step: int) -> int:
        """Returns the tokens that the run and those before it have trained on until a step."""
        parent = self.read_parent()
        before = parent.tokens if parent else 0
        return before + step * self.read_settings().tokens_per_step

    def changes_since_last_start(self, experiment: config.Experiment) -> list[str]:
        """Returns what changed since the last start, one line each: settings, and CPU cores.

        Call it before this start is recorded.
        """
        recorded = self.read_settings()
        if recorded is None:
            return []
        before = config.values(recorded)
        lines = [
            f"{name}: {before[name]!r} -> {value!r}"
            for name, value in config.values(experiment).items()
            if before[name] != value
        ]
        cores = re.findall(r"^cores (\d+)$", self._read_starts(), re.MULTILINE)
        if cores and int(cores[-1]) != workers.usable_cores():
            change = f"CPU cores: {cores[-1]} -> {workers.usable_cores()}"
            lines.append(f"{change}. On CPU, losses may differ by rounding")
        return lines

    def write_start(
        self,
        experiment: config.Experiment,
        vocabulary: vocabularies.Vocabulary,
        step: int = 0,
        changes: collections.abc.Sequence[str] = (),
    ):
        """Writes config.gin and vocabulary/, and appends a block for this start to environment.txt.

        `step` steps were done before. `changes` is the result of `changes_since_last_start`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        before = self._read_starts().rstrip("\n")
        block = [f"after step {step}: {change}" for change in changes]
        block = [*_describe_start(), *block, *_packages(before)]
        text = "\n\n".join(filter(None, (before, "\n".join(block))))
        storage.write(self.environment_file, f"{text}\n")
        storage.write(self.settings_file, gin_files.render(experiment))
        vocabulary.save(self.vocabulary_folder)

    def _read_starts(self) -> str:
        """Returns environment.txt, or "" if there is none."""
        file = self.environment_file
        return file.read_text(errors="replace") if file.exists() else ""


def _runs_in(folder: pathlib.Path) -> list[str]:
    """Returns the sorted names of the runs in a folder."""
    files = [path for name in RUN_FILES for path in folder.glob(f"*/{name}")]
    return sorted({path.parent.name for path in files})


def _is_at(file: typing.BinaryIO, path: pathlib.Path) -> bool:
    """Returns whether the path still names this file, which the holder before may have removed."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _read_if_present(file: pathlib.Path) -> dict[str, typing.Any]:
    return storage.read_json(file) if file.is_file() else {}


def _describe_start() -> list[str]:
    import jax

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
