"""Reads the documents of text files, on this machine and in buckets (gs://, s3://).

A document is text whose lines are its paragraphs. The name of a file tells its format: .jsonl,
.csv and .tsv, also packed with gzip, xz or zstd, .parquet, .arrow, TFRecord and ArrayRecord. A file
of any other name is text, if it looks so.
"""

import codecs
import contextlib
import csv
import functools
import glob
import gzip
import importlib
import io
import json
import lzma
import os
import pathlib
import re
import shutil
import stat
import tempfile
import typing
import zlib

from maelm_jax import storage
from maelm_jax.config import ConfigError, RunError

PACKINGS = (".gz", ".xz", ".zst")
JSON_LINES = (".jsonl", ".json", ".ndjson")
# A reader checks what a file holds. So these are errors of the program, and no file is left out.
DEFECTS = (TypeError, AttributeError, NameError, AssertionError)
LONGEST_CELL = 2**31 - 1  # characters
LOOKED_AT_BYTES = 1 << 16  # of a file whose name does not tell its format
# TFDS names its files `name.tfrecord-00000-of-00008`.
SHARD_NUMBER = re.compile(r"-\d+-of-\d+$")
STATE_FILE = "state.json"  # in a folder that `Dataset.save_to_disk` wrote
SPLITS_FILE = "dataset_dict.json"  # in a folder that `DatasetDict.save_to_disk` wrote
ARROW_MARKER = b"\xff" * 4  # begins each message of an .arrow stream; the last one is empty
READ_BYTES = 1 << 20  # of a .zst file that are unpacked at a time
TABLE_ROWS = 1024  # rows of a table, or records, in memory at a time
# Entries of fsspec's `info` that change with the content of an object in a bucket.
VERSIONS = ("md5Hash", "crc32c", "ETag", "etag")


class Unavailable(ConfigError):
    """The text cannot be read on this machine. Rows prepared elsewhere can still be used."""


class BadFile(ConfigError):
    """A file is damaged, unreadable or of another form. `Corpus.skip_bad_files` leaves it out."""

    def __init__(self, path: str, problem: str):
        super().__init__(f"{path}{problem}")
        self.path = path

    def __reduce__(self):  # a worker process raises it
        return type(self), (self.path, str(self).removeprefix(self.path))


class TextRow(typing.NamedTuple):
    """A row of a table, a record, or a document of a text file."""

    text: str
    value: typing.Any  # of the column that tells documents apart, if one was named


class File(typing.NamedTuple):
    """A file, with the size and version of its content, which are known without reading it."""

    path: str
    size: int  # bytes
    version: str  # time of the last change, or the bucket's checksum


def list_files(pattern: str) -> list[File]:
    """Returns the files of text that a glob matches, sorted by path.

    `**` matches any number of folders. A folder that Hugging Face `datasets` wrote stands for its
    .arrow files.

    Raises:
        Unavailable: Nothing matches.
        ConfigError: A match has an unknown format.
        OSError: A folder on the way cannot be listed.
    """
    files = _list_bucket(pattern) if storage.in_bucket(pattern) else _list_local(pattern)
    if not files:
        hint = "give a glob of .txt, .jsonl or .parquet files"
        literal = pattern.replace("[", "[[]")
        if literal != pattern and glob.glob(os.path.expanduser(literal)):
            hint = f"[ab] stands for a or b. To name a bracket itself, write {literal!r}"
        raise Unavailable(f"no text file matches {pattern!r} (in {os.getcwd()}); {hint}")
    for file in files:
        if _suffix(file.path) not in READERS | {".txt": None} and not _may_be_text(file):
            raise ConfigError(
                f"{file.path}: not a text file (UTF-8), and not a .jsonl, .csv, .tsv, .parquet, "
                f".arrow, .tfrecord or .array_record file; narrow the glob {pattern!r}"
            )
    return files


@functools.lru_cache(100_000)
def _may_be_text(file: File) -> bool:
    """Returns whether a file begins with text in UTF-8, and not with an object of JSON.

    Also True if it cannot be read, so that the one who reads it meets the fault.
    """
    path = file.path
    try:
        with _naming(path), _open(path) as opened, _unpacked(path, opened) as unpacked:
            beginning = unpacked.read(LOOKED_AT_BYTES)
    except BadFile:
        return True
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(beginning)
    except UnicodeDecodeError:
        return False
    return "\0" not in text and not re.match(r'\s*(\[\s*)?\{\s*"', text)


