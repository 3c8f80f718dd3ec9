"""The file `origin.json` of a workdir: what `Run.init_from` named when the run started.

A source may be moved, deleted or replaced while the run goes on, so what a later start or an export
needs of it is recorded.
"""

import json
import os
import pathlib
import typing

from maelm_jax import json_files, storage

FILE = "origin.json"


class Origin(typing.NamedTuple):
    """The source that a run started from.

    Attributes:
        path: `Run.init_from`.
        kind: What it is, in words.
        step: The step of a workdir's checkpoint; None for every other source.
        length: Its longest input in tokens, with `<s>` and `</s>`.
        has_decoder: Whether it has a decoder.
    """

    path: str
    kind: str
    step: int | None
    length: int
    has_decoder: bool


def write(workdir: str | os.PathLike, origin: Origin):
    """Writes the record of a run."""
    content = json.dumps(origin._asdict(), indent=1) + "\n"
    storage.write(pathlib.Path(workdir) / FILE, content)


def read(workdir: str | os.PathLike) -> Origin | None:
    """Reads the record of a run.

    Returns:
        The record. None if the run started from random weights, or in a version without this file.

    Raises:
        ConfigError: The file is damaged.
    """
    path = pathlib.Path(workdir) / FILE
    if not path.is_file():
        return None
    remedy = "put a copy of it there, or remove it and the source is read again if it is there"
    return Origin(**json_files.read(path, _is_record, remedy))


def _is_record(value: typing.Any) -> bool:
    if not isinstance(value, dict) or set(value) != set(Origin._fields):
        return False
    step = value["step"]
    return (
        isinstance(value["path"], str)
        and isinstance(value["kind"], str)
        and (step is None or json_files.is_integer(step, 0))
        and json_files.is_integer(value["length"], 1, json_files.LARGEST)
        and isinstance(value["has_decoder"], bool)
    )
