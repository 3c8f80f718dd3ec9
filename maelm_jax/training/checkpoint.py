"""Saves and restores checkpoints with Orbax.

A checkpoint is the folder checkpoints/STEP of a workdir. Orbax writes it in the background and
marks it as complete when everything is written. TensorStore has a codec with checksums, which rows
use. But Orbax chooses the codecs of arrays, without that one, and its files of JSON have no
checksum. So each checkpoint has a file with the MD5 of every other file. It is written before the
checkpoint is complete, and every reader verifies it.
"""

import base64
import collections.abc
import concurrent.futures
import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import os
import shutil
import typing
import warnings

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from maelm_jax import storage
from maelm_jax.config import ConfigError, RunError
from maelm_jax.training import distributed
from maelm_jax.training.workdir import Workdir

ITEM = "default"  # Orbax's name of the folder of a saved tree, in the folder of a step
CHECKSUMS = "checksums.json"
# Without a checksum: Orbax writes the last two when it commits. They hold times, no data.
UNCOVERED = (CHECKSUMS, "_CHECKPOINT_METADATA", "commit_success.txt")
THREADS = 8
T = typing.TypeVar("T")
log = logging.getLogger(__name__)


def _is_no_traceback_of_orbax(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


# Orbax logs a traceback in each of its threads, and then raises the error. Other libraries log here
# too.
logging.getLogger("absl").addFilter(_is_no_traceback_of_orbax)


class NoSuchStep(ConfigError):
    """A workdir has no complete checkpoint of a step. A run may have pruned it."""


class Damaged(ConfigError):
    """A file of a checkpoint is missing, or differs from what was written."""


class Restored(typing.NamedTuple):
    """The state of a checkpoint, and its step."""

    step: int
    state: typing.Any


class Name(typing.NamedTuple):
    """What WORKDIR@STEP or WORKDIR names."""

    workdir: Workdir
    step: int | None  # None: the newest


def split_name(name: str) -> Name:
    """Returns the workdir and the step of a checkpoint that the user names."""
    workdir, at, step = name.rpartition("@")
    is_step = at and step.isdecimal() and not os.path.exists(os.path.expanduser(name))
    return Name(Workdir(workdir), int(step)) if is_step else Name(Workdir(name), None)


def choose_step(name: str, step: int | None) -> Name:
    """Returns the workdir, and the step in its name or in a flag. Raises ConfigError for both."""
    workdir, named = split_name(name)
    if named is not None and step not in (None, named):
        raise ConfigError(f"{name} names another checkpoint than --step={step}. Give one of them")
    return Name(workdir, step if named is None else named)


def complete_steps(workdir: Workdir) -> list[int]:
    """Returns the steps of a workdir that have a complete checkpoint, ascending."""
    folder = workdir.checkpoints
    return sorted(ocp.utils.checkpoint_steps(folder)) if folder.is_dir() else []


def all_steps(workdir: Workdir) -> list[int]:
    """Returns `complete_steps`. Raises ConfigError if there is none."""
    steps = complete_steps(workdir)
    if not steps:
        raise ConfigError(
            f"{workdir.checkpoints} holds no checkpoint; has the run come to its first?"
        )
    return steps


def pick_step(workdir: Workdir, step: int | None = None) -> int:
    """Returns `step`, or the newest step of a workdir if `step` is None.

    Raises NoSuchStep if there is no such checkpoint. The message lists the steps.
    """
    steps = all_steps(workdir)
    if step is not None and step not in steps:
        raise NoSuchStep(
            f"{workdir.checkpoints} holds no checkpoint of step {step}; "
            f"it holds {', '.join(map(str, steps))}"
        )
    return steps[-1] if step is None else step


def has_optimizer_state(workdir: Workdir, step: int) -> bool:
    """Returns whether a checkpoint has the state of the optimiser. `merge` writes some without."""
    saved = ocp.PyTreeCheckpointHandler().metadata(workdir.checkpoints / str(step) / ITEM).tree
    return "opt_state" in saved


def read_params(workdir: Workdir, step: int | None = None) -> dict:
    """Reads the parameters of a checkpoint as numpy arrays, without the state of the optimiser.

    `step` None is the newest. Raises ConfigError if there is no such checkpoint, or it is damaged.
    """
    folder = workdir.checkpoints / str(pick_step(workdir, step))
    verify(folder)
    handler = ocp.PyTreeCheckpointHandler()
    saved = handler.metadata(folder / ITEM).tree["params"]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), saved)
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
    selection = ocp.args.PyTreeRestore(
        item={"params": shapes}, partial_restore=True, restore_args={"params": as_numpy}
    )
    with _storage_errors(folder):
        return handler.restore(folder / ITEM, args=selection)["params"]


