"""A store on disk: the rows of one source, with one zarr3 array for each split, and `store.json`.

store_manifest.py has the form of `store.json`. `Rows.open` checks that the files exist and have the
sizes that it lists. The checksum of a file is checked before the first row is read from it.
"""

import concurrent.futures
import logging
import os
import pathlib

import numpy as np
import tensorstore

from maelm_jax import config
from maelm_jax.data import block_files, store_manifest

CHUNK_ROWS = 16  # the smallest number of rows that is read from disk
VERIFY_THREADS = 8
log = logging.getLogger(__name__)


class Rows:
    """The rows of one split of a store.

    Attributes:
        length: Ids in a row.
        shard_rows: Rows in one file of the store.
        statistics: The counts and averages in `store.json`.
        folder: The store's folder on this machine.
        fetches: Whether `fetch` saves time.
    """

    fetches = False

    def __init__(
        self, folder: pathlib.Path, split: str, array: tensorstore.TensorStore, manifest: dict
    ):
        self.array = array
        self.statistics: dict[str, float] = manifest["splits"][split]
        self.length: int = array.shape[1]
        self.folder, self._split = folder, split
        self.shard_rows: int = array.chunk_layout.write_chunk.shape[0]
        self._checksums = {
            name: entry["sha256"]
            for name, entry in manifest.get("files", {}).items()
            if name.startswith(f"{split}/c/")
        }
        self._verified: set[str] = set()  # names of files

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
        manifest = store_manifest.read(folder)
        files = manifest.get("files")
        for name, entry in (files or {}).items():
            if name.startswith(f"{split}/"):
                store_manifest.check_size(folder, name, entry["bytes"])
        array = open_array(folder, split, manifest)
        if not files:
            for name, size in _shard_sizes(array, split).items():
                store_manifest.check_size(folder, name, size)
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
        return self._read(numbers)

    def fetch(self, numbers: np.ndarray) -> bool:
        """Begins to fetch rows that are needed later. Returns False if there is no space yet."""
        del numbers  # they are on this machine
        return True

    def _read(self, numbers: np.ndarray) -> np.ndarray:
        if self._checksums:
            self._verify(numbers)
        try:
            return self.array.oindex[numbers].read().result().astype(np.int32)
        except ValueError as error:  # TensorStore's error for missing or damaged data
            reason = " ".join(str(error).split())[:300]
            raise store_manifest.wrong(self.folder, self._split, reason) from error

    def _verify(self, numbers: np.ndarray):
        """Checks the files that hold these rows, each file once."""
        shards = np.unique(numbers // self.shard_rows).tolist()
        names = {shard_name(self._split, shard) for shard in shards} - self._verified
        due = {name: self._checksums[name] for name in sorted(names)}
        if due:
            with concurrent.futures.ThreadPoolExecutor(min(VERIFY_THREADS, len(due))) as pool:
                checks = [
                    pool.submit(store_manifest.check_content, self.folder, name, due[name])
                    for name in due
                ]
            for check in checks:
                check.result()
        self._verified.update(due)


def open_splits(folder: pathlib.Path) -> dict[str, Rows]:
    """{split: Rows} of a store. Raises ConfigError like `Rows.open`."""
    if "files" not in store_manifest.read(folder):
        log.warning(
            "%s: made before checksums were kept; only the sizes of its files are checked", folder
        )
    return {split: Rows.open(folder, split) for split in block_files.SPLITS}


def write(
    folder: pathlib.Path,
    files: list[pathlib.Path],
    source: str,
    vocabulary: str,
    length: int,
    dtype: np.dtype,
    shard_rows: int,
    left_out: block_files.LeftOut | None = None,
):
    """Joins blocks into a store.

    Args:
        folder: The store's folder.
        files: The blocks, in the order of their text (`block_files.finished`).
        source: The source's name.
        vocabulary: The vocabulary's fingerprint.
        length: Ids in a row.
        dtype: The type that ids are stored as.
        shard_rows: Rows in one file of the store.
        left_out: What was left out of the source, for `store.json`.

    Raises:
        ConfigError: A block is damaged.
        RunError: The disk is full, or cannot be written to.
    """
    counts = [block_files.read_counts(file) for file in files]
    splits = {}
    for split in block_files.SPLITS:
        total = {key: sum(count[split][key] for count in counts) for key in block_files.COUNTS}
        splits[split] = _statistics(total, length)
        try:
            _write_array(folder / split, files, split, (total["rows"], length), dtype, shard_rows)
        except ValueError as error:  # TensorStore's error for every failure of the disk
            reason = " ".join(str(error).split())[:300]
            raise config.RunError(
                f"{folder}: the rows could not be written ({reason}); free some space or check the "
                "disk, then give the same command again: it joins the finished blocks"
            ) from error
    store_manifest.write(folder, source, vocabulary, length, splits, left_out)


def _write_array(
    path: pathlib.Path,
    files: list[pathlib.Path],
    split: str,
    shape: tuple[int, int],
    dtype,
    shard_rows: int,
):
    spec = _spec(path) | {"metadata": _metadata(shape, dtype, shard_rows)}
    array = tensorstore.open(spec, create=True, delete_existing=True).result()
    start, waiting = 0, [np.zeros((0, shape[1]), dtype)]
    for file in files:
        waiting.append(block_files.read_array(file, split))
        # A file of the store is written once, with all its rows.
        if sum(map(len, waiting)) >= shard_rows:
            rows = np.concatenate(waiting)
            end = len(rows) - len(rows) % shard_rows
            array[start : start + end].write(rows[:end]).result()
            start, waiting = start + end, [rows[end:]]
    rest = np.concatenate(waiting)
    if len(rest):
        array[start : start + len(rest)].write(rest).result()


def _statistics(total: dict[str, int], length: int) -> dict[str, float]:
    """Returns the counts, the mean segment length and `fill`, the share of slots not padded."""
    segment = total["tokens"] / max(total["segments"], 1)
    return total | {
        "mean_segment": round(segment, 2),
        "fill": round(total["tokens"] / max(total["rows"] * length, 1), 5),
    }


def shard_name(split: str, shard: int) -> str:
    """Returns the name of a file of rows within its store."""
    return f"{split}/c/{shard}/0"


def _shard_sizes(array: tensorstore.TensorStore, split: str) -> dict[str, int]:
    """Returns {file: bytes} of an array: its chunks, and an index of 16 bytes a chunk and 4."""
    shard, chunk = (
        layout.shape[0]
        for layout in (array.chunk_layout.write_chunk, array.chunk_layout.read_chunk)
    )
    count, length = array.shape
    sizes = {}
    for start in range(0, count, shard):
        chunks = -(-min(shard, count - start) // chunk)
        index = shard // chunk * 16 + 4
        sizes[shard_name(split, start // shard)] = (
            chunks * chunk * length * array.dtype.numpy_dtype.itemsize + index
        )
    return sizes


def open_array(folder: pathlib.Path, split: str, manifest: dict) -> tensorstore.TensorStore:
    """Opens the array of a split, which needs only its metadata.

    Raises:
        ConfigError: The metadata are damaged, or do not agree with the manifest.
    """
    name = f"{split}/zarr.json"
    if files := manifest.get("files"):
        store_manifest.check_content(folder, name, files[name]["sha256"])
    try:
        array = tensorstore.open(_spec(folder / split), read=True, open=True).result()
    except ValueError as error:
        reason = " ".join(str(error).split()).partition(" [")[0]
        raise store_manifest.wrong(folder, name, f"damaged: {reason[:300]}") from error
    shape = (manifest["splits"][split]["rows"], manifest["length"])
    if array.shape != shape:
        raise store_manifest.wrong(
            folder,
            name,
            f"the array is {array.shape[0]} x {array.shape[1]}, "
            f"not {shape[0]} x {shape[1]} as in {store_manifest.FILE}",
        )
    return array


def _spec(path: pathlib.Path) -> dict:
    """Returns how TensorStore opens an array.

    A missing chunk is an error, so chunks of zeros are stored as well.
    """
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
