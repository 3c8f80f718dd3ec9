"""Fixed-length rows of ids on disk: prepared once per (source, vocabulary, length), then read at random.

A store is a folder `<source>-<request>-<content>` under `rows_dir`: one zarr3 array per split, and `store.json`, written last, without which it is
not whole. `request` is a hash of what was asked for, `content` one of the text; where the text itself is not at hand (a GPU node that got the rows
copied over), the store of the same request is taken. How rows are made of text is told in packing.py, how the work is shared in blocks.py.
"""

import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import time
import typing

import numpy as np
import tensorstore

from maelm_jax import config, storage
from maelm_jax.data import blocks, packing, sources
from maelm_jax.data import vocabulary as vocabularies

VERSION = 1  # of what is written: part of every key
CHUNK_ROWS = 16  # the least that is read from disk at a time
SHARD_ROWS = 4096  # rows in one file of the store
POLL_SECONDS = 2.0  # between looks at what other hosts have done
SILENCE_SECONDS = 1800  # after which a host that waits for the others gives up; a block takes seconds, joining a large store minutes
log = logging.getLogger(__name__)


class Rows:
    """Rows of one split: `len(rows)`, `length` (ids in a row), `statistics` (see `_statistics`), `rows[numbers]`."""

    def __init__(self, array: tensorstore.TensorStore, statistics: dict[str, float]):
        self.array = array
        self.statistics = statistics
        self.length: int = array.shape[1]

    @classmethod
    def open(cls, path: str | os.PathLike, split: str = "train") -> "Rows":
        """Opens a split ("train" or "heldout") of the store in the folder `path`. Raises ConfigError when there is no whole store."""
        manifest = pathlib.Path(path) / "store.json"
        if not manifest.is_file():
            raise config.ConfigError(f"{path}: no whole store of rows here (no store.json); run python -m maelm_jax.prepare")
        statistics = json.loads(manifest.read_text())["splits"][split]
        return cls(tensorstore.open(_spec(pathlib.Path(path) / split), read=True, open=True).result(), statistics)

    def __len__(self) -> int:
        return self.array.shape[0]

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        """The rows of these numbers (int [n], any order, repeats allowed), int32 [n, length]."""
        numbers = np.asarray(numbers, np.int64)
        if numbers.size == 0:
            return np.zeros((0, self.length), np.int32)
        return self.array.oindex[numbers].read().result().astype(np.int32)


def prepare(corpus: config.Corpus, vocabulary: vocabularies.Vocabulary, host: int = 0, hosts: int = 1) -> dict[str, dict[str, Rows]]:
    """The rows of each source of the corpus, {source: {"train": Rows, "heldout": Rows}}; made first where they are not there yet.

    Of several hosts with one `rows_dir`, each tokenises its share; host 0 joins the shares, the others wait for it. Rows come out the same whatever
    the number of hosts and processes. Raises ConfigError for a source that cannot be read, or that has too little text for one row.
    """
    result = {}
    for source, path in _stores(corpus, vocabulary).items():
        if not (path / "store.json").is_file():
            _make(path, source, corpus, vocabulary, host, hosts)
        result[source] = {split: Rows.open(path, split) for split in blocks.SPLITS}
        if not len(result[source]["train"]):
            raise config.ConfigError(f"{source}: no text left to train on; the source is too short, or Corpus.heldout_fraction too large")
    return result


def prepared(corpus: config.Corpus, vocabulary: vocabularies.Vocabulary) -> bool:
    """Whether the rows of every source are there already."""
    return all((path / "store.json").is_file() for path in _stores(corpus, vocabulary).values())


def _stores(corpus: config.Corpus, vocabulary: vocabularies.Vocabulary) -> dict[str, pathlib.Path]:
    """The folder of each source's rows, there or not."""
    result = {}
    for source in sources.rates(corpus):
        request = json.dumps([VERSION, source, corpus.json_field, vocabulary.fingerprint, corpus.sequence_length, corpus.heldout_fraction])
        result[source] = _find(corpus, _slug(source), request, [source], "store.json")
    return result


def vocabulary_for(settings: config.Vocabulary, corpus: config.Corpus) -> vocabularies.Vocabulary:
    """The vocabulary of `settings.file`, or one trained on the corpus (its sources by their rates, no held-out document), kept under `rows_dir`."""
    if settings.file:
        return vocabularies.load(settings.file)
    rates = sources.rates(corpus)
    request = json.dumps([VERSION, vocabularies.describe(settings), sorted(rates.items()), corpus.json_field, corpus.heldout_fraction])
    name = vocabularies.SentencePieceVocabulary.FILE
    path = _find(corpus, "vocabulary", request, list(rates), name)
    if not (path / name).is_file():
        _not_in_bucket(corpus, "vocabulary")
        started = time.monotonic()
        sampled = (vocabularies.sample(_training_text(source, corpus), settings.sample_megabytes * rate) for source, rate in rates.items())
        trained = vocabularies.train((text for texts in sampled for text in texts), settings)
        trained.save(path)
        log.info("vocabulary of %d ids trained in %.0f s, kept in %s", trained.size, time.monotonic() - started, path)
    return vocabularies.load(path)


def _training_text(source: str, corpus: config.Corpus) -> typing.Iterator[str]:
    return (text for text in sources.documents(source, corpus) if not packing.is_heldout(text, corpus.heldout_fraction))