def _list_bucket(pattern: str) -> list[File]:
    files, root = storage.file_system(pattern)
    found = []
    for name, entry in sorted(files.glob(root, detail=True).items()):
        if entry["type"] == "file":
            versions = [str(entry[key]) for key in VERSIONS if entry.get(key)]
            version = versions[0] if versions else files.ukey(name)
            found.append(File(str(files.unstrip_protocol(name)), entry["size"], version))
    return found


def _list_local(pattern: str) -> list[File]:
    pattern = os.path.expanduser(pattern)
    _check_folders(pattern)
    paths = _glob(pattern)
    files = _without_repeats([path for path in paths if not os.path.isdir(path)])
    folders = [path for path in paths if os.path.isdir(path) and _is_dataset(path)]
    if files and folders:
        raise ConfigError(
            f"{folders[0]}: a folder of Hugging Face datasets beside files; narrow the glob "
            f"{pattern!r} to the one or the other, or to the .arrow files of the folder"
        )
    for folder in folders:
        files += _files_of_dataset(folder)
    states = [(path, os.stat(path)) for path in files]
    for path, state in states:
        if not stat.S_ISREG(state.st_mode):
            raise ConfigError(
                f"{path}: a pipe, socket or device, which is no file of text; remove it, or narrow "
                f"the glob {pattern!r}"
            )
    return [File(path, state.st_size, str(state.st_mtime_ns)) for path, state in states]


def _without_repeats(paths: list[str]) -> list[str]:
    """Returns each file once, by its shortest path, where links lead to it on several ways."""
    shortest = {
        os.path.realpath(path): path
        for path in sorted(paths, key=lambda path: (len(path), path), reverse=True)
    }
    return sorted(shortest.values())


def _check_folders(pattern: str):
    """Raises the error of a folder that the glob must list and cannot; `glob` says nothing."""
    parts = pathlib.PurePath(pattern).parts
    for end in range(1, len(parts)):
        if glob.has_magic(parts[end]):
            for folder in filter(os.path.isdir, _glob(os.path.join(*parts[:end]))):
                os.scandir(folder).close()


def _glob(pattern: str) -> list[str]:
    """Returns the paths that a glob matches. `**` enters each folder once, although links loop."""
    parts = pathlib.PurePath(pattern).parts
    if "**" not in parts:
        return glob.glob(pattern)
    at = parts.index("**")
    rest = parts[at + 1 :] or ("*",)
    return [
        path
        for base in (_glob(os.path.join(*parts[:at])) if at else [""])
        for folder in _folders_below(base)
        for path in _glob(os.path.join(glob.escape(folder), *rest))
    ]


def _folders_below(base: str) -> list[str]:
    """Returns a folder and all in it that are not hidden, each once, by its shortest path."""
    folders, known = [base] if os.path.isdir(base or ".") else [], {os.path.realpath(base)}
    for folder in folders:  # the list grows
        with os.scandir(folder or ".") as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
        for name in names:
            path = os.path.join(folder, name)
            if not name.startswith(".") and (real := os.path.realpath(path)) not in known:
                known.add(real)
                folders.append(path)
    return folders


def _is_dataset(folder: str) -> bool:
    return any(os.path.isfile(os.path.join(folder, name)) for name in (SPLITS_FILE, STATE_FILE))


def _files_of_dataset(folder: str) -> list[str]:
    """Returns the .arrow files of a folder that Hugging Face `datasets` wrote, in their order."""
    path = pathlib.Path(folder)
    if (path / SPLITS_FILE).is_file():
        splits = ", ".join(sorted(item.name for item in path.iterdir() if item.is_dir()))
        raise ConfigError(
            f"{folder}: a dataset with several splits; name the folder of one ({splits})"
        )
    with storage.reading(path / STATE_FILE, "save the dataset again with save_to_disk"):
        state = json.loads((path / STATE_FILE).read_bytes())
        if state.get("_indices_data_files") or state.get("_indices_files"):
            raise ConfigError(
                f"{folder}: its rows are selected by an index; save dataset.flatten_indices()"
            )
        return [str(path / entry["filename"]) for entry in state["_data_files"]]


