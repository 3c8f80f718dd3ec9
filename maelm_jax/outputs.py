"""Checks the paths that a command writes to, before the work begins."""

import contextlib
import errno
import os
import pathlib
import typing

from maelm_jax.config import ConfigError

# Errors that another path avoids. A full or failing disk is not among them.
WRONG_PATH = frozenset((
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EACCES,
    errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EBUSY,
))  # fmt: skip


@contextlib.contextmanager
def writing(flag: str, path: str) -> typing.Iterator[None]:
    """Context manager that turns an OSError into a ConfigError if another path avoids it.

    Args:
        flag: The flag that holds the path, for the message.
        path: The path that the block writes to.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in WRONG_PATH:
            raise
        where = f" ({error.filename})" if error.filename else ""
        raise ConfigError(
            f"{flag}={path} cannot be written to: {error.strerror}{where}. Name another path"
        ) from error


def check_folder(flag: str, path: str):
    """Checks that `path` is a folder that can be written to, or that it can be created.

    Args:
        flag: The flag that holds the path, for the message.
        path: The path of the folder.

    Raises:
        ConfigError: The path cannot be a folder, or this process has no permission to write.
    """
    _check(flag, path)
    if os.path.exists(path) and not os.path.isdir(path):
        raise ConfigError(f"{flag}={path} is a file. Name a folder")
    if os.path.isdir(path):
        _check_access(flag, path, pathlib.Path(path))


def check_file(flag: str, path: str):
    """Checks that a file can be written at `path`.

    Args:
        flag: The flag that holds the path, for the message.
        path: The path of the file.

    Raises:
        ConfigError: The path is a folder, or this process has no permission to write.
    """
    _check(flag, path)
    if os.path.isdir(path):
        raise ConfigError(f"{flag}={path} is a folder. Name a file")


def _check(flag: str, path: str):
    """Raises ConfigError if the nearest existing folder above `path` cannot be written to."""
    if not path:
        raise ConfigError(f"{flag} is empty. Name a path")
    try:
        os.fsencode(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag}={path!r} is not UTF-8. Name a path that is") from error
    with writing(flag, path):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(path)  # raises OSError if the name is too long
        above = pathlib.Path(os.path.abspath(path)).parent
        while not os.path.lexists(above):
            above = above.parent
        above.stat()  # raises OSError for a circle of links, or a link to nothing
    if not above.is_dir():
        raise ConfigError(f"{flag}={path} lies under {above}, which is a file. Name another path")
    _check_access(flag, path, above)


def _check_access(flag: str, path: str, folder: pathlib.Path):
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{flag}={path} cannot be written to: {folder} is read-only or another user's. "
            "Name another path"
        )
