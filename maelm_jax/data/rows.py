"""The store: the rows of one source on disk or in a bucket, a zarr3 array for each split.

A store is a folder with the arrays `train` and `heldout` and the file `store.json`. TensorStore
checks the CRC-32C of every chunk that it reads. A chunk that is missing is an error and never reads
as zeros.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import typing

import numpy as np
import tensorstore

from maelm_jax import storage
from maelm_jax.config import ConfigError, Corpus, RunError
from maelm_jax.data.readers import Unavailable

MANIFEST = "store.json"
SPLITS = ("train", "heldout")
COUNTS = ("documents", "bytes", "words", "rows", "segments", "tokens")
SHARD_ROWS = 4096  # rows in one file
CHUNK_ROWS = 16  # the smallest number of rows that is read
LOCAL_CACHE = 256_000_000  # bytes of chunks in memory. The system caches files of this machine too.
BUCKET_CACHE = 2_000_000_000
BUCKET_REQUESTS = 256  # at a time, each of one chunk; not measured. TensorStore's default is 32.
# Errors of a bucket or network that does not answer, as TensorStore's messages begin.
FAILURES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "RESOURCE_EXHAUSTED", "INTERNAL")


class Rows:
    """The rows of one split of a store.

    Args:
        store: The store's folder, on this machine or in a bucket.
        split: "train" or "heldout".
        statistics: {name: number} of COUNTS, from the store's manifest. Stores of older code
            have no "words".
        context: TensorStore's context, which holds the cache.

    Attributes:
        length: Ids in a row.
        shard_rows: Rows in one file of the store.
        statistics: As above.
    """

    def __init__(
        self, store: str, split: str, statistics: dict[str, int], context: tensorstore.Context
    ):
        self._store, self.statistics = store, statistics
        spec = {
            "driver": "zarr3",
            "kvstore": _kvstore(f"{store}/{split}"),
            "recheck_cached_data": "open",
            "recheck_cached_metadata": "open",
            "fill_missing_data_reads": False,
        }
        opening = tensorstore.open(spec, context=context, read=True, open=True)
        self.array: tensorstore.TensorStore = self._wait(opening)
        self.length: int = self.array.shape[1]
        self.shard_rows: int = self.array.chunk_layout.write_chunk.shape[0]
        if len(self) != statistics["rows"]:
            raise self._error(f"{split} has {len(self)} rows, not {statistics['rows']}")

    def __len__(self) -> int:
        return self.array.shape[0]

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        """Reads rows, int32 [n, length]. Their numbers, int [n], have any order and may repeat.

        Raises:
            ConfigError: A file is missing or damaged. The message names it.
            RunError: The bucket does not answer.
        """
        return self.request(numbers)()

    def request(self, numbers: np.ndarray) -> typing.Callable[[], np.ndarray]:
        """Begins to read rows, and returns a function that waits for them (see `__getitem__`)."""
        numbers = np.asarray(numbers, np.int64)
        if not numbers.size:
            return lambda: np.zeros((0, self.length), np.int32)
        reading = self.array.oindex[numbers].read()
        return lambda: self._wait(reading).astype(np.int32)

    def _wait(self, future: tensorstore.Future) -> typing.Any:
        """Waits for TensorStore. Its errors name the file."""
        try:
            return future.result()
        except ValueError as error:
            raise self._error(str(error)) from error

    def _error(self, reason: str) -> ConfigError | RunError:
        reason = " ".join(reason.partition(" [tensorstore_spec")[0].split())[:300]
        if reason.startswith(FAILURES):
            return RunError(f"{self._store}: {reason}; start again when the storage answers")
        return ConfigError(
            f"{self._store}: {reason}; remove the folder and run python -m maelm_jax.prepare "
            "again, or copy the folder again"
        )


def _kvstore(path: str) -> str | dict:
    """Returns how TensorStore finds a folder."""
    if not storage.in_bucket(path):
        return {"driver": "file", "path": f"{os.path.abspath(path)}/"}
    kind, _, rest = path.partition("://")
    bucket, _, folder = rest.partition("/")
    spec = {"driver": {"gs": "gcs", "s3": "s3"}[kind], "bucket": bucket, "path": f"{folder}/"}
    # Other libraries read this variable, for storage that is not Amazon's. TensorStore does not.
    if kind == "s3" and (endpoint := os.environ.get("AWS_ENDPOINT_URL")):
        spec |= {"endpoint": endpoint, "aws_region": os.environ.get("AWS_DEFAULT_REGION", "auto")}
    return spec


def read_manifest(store: str) -> dict:
    """Reads the manifest of a store: `fingerprint`, `splits`, `left_out`, `empty` and `short`."""
    path = f"{store}/{MANIFEST}"
    try:
        content = storage.read_bytes(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{store}: no rows here (no {MANIFEST}); run python -m maelm_jax.prepare"
        ) from error
    with storage.reading(path, "remove the folder and run python -m maelm_jax.prepare again"):
        manifest = json.loads(content)
        result = {key: manifest[key] for key in ("fingerprint", "splits", "left_out")}
        return result | {"empty": manifest.get("empty", 0), "short": manifest.get("short", {})}


def open_stores(stores: dict[str, str]) -> dict[str, dict[str, Rows]]:
    """Opens stores, which share a cache.

    Args:
        stores: {source: the store's folder, on this machine or in a bucket}.

    Returns:
        {source: {"train": Rows, "heldout": Rows}}
    """
    in_bucket = any(map(storage.in_bucket, stores.values()))
    cache_bytes = BUCKET_CACHE if in_bucket else LOCAL_CACHE
    context = tensorstore.Context(
        {
            "cache_pool": {"total_bytes_limit": cache_bytes},
            "gcs_request_concurrency": {"limit": BUCKET_REQUESTS},
            "s3_request_concurrency": {"limit": BUCKET_REQUESTS},
        }
    )
    result = {}
    for source, store in stores.items():
        statistics = read_manifest(store)["splits"]
        result[source] = {split: Rows(store, split, statistics[split], context) for split in SPLITS}
    return result


def write(
    folder: pathlib.Path,
    blocks: typing.Callable[[str], typing.Iterable[np.ndarray]],
    counts: dict[str, dict[str, int]],
    length: int,
    dtype: np.dtype,
    left_out: dict[str, str],
    empty: int = 0,
    short: dict[str, dict[str, int]] | None = None,
):
    """Writes a store.

    Args:
        folder: The store's folder. Its parent exists.
        blocks: Returns the rows of a split, in order, in arrays of any number of rows.
        counts: {split: {name: number}} of COUNTS.
        length: Ids in a row.
        dtype: The type of ids.
        left_out: {file: why it was left out}, for `store.json`.
        empty: Number of rows of the source without text, for `store.json`.
        short: {file: numbers of its "documents" and "tokens"} of files with short documents, for
            `store.json`.

    Raises:
        RunError: The disk is full, or cannot be written to.
    """
    content_hash = hashlib.sha256()
    for split in SPLITS:
        try:
            _write_array(
                folder / split, blocks(split), (counts[split]["rows"], length), dtype, content_hash
            )
        except ValueError as error:  # TensorStore's error for every failure of the disk
            reason = " ".join(str(error).split())[:300]
            raise RunError(
                f"{folder}: the rows could not be written ({reason}); free some space or check the "
                "disk, then give the same command again: it joins the finished parts"
            ) from error
    manifest = {
        "fingerprint": content_hash.hexdigest(),
        "length": length,
        "splits": counts,
        "left_out": left_out,
        "empty": empty,
        "short": short or {},
    }
    storage.write(folder / MANIFEST, json.dumps(manifest, indent=1))


def _write_array(
    path: pathlib.Path,
    blocks: typing.Iterable[np.ndarray],
    shape: tuple[int, int],
    dtype: np.dtype,
    content_hash,
):
    """Writes one array and adds its bytes to `content_hash`."""
    inner = {
        "chunk_shape": [CHUNK_ROWS, shape[1]],
        "index_location": "start",
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ],
    }
    metadata = {
        "shape": shape,
        "data_type": dtype.name,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [SHARD_ROWS, shape[1]]},
        },
        "codecs": [{"name": "sharding_indexed", "configuration": inner}],
    }
    spec = {
        "driver": "zarr3",
        "kvstore": _kvstore(str(path)),
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,  # else a chunk of zeros would be missing
    }
    array = tensorstore.open(spec, create=True, delete_existing=True).result()
    start = 0
    for rows in _in_whole_files(blocks):
        content_hash.update(np.ascontiguousarray(rows))
        array[start : start + len(rows)].write(rows).result()
        start += len(rows)


def _in_whole_files(blocks: typing.Iterable[np.ndarray]) -> typing.Iterator[np.ndarray]:
    """Yields the rows in arrays that fill whole files, the last one apart."""
    waiting: list[np.ndarray] = []
    for block in blocks:
        waiting.append(block)
        if sum(map(len, waiting)) >= SHARD_ROWS:
            rows = np.concatenate(waiting)
            end = len(rows) - len(rows) % SHARD_ROWS
            yield rows[:end]
            waiting = [rows[end:]]
    if waiting:
        yield np.concatenate(waiting)


def digest(request: typing.Any) -> str:
    """Returns a short hash of what something was made of, for the name of its folder."""
    return hashlib.sha256(json.dumps(request).encode()).hexdigest()[:12]


def path_of(corpus: Corpus, name: str) -> str:
    """Returns the path of a file or folder in `Corpus.rows_dir`."""
    return f"{os.path.expanduser(corpus.rows_dir).rstrip('/')}/{name}"


def require_local(corpus: Corpus):
    """Raises Unavailable if `Corpus.rows_dir` is in a bucket, where nothing is prepared."""
    if storage.in_bucket(corpus.rows_dir):
        raise Unavailable(
            f"{corpus.rows_dir} holds no rows or vocabulary for these settings and this text; "
            "launch/prepare_data.sh makes them and copies them there"
        )


def remember(corpus: Corpus, name: str, value: typing.Any):
    """Keeps what was prepared last for the settings `name`, for machines without the text.

    `value` is anything that JSON can hold. Nothing is kept if `Corpus.rows_dir` is in a bucket or
    cannot be written.
    """
    path = path_of(corpus, f"{name}.json")
    if not storage.in_bucket(path) and recall(corpus, name) != value:
        with contextlib.suppress(OSError):
            storage.write(path, json.dumps(value, indent=1))


def recall(corpus: Corpus, name: str) -> typing.Any | None:
    """Returns what `remember` kept, here or in a bucket, None if there is nothing."""
    try:
        return storage.read_json(path_of(corpus, f"{name}.json"))
    except FileNotFoundError:
        return None
