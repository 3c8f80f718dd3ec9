"""The folder Corpus.rows_dir, which holds prepared rows and records that save work."""

import contextlib
import json
import logging
import pathlib
import typing

from maelm_jax import config, paths, storage

log = logging.getLogger(__name__)


def local_folder(corpus: config.Corpus) -> pathlib.Path:
    """Returns the local folder of `corpus.rows_dir`. It may not exist yet.

    Raises:
        ConfigError: The path cannot be a folder.
    """
    folder = storage.local_path(corpus.rows_dir)
    paths.check_folder("Corpus.rows_dir", folder)
    return folder


def writing(corpus: config.Corpus) -> contextlib.AbstractContextManager[None]:
    """Context manager that turns an OSError about `corpus.rows_dir` into ConfigError."""
    return paths.writing("Corpus.rows_dir", storage.local_path(corpus.rows_dir))


def remember(path: pathlib.Path, value: typing.Any):
    """Writes a JSON file that saves work later. Goes on without it on a read-only disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps(value, indent=0)
        if not path.is_file() or path.read_text() != content:
            storage.write(path, content)
    except OSError as error:
        log.info("%s is not kept: %s", path, error.strerror or error)
