"""Atomic file writes, and folders in buckets (gs://, s3://) through fsspec.

Small reads from a bucket are slow, and a bucket cannot append to a file. So metrics and TensorBoard
files are written to a local folder, which is copied to the bucket. Checkpoints are written to the
bucket directly, because Orbax writes few large objects.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import pathlib
import re
import stat
import time
import typing

from maelm_jax.config import ConfigError, RunError

FULL = (errno.ENOSPC, errno.EDQUOT)
WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # of flock(2): no lock support
LOCK_POLL_SECONDS = 0.5
# What Python raises for text that is no JSON, and for values of JSON that are of another form than
# expected.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+:/")  # as gs:/bucket, https://host, file:///folder
# Orbax's paths read buckets with fsspec too, even if TensorFlow is installed.
os.environ.setdefault("EPATH_USE_TF", "false")
log = logging.getLogger(__name__)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> typing.Iterator[typing.BinaryIO]:
    """Opens a temporary file for bytes that replaces `path` when the block ends.

    A reader never sees a partly written file, even if the writer is killed or the machine loses
    power: the file is flushed before it is renamed, and its folder afterwards. If the block raises,
    `path` is unchanged. Raises FileNotFoundError if the folder does not exist: somebody may have
    removed it on purpose.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=_open_without_links) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        flush_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in FULL and not error.filename:
            error.filename = str(path)
        raise


def _open_without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


class InsideName(typing.NamedTuple):
    """A name out of a file of a folder, resolved by `inside`."""

    path: pathlib.Path  # to read
    name: str  # relative, without ".", ".." and links, to write in another folder; "": the folder


def inside(folder: str | os.PathLike, name: str) -> InsideName:
    """Resolves a name that a file of a folder, perhaps a stranger's, gives to a file beside it.

    The rule: the name is relative and has no "..", and its links lead to a place in the folder.
    One layout has links out of its folder: in a cache of the Hub, the files of snapshots/REVISION
    are links into `blobs` beside `snapshots`. These are read too. What is written has the plain
    name. The result names a regular file, a folder, or nothing.

    Raises:
        ConfigError: The name leads out of the folder, or to a device or pipe.
    """
    plain = pathlib.PurePosixPath(name)
    if plain.is_absolute() or ".." in plain.parts:
        raise ConfigError(f"{folder} names the file {name}, which is outside of it. Correct it")
    path = pathlib.Path(folder).expanduser().absolute() / plain
    _require_inside(path, _own_places(folder), folder)
    return InsideName(path, "/".join(plain.parts))


def require_own_files(folder: str | os.PathLike):
    """Checks that a folder, perhaps a stranger's, holds its own files and folders only.

    The folder itself may be a link, and need not exist.

    Raises:
        ConfigError: A link leads out of the folder (see `inside`), or it holds a device or pipe.
    """
    places = _own_places(folder)
    for parent, folders, files in os.walk(places[0]):  # follows no links
        for name in (*folders, *files):
            _require_inside(pathlib.Path(parent, name), places, folder)


def _own_places(folder: str | os.PathLike) -> list[pathlib.Path]:
    """Returns the folders to which links in a folder may lead, that folder first."""
    root = pathlib.Path(os.path.realpath(pathlib.Path(folder).expanduser()))
    snapshots = [parent for parent in root.parents if parent.name == "snapshots"]
    return [root, *(parent.parent / "blobs" for parent in snapshots)]


def _require_inside(path: pathlib.Path, places: list[pathlib.Path], folder: str | os.PathLike):
    """Raises ConfigError unless `path` is in one of `places`, and no device or pipe."""
    target = pathlib.Path(os.path.realpath(path))
    if not any(target.is_relative_to(place) for place in places):
        raise ConfigError(
            f"{path} leads out of {folder}, to {target}. "
            "If it belongs there, replace the link with what it leads to"
        )
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a run may remove it
        mode = target.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
            raise ConfigError(f"{path} is a device or pipe. Put a file in its place, or remove it")


def flush_folder(path: str | os.PathLike):
    """Makes the names in a folder survive a loss of power (fsync)."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write(path: str | os.PathLike, content: bytes | str):
    """Writes a file atomically (`atomic_file`). A `str` is encoded as UTF-8."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def reading(
    path: str | os.PathLike,
    remedy: str = "put a whole copy of it there",
    errors: type[Exception] | tuple[type[Exception], ...] = MALFORMED,
):
    """Context manager that turns an error about the content of a file into one line.

    It raises ConfigError, with `remedy`, if the block raises one of `errors`, except OSError,
    RunError and ConfigError. The block takes values out of the content, or calls a library that
    documents `errors`. It does nothing else, because an error of other code is not the file's.
    """
    try:
        yield
    except (ConfigError, RunError, OSError):
        raise
    except errors as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConfigError(f"{path} cannot be read ({reason}); {remedy}") from error


def read_json(path: str | os.PathLike) -> typing.Any:
    """Reads a JSON file, here or in a bucket. Raises ConfigError if it is not JSON."""
    content = read_bytes(path)
    with reading(path, errors=(ValueError, RecursionError)):
        return json.loads(content)


