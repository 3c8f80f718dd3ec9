"""Labelled data as it lies on disk (tab-separated files, JSON files, each also .xz or .gz, TFDS
records), and folders to write to."""

import contextlib
import errno
import json
import os
import pathlib
import tempfile
import typing

from maelm_jax import config
from maelm_jax.data import sources

PACKINGS = ("", ".xz", ".gz")
# Errors of a path that cannot be written to. A full or failing disk is no mistake in the path.
UNUSABLE = {
    errno.EACCES, errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
    errno.ENOENT, errno.ENOTDIR, errno.ENOTSUP, errno.EPERM, errno.EROFS,
}  # fmt: skip


def locate(data_dir: str, *names: str) -> pathlib.Path | None:
    """The first of `names` found in `data_dir` or in its glue/ or squad/ folder, packed or not; None when there is none.

    Raises ConfigError when `data_dir` itself is not there.
    """
    root = pathlib.Path(os.path.expanduser(data_dir))
    if not os.path.isdir(root):
        raise config.ConfigError(
            f"DATA_DIR: no folder {data_dir}; give the folder that holds GLUE's folders or SQuAD's files, or None for TFDS"
        )
    candidates = [
        root / place / (name + packing)
        for name in names
        for place in ("", "glue", "squad")
        for packing in PACKINGS
    ]
    return next((path for path in candidates if os.path.isfile(path)), None)


def rows(path: str | pathlib.Path) -> typing.Iterator[tuple[int, list[str]]]:
    """(line number, cells) of a tab-separated file; quotes are characters like any other. Raises ConfigError: not UTF-8, empty, corrupt."""
    for number, (offset, line) in enumerate(sources.lines(str(path)), start=1):
        yield number, sources.decode(line, str(path), offset).split("\t")


def read_json(path: str | pathlib.Path) -> typing.Any:
    """The content of a JSON file.

    Raises:
        ConfigError: The file is not JSON, is nested too deeply, or holds an integer of thousands of
            digits. The message names the file, and the place where it is known.
    """
    text = "\n".join(
        sources.decode(line, str(path), offset) for offset, line in sources.lines(str(path))
    )
    try:
        return json.loads(text)
    except RecursionError as error:
        raise config.ConfigError(
            f"{path}: the JSON is nested too deeply. Check the file."
        ) from error
    except ValueError as error:  # of integers too long as well
        reason = str(error).partition(";")[0]
        raise config.ConfigError(f"{path}: not JSON ({reason}). Check the file.") from error


def read_record(path: str | os.PathLike, remedy: str, **kinds: type | tuple[type, ...]) -> dict:
    """A JSON object that this program wrote. `kinds` are the types of fields that it must have.

    Raises:
        ConfigError: The file cannot be read or holds anything else. `remedy` says what to do.
    """
    content = read_json(path)
    wrong = [
        name
        for name, kind in kinds.items()
        if not isinstance(content, dict) or not isinstance(content.get(name), kind)
    ]
    if wrong or not isinstance(content, dict):
        raise config.ConfigError(
            f"{path}: damaged, {', '.join(wrong) or 'the whole'} is not what was written there. "
            + remedy
        )
    return content


def records(name: str, split: str, corpus: config.Corpus) -> list[dict] | None:
    """All records of a split of a TFDS dataset, byte strings decoded; None when it has no such split. Raises ConfigError when it is not here."""
    from maelm_jax.data import seqio_tasks

    try:
        found = seqio_tasks.records(f"tfds:{name}", corpus, split)
    except sources.Unavailable as error:
        raise config.ConfigError(
            f"{error}; or read the files as published: --gin.DATA_DIR=FOLDER"
        ) from error
    return None if found is None else [_decoded(record) for record in found]


def _decoded(value):
    if isinstance(value, dict):
        return {name: _decoded(item) for name, item in value.items()}
    if isinstance(value, bytes):
        return value.decode("utf-8")
    return [_decoded(item) for item in value.tolist()] if getattr(value, "ndim", 0) else value


def check_folder(path: str | os.PathLike, flag: str):
    """Raises ConfigError when `path` is a file or lies under one. Makes nothing."""
    nearest = pathlib.Path(os.path.abspath(path))
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    if not os.path.isdir(nearest):
        raise config.ConfigError(f"{flag}={path}: {nearest} is not a folder. Name another folder.")


def make_folder(path: str | os.PathLike, flag: str):
    """Makes a folder and tries to write into it. Raises ConfigError when that is not possible."""
    with writing_to(path, flag):
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass


@contextlib.contextmanager
def writing_to(path: str | os.PathLike, flag: str) -> typing.Iterator[None]:
    """Context manager that turns an OSError about a path at or under `path` into ConfigError.

    Errors of a full or failing disk pass through.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in UNUSABLE or not _concerns(error, pathlib.Path(os.path.abspath(path))):
            raise
        reason = f"{error.strerror}: {error.filename}"
        raise config.ConfigError(
            f"{flag}={path}: cannot be written to ({reason}). Name another folder."
        ) from error


def _concerns(error: OSError, folder: pathlib.Path) -> bool:
    """Whether the error is about the folder, something in it or a folder above it."""
    if not isinstance(error.filename, str):
        return False
    place = pathlib.Path(os.path.abspath(error.filename))
    return place.is_relative_to(folder) or folder.is_relative_to(place)
