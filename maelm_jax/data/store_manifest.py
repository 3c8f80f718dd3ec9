"""`store.json` of a store of rows: its statistics, and the size and SHA-256 of every file.

The file is written last, so a folder without it is incomplete. Stores that were written without
checksums are checked by size alone.
"""

import collections
import hashlib
import json
import math
import os
import pathlib
import typing

from maelm_jax import config, json_files, storage
from maelm_jax.data import block_files, cleaning

VERSION = 1  # version of the format; the name of every store depends on it
FILE = "store.json"


def read(folder: str | os.PathLike) -> dict:
    """Returns the content of a store's `store.json`.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    path = pathlib.Path(folder) / FILE
    if not path.is_file():
        raise config.ConfigError(
            f"{folder}: no whole store of rows here (no {FILE}); run python -m maelm_jax.prepare"
        )
    return json_files.read(path, _is_manifest, remedy(path.parent))


def write(
    folder: pathlib.Path,
    source: str,
    vocabulary: str,
    length: int,
    splits: dict[str, dict],
    left_out: block_files.LeftOut | None = None,
):
    """Writes `store.json`, with the checksums of the arrays that are in the folder.

    Args:
        folder: The store's folder.
        source: The source's name.
        vocabulary: The vocabulary's fingerprint.
        length: Ids in a row.
        splits: {split: statistics}.
        left_out: What was left out of the source. None if its settings leave nothing out.
    """
    files = sorted(
        path
        for split in block_files.SPLITS
        for path in (folder / split).rglob("*")
        if path.is_file()
    )
    content = {
        "version": VERSION,
        "source": source,
        "vocabulary": vocabulary,
        "length": length,
        "splits": splits,
        "files": {
            str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
            for path in files
        },
    }
    if left_out is not None:
        content["left_out"] = {
            "documents": {reason: left_out.documents[reason] for reason in cleaning.REASONS},
            "files": left_out.files,
        }
    storage.write(folder / FILE, json.dumps(content, indent=1))


def left_out(folder: pathlib.Path) -> block_files.LeftOut | None:
    """Returns what was left out of a store. None if its settings left nothing out."""
    content = read(folder).get("left_out")
    if content is None:
        return None
    return block_files.LeftOut(collections.Counter(content["documents"]), content["files"])


def fingerprint(folder: pathlib.Path) -> str | None:
    """Returns a hash of the checksums of a store's files. None for a store without checksums."""
    files = read(folder).get("files")
    if files is None:
        return None
    return hashlib.sha256(
        json.dumps(sorted((name, entry["sha256"]) for name, entry in files.items())).encode()
    ).hexdigest()


def check_size(folder: pathlib.Path, name: str, expected: int):
    """Raises ConfigError unless the file `name` of a store has `expected` bytes."""
    try:
        size = os.stat(folder / name).st_size
    except OSError as error:
        raise wrong(folder, name, f"missing ({error.strerror})") from error
    if size != expected:
        raise wrong(folder, name, f"damaged: {size} bytes, not {expected}")


def check_content(folder: pathlib.Path, name: str, expected: str):
    """Raises ConfigError unless the file `name` of a store has the SHA-256 `expected`."""
    try:
        checksum = _sha256(folder / name)
    except OSError as error:
        raise wrong(folder, name, f"cannot be read ({error.strerror})") from error
    if checksum != expected:
        raise damaged(folder, name)


def damaged(folder: str | os.PathLike, name: str) -> config.ConfigError:
    """Returns the error for a file of a store whose checksum is wrong."""
    return wrong(folder, name, f"damaged: its checksum is not that of {FILE}")


def wrong(folder: str | os.PathLike, name: str, reason: str) -> config.ConfigError:
    """Returns the error for a file of a store that cannot be used."""
    return config.ConfigError(f"{folder}/{name}: {reason}; {remedy(folder)}")


def remedy(folder: str | os.PathLike) -> str:
    """Returns what the user can do about a damaged store."""
    return f"remove {folder} and run python -m maelm_jax.prepare again, or copy the folder again"


def _sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_manifest(value: typing.Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("splits"), dict):
        return False
    if not isinstance(value.get("vocabulary"), str):
        return False
    if not json_files.is_integer(value.get("length"), 0):
        return False
    if "left_out" in value and not _is_left_out(value["left_out"]):
        return False
    splits = value["splits"]
    if set(splits) != set(block_files.SPLITS) or not all(map(_is_statistics, splits.values())):
        return False
    if "files" not in value:
        return True
    files = value["files"]
    if not isinstance(files, dict) or not all(map(_is_file_entry, files.values())):
        return False
    return all(f"{split}/zarr.json" in files for split in splits)


def _is_left_out(value: typing.Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("documents"), dict):
        return False
    counts = value["documents"].values()
    counted = all(json_files.is_integer(count, 0) for count in counts)
    return counted and json_files.is_text_map(value.get("files"))


def _is_statistics(value: typing.Any) -> bool:
    if not isinstance(value, dict):
        return False
    if not all(json_files.is_integer(value.get(name), 0) for name in block_files.COUNTS):
        return False
    means = [value.get("mean_segment"), value.get("fill")]
    return all(isinstance(mean, (int, float)) and math.isfinite(mean) for mean in means)


def _is_file_entry(value: typing.Any) -> bool:
    if not isinstance(value, dict) or not json_files.is_integer(value.get("bytes"), 0):
        return False
    return isinstance(value.get("sha256"), str)