def _slug(source: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", source).strip("_")[-60:]


def _find(corpus: config.Corpus, slug: str, request: str, names: list[str], manifest: str) -> pathlib.Path:
    """The folder of what was asked for. Where a source is not (wholly) on this machine: the newest whole folder of the same request, if any."""
    prefix = f"{slug}-{hashlib.sha256(request.encode()).hexdigest()[:12]}"
    folder = storage.here(corpus.rows_dir)
    if storage.in_bucket(corpus.rows_dir):  # rows are read at random, which a bucket is slow at: the whole store is copied, once
        storage.fetch_folders(corpus.rows_dir, f"{prefix}-*", manifest)
    try:
        content = "".join(sources.identity(name, corpus) for name in names)
    except sources.Unavailable as error:
        whole = [path.parent for path in folder.glob(f"{prefix}-*/{manifest}")]
        if whole:
            newest = max(whole, key=lambda path: (path / manifest).stat().st_mtime)
            log.warning("%s; taking what was prepared before: %s", error, newest)
            return newest
        content = "".join(sources.identity(name, corpus, partial=True) for name in names)
    return folder / f"{prefix}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def _not_in_bucket(corpus: config.Corpus, what: str):
    if storage.in_bucket(corpus.rows_dir):
        raise config.ConfigError(f"{corpus.rows_dir} holds no {what} for these settings; launch/prepare_data.sh makes it and copies it there")


def _make(path: pathlib.Path, source: str, corpus: config.Corpus, vocabulary: vocabularies.Vocabulary, host: int, hosts: int):
    _not_in_bucket(corpus, f"whole store of the rows of {source}")
    started = time.monotonic()
    folder = path.with_name(path.name + ".parts")
    shards = sources.shards(source, corpus)
    try:
        blocks.write(folder, shards, vocabulary, corpus.sequence_length, host, hosts)
    except FileNotFoundError:  # host 0 had every block, joined them and cleared the folder while this host was still counting
        if not (path / "store.json").is_file():
            raise
    seen, since = None, time.monotonic()
    while not (path / "store.json").is_file():
        if host == 0 and not any(blocks.missing(folder, number) for number in range(len(shards))):
            _join(path, blocks.finished(folder, len(shards)), source, vocabulary, corpus.sequence_length)
            shutil.rmtree(folder, ignore_errors=True)
            break
        if seen is None:
            log.warning("%s: waiting for the other hosts' share of %s", source, folder)
        if (files := len(list(folder.glob("*")))) != seen:
            seen, since = files, time.monotonic()
        elif time.monotonic() - since > SILENCE_SECONDS and not (path / "store.json").is_file():
            raise config.RunError(f"{folder}: no host wrote anything for {SILENCE_SECONDS / 60:.0f} minutes; start prepare again where it ended")
        time.sleep(POLL_SECONDS)
    total = json.loads((path / "store.json").read_text())["splits"]
    size = sum(total[split]["bytes"] for split in blocks.SPLITS) / 1e6
    log.info("%s: %.1f MB of text in %.0f s, kept in %s", source, size, time.monotonic() - started, path)


def _join(path: pathlib.Path, files: list[pathlib.Path], source: str, vocabulary: vocabularies.Vocabulary, length: int):
    """Blocks -> the arrays of the store, then its manifest."""
    counts = []
    for file in files:
        with np.load(file) as block:
            counts.append(json.loads(str(block["counts"])))
    manifest: dict = {"version": VERSION, "source": source, "vocabulary": vocabulary.fingerprint, "length": length, "splits": {}}
    for split in blocks.SPLITS:
        total = {key: sum(count[split][key] for count in counts) for key in blocks.COUNTS}
        spec = _spec(path / split) | {"metadata": _metadata(total["rows"], length, blocks.dtype(vocabulary))}
        array = tensorstore.open(spec, create=True, delete_existing=True).result()
        start, waiting = 0, [np.zeros((0, length), blocks.dtype(vocabulary))]
        for file in files:
            with np.load(file) as block:
                waiting.append(block[split])
            if sum(map(len, waiting)) >= SHARD_ROWS:  # files of the store are written whole, never read back and added to
                rows = np.concatenate(waiting)
                end = len(rows) - len(rows) % SHARD_ROWS
                array[start : start + end].write(rows[:end]).result()
                start, waiting = start + end, [rows[end:]]
        rest = np.concatenate(waiting)
        if len(rest):
            array[start : start + len(rest)].write(rest).result()
        manifest["splits"][split] = _statistics(total, length)
    storage.write(path / "store.json", json.dumps(manifest, indent=1))


def _statistics(total: dict[str, int], length: int) -> dict[str, float]:
    """The counts (documents, bytes of UTF-8 text, rows, segments, tokens: ids but padding), `mean_segment` in ids, `fill`: share of slots filled."""
    segment = total["tokens"] / max(total["segments"], 1)
    return total | {"mean_segment": round(segment, 2), "fill": round(total["tokens"] / max(total["rows"] * length, 1), 5)}


def _spec(path: pathlib.Path) -> dict:
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path.absolute()}/"},
        "context": {"cache_pool": {"total_bytes_limit": 256_000_000}},
        "recheck_cached_data": "open",
        "recheck_cached_metadata": "open",
    }


def _metadata(rows: int, length: int, dtype: np.dtype) -> dict:
    inner = {"chunk_shape": [CHUNK_ROWS, length], "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]}
    return {
        "shape": [rows, length],
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [SHARD_ROWS, length]}},
        "codecs": [{"name": "sharding_indexed", "configuration": inner}],
    }
