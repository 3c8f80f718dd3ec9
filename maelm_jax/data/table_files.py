"""Reads documents from tables: .parquet files, and .arrow files of Hugging Face `datasets`."""

import contextlib
import json
import os
import pathlib
import typing

from maelm_jax import config, json_files
from maelm_jax.data import file_access
from maelm_jax.data.documents import BadFile

BATCH_ROWS = 1024  # rows of a table in memory at a time
STATE_FILE = "state.json"  # in a folder that `Dataset.save_to_disk` wrote
MARKER = b"\xff" * 4  # before each message of an .arrow stream, and before the 0 at its end
SPLITS_FILE = "dataset_dict.json"  # in a folder that `DatasetDict.save_to_disk` wrote


def import_pyarrow():
    """Returns the pyarrow module. Raises ConfigError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise config.ConfigError(
            f".parquet, .arrow and .zst files need pyarrow ({error}); "
            "pip install 'maelm_jax[files]'"
        ) from error
    return pyarrow


def is_dataset(folder: str) -> bool:
    """Returns whether Hugging Face `datasets` wrote a folder."""
    return any((pathlib.Path(folder) / name).is_file() for name in (SPLITS_FILE, STATE_FILE))


def files_of_dataset(folder: str) -> list[str]:
    """Returns the .arrow files of a folder that Hugging Face `datasets` wrote, in their order.

    Raises:
        ConfigError: The folder is no such folder, has several splits, or is damaged.
    """
    path = pathlib.Path(folder)
    if (path / SPLITS_FILE).is_file():
        splits = ", ".join(sorted(item.name for item in path.iterdir() if item.is_dir()))
        raise config.ConfigError(
            f"{folder}: a dataset with several splits; name the folder of one ({splits})"
        )
    if not (path / STATE_FILE).is_file():
        raise config.ConfigError(
            f"{folder}: a folder without {STATE_FILE}, so not one of Hugging Face datasets; "
            "give a glob of files"
        )
    remedy = "save the dataset again with save_to_disk"
    state = json_files.read(path / STATE_FILE, _is_state, remedy)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise config.ConfigError(
            f"{folder}: its rows are selected by an index; save dataset.flatten_indices() instead"
        )
    return [str(path / entry["filename"]) for entry in state["_data_files"]]


def _is_state(value: typing.Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("_data_files"), list):
        return False
    return all(
        json_files.is_text_map(entry) and os.path.basename(entry.get("filename", "/")) != ""
        for entry in value["_data_files"]
    )


def parquet_documents(path: str, column: str) -> typing.Iterator[str]:
    """Reads the documents of a .parquet file from a column of text."""
    pyarrow = import_pyarrow()
    with _reading(path, ".parquet"), file_access.opened(path) as file:
        table = pyarrow.parquet.ParquetFile(file)
        _check_column(path, table.schema_arrow, column)
        for batch in table.iter_batches(BATCH_ROWS, columns=[column], use_threads=False):
            yield from _texts(batch.column(0))


def arrow_documents(path: str, column: str) -> typing.Iterator[str]:
    """Reads the documents of an .arrow file (a stream or a file of Arrow's IPC format)."""
    pyarrow = import_pyarrow()
    with _reading(path, ".arrow"), file_access.opened(path) as file:
        is_stream = file.read(6) != b"ARROW1"
        file.seek(0)
        if is_stream:
            _check_end(path, file)
            stream = pyarrow.ipc.open_stream(file)
            batches = iter(stream)
        else:
            stream = pyarrow.ipc.open_file(file)
            batches = map(stream.get_batch, range(stream.num_record_batches))
        _check_column(path, stream.schema, column)
        for batch in batches:
            yield from _texts(batch.column(column))


def _check_end(path: str, file: typing.BinaryIO):
    """Raises BadFile if a stream of Arrow's IPC format has no end.

    pyarrow takes a stream that is cut off between two batches for a whole one. Streams of before
    Arrow 0.15 begin and end without the marker, and are not checked.
    """
    marker = file.read(4)
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 8))
    if marker == MARKER and file.read() != MARKER + bytes(4):
        raise BadFile(f"{path}: damaged .arrow data (it has no end); fetch the file again")
    file.seek(0)


@contextlib.contextmanager
def _reading(path: str, format: str) -> typing.Iterator[None]:
    """Context manager that turns errors of the data into BadFile."""
    pyarrow = import_pyarrow()
    try:
        yield
    except UnicodeDecodeError as error:  # pyarrow does not check the bytes of its texts
        reason = f"byte {error.object[error.start]:#x} at {error.start}"
        raise BadFile(
            f"{path}: a text that is not UTF-8 ({reason}); write the file again from UTF-8"
        ) from error
    except pyarrow.ArrowException as error:
        raise _damaged(path, format, error) from error
    except OSError as error:  # also pyarrow's error for damaged data, without a number
        if error.errno is not None or isinstance(error, file_access.PASSING):
            raise file_access.unreadable(path, error) from error
        raise _damaged(path, format, error) from error


def _damaged(path: str, format: str, error: Exception) -> BadFile:
    reason = " ".join(str(error).split())[:200]
    return BadFile(f"{path}: damaged {format} data ({reason}); fetch the file again")


def _check_column(path: str, schema, column: str):
    """Raises BadFile unless the table has the column and the column is of text."""
    types = import_pyarrow().types
    if column not in schema.names:
        known = json.dumps(schema.names)[1:-1][:200]
        raise BadFile(f"{path}: no column {column!r} (it has {known}); set Corpus.text_column")
    if schema.names.count(column) > 1:
        raise BadFile(f"{path}: several columns {column!r}; write the file with one of them")
    kind = schema.field(column).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise BadFile(f"{path}: column {column!r} holds {kind}, not text; set Corpus.text_column")


def _texts(column) -> typing.Iterator[str]:
    """Yields the texts of a part of a column. A missing text is an empty document."""
    return (text or "" for text in column.to_pylist())
