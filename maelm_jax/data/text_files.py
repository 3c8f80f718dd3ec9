"""Reads documents from .txt and .jsonl files, which can be packed with gzip, xz or zstd."""

import contextlib
import gzip
import io
import lzma
import typing
import zlib

from maelm_jax import json_files
from maelm_jax.config import ConfigError
from maelm_jax.data import file_access, table_files
from maelm_jax.data.documents import BadFile

PACKINGS = {".gz": "gzip", ".xz": "xz", ".zst": "zstd"}  # suffix -> name
READ_BYTES = 1 << 20  # bytes that are read or unpacked at a time


def without_packing(path: str) -> str:
    """Returns the path or name of a file without the suffix of its packing, if it has one."""
    return next((path.removesuffix(end) for end in PACKINGS if path.endswith(end)), path)


def lines(path: str) -> typing.Iterator[tuple[int, bytes]]:
    """Reads the lines of a text file.

    Yields:
        (byte offset in the unpacked text, line without its end)

    Raises:
        BadFile: The file is empty, corrupt or unreadable.
    """
    offset = 0
    packing = next((name for suffix, name in PACKINGS.items() if path.endswith(suffix)), None)
    try:
        with file_access.opened(path) as file, _unpacked(file, packing) as unpacked:
            for line in unpacked:
                yield offset, line.rstrip(b"\r\n")
                offset += len(line)
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise _corrupt(path, packing, offset, error) from error
    except OSError as error:
        is_passing = isinstance(error, file_access.PASSING)
        if error.errno is None and packing == "zstd" and not is_passing:  # damaged, says pyarrow
            raise _corrupt(path, packing, offset, error) from error
        raise file_access.unreadable(path, error) from error
    if offset == 0:
        raise BadFile(f"{path}: the file is empty; remove it, or give one with text")


def _unpacked(
    file: typing.BinaryIO, packing: str | None
) -> contextlib.AbstractContextManager[typing.Iterable[bytes]]:
    """Returns a context manager that gives the lines of a file's unpacked content."""
    if packing == "gzip":
        return gzip.open(file)
    if packing == "xz":
        return io.BufferedReader(_XzStreams(file), READ_BYTES)
    if packing == "zstd":
        pyarrow = table_files.import_pyarrow()
        stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
        return io.BufferedReader(stream, READ_BYTES)
    return contextlib.nullcontext(file)


class _XzStreams(io.RawIOBase):
    """Unpacks the .xz streams of a file one after the other.

    `lzma.open` ends without an error where a later stream is damaged or padding stands before it.
    """

    def __init__(self, file: typing.BinaryIO):
        super().__init__()
        self._file = file
        self._stream = lzma.LZMADecompressor()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        size = len(buffer)
        unpacked = b""
        while not unpacked:
            if self._stream.eof:
                packed = self._start_of_next_stream()
                if not packed:
                    return 0
                self._stream = lzma.LZMADecompressor()
            elif self._stream.needs_input:
                packed = self._file.read(READ_BYTES)
                if not packed:
                    raise EOFError("the file ends in the middle of a stream")
            else:
                packed = b""
            unpacked = self._stream.decompress(packed, size)
        buffer[: len(unpacked)] = unpacked
        return len(unpacked)

    def _start_of_next_stream(self) -> bytes:
        """Returns the first bytes after the padding, b"" at the end of the file."""
        packed = self._stream.unused_data.lstrip(b"\0")
        while not packed:
            read = self._file.read(READ_BYTES)
            if not read:
                return b""
            packed = read.lstrip(b"\0")
        return packed


def _corrupt(path: str, packing: str | None, offset: int, error: Exception) -> BadFile:
    return BadFile(
        f"{path}: corrupt {packing} data after {offset} bytes of text ({error}); "
        "fetch or pack the file again"
    )


def decode(line: bytes, path: str, offset: int) -> str:
    """Returns a line as text.

    Args:
        line: The line.
        path: The file, for the message.
        offset: Position of the line in the unpacked file.

    Raises:
        BadFile: The line is not UTF-8.
    """
    try:
        return line.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise BadFile(
            f"{path}: not UTF-8 at byte {offset + error.start} of the (unpacked) text; "
            "convert the file, e.g. with iconv -t UTF-8"
        ) from error


def paragraph_documents(path: str) -> typing.Iterator[str]:
    """Reads a .txt file: a paragraph on each line, a blank line between documents."""
    paragraphs: list[str] = []
    for offset, line in lines(path):
        text = decode(line, path, offset).strip()
        if text:
            paragraphs.append(text)
        elif paragraphs:
            yield "\n".join(paragraphs)
            paragraphs = []
    if paragraphs:
        yield "\n".join(paragraphs)


def json_documents(path: str, field: str) -> typing.Iterator[str]:
    """Reads a .jsonl file: a record on each line, with the document in the field `field`."""
    for number, (offset, line) in enumerate(lines(path), start=1):
        text = decode(line, path, offset)
        if not text.strip():
            continue
        try:
            record = json_files.parse(
                text, f"{path}:{number}", "a .jsonl file holds one record a line"
            )
        except ConfigError as error:
            raise BadFile(str(error)) from error
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            raise BadFile(
                f"{path}:{number}: no text field {field!r} in the record ({_fields_of(record)}); "
                "set Corpus.json_field"
            )
        # JSON can hold a lone surrogate, which is not valid text.
        yield record[field].encode("utf-8", "replace").decode("utf-8")


def _fields_of(record: typing.Any) -> str:
    """Returns the names of a record's fields in printable characters, or its type."""
    if not isinstance(record, dict):
        return type(record).__name__
    return "".join(
        character if character.isprintable() else repr(character)[1:-1]
        for character in ", ".join(record)
    )[:200]
