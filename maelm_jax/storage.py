"""Atomic file writes, and folders in buckets (gs://, s3://) through fsspec.

Small reads from a bucket are slow, and a bucket cannot append to a file. So rows, which are read
at random, are copied to this machine once, or fetched as whole files into memory. Metrics and
TensorBoard files are written to a local folder, which is copied to the bucket. Checkpoints are
written to the bucket directly, because Orbax writes few large objects.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import logging
import os
import pathlib
import shutil
import threading
import time
import typing

from maelm_jax import settings

POLL_SECONDS = 1.0  # between attempts to lock
WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # of flock(2): no lock support
log = logging.getLogger(__name__)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> typing.Iterator[typing.BinaryIO]:
    """Opens a temporary file for bytes that replaces `path` when the block ends.

    If the block raises, the temporary file is removed and `path` is unchanged. A reader never sees
    a partly written file, even if the writer is killed.

    Raises:
        FileNotFoundError: The folder does not exist. It is not created, because somebody may have
            removed it on purpose.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(
        f"{path.name}.{os.uname().nodename}.{os.getpid()}.{threading.get_native_id()}.tmp"
    )
    try:
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write(path: str | os.PathLike, content: bytes | str):
    """Writes a file atomically (`atomic_file`). A `str` is encoded as UTF-8."""
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def try_lock(file: typing.BinaryIO | int) -> bool:
    """Locks an open file with flock(2), until it is closed or the process ends.

    The lock works between hosts on NFS version 4, and on Lustre and FUSE if they are mounted with
    locks. On a file system without locks, a warning says so and the result is True.

    Returns:
        False if another process holds the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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


def unused(path):
    """Returns a path that does not exist: `path`, or the first free one of STEM-2, STEM-3, ...

    Args:
        path: A pathlib or epath Path.
    """
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free


def in_bucket(path: str | os.PathLike) -> bool:
    """Returns whether a path is in a bucket."""
    return str(path).startswith(("gs://", "s3://"))


def require_local(path: str):
    """Raises ConfigError if `path` is in a bucket, for code that supports local folders only."""
    if in_bucket(path):
        raise settings.ConfigError(
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
    # Orbax's paths then use fsspec too, even if TensorFlow is installed.
    os.environ.setdefault("EPATH_USE_TF", "false")
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    folder = cache / "maelm_jax" / hashlib.sha256(path.rstrip("/").encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def reaching(function: typing.Callable) -> typing.Callable:
    """Decorates a function of a path, so that a refusal or failure of a bucket is one line.

    The libraries of buckets raise many types of exceptions, also an OSError without a number.

    Raises:
        RunError: The bucket refuses or does not answer.
    """

    @functools.wraps(function)
    def call(path, *arguments, **options):
        try:
            return function(path, *arguments, **options)
        except FileNotFoundError:
            raise
        except Exception as error:
            without_number = isinstance(error, OSError) and error.errno is None
            if not in_bucket(path) or not (without_number or is_of_bucket(error)):
                raise
            raise unreachable(path, error) from error

    return call


def is_of_bucket(error: Exception) -> bool:
    """Returns whether an error comes from a library of buckets."""
    libraries = ("aiobotocore", "aiohttp", "botocore", "gcsfs", "google", "s3fs")
    return type(error).__module__.partition(".")[0] in libraries


def unreachable(path: str, error: Exception) -> settings.RunError:
    """Returns the error for a bucket that refuses or does not answer."""
    return settings.RunError(
        f"{path}: the bucket cannot be reached now ({settings.described(error)}); check its name "
        "and your permissions, then give the same command again"
    )


@reaching
def folders_with(path: str, pattern: str, manifest: str) -> dict[str, float]:
    """Returns the subfolders of a bucket's folder that hold a file `manifest`.

    Args:
        path: A folder in a bucket.
        pattern: Glob pattern for the names of the subfolders.
        manifest: A file name.

    Returns:
        {name of the subfolder: time at which the bucket got its manifest, in seconds}
    """
    files, root = file_system(path)
    manifests = files.glob(f"{root}/{pattern}/{manifest}")
    return {name.split("/")[-2]: files.modified(name).timestamp() for name in manifests}


@reaching
def fetch_folders(
    path: str, pattern: str, manifest: str, parent: pathlib.Path, depth: int | None = None
):
    """Copies subfolders of a bucket's folder to this machine.

    A folder that is on this machine already is not copied again.

    Args:
        path: A folder in a bucket.
        pattern: Glob pattern for the names of the subfolders.
        manifest: A file name. Only subfolders that hold this file are copied.
        parent: The folder that they are copied into. It is created if it does not exist.
        depth: Deeper files are not copied. The files of a subfolder itself have depth 1.
    """
    files, root = file_system(path)
    parent.mkdir(parents=True, exist_ok=True)
    for manifest_path in files.glob(f"{root}/{pattern}/{manifest}"):
        source = manifest_path.rsplit("/", 1)[0]
        target = parent / source.rsplit("/", 1)[1]
        if target.is_dir():
            continue
        with open(parent / f".{target.name}.lock", "wb") as lock:
            while not try_lock(lock):  # another process of this machine copies it
                time.sleep(POLL_SECONDS)
            if target.is_dir():
                continue
            arriving = parent / f".{target.name}.{os.uname().nodename}.partial"
            shutil.rmtree(arriving, ignore_errors=True)  # of a process that was killed
            arriving.mkdir()
            try:
                files.get(f"{source}/", f"{arriving}/", recursive=True, maxdepth=depth)
                os.rename(arriving, target)
            finally:
                shutil.rmtree(arriving, ignore_errors=True)


@reaching
def fetch_files(path: str, names: typing.Sequence[str]):
    """Copies files of a bucket's folder into `local_path(path)`.

    Local copies of files that the bucket does not have are deleted.
    """
    files, root = file_system(path)
    for name in names:
        target = local_path(path) / name
        if files.exists(f"{root}/{name}"):
            write(target, files.cat_file(f"{root}/{name}"))
        else:
            target.unlink(missing_ok=True)


@reaching
def send(path: str):
    """Copies all files of `local_path(path)` to the bucket, except temporary and lock files.

    Does nothing if `path` is a local folder.
    """
    if not in_bucket(path):
        return
    files, root = file_system(path)
    local = local_path(path)
    for file in sorted(local.rglob("*")):
        if file.is_file() and file.suffix not in (".tmp", ".lock"):
            files.pipe_file(f"{root}/{file.relative_to(local)}", file.read_bytes())


@reaching
def remove(path: str, name: str):
    """Deletes a file from `local_path(path)` and from the bucket, if it is there."""
    (local_path(path) / name).unlink(missing_ok=True)
    if in_bucket(path):
        files, root = file_system(path)
        if files.exists(f"{root}/{name}"):
            files.rm_file(f"{root}/{name}")


def file_system(path: str):
    """Opens the file system of a folder, in a bucket or on this machine, without a listings cache.

    Returns:
        fsspec's file system, and the path of the folder in it.

    Raises:
        ConfigError: The package for this kind of bucket is not installed.
    """
    try:
        import fsspec

        # It logs a traceback of each error, and then raises it.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        files, root = fsspec.url_to_fs(path, use_listings_cache=False)
    except ImportError as error:
        raise settings.ConfigError(
            f"{path}: {error}; pip install '.[bucket]' has what buckets need"
        ) from error
    return files, root.rstrip("/")
