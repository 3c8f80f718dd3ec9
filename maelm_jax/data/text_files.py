"""Reads documents from .txt and .jsonl files, which can be packed with gzip or xz."""

import gzip
import lzma
import typing
import zlib

from maelm_jax import config, json_files


def lines(path: str) -> typing.Iterator[tuple[int, bytes]]:
    """Reads the lines of a text file.

    Yields:
        (byte offset in the unpacked text, line without its end)

    Raises:
        ConfigError: The file is empty, corrupt or unreadable.
    """
    opener = gzip.open if path.endswith(".gz") else lzma.open if path.endswith(".xz") else open
    offset = 0
    try:
        with opener(path, "rb") as file:
            for line in file:
                yield offset, line.rstrip(b"\r\n")
                offset += len(line)
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        packing = "gzip" if path.endswith(".gz") else "xz"
        raise config.ConfigError(
            f"{path}: corrupt {packing} data after {offset} bytes of text ({error}); "
            "fetch or pack the file again") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if offset == 0:
        raise config.ConfigError(
            f"{path}: the file is empty; remove it or leave it out of the glob")


def unreadable(path: str, error: OSError) -> config.ConfigError:
    """Returns the error for a file that cannot be opened or read."""
    return config.ConfigError(
        f"{path}: cannot be read ({error.strerror or error}); check its permissions or leave it out"
    )


def decode(line: bytes, path: str, offset: int) -> str:
    """Returns a line as text.

    Args:
        line: The line.
        path: The file, for the message.
        offset: Position of the line in the unpacked file.

    Raises:
        ConfigError: The line is not UTF-8.
    """
    try:
        return line.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise config.ConfigError(
            f"{path}: not UTF-8 at byte {offset + error.start} of the (unpacked) text; "
            "convert the file, e.g. with iconv -t UTF-8") from error


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
        record = json_files.parse(text, f"{path}:{number}", "a .jsonl file holds one record a line")
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            raise config.ConfigError(
                f"{path}:{number}: no text field {field!r} in the record ({_fields_of(record)}); "
                "set Corpus.json_field")
        # JSON can hold a lone surrogate, which is not valid text.
        yield record[field].encode("utf-8", "replace").decode("utf-8")


def _fields_of(record: typing.Any) -> str:
    """Returns the names of a record's fields in printable characters, or its type."""
    if not isinstance(record, dict):
        return type(record).__name__
    return "".join(
        character if character.isprintable() else repr(character)[1:-1]
        for character in ", ".join(record))[:200]
