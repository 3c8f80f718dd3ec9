"""Checks paths that a user gives, and says how to correct them."""

import contextlib
import errno
import os
import pathlib
import stat
import tempfile
import typing

from maelm_jax import storage
from maelm_jax.config import ConfigError
from maelm_jax.settings import shown

# Errors of a path that the user can correct, and how (exit status 2).
WRONG_PATH = {
    errno.ENOENT: "is the path right?",
    errno.ENOTDIR: "a part of the path is a file; give a folder",
    errno.EISDIR: "give a file instead of a folder",
    errno.EEXIST: "give another name, or remove it",
    errno.ENOTEMPTY: "give another name, or empty it",
    errno.EACCES: "give a path with permission, or change its permissions",
    errno.EPERM: "give a path with permission, or change its permissions",
    errno.EROFS: "give a path on a disk that can be written",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "its symbolic links form a circle; remove one",
    errno.EINVAL: "give another name",
    errno.EBUSY: "another program uses it; give another path",
    errno.ENOTSUP: "give a path on another disk",
}
# Errors of a disk or system that fails (exit status 1). They may have no path.
FAILING = {
    errno.ENOSPC: "free some space; what was whole stays whole",
    errno.EDQUOT: "free some space; what was whole stays whole",
    errno.EIO: "check the disk, then give the same command again",
    errno.ESTALE: "check the network file system, then give the same command again",
    errno.ENXIO: "check the disk, then give the same command again",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close other programs, then give the same command again",
    errno.ENOMEM: "free some memory, then give the same command again",
}


def describe(error: OSError) -> str:
    """Returns what an OSError means and how to correct it."""
    remedy = (WRONG_PATH | FAILING).get(error.errno, "is the path right?")
    meaning = str(error) if error.errno is None else os.strerror(error.errno)
    return f"{meaning}; {remedy}"


def check_folder(flag: str, path: str | os.PathLike):
    """Checks that `path` is a folder or can become one. Accepts every path in a bucket.

    Args:
        flag: The flag or setting that holds the path, for the message.
        path: The path of the folder.

    Raises:
        ConfigError: A part of the path is a file, or the path cannot be looked up.
    """
    if storage.in_bucket(path):
        return
    for part in (pathlib.Path(path), *pathlib.Path(path).parents):
        try:
            mode = part.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            if os.path.islink(part):
                raise ConfigError(
                    f"{flag}={path}: {part} is a link to nothing; give a folder"
                ) from None
            continue
        except OSError as error:
            raise ConfigError(f"{flag}={shown(str(path))}: {describe(error)}") from error
        if not stat.S_ISDIR(mode):
            raise ConfigError(f"{flag}={path}: {part} is a file; give a folder")
        return


def check_output_folder(flag: str, path: str):
    """Checks that `path` is a folder that can be written to, or that it can be created.

    Args:
        flag: The flag that holds the path, for the message.
        path: The path of the folder.

    Raises:
        ConfigError: The path cannot be a folder, or this process has no permission to write.
    """
    _check_text(flag, path)
    check_folder(flag, path)
    _check_access(flag, path)


def listed(flag: str, value: str) -> list[str]:
    """Returns the paths of a flag that separates them by commas.

    Raises:
        ConfigError: There is none, or one is there twice.
    """
    # bash leaves the ~ of --runs=~/runs/tiny
    paths = [os.path.expanduser(path) for path in value.split(",") if path]
    listed = [path.rstrip("/") or "/" for path in paths]
    if not listed:
        raise ConfigError(f"{flag}={value} names nothing. Give at least one")
    if len(set(listed)) < len(listed):
        raise ConfigError(f"{flag}={value} names one twice. Name each once")
    return listed


def check_output_file(flag: str, path: str):
    """Checks that a file can be written at `path`.

    Args:
        flag: The flag that holds the path, for the message.
        path: The path of the file.

    Raises:
        ConfigError: The path is a folder, or this process has no permission to write.
    """
    _check_text(flag, path)
    if os.path.isdir(path):
        raise ConfigError(f"{flag}={path}: is a folder; name a file")
    with writing(flag, path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.stat(path)  # raises another OSError if the name is too long
    folder = os.path.dirname(os.path.abspath(path))
    check_folder(flag, folder)
    _check_access(flag, folder)


def _check_text(flag: str, path: str):
    if not path:
        raise ConfigError(f"{flag}: is empty; name a path")
    try:
        os.fsencode(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag}={path!r}: is not UTF-8; name a path that is") from error


def _check_access(flag: str, path: str):
    """Raises ConfigError if the nearest existing folder cannot be written to."""
    folder = pathlib.Path(os.path.abspath(path))
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{flag}={path}: cannot be written to ({folder} is read-only or another user's); "
            "name another path"
        )


def make_folder(flag: str, path: str | os.PathLike):
    """Makes a folder and tries to write into it. Raises ConfigError if this fails."""
    with writing(flag, path):
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass


@contextlib.contextmanager
def writing(flag: str, path: str | os.PathLike) -> typing.Iterator[None]:
    """Context manager that turns an OSError about `path` into a ConfigError.

    The error can be about `path`, a folder above it, or a file under it or beside it with a longer
    name. Errors of a full or failing disk, and errors about other paths, pass through.

    Args:
        flag: The flag that holds the path, for the message.
        path: The path that the block writes to.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in WRONG_PATH or not _concerns(error, os.path.abspath(path)):
            raise
        file = "" if error.filename is None else f": {error.filename}"
        raise ConfigError(
            f"{flag}={path}: cannot be written to ({os.strerror(error.errno)}{file}); "
            "name another path"
        ) from error


def _concerns(error: OSError, path: str) -> bool:
    """Returns whether an error is about `path`. One that names no file is."""
    names = [name for name in (error.filename, error.filename2) if isinstance(name, str)]
    return not names or any(
        name.startswith(path) or pathlib.Path(path).is_relative_to(name)
        for name in map(os.path.abspath, names)
    )