def _open(path: str) -> typing.BinaryIO:
    """Opens a file for bytes, on this machine or in a bucket."""
    if storage.in_bucket(path):
        files, name = storage.file_system(path)
        return files.open(name, "rb")
    return open(path, "rb")


@contextlib.contextmanager
def _naming(path: str, opened: str | None = None) -> typing.Iterator[None]:
    """Context manager that turns an error in a file into one that names the file.

    `opened` is the local copy of a file of a bucket, if that is read.

    Raises:
        BadFile: The file is missing, forbidden or damaged.
        RunError: The network or the machine fails. Such a file is never left out.
    """
    try:
        yield
    except (ConfigError, RunError, ImportError, *DEFECTS):
        raise
    except Exception as error:  # the libraries of formats and of buckets have no class in common
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if _is_of_file(opened or path, error):
            raise BadFile(
                path, f": cannot be read ({reason}); fetch the file again, or leave it out"
            ) from error
        raise RunError(
            f"{path}: could not be read now ({reason}); give the same command again: it goes on "
            "where it stopped"
        ) from error


def _is_of_file(path: str, error: Exception) -> bool:
    """Returns whether a file itself is the cause of an error, not the network or the machine.

    The libraries of buckets raise the same error for an expired token and for a forbidden file. So
    of a bucket, a file that is missing or whose content is wrong counts alone.
    """
    in_bucket = storage.in_bucket(path)
    if isinstance(error, gzip.BadGzipFile | FileNotFoundError):
        return True
    if isinstance(error, TimeoutError | ConnectionError | MemoryError):
        return False
    if isinstance(error, OSError):
        if error.errno is None:  # of pyarrow: damaged data
            return not in_bucket or path.lower().endswith((".zst", ".parquet", ".arrow"))
        return not in_bucket and isinstance(error, PermissionError | IsADirectoryError)
    return not in_bucket or isinstance(error, ValueError | EOFError | zlib.error | lzma.LZMAError)


def without_packing(path: str) -> str:
    """Returns the path or name of a file without the suffix of its packing, if it has one."""
    return path[: -len(_packing(path))] if _packing(path) else path


def _packing(path: str) -> str:
    return next((packing for packing in PACKINGS if path.lower().endswith(packing)), "")


def _suffix(path: str) -> str:
    """Returns what tells the format of a file: `.txt` of books.TXT.gz.

    A packed table or file of records has all suffixes, `.parquet.gz`, which no reader knows.
    """
    suffix = pathlib.PurePath(without_packing(SHARD_NUMBER.sub("", path))).suffix.lower()
    if _packing(path) and suffix in READERS and READERS[suffix] not in LINE_READERS:
        return suffix + _packing(path)
    return suffix


def can_be_cut(path: str) -> bool:
    """Returns whether a range of a file's bytes can be read alone."""
    reader = READERS.get(_suffix(path), _paragraph_documents)
    return not _packing(path) and reader in (_paragraph_documents, _json_documents)


def documents(
    path: str, fields: str | typing.Sequence[str], start: int = 0, end: int | None = None
) -> typing.Iterator[str]:
    """Reads the documents of one file, in order.

    Args:
        path: The file.
        fields: The field, column or feature that holds a document, or names for it, of which the
            first that a file or record has is read. A text file has none.
        start: First byte of a range, of a file that can be cut.
        end: End of the range. Ranges that follow one another give each document once.

    Yields:
        The text of each document. It is empty where a record has no text.

    Raises:
        BadFile: The file cannot be read. The message names the file and the position.
        RunError: The file cannot be read at the moment.
    """
    fields = (fields,) if isinstance(fields, str) else fields
    return (row.text for row in rows(path, fields, None, start, end))


def rows(
    path: str,
    fields: typing.Sequence[str],
    column: str | None = None,
    start: int = 0,
    end: int | None = None,
) -> typing.Iterator[TextRow]:
    """Reads the rows of one file, as `documents` does, with the values of a column."""
    reader, bounds = READERS.get(_suffix(path), _paragraph_documents), (start, end) if end else ()
    with _naming(path):
        yield from reader(path, fields, column, *bounds)


def _first_of(fields: typing.Sequence[str], known: typing.Container[str]) -> str | None:
    return next((field for field in fields if field in known), None)


def _listed(fields: typing.Sequence[str]) -> str:
    return " or ".join(map(repr, fields))


