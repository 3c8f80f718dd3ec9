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
# Errors of the network and of a machine that has too much open, not of the file.
PASSING = (TimeoutError, ConnectionError)
PASSING_NUMBERS = (
    errno.EAGAIN, errno.EBUSY, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EINTR, errno.EMFILE,
    errno.ENETDOWN, errno.ENETUNREACH, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOTCONN,
    errno.ESTALE,
)  # fmt: skip


def expand(pattern: str) -> list[str]:
    """Returns the files and folders that a glob pattern matches, sorted.

    `**` matches any number of folders. Of a bucket, only files are returned.
    """
    if not storage.in_bucket(pattern):
        return sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    files, root = storage.file_system(pattern)
    return sorted(
        str(files.unstrip_protocol(name))
        for name, entry in files.glob(root, detail=True).items()
        if entry["type"] == "file")


def is_file(path: str) -> bool:
    """Returns whether a path of `expand` is a file."""
    return storage.in_bucket(path) or os.path.isfile(path)


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
    """
    if not storage.in_bucket(path):
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=pathlib.PurePath(path).suffix) as copy:
        with opened(path) as file:
            shutil.copyfileobj(file, copy)
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

    It is a BadFile, which may be left out, unless the error is one of the moment.
    """
    reason = error.strerror or error
    if isinstance(error, PASSING) or error.errno in PASSING_NUMBERS:
        return config.RunError(
            f"{path}: could not be read now ({reason}); give the same command again: it goes on "
            "where it stopped")
    return BadFile(f"{path}: cannot be read ({reason}); check its permissions or leave it out")
