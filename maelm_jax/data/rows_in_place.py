"""Reads rows from a bucket or a shared disk without a copy (`Corpus.cache_gb`).

A file of the store is fetched as a whole when a step needs one of its rows, and its checksum is
verified. Files stay in a cache in memory (shard_cache.py). On this machine's disk are only the
small files of the store: its manifest and the metadata of its arrays.
"""

import functools
import hashlib
import logging
import pathlib
import threading

import numpy as np
import tensorstore

from maelm_jax import config, storage
from maelm_jax.data import block_files, shard_cache, store, store_manifest

WINDOWS = 2  # windows of Corpus.shuffle_shards that a cache should hold: the present and the next
log = logging.getLogger(__name__)


class RowsInPlace(store.Rows):
    """The rows of one split of a store that lies elsewhere.

    Args:
        folder: A folder of this machine with the small files of the store.
        split: "train" or "heldout".
        manifest: The content of `store.json`.
        location: The store's folder, local or in a bucket.
        cache: Holds files of this and of other stores.

    Raises:
        ConfigError: The store has no checksums, or its metadata are damaged.
    """

    fetches = True

    def __init__(
        self,
        folder: pathlib.Path,
        split: str,
        manifest: dict,
        location: str,
        cache: shard_cache.ShardCache,
    ):
        if "files" not in manifest:
            raise config.ConfigError(
                f"{location}: made before checksums were kept; set Corpus.cache_gb=0 to copy it"
            )
        super().__init__(folder, split, store.open_array(folder, split, manifest), manifest)
        self._files, self._root = storage.file_system(location)
        self._location, self._cache = location, cache
        self._decoder = _Decoder((folder / split / "zarr.json").read_bytes(), self.shard_rows)
        row_bytes = self.array.dtype.numpy_dtype.itemsize * self.length
        self.shard_bytes = self.shard_rows * row_bytes
        self.bytes = len(self) * row_bytes

    def fetch(self, numbers: np.ndarray) -> bool:
        """Begins to fetch the files of rows. Returns False if the cache has no space for all."""
        return all(
            self._cache.fetch(self._path(shard), self.shard_bytes, self._loader(shard))
            for shard in np.unique(numbers // self.shard_rows).tolist()
        )

    def _read(self, numbers: np.ndarray) -> np.ndarray:
        self.fetch(numbers)
        shards = numbers // self.shard_rows
        result = np.empty((len(numbers), self.length), np.int32)
        for shard in np.unique(shards).tolist():
            chosen = shards == shard
            rows = self._cache.get(self._path(shard), self.shard_bytes, self._loader(shard))
            result[chosen] = rows[numbers[chosen] % self.shard_rows]
        return result

    def _path(self, shard: int) -> str:
        return f"{self._root}/{store.shard_name(self._split, shard)}"

    def _loader(self, shard: int) -> functools.partial[np.ndarray]:
        return functools.partial(self._load, shard)

    def _load(self, shard: int) -> np.ndarray:
        """Fetches, verifies and decodes one file."""
        name = store.shard_name(self._split, shard)
        try:
            content = self._files.cat_file(self._path(shard))
        except FileNotFoundError as error:
            raise store_manifest.wrong(self._location, name, "missing") from error
        except Exception as error:  # each kind of bucket has its own
            raise config.RunError(
                f"{self._location}/{name}: cannot be read ({' '.join(str(error).split())[:200]}); "
                "start the run again when the storage answers"
            ) from error
        if hashlib.sha256(content).hexdigest() != self._checksums[name]:
            raise store_manifest.damaged(self._location, name)
        return self._decoder.decode(shard, content)


class _Decoder:
    """Decodes files of a zarr3 array that TensorStore gets from memory."""

    def __init__(self, metadata: bytes, shard_rows: int):
        memory = {"driver": "memory"}
        context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}})
        self._memory = tensorstore.KvStore.open(memory, context=context).result()
        self._memory["zarr.json"] = metadata
        spec = {"driver": "zarr3", "kvstore": memory, "fill_missing_data_reads": False}
        self._array = tensorstore.open(spec, context=context, read=True, open=True).result()
        self._shard_rows = shard_rows
        self._lock = threading.Lock()

    def decode(self, shard: int, content: bytes) -> np.ndarray:
        """Returns the rows of one file, [rows, length]. Several threads may call it."""
        key = store.shard_name("", shard).removeprefix("/")
        start = shard * self._shard_rows
        end = min(start + self._shard_rows, self._array.shape[0])
        # A file that was dropped while it was loaded can be loaded by two threads at once.
        with self._lock:
            self._memory[key] = content
            try:
                return self._array[start:end].read().result()
            finally:
                self._memory[key] = None


def open_stores(
    folders: dict[str, pathlib.Path], corpus: config.Corpus
) -> dict[str, dict[str, store.Rows]]:
    """Opens the stores of all sources: in place with `Corpus.cache_gb`, else from their folders.

    Args:
        folders: {source: folder of this machine}.
        corpus: Says where the stores lie, and the size of the cache.

    Returns:
        {source: {"train": Rows, "heldout": Rows}}
    """
    if not corpus.cache_gb:
        return {source: store.open_splits(folder) for source, folder in folders.items()}
    cache = shard_cache.ShardCache(int(corpus.cache_gb * 1e9))
    result: dict[str, dict[str, store.Rows]] = {}
    for source, folder in folders.items():
        manifest, location = store_manifest.read(folder), str(folder)
        if storage.in_bucket(corpus.rows_dir):
            location = f"{corpus.rows_dir.rstrip('/')}/{folder.name}"
        result[source] = {
            split: RowsInPlace(folder, split, manifest, location, cache)
            for split in block_files.SPLITS
        }
    _warn_if_small(cache.limit, [splits["train"] for splits in result.values()], corpus)
    return result


def _warn_if_small(limit: int, stores: list[RowsInPlace], corpus: config.Corpus):
    """Logs a warning if steps would fetch the same files again and again."""
    total = sum(rows.bytes for rows in stores)
    if not corpus.shuffle_shards:
        needed, remedy = total, "set Corpus.shuffle_shards, or raise Corpus.cache_gb to {:.2g}"
    else:
        window = sum(WINDOWS * corpus.shuffle_shards * rows.shard_bytes for rows in stores)
        needed, remedy = min(window, total), "raise Corpus.cache_gb to {:.2g}"
    if needed > limit:
        log.warning(
            "Corpus.cache_gb=%g is too small for the %.2g GB of rows that are shuffled together, "
            "so files are fetched many times; %s",
            corpus.cache_gb,
            needed / 1e9,
            remedy.format(needed / 1e9 * 1.05),
        )