def read_kept(workdir: Workdir, step: int, wanted: int | None) -> Restored:
    """Reads the parameters of `step`, or of the newest step if the run has pruned it meanwhile.

    If a step was `wanted`, no other is read. Raises ConfigError as `read_params`, NoSuchStep if the
    run has pruned the wanted step.
    """
    while True:
        try:
            return Restored(step, read_params(workdir, step))
        except Exception:  # a checkpoint that is being removed fails in many ways
            newest = pick_step(workdir, wanted)
            if newest == step:
                raise
            step = newest


def read_each(
    steps: collections.abc.Sequence[int | None], read: collections.abc.Callable[[int | None], T]
) -> collections.abc.Iterator[T]:
    """Yields `read(step)` of each step. A step that the run prunes before is left out.

    A warning names it. Raises NoSuchStep if no step is left.
    """
    gone = []
    for step in steps:
        try:
            value = read(step)
        except NoSuchStep as error:
            gone.append(error)
            continue
        yield value
    for error in gone:
        if len(gone) == len(steps):
            raise error
        log.warning("%s. It was removed meanwhile, and is left out", error)


def restore_params(workdir: Workdir, like: dict, step: int | None = None) -> dict:
    """Restores parameters of a checkpoint onto devices, in the layout of `like`.

    `like` is a tree of arrays or ShapeDtypeStructs with shardings. `step` None is the newest.
    Raises ConfigError if there is no such checkpoint, it is damaged, or it does not fit `like`.
    """
    saved = read_params(workdir, step)
    _check_shapes(saved, like, f"{workdir} does not fit this model")
    values = dict(jax.tree_util.tree_leaves_with_path(saved))
    return jax.tree_util.tree_map_with_path(
        lambda keys, x: jax.device_put(values[keys], x.sharding), like
    )


def restore(workdir: Workdir, step: int, like: typing.Any) -> typing.Any:
    """Restores a state from a verified checkpoint. All processes of the run call this function.

    `like` is a tree of arrays or ShapeDtypeStructs with shardings, whose layout the result has.
    Raises ConfigError if the checkpoint does not fit it.
    """
    folder, handler = workdir.checkpoints / str(step) / ITEM, ocp.StandardCheckpointHandler()
    # Orbax itself would print a traceback for each array that does not fit.
    _check_shapes(handler.metadata(folder).tree, like, f"{folder} does not fit this model")
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
    )
    with _storage_errors(folder):
        return handler.restore(folder, args=ocp.args.StandardRestore(shapes))


def restore_newest(workdir: Workdir, like: typing.Any) -> Restored | None:
    """Restores the newest checkpoint that is not damaged. All processes call this function.

    Damaged checkpoints are renamed `damaged-STEP`, if an older one is whole. `like` is that of
    `restore`. Returns None if there is no checkpoint. Raises ConfigError if the checkpoint does not
    fit `like`, or if all are damaged.
    """
    # JAX does not know a missing number, and no checkpoint has step -1.
    chosen = -1 if jax.process_index() else _choose_step(workdir)
    chosen = distributed.from_process_zero(chosen)
    return None if chosen < 0 else Restored(chosen, restore(workdir, chosen, like))


def _choose_step(workdir: Workdir) -> int:
    """Returns the newest step whose checkpoint is whole, and renames those after it. -1: none."""
    folder, damaged = workdir.checkpoints, []
    for step in reversed(complete_steps(workdir)):
        try:
            verify(folder / str(step))
        except Damaged as error:
            log.warning("%s. Trying the one before", error)
            damaged.append(step)
            continue
        for number in damaged:
            aside = folder / f"damaged-{number}"
            if aside.exists():
                aside.rmtree()
            (folder / str(number)).rename(aside)
        return step
    if damaged:
        raise ConfigError(
            f"every checkpoint in {folder} is damaged. Nothing was changed. Copy an undamaged one "
            "there, or give another --workdir to begin again"
        )
    return -1


