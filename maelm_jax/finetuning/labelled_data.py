"""Reads and writes tables (tab-separated, .csv, .jsonl, .parquet), and reads records of TFDS.

Each file that is read, except for .parquet, can be packed (data/readers.py).
"""

import collections.abc
import csv
import io
import itertools
import json
import os
import pathlib
import re
import types
import typing

from maelm_jax import config, storage
from maelm_jax.data import readers

JSON_LINES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
TABLES = (".csv", ".tsv", *JSON_LINES, PARQUET)  # endings of files that are written
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+(\.0*)?")  # pandas writes 1.0 in a column with a gap


class Row(typing.NamedTuple):
    """One row of a table."""

    location: str  # FILE:LINE of its last line, for messages; of .parquet the number of the row
    values: dict[str, typing.Any]  # by column: text, or a value of JSON

    def text(self, column: str) -> str:
        """Returns a cell as text. Numbers and booleans are written as in JSON.

        Raises:
            ConfigError: The cell is absent, null, NaN, a list or an object.
        """
        value = self.values.get(column)
        if isinstance(value, str):
            # JSON can hold a lone surrogate, which no tokenizer takes.
            return value.encode("utf-8", "replace").decode("utf-8").strip()
        if isinstance(value, (bool, int, float)):
            return json.dumps(value)
        kind = "null, NaN or absent" if value is None else f"a {type(value).__name__}"
        raise config.ConfigError(
            f"{self.location}: the field {column!r} is {kind}. Give text, a number or a boolean"
        )

    def names(self, column: str, separator: str | None) -> list[str]:
        """Returns the names of the labels in a cell. In .jsonl, it can hold a list of them.

        `separator` is None if the cell holds one name.
        """
        if separator is None:
            return [self.text(column)]
        value = self.values.get(column)
        if isinstance(value, list):
            return [Row(self.location, {column: item}).text(column) for item in value]
        return [name for part in self.text(column).split(separator) if (name := part.strip())]


def read(
    path: str | os.PathLike,
    needed: collections.abc.Sequence[str],
    headless: collections.abc.Sequence[str] = (),
    exact: bool = False,
    broken: list[str] | None = None,
) -> list[Row]:
    """Reads a table. The end of its name says what it is.

    - .csv: cells between commas, quotes as in RFC 4180. A cell can have several lines.
    - .jsonl and .ndjson: an object on each line, its fields are the columns.
    - .parquet: its columns of text, numbers, booleans and lists.
    - any other: cells between tabs. Quotes are taken literally.

    Args:
        path: The file.
        needed: The columns that every row must have.
        headless: The columns of a file without a header (`lacks_header`).
        exact: Whether a row must have as many cells as the header.
        broken: Gets the location of each row without all needed columns, which is left out. None:
            such a row is an error.

    Raises:
        ConfigError: The file is not of its kind or holds no row, or a needed column is missing. The
            message names file and line.
    """
    path = str(path)
    if ending_of(path) in JSON_LINES:
        return list(_read_json_lines(path))
    if ending_of(path) == PARQUET:
        rows = _read_parquet(path)
        _check_header(path, list(rows[0].values), needed)
        return rows
    lines = _cells(path)
    header, rows = _read_header(lines), []
    if lacks_header(header, headless):
        lines, header = _cells(path), list(headless)
    _check_header(path, header, needed)
    least = max(map(header.index, needed)) + 1
    for number, cells in lines:
        if cells == [""] and len(header) > 1:
            continue  # an empty line
        if len(cells) < least or (exact and len(cells) != len(header)):
            if broken is not None:
                broken.append(f"{path}:{number}")
                continue
            raise config.ConfigError(
                f"{path}:{number}: {len(cells)} columns, expected {len(header)} "
                f"({', '.join(header)[:200]}). Is a cell missing, or are cells in quotes? Only a "
                ".csv file may quote them"
            )
        rows.append(Row(f"{path}:{number}", dict(zip(header, cells, strict=False))))
    if not rows:
        raise config.ConfigError(f"{path}: holds no example. Give a file with examples")
    return rows


