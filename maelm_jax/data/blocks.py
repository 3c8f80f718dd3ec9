"""Tokenises and packs text in blocks, which processes and hosts share.

A block is about BLOCK_CHARACTERS of consecutive documents of one shard. Its limits do not depend
on the number of processes and hosts. Each block is packed into one file. The file is written under
a temporary name and then renamed, so an interrupted preparation keeps its finished blocks.

When all blocks of a shard are counted, the count is written to a mark file. The rows are complete
when every shard has its mark and all its blocks.
"""

import collections
import concurrent.futures
import dataclasses
import json
import logging
import multiprocessing
import os
import pathlib
import threading
import typing
import zipfile
import zlib

import numpy as np
import tqdm

from maelm_jax import config, json_files, storage
from maelm_jax.data import packing, sources
from maelm_jax.data import vocabulary as vocabularies
from maelm_jax.data.documents import is_heldout

SPLITS = ("train", "heldout")
BLOCK_CHARACTERS = 4_000_000  # a block ends at the first document that reaches this
COUNTS = ("documents", "bytes", "rows", "segments", "tokens")
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Job:
    """A block to tokenise if `documents` is set, else a shard to read and tokenise."""

    folder: pathlib.Path
    shard: sources.Shard
    number: int  # number of the shard
    length: int  # ids in a row
    owned: tuple[int, int] = (0, 1)  # (i, n): this host owns block b if (number + b) % n == i
    block: int = 0
    documents: list[str] | None = None


def block_path(folder: pathlib.Path, shard: int, block: int) -> pathlib.Path:
    """The file of one block."""
    return folder / f"{shard:06d}-{block:06d}.npz"


def mark_path(folder: pathlib.Path, shard: int) -> pathlib.Path:
    """The mark file of a shard, which holds the number of its blocks."""
    return folder / f"{shard:06d}.json"


def missing(folder: pathlib.Path, shard: int) -> bool:
    """Whether a block of the shard, or its mark, is not written yet."""
    if not mark_path(folder, shard).is_file():
        return True
    return not all(
        block_path(folder, shard, block).is_file() for block in range(_count(folder, shard))
    )


def all_written(folder: pathlib.Path, shards: int) -> bool:
    """Whether all blocks of `shards` shards, and their marks, are written."""
    return not any(missing(folder, shard) for shard in range(shards))


def finished(folder: pathlib.Path, shards: int) -> list[pathlib.Path]:
    """The files of all blocks of `shards` complete shards, in the order of their text."""
    counts = [_count(folder, shard) for shard in range(shards)]
    return [
        block_path(folder, shard, block)
        for shard, count in enumerate(counts)
        for block in range(count)
    ]


def _count(folder: pathlib.Path, shard: int) -> int:
    """The number of blocks that the shard's mark states."""
    path = mark_path(folder, shard)
    return json_files.read(path, _is_mark, f"remove {path} and start prepare again")["blocks"]


def _is_mark(value: typing.Any) -> bool:
    return isinstance(value, dict) and type(value.get("blocks")) is int and value["blocks"] >= 0


def read_counts(file: pathlib.Path) -> dict[str, dict[str, int]]:
    """The counts of one block, {split: {name: number}}, with the names in COUNTS.

    Raises:
        ConfigError: The file is damaged.
    """
    remedy = f"remove {file} and start prepare again"
    counts = json_files.parse(str(_read(file, "counts")), str(file), remedy)
    if not isinstance(counts, dict) or not all(
        _is_split_counts(counts.get(split)) for split in SPLITS
    ):
        raise config.ConfigError(f"{file}: damaged (its counts are not there); {remedy}")
    return counts


def _is_split_counts(value: typing.Any) -> bool:
    return isinstance(value, dict) and all(type(value.get(name)) is int for name in COUNTS)


def read_rows(file: pathlib.Path, split: str) -> np.ndarray:
    """The rows of one split of a block, [rows, length].

    Raises:
        ConfigError: The file is damaged.
    """
    return _read(file, split)


def _read(file: pathlib.Path, name: str) -> np.ndarray:
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
            _count(folder, shard)
        except config.ConfigError as error:
            _discard(path, error)
    for path in sorted(folder.glob(f"{shard:06d}-*.npz")):
        try:
            counts = read_counts(path)
            for split in SPLITS:
                if len(read_rows(path, split)) != counts[split]["rows"]:
                    raise config.ConfigError(
                        f"{path}: damaged (its rows are not as many as it says)"
                    )
        except config.ConfigError as error:
            _discard(path, error)


def _discard(path: pathlib.Path, error: config.ConfigError):
    log.warning("%s is made again: %s", path.name, str(error).partition(";")[0])
    path.unlink(missing_ok=True)


