"""Labelled data as it lies on disk: tab-separated files, JSON files (each also .xz or .gz), TFDS records."""

import json
import pathlib
import typing

from maelm_jax import config
from maelm_jax.data import sources

PACKINGS = ("", ".xz", ".gz")


def locate(data_dir: str, *names: str) -> pathlib.Path | None:
    """The first of `names` found in `data_dir` or in its glue/ or squad/ folder, packed or not; None when there is none.

    Raises ConfigError when `data_dir` itself is not there.
    """
    root = pathlib.Path(data_dir).expanduser()
    if not root.is_dir():
        raise config.ConfigError(f"DATA_DIR: no folder {data_dir}; give the folder that holds GLUE's folders or SQuAD's files, or None for TFDS")
    candidates = [root / place / (name + packing) for name in names for place in ("", "glue", "squad") for packing in PACKINGS]
    return next((path for path in candidates if path.is_file()), None)


def rows(path: str | pathlib.Path) -> typing.Iterator[tuple[int, list[str]]]:
    """(line number, cells) of a tab-separated file; quotes are characters like any other. Raises ConfigError: not UTF-8, empty, corrupt."""
    for number, (offset, line) in enumerate(sources.lines(str(path)), start=1):
        yield number, sources.decode(line, str(path), offset).split("\t")


def read_json(path: str | pathlib.Path) -> typing.Any:
    """The content of a JSON file. Raises ConfigError, naming file and place, when it is not JSON."""
    text = "\n".join(sources.decode(line, str(path), offset) for offset, line in sources.lines(str(path)))
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise config.ConfigError(f"{path}: not JSON ({error})") from error


def records(name: str, split: str, corpus: config.Corpus) -> list[dict] | None:
    """All records of a split of a TFDS dataset, byte strings decoded; None when it has no such split. Raises ConfigError when it is not here."""
    from maelm_jax.data import tasks

    try:
        found = tasks.records(f"tfds:{name}", corpus, split)
    except sources.Unavailable as error:
        raise config.ConfigError(f"{error}; or read the files as published: --gin.DATA_DIR=FOLDER") from error
    return None if found is None else [_decoded(record) for record in found]


def _decoded(value):
    if isinstance(value, dict):
        return {name: _decoded(item) for name, item in value.items()}
    if isinstance(value, bytes):
        return value.decode("utf-8")
    return [_decoded(item) for item in value.tolist()] if getattr(value, "ndim", 0) else value