def _check_shapes(saved: typing.Any, like: typing.Any, problem: str):
    """Raises ConfigError if `saved` lacks an array of `like`, or has another shape there."""

    def shapes(tree) -> dict[str, tuple[int, ...]]:
        return {
            jax.tree_util.keystr(keys, simple=True, separator="/"): tuple(leaf.shape)
            for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }

    stored = shapes(saved)
    for path, shape in shapes(like).items():
        if stored.get(path) != shape:
            found = f"shape {stored[path]}" if path in stored else "no such array"
            raise ConfigError(f"{problem}: {path} has {found} there, {shape} here")


@dataclasses.dataclass
class _Kept(ocp.checkpoint_managers.PreservationPolicy):
    """Which checkpoints Orbax keeps: see `Checkpoints`."""

    newest: int
    every: int | None
    at: frozenset[int]

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """Returns whether each of some checkpoints, in the order of their steps, is kept."""
        first_kept = len(checkpoints) - self.newest
        return [
            number >= first_kept
            or one.step in self.at
            or (self.every is not None and one.step % self.every == 0)
            for number, one in enumerate(checkpoints)
        ]


class Checkpoints:
    """Writes the checkpoints of a run, in the background.

    The newest `keep` are kept, all whose step is a multiple of `keep_every`, and those of
    `keep_at`. The workdir is a folder of this machine or in a bucket.
    """

    def __init__(
        self,
        workdir: Workdir,
        keep: int = 3,
        keep_every: int | None = None,
        keep_at: collections.abc.Collection[int] = (),
    ):
        self._workdir, self._folder = workdir, workdir.checkpoints
        self._newest = max(complete_steps(workdir), default=None)
        self._saving: int | None = None  # the step that is being written
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=_Kept(keep, keep_every, frozenset(keep_at)),
                create=True,
                enable_async_checkpointing=True,
                async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums),
            ),
        )
        # Process 0 made the folder. The others may not see it yet, if its disk is shared over NFS.
        is_checked = not (workdir.in_bucket or jax.process_index())
        self._opened = os.open(self._folder, os.O_RDONLY) if is_checked else None

    def check_in_place(self):
        """Raises RunError if the folder was removed or renamed. Orbax would create it again.

        Process 0 checks. The folder must be on a disk: a bucket has no folders to rename.
        """
        if self._opened is None:
            return
        is_there = self._folder.exists()
        if not (is_there and os.path.samestat(os.fstat(self._opened), os.stat(self._folder))):
            # The run ends, and Orbax never awaits what its failed write was to do next.
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            raise RunError(
                f"{self._workdir} was removed or renamed while the run worked in it. "
                "To go on, start the command again with its present name"
            )

    def newest(self) -> int | None:
        """Returns the newest step that is known to have a complete checkpoint."""
        if self._saving is not None and not self._manager.is_saving_in_progress():
            if ocp.utils.is_checkpoint_finalized(self._folder / str(self._saving)):
                self._newest = self._saving
            self._saving = None
        return self._newest

    def save(self, step: int, state: typing.Any):
        """Starts to write `state`. Does nothing if the step has a checkpoint.

        Raises:
            OSError: ENOSPC if the disk has too little space. The check comes before the write,
                because Orbax prints a traceback for each array. Also errors of the write before.
            RunError: The workdir was removed or renamed.
        """
        if step == self.newest():
            return
        self.wait()
        self.check_in_place()
        if not storage.in_bucket(self._folder):
            self._check_disk(state)
        self._saving = step
        with _storage_errors(self._folder):
            self._manager.save(step, args=ocp.args.StandardSave(state), force=True)

    def _check_disk(self, state: typing.Any):
        # All processes write to this disk, each a part of the state.
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            space = f"{needed / 1e6:.1f} MB are needed, {free / 1e6:.1f} MB are free"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({space})", str(self._folder))

    def _write_checksums(self):
        """Orbax calls this on process 0 after the data and before it marks the step as complete."""
        self.check_in_place()
        # On a disk Orbax renames a temporary folder. In a bucket it adds a marker file instead.
        unnamed = self._folder / f"{self._saving}{ocp.utils.TMP_DIR_SUFFIX}"
        write_checksums(unnamed if unnamed.exists() else self._folder / str(self._saving))

    def wait(self):
        """Waits until the write has ended. Raises RunError or OSError if it failed."""
        try:
            with _storage_errors(self._folder):
                self._manager.wait_until_finished()
        except Exception:
            self.check_in_place()  # a better reason, if it is one
            raise
        self.newest()

    def close(self):
        """Waits for the write in progress and frees Orbax's threads."""
        with _storage_errors(self._folder):
            self._manager.close()
        if self._opened is not None:
            os.close(self._opened)


