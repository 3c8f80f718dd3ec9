"""Reads the rows of labelled tables: tab-separated, .csv and .jsonl files, also as .xz and .gz."""

import csv
import json
import pathlib
import typing

from maelm_jax import config, json_files
from maelm_jax.data import text_files


class Row(typing.NamedTuple):
    """One row of a table, as the text of its cells."""

    number: int  # of its (last) line in the file, from 1
    cells: list[str]


def separator(path: str | pathlib.Path) -> str:
    """Returns what stands between two cells of a file, in words."""
    return {"csv": "commas", "jsonl": "fields"}.get(_ending(path), "tabs")


def rows(path: str | pathlib.Path) -> typing.Iterator[Row]:
    """Yields the rows of a table. The first one has the names of the columns.

    The end of the name says what the file is:

    - .csv: cells between commas, quotes as in RFC 4180. A cell can have several lines.
    - .jsonl: an object on each line. The columns are the fields of the first one. Values are text,
      numbers or booleans.
    - any other: cells between tabs. Quotes are taken literally.

    Raises:
        ConfigError: The file cannot be read, is empty, corrupt, not UTF-8, or not of its kind.
    """
    read = {"csv": _comma_separated, "jsonl": _json_lines}.get(_ending(path), _tab_separated)
    is_empty = True
    for row in read(str(path)):
        is_empty = False
        yield row
    if is_empty:
        raise config.ConfigError(f"{path}: only empty lines. Give a file with examples")


def _ending(path: str | pathlib.Path) -> str:
    """Returns the ending of a file's name, without that of its packing."""
    suffixes = [suffix for suffix in pathlib.Path(path).suffixes if suffix not in (".xz", ".gz")]
    return suffixes[-1].removeprefix(".").lower() if suffixes else ""


def _lines(path: str) -> typing.Iterator[str]:
    for offset, line in text_files.lines(path):
        yield text_files.decode(line, path, offset)


def _tab_separated(path: str) -> typing.Iterator[Row]:
    for number, line in enumerate(_lines(path), start=1):
        yield Row(number, line.split("\t"))


def _comma_separated(path: str) -> typing.Iterator[Row]:
    reader = csv.reader((line + "\n" for line in _lines(path)), strict=True)
    try:
        for cells in reader:
            if cells:  # an empty line is no row
                yield Row(reader.line_num, cells)
    except csv.Error as error:
        raise config.ConfigError(
            f"{path}:{reader.line_num}: not CSV ({error}). Quote a cell with commas or quotes as "
            'in "a ""word"", and more"'
        ) from error


def _json_lines(path: str) -> typing.Iterator[Row]:
    columns: list[str] = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        remedy = "each line holds one object"
        content = json_files.parse(line, f"{path}:{number}", remedy)
        if not isinstance(content, dict):
            raise config.ConfigError(f"{path}:{number}: {type(content).__name__}, no object")
        if not columns:
            columns = list(content)
            yield Row(number, columns)
        if absent := [name for name in columns if name not in content]:
            raise config.ConfigError(
                f"{path}:{number}: no field {absent[0]!r}, which the first object has"
            )
        yield Row(number, [_cell(content[name], f"{path}:{number}", name) for name in columns])


def _cell(value: typing.Any, location: str, name: str) -> str:
    """Returns a value as text: a number or a boolean as JSON writes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    raise config.ConfigError(
        f"{location}: the field {name!r} is {type(value).__name__}: give text, a number or a "
        "boolean"
    )