def lacks_header(
    first: collections.abc.Sequence[str], headless: collections.abc.Sequence[str]
) -> bool:
    """Whether a first line is a row of the columns `headless`, of which "label" is a number."""
    return len(first) == len(headless) > 0 and first[headless.index("label")].isdigit()


def sort_labels(names: collections.abc.Iterable[str]) -> tuple[str, ...]:
    """Returns the different labels in order: as numbers if all are whole numbers, else as text.

    So class i of a model is the label i, where the labels are 0, 1, 2, ...
    """
    different = sorted(set(names))
    if all(map(WHOLE_NUMBER.fullmatch, different)):
        different.sort(key=float)
    return tuple(different)


def columns_of(path: str | os.PathLike) -> list[str]:
    """Returns the columns of a table: its header, or the fields of its first object."""
    path = str(path)
    if ending_of(path) in JSON_LINES:
        return list(next(_read_json_lines(path)).values)
    if ending_of(path) == PARQUET:
        parquet, errors = _load_parquet()
        with storage.reading(path, errors=errors):
            return parquet.read_schema(path).names
    return _read_header(_cells(path))


def write(path: pathlib.Path, rows: list[dict[str, typing.Any]], source: str | None = None):
    """Writes rows {column: value} as a table. The end of its name says what it is, as in `read`.

    In a .jsonl or .parquet file, values are of any type. In other files, None and an absent value
    become an empty cell. Numbers, booleans and lists are written as in JSON, and dates as text.
    `source` is the file that the rows were read from: if both are .parquet, its columns keep their
    types.

    Raises:
        ConfigError: A cell of a tab-separated file would hold a tab or the end of a line.
    """
    ending = ending_of(str(path))
    if ending in JSON_LINES:
        lines = (json.dumps(row, ensure_ascii=False, default=str) for row in rows)
        storage.write(path, "".join(f"{line}\n" for line in lines))
        return
    columns = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
    if ending == PARQUET:
        parquet, errors = _load_parquet()
        pyarrow, kept = readers.load_module("pyarrow"), None
        if source is not None and ending_of(source) == PARQUET:
            kept = parquet.read_table(source, use_threads=False)
        added = {}
        for column in columns[0 if kept is None else kept.num_columns :]:
            try:
                added[column] = pyarrow.array([row.get(column) for row in rows])
            except errors as error:
                raise config.ConfigError(
                    f"{path}: the values of {column!r} have no type in common ({error}). Name a "
                    ".csv or .jsonl file"
                ) from error
        if kept is None:
            kept, added = pyarrow.table(added), {}
        for column, values in added.items():
            kept = kept.append_column(column, values)
        with storage.atomic_file(path) as file:
            parquet.write_table(kept, file)
        return
    cells = [columns, *([_as_cell(row.get(column)) for column in columns] for row in rows)]
    if ending == ".csv":
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(cells)
        storage.write(path, text.getvalue())
        return
    for row in cells:
        for cell in row:
            if any(mark in cell for mark in "\t\n\r"):
                raise config.ConfigError(
                    f"{path}: the cell {cell[:50]!r} holds a tab or the end of a line. Name a .csv "
                    "or .jsonl file"
                )
    storage.write(path, "".join("\t".join(row) + "\n" for row in cells))


