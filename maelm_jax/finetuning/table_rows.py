"""Reads the rows of labelled tables: tab-separated, .csv and .jsonl, also packed."""

import collections.abc
import csv
import json
import pathlib
import types
import typing

from maelm_jax import config, json_files
from maelm_jax.data import readers

LONGEST_CELL = 2**31 - 1  # characters


class Row(typing.NamedTuple):
    """One row of a table, as the text of its cells."""

    number: int  # of its (last) line in the file, from 1
    cells: list[str]


def separator(path: str | pathlib.Path) -> str:
    """Returns what stands between two cells of a file, in words."""
    return {"csv": "commas", "jsonl": "fields", "ndjson": "fields"}.get(_ending(path), "tabs")


def rows(
    path: str | pathlib.Path,
    needed: collections.abc.Container[str] = (),
    joined: collections.abc.Mapping[str, str] = types.MappingProxyType({}),
) -> typing.Iterator[Row]:
    """Yields the rows of a table. The first one has the names of the columns.

    The end of the name says what the file is:

    - .csv: cells between commas, quotes as in RFC 4180. A cell can have several lines.
    - .jsonl and .ndjson: an object on each line. The columns are the fields of the first one.
      Values are text, numbers or booleans.
    - any other: cells between tabs. Quotes are taken literally.

    Args:
        path: The file.
        needed: The columns that every object must have, as text, a number or a boolean. In other
            columns, what is absent or of another type is an empty cell.
        joined: {needed column: separator}. In an object, such a column can also hold a list of text
            and numbers. Its cell has the separator between the items.

    Raises:
        ConfigError: The file cannot be read, is empty, corrupt, not UTF-8, or not of its kind.
    """
    is_empty = True
    for row in _rows(str(path), needed, joined):
        is_empty = False
        yield row
    if is_empty:
        raise config.ConfigError(f"{path}: only empty lines. Give a file with examples")


def _rows(
    path: str,
    needed: collections.abc.Container[str],
    joined: collections.abc.Mapping[str, str],
) -> typing.Iterator[Row]:
    ending = _ending(path)
    if ending == "csv":
        return _comma_separated(path)
    if ending in ("jsonl", "ndjson"):
        return _json_lines(path, needed, joined)
    if ending == "json":
        raise config.ConfigError(
            f"{path}: a .json file cannot be read as a table. Write one JSON object on each line, "
            "and name the file .jsonl"
        )
    return _tab_separated(path)


def _ending(path: str | pathlib.Path) -> str:
    """Returns the ending of a file's name, without that of its packing."""
    name = readers.without_packing(str(path))
    return pathlib.Path(name).suffix.removeprefix(".").lower()


def _lines(path: str) -> typing.Iterator[str]:
    for offset, line in readers.lines(path):
        yield readers.decode(line, path, offset)


def _tab_separated(path: str) -> typing.Iterator[Row]:
    for number, line in enumerate(_lines(path), start=1):
        yield Row(number, line.split("\t"))


def _comma_separated(path: str) -> typing.Iterator[Row]:
    csv.field_size_limit(LONGEST_CELL)
    lines = (line + "\n" for line in _lines(path))
    reader = csv.reader(lines, strict=True, skipinitialspace=True)
    begins = 1  # line of the row that is read
    try:
        for cells in reader:
            if cells:  # an empty line is no row
                yield Row(reader.line_num, cells)
            begins = reader.line_num + 1
    except csv.Error as error:
        raise config.ConfigError(
            f"{path}:{begins}: not CSV from this line on ({error}). Quote a cell with commas or "
            'quotes as in "a ""word"", and more"'
        ) from error


def _json_lines(
    path: str,
    needed: collections.abc.Container[str],
    joined: collections.abc.Mapping[str, str],
) -> typing.Iterator[Row]:
    columns: list[str] = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        remedy = "each line holds one object"
        content = json_files.parse(line, f"{path}:{number}", remedy)
        if not isinstance(content, dict):
            kind = type(content).__name__
            raise config.ConfigError(f"{path}:{number}: the line holds a {kind}, not a JSON object")
        if not columns:
            columns = list(content)
            yield Row(number, columns)
        location = f"{path}:{number}"
        for name in joined.keys() & content.keys():
            content[name] = _joined(content[name], joined[name], location)
        yield Row(number, [_cell(content, name, location, name in needed) for name in columns])


def _joined(value: typing.Any, separator: str, location: str) -> typing.Any:
    """Returns the text or numbers of a list with a separator between them. Keeps other values."""
    if not isinstance(value, list) or not all(isinstance(item, str | int) for item in value):
        return value
    items = [item if isinstance(item, str) else json.dumps(item) for item in value]
    if unclear := [item for item in items if separator in item]:
        raise config.ConfigError(
            f"{location}: {unclear[0][:50]!r} contains {separator!r}, which separates labels. "
            "Set CustomTask.label_separator to text that no label has"
        )
    return separator.join(items)


def _cell(content: dict, name: str, location: str, needed: bool) -> str:
    """Returns a field as text: a number or a boolean as JSON writes it.

    One that is not `needed` is empty if it is absent or of another type.
    """
    value = content.get(name)
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if isinstance(value, str) and not _has_half_surrogate(value):
        return value
    if not needed:
        return ""
    if name not in content:
        raise config.ConfigError(f"{location}: no field {name!r}, which the first object has")
    if isinstance(value, str):
        raise config.ConfigError(
            f"{location}: the field {name!r} has half of a surrogate pair. Correct the file"
        )
    kind = "null" if value is None else f"a {type(value).__name__}"
    raise config.ConfigError(
        f"{location}: the field {name!r} is {kind}. Give text, a number or a boolean"
    )


def _has_half_surrogate(text: str) -> bool:
    """Returns whether JSON's escapes left a character that is no text, as of a cut emoji."""
    return any("\ud800" <= character <= "\udfff" for character in text)
