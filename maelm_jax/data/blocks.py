"""Tokenises and packs text in blocks, which processes and hosts share.

A block is about BLOCK_CHARACTERS of consecutive documents of one shard. Its limits do not depend
on the number of processes and hosts. Each block is packed into one file. The file is written under
a temporary name and then renamed, so an interrupted preparation keeps its finished blocks.

When all blocks of a shard are counted, the count is written to a mark file. The rows are complete
when every shard has its mark and all its blocks.
"""

import collections
import dataclasses
import json
import pathlib
import typing

import numpy as np
import tqdm

from maelm_jax import storage
from maelm_jax.data import block_files, cleaning, packing, sources, vocabularies, workers
from maelm_jax.data.documents import BadFile, is_heldout

BLOCK_CHARACTERS = 4_000_000  # a block ends at the first document that reaches this


NO_DUPLICATES = np.zeros(0, np.int64)


@dataclasses.dataclass(frozen=True)
class Job:
    """A block to tokenise if `documents` is set, else a shard to read and tokenise."""

    folder: pathlib.Path
    shard: sources.Shard
    number: int  # number of the shard
    length: int  # ids in a row
    owned: tuple[int, int] = (0, 1)  # (i, n): this host owns block b if (number + b) % n == i
    # Positions of the shard's documents that came before, int64 [n], sorted.
    duplicates: np.ndarray = dataclasses.field(default_factory=lambda: NO_DUPLICATES)
    block: int = 0
    documents: list[str] | None = None


def write(
    folder: pathlib.Path,
    shards: list[sources.Shard],
    vocabulary: vocabularies.Vocabulary,
    length: int,
    host: int = 0,
    hosts: int = 1,
    duplicates: list[np.ndarray] | None = None,
):
    """Writes this host's share of the missing blocks. Shows a progress bar.

    Args:
        folder: The folder of the blocks.
        shards: All shards of the source.
        vocabulary: Turns text into ids.
        length: Ids in a row.
        host: Number of this host, from 0.
        hosts: Number of hosts that share the work.
        duplicates: For each shard, positions of its documents that are left out.

    Raises:
        ConfigError: The text cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # With fewer shards than hosts, every host reads all shards and they divide the blocks.
    by_shard = len(shards) >= hosts
    owned = (0, 1) if by_shard else (host, hosts)
    jobs = [
        Job(folder, shard, number, length, owned, *([duplicates[number]] if duplicates else []))
        for number, shard in enumerate(shards)
        if not by_shard or number % hosts == host
    ]
    for job in jobs:
        block_files.remove_damaged(folder, job.number)
    jobs = [job for job in jobs if block_files.missing(folder, job.number)]
    if not jobs:
        return
    processes = workers.count(jobs[0].shard.corpus)
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
        for counts in workers.results(_run, queue, processes, vocabulary):
            tokens += counts["tokens"]
            bar.update(counts["bytes"])
            elapsed = bar.format_dict["elapsed"]
            bar.set_postfix_str(f"{tokens / max(elapsed, 1e-9) / 1e3:.0f}k tokens/s", refresh=False)


def write_shard(job: Job, vocabulary: vocabularies.Vocabulary):
    """Writes the missing blocks of one shard."""
    job.folder.mkdir(parents=True, exist_ok=True)
    block_files.remove_damaged(job.folder, job.number)
    if block_files.missing(job.folder, job.number):
        _run(job, vocabulary)


def _run(job: Job, vocabulary: vocabularies.Vocabulary) -> dict[str, int]:
    jobs = [job] if job.documents is not None else _blocks(job)
    done = [_write_block(block, vocabulary) for block in jobs]
    return {key: sum(counts[key] for counts in done) for key in ("bytes", "tokens")}


def _blocks(job: Job) -> typing.Iterator[Job]:
    """Reads a shard, yields its blocks that this host owns and lacks, then writes the mark."""
    left_out = block_files.LeftOut(collections.Counter(), {})
    count = 0
    try:
        for count, documents in enumerate(_cut(_new_documents(job, left_out.documents)), start=1):
            block = count - 1
            path = block_files.block_path(job.folder, job.number, block)
            index, hosts = job.owned
            if (job.number + block) % hosts == index and not path.is_file():
                # A worker process gets the job. The documents are without duplicates by now.
                yield dataclasses.replace(
                    job, block=block, documents=documents, duplicates=NO_DUPLICATES
                )
    except BadFile as error:
        if not job.shard.corpus.skip_bad_files:
            raise
        count = 0
        left_out = block_files.LeftOut(collections.Counter(), {job.shard.path: str(error)})
    block_files.write_mark(job.folder, job.number, count, left_out)


def _new_documents(job: Job, dropped: collections.Counter[str]) -> typing.Iterator[str]:
    """Reads the documents of a shard that are no duplicates. Counts those that are left out."""
    duplicates = set(job.duplicates.tolist())
    for position, document in enumerate(job.shard.documents(dropped)):
        if position in duplicates:
            dropped[cleaning.DUPLICATE] += 1
        else:
            yield document


def _cut(documents: typing.Iterable[str]) -> typing.Iterator[list[str]]:
    """Cuts documents into blocks."""
    block: list[str] = []
    size = 0
    for document in documents:
        block.append(document)
        size += len(document)
        if size >= BLOCK_CHARACTERS:
            yield block
            block, size = [], 0
    if block:
        yield block


def _write_block(job: Job, vocabulary: vocabularies.Vocabulary) -> dict[str, int]:
    corpus = job.shard.corpus
    chosen: dict[str, list[str]] = {split: [] for split in block_files.SPLITS}
    for text in job.documents or []:
        chosen["heldout" if is_heldout(text, corpus.heldout_fraction) else "train"].append(text)
    arrays, counts = {}, {}
    for split, documents in chosen.items():
        rows, segments = packing.pack(documents, vocabulary, job.length)
        arrays[split] = rows.astype(dtype(vocabulary))
        values = (
            len(documents),
            sum(len(text.encode()) for text in documents),
            len(rows),
            segments,
            int((rows != vocabulary.pad).sum()),
        )
        counts[split] = dict(zip(block_files.COUNTS, values, strict=True))
    with storage.atomic_file(block_files.block_path(job.folder, job.number, job.block)) as file:
        np.savez(file, counts=json.dumps(counts), **arrays)
    return {key: sum(count[key] for count in counts.values()) for key in ("bytes", "tokens")}


def dtype(vocabulary: vocabularies.Vocabulary) -> np.dtype:
    """Returns the integer type that ids are stored as."""
    return np.dtype(np.uint16 if vocabulary.size <= 65536 else np.uint32)