def _as_cell(value: typing.Any) -> str:
    """Returns a value as text."""
    if value is None:
        return ""
    if isinstance(value, (bool, int, float, list, dict)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def ending_of(path: str) -> str:
    """Returns the ending of a file's name, without that of its packing."""
    return pathlib.Path(readers.without_packing(path)).suffix.lower()


def read_lines(path: str | os.PathLike) -> typing.Iterator[str]:
    """Yields the lines of a text file, unpacked, without their ends."""
    for offset, line in readers.lines(str(path)):
        yield readers.decode(line, str(path), offset)


def _read_header(lines: typing.Iterator[tuple[int, list[str]]]) -> list[str]:
    """Returns the cells of the first row."""
    _, cells = next(lines, (0, []))
    return [cell.strip() for cell in cells]


def _cells(path: str) -> typing.Iterator[tuple[int, list[str]]]:
    """Yields the line number and the cells of each row."""
    if ending_of(path) == ".json":
        raise config.ConfigError(
            f"{path}: a .json file is no table. Write one object on each line, and name it .jsonl"
        )
    return readers.table_cells(path)


def _read_json_lines(path: str) -> typing.Iterator[Row]:
    is_empty = True
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        location = f"{path}:{number}"
        with storage.reading(location, "each line holds one JSON object"):
            # pandas writes NaN for a missing value: it is as absent as null.
            content = json.loads(
                line, parse_constant=lambda _: None, object_pairs_hook=_without_repetitions
            )
            row = Row(location, dict(content))
        is_empty = False
        yield row
    if is_empty:
        raise config.ConfigError(f"{path}: holds no example. Give a file with examples")


def _without_repetitions(pairs: list[tuple[str, typing.Any]]) -> dict[str, typing.Any]:
    """Returns the object of JSON with these fields. Raises ValueError if one is there twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"two fields {next(name for name in names if names.count(name) > 1)!r}")
    return content


def _load_parquet() -> tuple[types.ModuleType, tuple[type[Exception], ...]]:
    """Returns pyarrow.parquet, and what it raises for a file or values that it cannot take."""
    error = readers.load_module("pyarrow").ArrowException
    return readers.load_module("pyarrow.parquet"), (error, ValueError, OverflowError)


def _read_parquet(path: str) -> list[Row]:
    parquet, errors = _load_parquet()
    with storage.reading(path, errors=errors):
        records = parquet.read_table(path, use_threads=False).to_pylist()
    if not records:
        raise config.ConfigError(f"{path}: holds no example. Give a file with examples")
    return [
        # pandas writes NaN for a missing value.
        Row(f"{path}:{number}", {key: None if x != x else x for key, x in record.items()})
        for number, record in enumerate(records, start=1)
    ]


def _check_header(path: str, header: list[str], needed: collections.abc.Sequence[str]):
    """Raises ConfigError if a needed column is missing, or there twice."""
    for name in needed:
        if header.count(name) > 1:
            raise config.ConfigError(
                f"{path}:1: {header.count(name)} columns have the name {name!r}. Rename all but "
                "the one to read"
            )
    absent = [name for name in needed if name not in header]
    if not absent:
        return
    hint = ""
    if len(header) == 1 and any(mark in header[0] for mark in "\t,;"):
        hint = ". Columns stand between commas in a .csv file, between tabs in any other"
    raise config.ConfigError(
        f"{path}:1: no column {', '.join(map(repr, absent))}; needed are {', '.join(needed)}, "
        f"the header has {', '.join(header)[:200]}{hint}"
    )


def find_file(data_dir: str, *names: str) -> pathlib.Path | None:
    """Finds the first of the files `names` in a folder, its glue/ or its squad/, packed or not.

    Returns:
        Its path; None when there is none.

    Raises:
        ConfigError: There is no folder `data_dir`.
    """
    root = pathlib.Path(data_dir).expanduser()
    if not root.is_dir():
        raise config.ConfigError(
            f"DATA_DIR: no folder {data_dir}; give the folder that holds GLUE's folders "
            "or SQuAD's files, or None for TFDS"
        )
    candidates = [
        root / folder / (name + packing)
        for name in names
        for folder in ("", "glue", "squad")
        for packing in ("", *readers.PACKINGS)
    ]
    return next((path for path in candidates if path.is_file()), None)


def existing_file(setting: str, path: str) -> pathlib.Path:
    """Returns the path of a file that a setting names. Raises ConfigError if there is none."""
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
        raise config.ConfigError(f"{setting}: no file {path}")
    return file


def tfds_records(name: str, split: str) -> list[dict] | None:
    """Reads all records of a split of a TFDS dataset (as glue/rte), with text for byte strings.

    Returns:
        The records; None when the dataset has no such split.

    Raises:
        ConfigError: The dataset is not available.
    """
    from maelm_jax.data import seqio_tasks

    records = seqio_tasks.records(f"tfds:{name}", split)
    return None if records is None else [_decode(record) for record in records]


def _decode(value):
    """Returns part of a record with text for byte strings and lists for arrays."""
    if isinstance(value, dict):
        return {name: _decode(item) for name, item in value.items()}
    if isinstance(value, bytes):
        return value.decode("utf-8")
    return [_decode(item) for item in value.tolist()] if getattr(value, "ndim", 0) else value
