"""Finds, opens and identifies files on this machine and in buckets (gs://, s3://)."""

import contextlib
import errno
import glob
import hashlib
import os
import pathlib
import shutil
import tempfile
import typing

from maelm_jax import config, storage
from maelm_jax.data.documents import BadFile

# Entries of fsspec's `info` that change with the content of an object in a bucket.
CHECKSUMS = ("md5Hash", "crc32c", "ETag", "etag")
# Errors of the network (EIO too: of NFS and FUSE) and of a machine that has too much open, not of
# the file.
PASSING = (TimeoutError, ConnectionError)
PASSING_NUMBERS = (
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECOMM,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.EIO,
    errno.EMFILE,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOLINK,
    errno.ENOMEM,
    errno.ENOTCONN,
    errno.EREMOTEIO,
    errno.ESTALE,
)


def expand(pattern: str) -> list[str]:
    """Returns the files and folders that a glob pattern matches, sorted.

    `**` matches any number of folders. Of a bucket, only files are returned.

    Raises:
        ConfigError: A folder on the way cannot be listed.
        RunError: A folder cannot be listed at the moment.
    """
    if not storage.in_bucket(pattern):
        pattern = os.path.expanduser(pattern)
        _check_folders(pattern)
        return sorted(glob.glob(pattern, recursive=True))
    files, root = storage.file_system(pattern)
    return sorted(
        str(files.unstrip_protocol(name))
        for name, entry in files.glob(root, detail=True).items()
        if entry["type"] == "file"
    )


def _check_folders(pattern: str):
    """Raises the error of a folder that the pattern lists and this process cannot.

    `glob.glob` leaves out such folders without a word.
    """
    parts = pathlib.PurePath(pattern).parts
    for end in range(1, len(parts)):
        if not (glob.has_magic(parts[end]) or "**" in parts[:end]):
            continue
        # With a slash at its end, a pattern matches folders only.
        for folder in glob.glob(os.path.join(*parts[:end], ""), recursive=True):
            try:
                os.scandir(folder).close()
            except OSError as error:
                raise unreadable(folder, error) from error


def is_folder(path: str) -> bool:
    """Returns whether a path of `expand` is a local folder that can be looked up."""
    return not storage.in_bucket(path) and os.path.isdir(path)


@contextlib.contextmanager
def opened(path: str) -> typing.Iterator[typing.BinaryIO]:
    """Opens a file for bytes."""
    if storage.in_bucket(path):
        files, name = storage.file_system(path)
        with files.open(name, "rb") as file:
            yield file
    else:
        with open(path, "rb") as file:
            yield file


@contextlib.contextmanager
def local_copy(path: str) -> typing.Iterator[str]:
    """Gives a path on this machine, for libraries that open files themselves.

    A file in a bucket is copied to a temporary file.

    Raises:
        BadFile: The bucket does not have the file.
        RunError: The file cannot be read at the moment.
    """
    if not storage.in_bucket(path):
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=pathlib.PurePath(path).suffix) as copy:
        try:
            with opened(path) as file:
                shutil.copyfileobj(file, copy)
        except OSError as error:
            raise unreadable(path, error) from error
        copy.flush()
        yield copy.name


class Version(typing.NamedTuple):
    """What tells a state of a file from another without reading the file."""

    key: str  # path, size and time of the last change, or checksum in the bucket
    content_hash: str | None  # hash that stands for the content; None if it must be read


def version(path: str) -> Version:
    """Looks up the present state of a file.

    Raises:
        OSError: The file cannot be looked up.
        RunError: The bucket refuses or does not answer.
    """
    if not storage.in_bucket(path):
        stat = os.stat(path)
        return Version(f"{os.path.abspath(path)} {stat.st_size} {stat.st_mtime_ns}", None)
    files, name = storage.file_system(path)
    entry = files.info(name)
    checksums = [f"{key} {entry[key]}" for key in CHECKSUMS if entry.get(key)]
    if not checksums:
        return Version(f"{path} {files.ukey(name)}", None)
    state = f"{entry['size']} {checksums[0]}"
    return Version(f"{path} {state}", hashlib.sha256(state.encode()).hexdigest())


def content_hash(path: str) -> str:
    """Returns the SHA-256 of a file's content in hex.

    Raises:
        OSError: The file cannot be read.
    """
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unreadable(path: str, error: OSError) -> BadFile | config.RunError:
    """Returns the error for a file that cannot be opened or read.

    It is a BadFile if the file itself is the cause: `Corpus.skip_bad_files` may leave it out. It is
    a RunError if the network or the machine is the cause. In a bucket, every error but "not found"
    gives a RunError, because the libraries raise the same error for an expired token and for a
    forbidden file.
    """
    reason = error.strerror or error
    is_refusal = storage.in_bucket(path) and not isinstance(error, FileNotFoundError)
    if is_refusal or isinstance(error, PASSING) or error.errno in PASSING_NUMBERS:
        return config.RunError(
            f"{path}: could not be read now ({reason}); give the same command again: it goes on "
            "where it stopped"
        )
    return BadFile(f"{path}: cannot be read ({reason}); check its permissions or leave it out")
