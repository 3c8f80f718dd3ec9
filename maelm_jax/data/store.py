"""A store on disk: the rows of one source, with one zarr3 array for each split, and `store.json`.

`store.json` is written last, so a folder without it is incomplete. It lists every file with its
size and SHA-256. `Rows.open` checks that the files exist and have these sizes. The checksum of a
file is checked before the first row is read from it. A store without checksums is checked by size
alone.
"""

import concurrent.futures
import hashlib
import json
import logging
import math
import os
import pathlib
import typing

import numpy as np
import tensorstore

from maelm_jax import config, json_files, storage
from maelm_jax.data import blocks

VERSION = 1  # version of the format; the name of every store depends on it
MANIFEST = "store.json"
CHUNK_ROWS = 16  # the smallest number of rows that is read from disk
VERIFY_THREADS = 8
log = logging.getLogger(__name__)


class Rows:
    """The rows of one split of a store.

    Attributes:
        length: Ids in a row.
        shard_rows: Rows in one file of the store.
        statistics: The counts and averages in `store.json`.
        folder: The store's folder.
    """

    def __init__(
        self, folder: pathlib.Path, split: str, array: tensorstore.TensorStore, manifest: dict
    ):
        self.array = array
        self.statistics: dict[str, float] = manifest["splits"][split]
        self.length: int = array.shape[1]
        self.folder, self._split = folder, split
        self.shard_rows: int = array.chunk_layout.write_chunk.shape[0]
        self._unverified = {
            name: entry["sha256"]
            for name, entry in manifest.get("files", {}).items()
            if name.startswith(f"{split}/c/")}

    @classmethod
    def open(cls, path: str | os.PathLike, split: str = "train") -> "Rows":
        """Opens one split of a store.

        Args:
            path: The store's folder.
            split: "train" or "heldout".

        Raises:
            ConfigError: The store is incomplete or a file is damaged. The message names the file.
        """
        folder = pathlib.Path(path)
        manifest = read_manifest(folder)
        metadata = f"{split}/zarr.json"
        files = manifest.get("files")
        for name, entry in (files or {}).items():
            if name.startswith(f"{split}/"):
                _check_size(folder, name, entry["bytes"])
        if files:
            _check_content(folder, metadata, files[metadata]["sha256"])
        array = _open_array(folder, split)
        shape = (manifest["splits"][split]["rows"], manifest["length"])
        if array.shape != shape:
            raise config.ConfigError(
                f"{folder / metadata}: the array is {array.shape[0]} x {array.shape[1]}, "
                f"not {shape[0]} x {shape[1]} as in {MANIFEST}; {_remedy(folder)}")
        if not files:
            for name, size in _shard_sizes(array, split).items():
                _check_size(folder, name, size)
        return cls(folder, split, array, manifest)

    def __len__(self) -> int:
        return self.array.shape[0]

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        """Reads rows.

        Args:
            numbers: Row numbers in any order, with repeats, int [n].

        Returns:
            The rows, int32 [n, length].

        Raises:
            ConfigError: A file is missing or damaged. The message names it.
        """
        numbers = np.asarray(numbers, np.int64)
        if numbers.size == 0:
            return np.zeros((0, self.length), np.int32)
        if self._unverified:
            self._verify(numbers)
        try:
            return self.array.oindex[numbers].read().result().astype(np.int32)
        except ValueError as error:  # TensorStore's error for missing or damaged data
            reason = " ".join(str(error).split())[:300]
            message = f"{self.folder / self._split}: {reason}; {_remedy(self.folder)}"
            raise config.ConfigError(message) from error

    def _verify(self, numbers: np.ndarray):
        """Checks the files that hold these rows, each file once."""
        shards = np.unique(numbers // self.shard_rows).tolist()
        names = [name for name in (_shard_name(self._split, shard) for shard in shards)]
        due = {name: self._unverified[name] for name in names if name in self._unverified}
        if due:
            with concurrent.futures.ThreadPoolExecutor(min(VERIFY_THREADS, len(due))) as pool:
                list(pool.map(lambda item: _check_content(self.folder, *item), due.items()))
        for name in due:
            self._unverified.pop(name, None)


def open_splits(folder: pathlib.Path) -> dict[str, Rows]:
    """{split: Rows} of a store. Raises ConfigError like `Rows.open`."""
    if "files" not in read_manifest(folder):
        log.warning(
            "%s: made before checksums were kept; only the sizes of its files are checked", folder)
    return {split: Rows.open(folder, split) for split in blocks.SPLITS}


def fingerprint(folder: pathlib.Path) -> str | None:
    """A hash of the checksums of the store's files. None for a store without checksums."""
    files = read_manifest(folder).get("files")
    if files is None:
        return None
    return hashlib.sha256(
        json.dumps(sorted((name, entry["sha256"]) for name, entry in files.items())).encode()
    ).hexdigest()


def read_manifest(folder: pathlib.Path) -> dict:
    """The contents of `store.json`.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    path = pathlib.Path(folder) / MANIFEST
    if not path.is_file():
        raise config.ConfigError(
            f"{folder}: no whole store of rows here (no {MANIFEST}); "
            "run python -m maelm_jax.prepare")
    return json_files.read(path, _is_manifest, _remedy(folder))


def _is_manifest(value: typing.Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("splits"), dict):
        return False
    if not isinstance(value.get("vocabulary"), str) or not _is_count(value.get("length")):
        return False
    splits = value["splits"]
    if set(splits) != set(blocks.SPLITS) or not all(
        _is_statistics(split) for split in splits.values()
    ):
        return False
    if "files" not in value:
        return True
    files = value["files"]
    listed = isinstance(files, dict) and all(_is_file_entry(entry) for entry in files.values())
    return listed and all(f"{split}/zarr.json" in files for split in splits)


def _is_statistics(value: typing.Any) -> bool:
    if not isinstance(value, dict) or not all(_is_count(value.get(name)) for name in blocks.COUNTS):
        return False
    shares = [value.get("mean_segment"), value.get("fill")]
    return all(isinstance(share, (int, float)) and math.isfinite(share) for share in shares)


def _is_file_entry(value: typing.Any) -> bool:
    return (
        isinstance(value, dict)
        and _is_count(value.get("bytes"))
        and isinstance(value.get("sha256"), str))


def _is_count(value: typing.Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def write(
    folder: pathlib.Path, files: list[pathlib.Path], source: str, vocabulary: str, length: int,
    dtype: np.dtype, shard_rows: int
):
    """Joins blocks into a store.

    Args:
        folder: The store's folder.
        files: The blocks, in the order of their text (`blocks.finished`).
        source: The source's name.
        vocabulary: The vocabulary's fingerprint.
        length: Ids in a row.
        dtype: The type that ids are stored as.
        shard_rows: Rows in one file of the store.

    Raises:
        ConfigError: A block is damaged.
    """
    counts = [blocks.read_counts(file) for file in files]
    splits = {}
    for split in blocks.SPLITS:
        total = {key: sum(count[split][key] for count in counts) for key in blocks.COUNTS}
        splits[split] = _statistics(total, length)
        _write_array(folder / split, files, split, (total["rows"], length), dtype, shard_rows)
    manifest = {"version": VERSION, "source": source, "vocabulary": vocabulary, "length": length}
    manifest |= {"splits": splits, "files": _list_files(folder)}
    storage.write(folder / MANIFEST, json.dumps(manifest, indent=1))


def _write_array(
    path: pathlib.Path, files: list[pathlib.Path], split: str, shape: tuple[int, int], dtype,
    shard_rows: int
):
    spec = _spec(path) | {"metadata": _metadata(shape, dtype, shard_rows)}
    array = tensorstore.open(spec, create=True, delete_existing=True).result()
    start, waiting = 0, [np.zeros((0, shape[1]), dtype)]
    for file in files:
        waiting.append(blocks.read_rows(file, split))
        # A file of the store is written once, with all its rows.
        if sum(map(len, waiting)) >= shard_rows:
            rows = np.concatenate(waiting)
            end = len(rows) - len(rows) % shard_rows
            array[start : start + end].write(rows[:end]).result()
            start, waiting = start + end, [rows[end:]]
    rest = np.concatenate(waiting)
    if len(rest):
        array[start : start + len(rest)].write(rest).result()


def _list_files(folder: pathlib.Path) -> dict[str, dict]:
    """Size and checksum of every file of the arrays."""
    found = sorted(
        path for split in blocks.SPLITS for path in (folder / split).rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in found}


def _statistics(total: dict[str, int], length: int) -> dict[str, float]:
    """The counts, the mean length of a segment and `fill`, the share of slots not padded."""
    segment = total["tokens"] / max(total["segments"], 1)
    return total | {
        "mean_segment": round(segment, 2),
        "fill": round(total["tokens"] / max(total["rows"] * length, 1), 5),
    }


def _remedy(folder: pathlib.Path) -> str:
    return f"remove {folder} and run python -m maelm_jax.prepare again, or copy the folder again"


def _check_size(folder: pathlib.Path, name: str, expected: int):
    try:
        size = os.stat(folder / name).st_size
    except OSError as error:
        raise config.ConfigError(
            f"{folder / name}: missing ({error.strerror}); {_remedy(folder)}") from error
    if size != expected:
        raise config.ConfigError(
            f"{folder / name}: damaged: {size} bytes, not {expected}; {_remedy(folder)}")


def _check_content(folder: pathlib.Path, name: str, expected: str):
    try:
        found = _sha256(folder / name)
    except OSError as error:
        raise config.ConfigError(
            f"{folder / name}: cannot be read ({error.strerror}); {_remedy(folder)}") from error
    if found != expected:
        raise config.ConfigError(
            f"{folder / name}: damaged: its checksum is not that of {MANIFEST}; {_remedy(folder)}")


def _sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _shard_name(split: str, shard: int) -> str:
    return f"{split}/c/{shard}/0"


def _shard_sizes(array: tensorstore.TensorStore, split: str) -> dict[str, int]:
    """{file: bytes} of an array: its chunks, 16 bytes of index per chunk, a checksum of 4."""
    shard, chunk = (
        layout.shape[0]
        for layout in (array.chunk_layout.write_chunk, array.chunk_layout.read_chunk))
    count, length = array.shape
    sizes = {}
    for start in range(0, count, shard):
        chunks = -(-min(shard, count - start) // chunk)
        index = shard // chunk * 16 + 4
        sizes[_shard_name(split, start // shard)] = (
            chunks * chunk * length * array.dtype.numpy_dtype.itemsize + index)
    return sizes


def _open_array(folder: pathlib.Path, split: str) -> tensorstore.TensorStore:
    try:
        return tensorstore.open(_spec(folder / split), read=True, open=True).result()
    except ValueError as error:
        reason = " ".join(str(error).split()).partition(" [")[0]
        raise config.ConfigError(
            f"{folder / split / 'zarr.json'}: damaged: {reason[:300]}; {_remedy(folder)}"
        ) from error


def _spec(path: pathlib.Path) -> dict:
    """How TensorStore opens an array. A missing chunk is an error, so zeros are stored as well."""
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path.absolute()}/"},
        "context": {"cache_pool": {"total_bytes_limit": 256_000_000}},
        "recheck_cached_data": "open",
        "recheck_cached_metadata": "open",
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }


def _metadata(shape: tuple[int, int], dtype: np.dtype, shard_rows: int) -> dict:
    rows, length = shape
    inner = {
        "chunk_shape": [CHUNK_ROWS, length],
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    return {
        "shape": [rows, length],
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [shard_rows, length]}},
        "codecs": [{"name": "sharding_indexed", "configuration": inner}],
    }
