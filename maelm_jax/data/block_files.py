"""Files of the blocks and marks of an unfinished preparation.

A block is one file. The mark of a shard says how many blocks the shard has and what was left out of
it. The rows are complete when every shard has its mark and all its blocks.
"""

import collections
import json
import logging
import pathlib
import typing
import zipfile
import zlib

import numpy as np

from maelm_jax import config, json_files, storage
from maelm_jax.data import cleaning

SPLITS = ("train", "heldout")
COUNTS = ("documents", "bytes", "rows", "segments", "tokens")
log = logging.getLogger(__name__)


class LeftOut(typing.NamedTuple):
    """What was left out of a source or shard."""

    documents: collections.Counter[str]  # by the reason (cleaning.REASONS)
    files: dict[str, str]  # {path: why it cannot be read}


def block_path(folder: pathlib.Path, shard: int, block: int) -> pathlib.Path:
    """Returns the file of one block."""
    return folder / f"{shard:06d}-{block:06d}.npz"


def mark_path(folder: pathlib.Path, shard: int) -> pathlib.Path:
    """Returns the mark file of a shard."""
    return folder / f"{shard:06d}.json"


def missing(folder: pathlib.Path, shard: int) -> bool:
    """Returns whether a block of the shard, or its mark, is not written yet."""
    if not mark_path(folder, shard).is_file():
        return True
    count = _mark(folder, shard)["blocks"]
    return not all(block_path(folder, shard, block).is_file() for block in range(count))


def all_written(folder: pathlib.Path, shards: int) -> bool:
    """Returns whether all blocks of `shards` shards, and their marks, are written."""
    return not any(missing(folder, shard) for shard in range(shards))


def finished(folder: pathlib.Path, shards: int) -> list[pathlib.Path]:
    """Returns the files of all blocks of `shards` complete shards, in the order of their text."""
    counts = [_mark(folder, shard)["blocks"] for shard in range(shards)]
    return [
        block_path(folder, shard, block)
        for shard, count in enumerate(counts)
        for block in range(count)
    ]


def write_mark(folder: pathlib.Path, shard: int, blocks: int, left_out: LeftOut):
    """Writes the mark of a shard that was read to its end.

    Args:
        folder: The folder of the blocks.
        shard: Number of the shard.
        blocks: Number of its blocks.
        left_out: What was left out of it.
    """
    path = mark_path(folder, shard)
    # Hosts that share a shard count the same number, so the first mark stays. Host 0 removes the
    # folder after joining the rows, so a second write could fail.
    if path.is_file():
        return
    mark: dict[str, typing.Any] = {"blocks": blocks}
    if left_out.documents:
        mark["documents_left_out"] = dict(sorted(left_out.documents.items()))
    if left_out.files:
        mark["files_left_out"] = left_out.files
    storage.write(path, json.dumps(mark))


def left_out(folder: pathlib.Path, shards: int) -> LeftOut:
    """Adds up what was left out of `shards` complete shards."""
    total = LeftOut(collections.Counter(), {})
    for shard in range(shards):
        mark = _mark(folder, shard)
        total.documents.update(mark.get("documents_left_out", {}))
        total.files.update(mark.get("files_left_out", {}))
    return total


def _mark(folder: pathlib.Path, shard: int) -> dict[str, typing.Any]:
    """Returns the content of a shard's mark."""
    path = mark_path(folder, shard)
    return json_files.read(path, _is_mark, f"remove {path} and start prepare again")


def _is_mark(value: typing.Any) -> bool:
    if not isinstance(value, dict) or not json_files.is_integer(value.get("blocks"), 0):
        return False
    documents = value.get("documents_left_out", {})
    if not isinstance(documents, dict) or not set(documents) <= set(cleaning.REASONS):
        return False
    counted = all(json_files.is_integer(count, 0) for count in documents.values())
    return counted and json_files.is_text_map(value.get("files_left_out", {}))


def read_counts(file: pathlib.Path) -> dict[str, dict[str, int]]:
    """Returns the counts of one block, {split: {name: number}}, with the names in COUNTS.

    Raises:
        ConfigError: The file is damaged.
    """
    remedy = f"remove {file} and start prepare again"
    counts = json_files.parse(str(read_array(file, "counts")), str(file), remedy)
    if not isinstance(counts, dict) or not all(
        _is_split_counts(counts.get(split)) for split in SPLITS
    ):
        raise config.ConfigError(f"{file}: damaged (its counts are not there); {remedy}")
    return counts


def _is_split_counts(value: typing.Any) -> bool:
    return isinstance(value, dict) and all(type(value.get(name)) is int for name in COUNTS)


def read_array(file: pathlib.Path, name: str) -> np.ndarray:
    """Returns an array of a block: the rows of a split, [rows, length], or its counts.

    Raises:
        ConfigError: The file is damaged.
    """
    try:
        with open(file, "rb") as opened, np.load(opened, allow_pickle=False) as block:
            return block[name]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = " ".join(str(error).split())[:200]
        message = f"{file}: damaged ({reason}); remove it and start prepare again"
        raise config.ConfigError(message) from error


def remove_damaged(folder: pathlib.Path, shard: int):
    """Removes the damaged marks and blocks of a shard, so that `write` makes them again."""
    for path in sorted(folder.glob(f"{shard:06d}.json")):
        try:
            _mark(folder, shard)
        except config.ConfigError as error:
            _discard(path, error)
    for path in sorted(folder.glob(f"{shard:06d}-*.npz")):
        try:
            counts = read_counts(path)
            for split in SPLITS:
                if len(read_array(path, split)) != counts[split]["rows"]:
                    raise config.ConfigError(
                        f"{path}: damaged (its rows are not as many as it says)"
                    )
        except config.ConfigError as error:
            _discard(path, error)


def _discard(path: pathlib.Path, error: config.ConfigError):
    log.warning("%s is made again: %s", path.name, str(error).partition(";")[0])
    path.unlink(missing_ok=True)
