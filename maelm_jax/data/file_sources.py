"""The files of a `files:GLOB` source: which they are, their documents, their hashes."""

import glob
import hashlib
import os
import pathlib
import re
import typing

from maelm_jax import config, json_files
from maelm_jax.data import documents, rows_dir, text_files

FORMATS = (".txt", ".jsonl")
PACKINGS = ("", ".gz", ".xz")
SUFFIXES = tuple(format + packing for format in FORMATS for packing in PACKINGS)
HASH = re.compile("[0-9a-f]{64}")
HASHES_FILE = "file_hashes.json"


def matching(source: str) -> list[str]:
    """Returns the files of a `files:GLOB` source, sorted.

    Raises:
        Unavailable: No file matches.
        ConfigError: A file has another format.
    """
    pattern = source.removeprefix("files:")
    paths = sorted(
        path
        for path in glob.glob(os.path.expanduser(pattern), recursive=True)
        if os.path.isfile(path))
    if not paths:
        raise documents.Unavailable(
            f"no text file matches {pattern!r} (in {os.getcwd()}); "
            "give a glob of .txt or .jsonl files, each also .gz or .xz")
    for path in paths:
        if not path.endswith(SUFFIXES):
            raise config.ConfigError(
                f"{path}: not a .txt or .jsonl file (each also .gz or .xz); "
                f"narrow the glob {pattern!r}")
    return paths


def documents_of(path: str, json_field: str) -> typing.Iterator[str]:
    """Reads the documents of one file, in order.

    Args:
        path: The file. Its name tells its format.
        json_field: Field of a .jsonl record that holds the document.

    Raises:
        ConfigError: The file cannot be read. The message names the file and the position.
    """
    if ".jsonl" in pathlib.Path(path).suffixes:
        return text_files.json_documents(path, json_field)
    return text_files.paragraph_documents(path)


def identity(source: str, corpus: config.Corpus) -> str:
    """Returns what identifies the text of a source: names and contents of its files."""
    hashes = content_hashes(source, corpus)
    field = corpus.json_field if any(".jsonl" in path for path in hashes) else ""
    return "\n".join([field, *(f"{os.path.basename(path)} {hashes[path]}" for path in hashes)])


def content_hashes(source: str, corpus: config.Corpus) -> dict[str, str]:
    """Returns {file: SHA-256 in hex}.

    The hashes are kept under `rows_dir`, so an unchanged file is not read at each start.
    """
    record = rows_dir.local_folder(corpus) / HASHES_FILE
    known = {}
    if record.is_file():
        known = json_files.read(record, _are_hashes, f"remove {record}; it is made again")
    before, result = len(known), {}
    for path in matching(source):
        try:
            stat = os.stat(path)
            key = f"{os.path.abspath(path)} {stat.st_size} {stat.st_mtime_ns}"
            if key not in known:
                with open(path, "rb") as file:
                    known[key] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise text_files.unreadable(path, error) from error
        result[path] = known[key]
    if len(known) > before:
        rows_dir.remember(record, known)
    return result


def _are_hashes(value: typing.Any) -> bool:
    return json_files.is_text_map(value) and all(map(HASH.fullmatch, value.values()))
