"""The folder Corpus.rows_dir, which holds prepared rows and records that save work."""

import contextlib
import errno
import json
import logging
import os
import pathlib
import typing

from maelm_jax import config, storage

log = logging.getLogger(__name__)


def local_folder(corpus: config.Corpus) -> pathlib.Path:
    """Returns the local folder of `corpus.rows_dir`. It may not exist yet.

    Raises:
        ConfigError: The path cannot be a folder.
    """
    folder = storage.local_path(corpus.rows_dir)
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise config.ConfigError(
            f"Corpus.rows_dir: {corpus.rows_dir} cannot be a folder: {nearest} is none; "
            "name another folder")
    return folder


@contextlib.contextmanager
def writing(corpus: config.Corpus) -> typing.Iterator[None]:
    """Context manager that turns failed writes under `corpus.rows_dir` into ConfigError.

    A full disk stays an OSError, because the setting is not wrong.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        reason = f"{error.strerror or error}: {error.filename or corpus.rows_dir}"
        raise config.ConfigError(
            f"Corpus.rows_dir: {corpus.rows_dir} cannot be written to ({reason}); "
            "name another folder") from error


def remember(path: pathlib.Path, value: typing.Any):
    """Writes a JSON file that saves work later. Goes on without it on a read-only disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps(value, indent=0)
        if not path.is_file() or path.read_text() != content:
            storage.write(path, content)
    except OSError as error:
        log.info("%s is not kept: %s", path, error.strerror or error)