def lines(path: str, start: int = 0) -> typing.Iterator[tuple[int, bytes]]:
    """Reads the lines of a text file.

    Args:
        path: The file, which may be packed.
        start: The first line begins at this byte or after it.

    Yields:
        (byte offset in the unpacked text, line without its end)

    Raises:
        BadFile: The file is empty, damaged or unreadable.
    """
    offset = start
    with _naming(path), _open(path) as file, _unpacked(path, file) as unpacked:
        if start:
            unpacked.seek(start - 1)
            offset = start - 1 + len(unpacked.readline())
        for line in unpacked:
            yield offset, line.rstrip(b"\r\n")
            offset += len(line)
    if offset == 0:
        raise BadFile(path, ": the file is empty; remove it, or give one with text")


def _unpacked(path: str, file: typing.BinaryIO) -> typing.BinaryIO:
    """Returns the unpacked content of a file."""
    packing = _packing(path)
    if packing == ".gz":
        return gzip.open(file)
    if packing == ".xz":
        return io.BufferedReader(_XzFile(file), READ_BYTES)
    if packing == ".zst":
        pyarrow = load_module("pyarrow")
        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
        return io.BufferedReader(stream, READ_BYTES)
    return file


class _XzFile(io.RawIOBase):
    """The unpacked content of the streams of an .xz file.

    `lzma.open` ends at the first bytes that begin no stream, without an error (cpython#88300). Here
    a stream is followed by padding (zero bytes, a multiple of four), by another stream, or by the
    end of the file. Anything else is an error.
    """

    def __init__(self, file: typing.BinaryIO):
        self._blocks = _xz_blocks(file)
        self._block = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._block:
            self._block = memoryview(next(self._blocks, b""))
            if not self._block:
                return 0
        size = min(len(buffer), len(self._block))
        buffer[:size], self._block = self._block[:size], self._block[size:]
        return size


def _xz_blocks(file: typing.BinaryIO) -> typing.Iterator[bytes]:
    """Yields the unpacked content of an .xz file in blocks. None of them is empty."""
    packed = b""
    while True:
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        while not stream.eof:
            if stream.needs_input:
                packed = packed or file.read(READ_BYTES)
                if not packed:
                    raise EOFError("the last stream has no end")
            block = stream.decompress(packed, READ_BYTES)
            packed = b""
            if block:
                yield block
        packed, padding = stream.unused_data, 0
        while packed := packed or file.read(READ_BYTES):
            rest = packed.lstrip(b"\0")
            padding += len(packed) - len(rest)
            packed = rest
            if rest:
                break
        if padding % 4:
            raise lzma.LZMAError(f"{padding} bytes of padding after a stream, no multiple of four")
        if not packed:
            return


def decode(line: bytes, path: str, offset: int) -> str:
    """Returns a line of a file as text. `offset` is its position in the unpacked file.

    Raises BadFile if the line is not UTF-8.
    """
    try:
        return line.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise BadFile(
            path,
            f": not UTF-8 at byte {offset + error.start} of the (unpacked) text; "
            "convert the file, e.g. with iconv -t UTF-8",
        ) from error


def _paragraph_documents(
    path: str,
    fields: typing.Sequence[str],
    column: str | None,
    start: int = 0,
    end: int | None = None,
):
    """Reads a text file: a paragraph on each line, a blank line between documents.

    A range begins after the first blank line at `start` or after it, and ends at the first blank
    line at `end` or after it.
    """
    del fields
    if column is not None:
        raise BadFile(path, f": a text file has no column {column!r}; correct Corpus.documents")
    paragraphs: list[str] = []
    is_inside = start == 0
    for offset, line in lines(path, start):
        if end is not None and offset >= end and not is_inside:
            return  # the whole range belongs to a document that begins before it
        text = decode(line, path, offset).strip()
        if text:
            if is_inside:
                paragraphs.append(text)
            continue
        if paragraphs:
            yield TextRow("\n".join(paragraphs), None)
            paragraphs = []
        if end is not None and offset >= end:
            return
        is_inside = True
    if paragraphs:
        yield TextRow("\n".join(paragraphs), None)