def write(
    folder: pathlib.Path, shards: list[sources.Shard], vocabulary: vocabularies.Vocabulary,
    length: int, host: int = 0, hosts: int = 1
):
    """Writes this host's share of the missing blocks. Shows a progress bar.

    Args:
        folder: The folder of the blocks.
        shards: All shards of the source.
        vocabulary: Turns text into ids.
        length: Ids in a row.
        host: Number of this host, from 0.
        hosts: Number of hosts that share the work.

    Raises:
        ConfigError: The text cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # With fewer shards than hosts, every host reads all shards and they divide the blocks.
    by_shard = len(shards) >= hosts
    owned = (0, 1) if by_shard else (host, hosts)
    jobs = [
        Job(folder, shard, number, length, owned)
        for number, shard in enumerate(shards)
        if not by_shard or number % hosts == host
    ]
    for job in jobs:
        remove_damaged(folder, job.number)
    jobs = [job for job in jobs if missing(folder, job.number)]
    if not jobs:
        return
    processes = jobs[0].shard.corpus.processes or len(os.sched_getaffinity(0))
    if processes > 1 and len(jobs) < 2 * processes:
        # Too few files to keep the processes busy: this one reads, the others tokenise.
        queue = (block for job in jobs for block in _blocks(job))
    else:
        queue = iter(jobs)
    source = jobs[0].shard.source
    with tqdm.tqdm(
        desc=f"rows of {source}"[:40], unit="B", unit_scale=True, disable=None, mininterval=0.5
    ) as bar:
        tokens = 0
        for counts in _results(queue, vocabulary, processes):
            tokens += counts["tokens"]
            bar.update(counts["bytes"])
            elapsed = bar.format_dict["elapsed"]
            bar.set_postfix_str(f"{tokens / max(elapsed, 1e-9) / 1e3:.0f}k tokens/s", refresh=False)


def _results(
    queue: typing.Iterator[Job], vocabulary: vocabularies.Vocabulary, processes: int
) -> typing.Iterator[dict[str, int]]:
    """Runs the jobs and yields the counts of each. Few jobs are in memory at a time."""
    if processes == 1:
        _worker["vocabulary"] = vocabulary
        for job in queue:
            yield _run(job)
        return
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(
        processes, mp_context=context, initializer=_start_worker, initargs=(vocabulary,)
    )
    try:
        pending: collections.deque = collections.deque()
        for job in queue:
            pending.append(pool.submit(_run, job))
            if len(pending) > 2 * processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


_worker: dict[str, vocabularies.Vocabulary] = {}


def _start_worker(vocabulary: vocabularies.Vocabulary):
    _worker["vocabulary"] = vocabulary
    # Without this thread, a worker whose parent was killed would wait for work forever.
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _run(job: Job) -> dict[str, int]:
    jobs = [job] if job.documents is not None else _blocks(job)
    done = [_write_block(block, _worker["vocabulary"]) for block in jobs]
    return {key: sum(counts[key] for counts in done) for key in ("bytes", "tokens")}


def _blocks(job: Job) -> typing.Iterator[Job]:
    """Reads a shard, yields its blocks that this host owns and lacks, then writes the mark."""
    number = 0

    def due(documents: list[str]) -> list[Job]:
        index, count = job.owned
        mine = (job.number + number) % count == index and not block_path(
            job.folder, job.number, number
        ).is_file()
        return [dataclasses.replace(job, block=number, documents=documents)] if mine else []

    documents, size = [], 0
    for document in job.shard.documents():
        documents.append(document)
        size += len(document)
        if size >= BLOCK_CHARACTERS:
            yield from due(documents)
            documents, size, number = [], 0, number + 1
    if documents:
        yield from due(documents)
        number += 1
    mark = mark_path(job.folder, job.number)
    # Hosts that share a shard count the same number, so the first mark stays. Host 0 removes the
    # folder after joining the rows, so a second write could fail.
    if not mark.is_file():
        storage.write(mark, json.dumps({"blocks": number}))


def _write_block(job: Job, vocabulary: vocabularies.Vocabulary) -> dict[str, int]:
    corpus = job.shard.corpus
    chosen: dict[str, list[str]] = {split: [] for split in SPLITS}
    for text in job.documents or []:
        chosen["heldout" if is_heldout(text, corpus.heldout_fraction) else "train"].append(
            text
        )
    arrays, counts = {}, {}
    for split, documents in chosen.items():
        rows, segments = packing.pack(documents, vocabulary, job.length)
        arrays[split] = rows.astype(dtype(vocabulary))
        values = (
            len(documents), sum(len(text.encode()) for text in documents), len(rows), segments,
            int((rows != vocabulary.pad).sum())
        )
        counts[split] = dict(zip(COUNTS, values, strict=True))
    with storage.atomic_file(block_path(job.folder, job.number, job.block)) as file:
        np.savez(file, counts=json.dumps(counts), **arrays)
    return {key: sum(counts[split][key] for split in SPLITS) for key in ("bytes", "tokens")}


def dtype(vocabulary: vocabularies.Vocabulary) -> np.dtype:
    """The integer type that ids are stored as."""
    return np.dtype(np.uint16 if vocabulary.size <= 65536 else np.uint32)