def write_json(path: str | os.PathLike, content: typing.Any):
    """Writes a JSON file atomically."""
    write(path, json.dumps(content, indent=1) + "\n")


def try_lock(file: typing.BinaryIO | int, shared: bool = False) -> bool:
    """Locks an open file with flock(2), until it is closed or the process ends.

    Returns False if another process holds the lock. With `shared`, several may hold it, and NFS
    takes a file that is open for reading only. The lock works between hosts on NFS version 4, and
    on Lustre and FUSE if they are mounted with locks. On a file system without locks, a warning
    says so and the result is True.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        log.warning(
            "this file system has no locks: "
            "make sure that no other process works on the same folder"
        )
    return True


def open_lock(path: str | os.PathLike) -> typing.BinaryIO:
    """Opens the file of a lock, which is created if necessary, to append to it.

    Raises ConfigError if it is a link, device or pipe, which a stranger may have put there.
    """
    try:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ConfigError(f"{path} is a link, and a lock is a file. Remove the link") from error
    file = os.fdopen(opened, "ab")
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        file.close()
        raise ConfigError(f"{path} is a device or pipe, and a lock is a file. Remove it")
    return file


@contextlib.contextmanager
def locked(path: str | os.PathLike, what: str) -> typing.Iterator[None]:
    """Context manager that holds the lock of a file, and waits while another process holds it.

    The file is created with its folder, and it stays. A process that is killed frees its lock.
    `what` says what the holder does, for the message of a process that waits.
    """
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open_lock(path) as file:
        if not try_lock(file):
            log.warning("another process %s; waiting for it", what)
            if multiprocessing.current_process().name != "MainProcess":
                log.warning('if it runs this script too, put it under `if __name__ == "__main__":`')
            while not try_lock(file):
                time.sleep(LOCK_POLL_SECONDS)
        yield


def in_bucket(path: str | os.PathLike) -> bool:
    """Returns whether a path is in a bucket. Raises ConfigError for other kinds of addresses."""
    if str(path).startswith(("gs://", "s3://")):
        return True
    if ADDRESS.match(str(path)):
        raise ConfigError(
            f"{path} is no address of a bucket, which begins with gs:// or s3://. For a folder of "
            f"this name, give ./{path}"
        )
    return False


def require_local(path: str | os.PathLike):
    """Raises ConfigError if `path` is in a bucket, for code that supports local folders only."""
    if in_bucket(path):
        raise ConfigError(
            f"{path}: only train and prepare know buckets; "
            "give a folder of this machine (gcloud storage cp -r copies one)"
        )


def local_path(path: str) -> pathlib.Path:
    """Returns a folder on this machine for `path`.

    A local folder is returned with a `~` expanded. For a folder in a bucket, the result is its
    local copy under $XDG_CACHE_HOME/maelm_jax, which is created if it does not exist.
    """
    if not in_bucket(path):
        return pathlib.Path(path).expanduser()
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    folder = cache / "maelm_jax" / hashlib.sha256(path.rstrip("/").encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def read_bytes(path: str | os.PathLike) -> bytes:
    """Reads a file on this machine or in a bucket.

    Raises ConfigError if it is a device or pipe, which may have no end.
    """
    if not in_bucket(path):
        path = pathlib.Path(path)
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigError(f"{path} is a device or pipe. Put a file in its place")
        return path.read_bytes()
    files, name = file_system(str(path))
    return files.cat_file(name)


def exists(path: str | os.PathLike) -> bool:
    """Returns whether a file or folder exists, on this machine or in a bucket."""
    if not in_bucket(path):
        return pathlib.Path(path).exists()
    files, name = file_system(str(path))
    return files.exists(name)


def fetch_files(path: str, names: typing.Sequence[str]):
    """Copies files of a bucket's folder into `local_path(path)`.

    Local copies of files that the bucket does not have are deleted.
    """
    files, root = file_system(path)
    for name in names:
        target = local_path(path) / name
        if files.exists(f"{root}/{name}"):
            target.parent.mkdir(parents=True, exist_ok=True)
            write(target, files.cat_file(f"{root}/{name}"))
        else:
            target.unlink(missing_ok=True)


def send(path: str):
    """Copies all files of `local_path(path)` to the bucket, except temporary and lock files.

    Does nothing if `path` is a local folder.
    """
    if not in_bucket(path):
        return
    files, root = file_system(path)
    local = local_path(path)
    # config.gin comes after metrics.jsonl, as in `record_start`.
    for file in sorted(local.rglob("*"), reverse=True):
        if file.is_file() and file.suffix not in (".tmp", ".lock"):
            files.pipe_file(f"{root}/{file.relative_to(local)}", file.read_bytes())


def file_system(path: str):
    """Opens the file system of a folder, in a bucket or on this machine, without a listings cache.

    Returns:
        fsspec's file system, and the path of the folder in it.
    """
    try:
        import fsspec

        # It logs a traceback of each error, and then raises it.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        files, root = fsspec.url_to_fs(path, use_listings_cache=False)
    except ImportError as error:
        raise ConfigError(
            f"{path}: {error}; pip install '.[bucket]' has what buckets need"
        ) from error
    return files, root.rstrip("/")
