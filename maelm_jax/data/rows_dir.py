"""The folder Corpus.rows_dir, which holds prepared rows and records that save work."""

import contextlib
import json
import logging
import pathlib
import typing

from maelm_jax import config, paths, storage

IN_PLACE = "in_place"  # folder of small files of stores whose rows stay in the bucket
# Folders below a prepared folder that hold its small files. Files of rows are deeper.
SMALL_FILES_DEPTH = 2
log = logging.getLogger(__name__)


def local_folder(corpus: config.Corpus) -> pathlib.Path:
    """Returns the local folder of `corpus.rows_dir`. It may not exist yet.

    Raises:
        ConfigError: The path cannot be a folder.
    """
    folder = storage.local_path(corpus.rows_dir)
    paths.check_folder("Corpus.rows_dir", folder)
    return folder


def prepared_folder(corpus: config.Corpus) -> pathlib.Path:
    """Returns the local folder of what was prepared. It may not exist yet."""
    folder = local_folder(corpus)
    if storage.in_bucket(corpus.rows_dir) and corpus.cache_gb:
        return folder / IN_PLACE
    return folder


def complete_folders(corpus: config.Corpus, prefix: str, main_file: str) -> dict[str, float]:
    """Returns the complete folders of a request in `corpus.rows_dir`, also in a bucket.

    Args:
        corpus: Holds `rows_dir`.
        prefix: The start of the folders' names (`prepared_folders.prefix`).
        main_file: Name of the file that a complete folder has.

    Returns:
        {name of the folder: time at which its main file was written, in seconds}
    """
    if storage.in_bucket(corpus.rows_dir):
        return storage.folders_with(corpus.rows_dir, f"{prefix}-*", main_file)
    files = local_folder(corpus).glob(f"{prefix}-*/{main_file}")
    return {file.parent.name: file.stat().st_mtime for file in files}


def fetch(corpus: config.Corpus, pattern: str, main_file: str):
    """Copies prepared folders of a bucket into `prepared_folder`, once.

    With `Corpus.cache_gb`, only their small files are copied.

    Args:
        corpus: Holds `rows_dir`. Nothing is done if it is not in a bucket.
        pattern: Glob pattern for the names of the folders.
        main_file: Name of the file that a complete folder has.
    """
    if storage.in_bucket(corpus.rows_dir):
        depth = SMALL_FILES_DEPTH if corpus.cache_gb else None
        storage.fetch_folders(corpus.rows_dir, pattern, main_file, prepared_folder(corpus), depth)


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
