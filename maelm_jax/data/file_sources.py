"""The files of a `files:GLOB` source: which they are, their documents, their identity."""

import os
import pathlib
import re
import typing

from maelm_jax import config
from maelm_jax.data import (
    documents,
    file_access,
    file_hashes,
    record_files,
    table_files,
    text_files,
)

JSON_SUFFIXES = (".jsonl", ".json")  # one record a line
TEXT_SUFFIXES = (".txt", *JSON_SUFFIXES)  # each also packed
# Formats whose records have named fields (Corpus.text_column).
RECORD_READERS = {
    ".parquet": table_files.parquet_documents,
    ".arrow": table_files.arrow_documents,
    ".tfrecord": record_files.tfrecord_documents,
    ".array_record": record_files.array_record_documents,
    ".arrayrecord": record_files.array_record_documents,
}
# TFDS names its shards `name.tfrecord-00000-of-00008`.
SHARD_NUMBER = re.compile(r"-\d+-of-\d+$")
KNOWN_FORMATS = (
    ".txt, .jsonl or .json file (each also .gz, .xz or .zst), nor a .parquet, .arrow, .tfrecord "
    "or .array_record file"
)


def matching(source: str) -> list[str]:
    """Returns the files of a `files:GLOB` source, sorted.

    A folder that Hugging Face `datasets` wrote stands for its .arrow files.

    Raises:
        Unavailable: Nothing matches.
        ConfigError: A file has another format, or files and datasets match.
    """
    pattern = source.removeprefix("files:")
    files, folders = [], []
    for path in file_access.expand(pattern):
        (folders if file_access.is_folder(path) else files).append(path)
    if not files:
        files = [file for folder in folders for file in table_files.files_of_dataset(folder)]
    elif datasets := [path for path in folders if table_files.is_dataset(path)]:
        raise config.ConfigError(
            f"{datasets[0]}: a folder of Hugging Face datasets beside files; narrow the glob "
            f"{pattern!r} to the one or the other, or to the .arrow files of the folder"
        )
    if not files:
        raise documents.Unavailable(
            f"no text file matches {pattern!r} (in {os.getcwd()}); "
            "give a glob of .txt, .jsonl or .parquet files"
        )
    for path in files:
        if _format(path) is None:
            raise config.ConfigError(f"{path}: not a {KNOWN_FORMATS}; narrow the glob {pattern!r}")
    return files


def _format(path: str) -> str | None:
    """Returns the format of a file, by its name: a suffix, or None for an unknown one."""
    name = pathlib.PurePath(SHARD_NUMBER.sub("", path))
    if name.suffix in RECORD_READERS:
        return name.suffix
    if name.suffix in text_files.PACKINGS:
        name = name.with_suffix("")
    return name.suffix if name.suffix in TEXT_SUFFIXES else None


def documents_of(path: str, corpus: config.Corpus) -> typing.Iterator[str]:
    """Reads the documents of one file, in order.

    Args:
        path: The file. Its name tells its format.
        corpus: Names the field or column that holds the document.

    Raises:
        BadFile: The file cannot be read. The message names the file and the position.
    """
    format = _format(path)
    if format in RECORD_READERS:
        return RECORD_READERS[format](path, corpus.text_column)
    if format in JSON_SUFFIXES:
        return text_files.json_documents(path, corpus.json_field)
    return text_files.paragraph_documents(path)


def identity(source: str, corpus: config.Corpus) -> str:
    """Returns what identifies the text of a source: names and contents of its files."""
    hashes = file_hashes.of_files(matching(source), corpus)
    has_json = any(_format(path) in JSON_SUFFIXES for path in hashes)
    lines = [corpus.json_field if has_json else ""]
    if any(_format(path) in RECORD_READERS for path in hashes):
        lines.append(corpus.text_column)
    return "\n".join([*lines, *(f"{os.path.basename(path)} {hashes[path]}" for path in hashes)])