def _json_documents(
    path: str,
    fields: typing.Sequence[str],
    column: str | None,
    start: int = 0,
    end: int | None = None,
):
    """Reads a .jsonl file: a record on each line."""
    for offset, line in lines(path, start):
        if end is not None and offset >= end:
            return
        text = decode(line, path, offset)
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except ValueError as error:
            number = _line_number(path, offset)
            raise BadFile(
                path, f":{number}: not JSON ({error}); a .jsonl file holds one record a line"
            ) from error
        field = _first_of(fields, record) if isinstance(record, dict) else None
        if field is None or not isinstance(record[field], str | None):
            kind = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise BadFile(
                path,
                f":{_line_number(path, offset)}: no text field {_listed(fields)} in the record "
                f"({kind[:200]}); set Corpus.text_field, to several names if files differ",
            )
        if column is not None:
            _check_boundary(path, list(record), column)
        # JSON can hold a lone surrogate, which is not valid text.
        cleaned = (record[field] or "").encode("utf-8", "replace").decode("utf-8")
        yield TextRow(cleaned, record.get(column))


def table_cells(path: str) -> typing.Iterator[tuple[int, list[str]]]:
    """Reads the cells of each row of a table, its header included.

    A .csv file has cells between commas, with quotes as in RFC 4180, and a cell can have several
    lines. Any other file has cells between tabs, and quotes are taken literally.

    Yields:
        (number of the row's last line, its cells)

    Raises:
        BadFile: The file is not of its kind.
    """
    texts = (decode(line, path, offset) for offset, line in lines(path))
    if pathlib.PurePath(without_packing(path)).suffix.lower() != ".csv":
        yield from ((number, line.split("\t")) for number, line in enumerate(texts, start=1))
        return
    csv.field_size_limit(LONGEST_CELL)
    reader = csv.reader((f"{line}\n" for line in texts), strict=True, skipinitialspace=True)
    begins = 1  # line of the row that is read
    try:
        for cells in reader:
            if cells:  # an empty line is no row
                yield reader.line_num, cells
            begins = reader.line_num + 1
    except csv.Error as error:
        raise BadFile(
            path,
            f":{begins}: not CSV from this line on ({error}). Quote a cell with commas or "
            'quotes as in "a ""word"", and more"',
        ) from error


def _cell_documents(path: str, columns: typing.Sequence[str], column: str | None):
    """Reads a .csv or .tsv file: a document in each row, below a header."""
    rows = table_cells(path)
    _, header = next(rows, (0, []))
    header = [name.strip() for name in header]
    index = header.index(_column(path, header, columns))
    if column is not None:
        _check_boundary(path, header, column)
    for number, cells in rows:
        if cells == [""] and len(header) > 1:
            continue  # an empty line
        if len(cells) != len(header):
            raise BadFile(
                path,
                f":{number}: {len(cells)} columns, the header has {len(header)}. Is a cell "
                "missing, or are cells in quotes? Only a .csv file may quote them",
            )
        yield TextRow(cells[index], column and cells[header.index(column)])


def _check_boundary(path: str, names: typing.Sequence[str], column: str):
    """Raises BadFile if a table lacks the column that tells its documents apart."""
    if column not in names:
        raise BadFile(
            path,
            f": no column {column!r} (it has {', '.join(names)[:200]}); correct Corpus.documents",
        )


def _column(path: str, names: typing.Sequence[str], columns: typing.Sequence[str]) -> str:
    """Returns the first of `columns` that a table has. Raises BadFile if it has none."""
    column = _first_of(columns, names)
    if column is None:
        raise BadFile(
            path,
            f": no column {_listed(columns)} (it has {', '.join(names)[:200]}); "
            "set Corpus.text_field, to several names if files differ",
        )
    return column


def _line_number(path: str, offset: int) -> int:
    return sum(1 for position, _ in lines(path) if position <= offset)