@contextlib.contextmanager
def _storage_errors(folder: epath.Path) -> collections.abc.Iterator[None]:
    """Raises RunError where TensorStore raises ValueError: for every failure of a disk or bucket.

    A ValueError would count as wrong input, with which a run is not started again.
    """
    try:
        yield
    except ValueError as error:
        reason = " ".join(str(error).split())[:500]
        raise RunError(
            f"{folder}: {reason}; free some space or mend the storage, then start again"
        ) from error


def write_checksums(folder: epath.Path):
    """Writes the MD5 of all files of a checkpoint into its folder."""
    files, root = storage.file_system(str(folder))
    covered = [name for name in _list_files(folder) if name not in UNCOVERED]
    content = json.dumps(_checksums(files, root, covered), indent=1) + "\n"
    if storage.in_bucket(folder):
        files.pipe_file(f"{root}/{CHECKSUMS}", content.encode())
    else:
        storage.write(folder / CHECKSUMS, content)


def verify(folder: epath.Path):
    """Compares the files of a checkpoint with their checksums.

    Only files that the folder really holds are opened, and no links: the checkpoint may be a
    stranger's.

    Raises:
        Damaged: A file is missing, not in the list, or differs. The message names it.
        OSError: A file cannot be read. Libraries for buckets raise exceptions of their own.
    """
    files, root = storage.file_system(str(folder))
    try:
        present = _list_files(folder)
        if CHECKSUMS not in present:
            raise FileNotFoundError(CHECKSUMS)
        recorded = dict(json.loads(files.cat_file(f"{root}/{CHECKSUMS}")))
        covered = [name for name in present if name not in UNCOVERED]
        for name in sorted(set(recorded) - set(covered)):
            raise FileNotFoundError(name)
        for name in sorted(set(covered) - set(recorded)):
            raise ValueError(f"{name} is not in the list")
        found = _checksums(files, root, covered)
    except FileNotFoundError as error:
        missing = str(error.filename or error).removeprefix(f"{root}/")
        raise Damaged(f"the checkpoint {folder} is damaged: {missing} is missing") from error
    except (ValueError, TypeError) as error:
        raise Damaged(f"the checkpoint {folder} is damaged: {CHECKSUMS}: {error}") from error
    for name, checksum in recorded.items():
        if found[name] != checksum:
            raise Damaged(f"the checkpoint {folder} is damaged: {name} is not what was written")


def _list_files(folder: epath.Path) -> list[str]:
    """Returns the names of the regular files of a folder, sorted. A link is no file."""
    files, root = storage.file_system(str(folder))
    # By default fsspec omits what it cannot list.
    strict = {} if storage.in_bucket(folder) else {"on_error": "raise"}
    found = sorted(files.find(root, detail=True, **strict).items())
    return [path[len(root) :].lstrip("/") for path, info in found if info["type"] == "file"]


def _checksums(files, root: str, names: list[str]) -> dict[str, str]:
    """Returns {name: MD5 in hex} of files of a folder."""

    def md5(name: str) -> str:
        info = files.info(f"{root}/{name}")
        if info.get("md5Hash"):  # Google Cloud Storage keeps it, so the file is not read
            return base64.b64decode(info["md5Hash"]).hex()
        digest = hashlib.md5(usedforsecurity=False)
        with files.open(f"{root}/{name}", "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(md5, names), strict=True))