def load_module(name: str):
    """Imports a module of an optional package.

    Raises Unavailable if the libraries of datasets are not installed, ConfigError without pyarrow:
    rows that were made before must not stand in for files that are here.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow logs errors only
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if name.startswith("pyarrow"):
            raise ConfigError(
                f".parquet, .arrow and .zst files need {name} ({error}); "
                "pip install 'maelm_jax[files]'"
            ) from error
        raise Unavailable(f"{name} is missing ({error}); pip install 'maelm_jax[data]'") from error


def _parquet_documents(path: str, columns: typing.Sequence[str], boundary: str | None):
    parquet = load_module("pyarrow.parquet")
    with _open(path) as file:
        table = parquet.ParquetFile(file)
        column = _text_column(path, table.schema_arrow, columns, boundary)
        chosen = list(filter(None, {column, boundary}))
        for batch in table.iter_batches(TABLE_ROWS, columns=chosen, use_threads=False):
            yield from _text_rows(batch, column, boundary)


def _arrow_documents(path: str, columns: typing.Sequence[str], boundary: str | None):
    """Reads an .arrow file: a stream or a file of Arrow's IPC format."""
    ipc = load_module("pyarrow.ipc")
    with _open(path) as file:
        begin = file.read(6)
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 8, 0))
        # pyarrow takes a stream that is cut off between two messages for a whole one.
        if begin.startswith(ARROW_MARKER) and file.read() != ARROW_MARKER + bytes(4):
            raise EOFError("the stream has no end")
        file.seek(0)
        if begin == b"ARROW1":
            reader = ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            reader = batches = ipc.open_stream(file)
        column = _text_column(path, reader.schema, columns, boundary)
        for batch in batches:
            yield from _text_rows(batch, column, boundary)


def _text_column(path: str, schema, columns: typing.Sequence[str], boundary: str | None) -> str:
    """Returns the column of text of a table. Raises BadFile unless it is there and of text."""
    column = _column(path, schema.names, columns)
    if boundary is not None:
        _check_boundary(path, schema.names, boundary)
    kind = schema.field(column).type
    if load_module("pyarrow.types").is_dictionary(kind):
        kind = kind.value_type
    if str(kind) not in ("string", "large_string", "string_view"):
        raise BadFile(path, f": column {column!r} holds {kind}, not text; set Corpus.text_field")
    return column


def _text_rows(batch, column: str, boundary: str | None) -> typing.Iterator[TextRow]:
    """Yields the rows of a part of a table. A missing text is empty."""
    texts = batch.column(column).to_pylist()
    values = batch.column(boundary).to_pylist() if boundary else [None] * len(texts)
    for text, value in zip(texts, values, strict=True):
        yield TextRow(text or "", value)


@contextlib.contextmanager
def _local_copy(path: str) -> typing.Iterator[str]:
    """Gives a path on this machine, for libraries that open files themselves.

    A file in a bucket is copied to a temporary file.
    """
    if not storage.in_bucket(path):
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=pathlib.PurePath(path).suffix) as copy:
        with _open(path) as file:
            shutil.copyfileobj(file, copy)
        copy.flush()
        yield copy.name


def _example_documents(path: str, fields: typing.Sequence[str], column: str | None):
    """Reads a TFRecord or ArrayRecord file, whose records are tf.train.Examples."""
    parse = load_module("tensorflow").train.Example.FromString
    is_empty = True
    with _local_copy(path) as local, _naming(path, local):
        for record in _records(local):
            is_empty = False
            features = parse(record).features.feature
            feature = _column(path, sorted(features), fields)
            values = features[feature].bytes_list.value
            if len(values) != 1:
                raise BadFile(
                    path, f": feature {feature!r} does not hold one text; set Corpus.text_field"
                )
            if column is not None:
                _check_boundary(path, sorted(features), column)
            value = column and features[column].SerializeToString()
            yield TextRow(values[0].decode("utf-8"), value)
    if is_empty:
        raise BadFile(path, ": holds no record; remove it, or fetch it again")


def _records(path: str) -> typing.Iterator[bytes]:
    if _suffix(path) == ".tfrecord":
        tensorflow = load_module("tensorflow")
        yield from tensorflow.data.TFRecordDataset(path).as_numpy_iterator()
        return
    reader = load_module("array_record.python.array_record_module").ArrayRecordReader(path)
    count = reader.num_records()
    for start in range(0, count, TABLE_ROWS):
        yield from reader.read(start, min(start + TABLE_ROWS, count))


LINE_READERS = (_json_documents, _cell_documents)  # of files that can be packed
READERS = {
    **dict.fromkeys(JSON_LINES, _json_documents),
    **dict.fromkeys((".csv", ".tsv"), _cell_documents),
    ".parquet": _parquet_documents,
    ".arrow": _arrow_documents,
    **dict.fromkeys((".tfrecord", ".array_record", ".arrayrecord"), _example_documents),
}
