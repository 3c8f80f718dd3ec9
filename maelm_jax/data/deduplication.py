"""Finds documents whose exact text came before, in the order of a source's shards.

Each shard's documents are hashed into a file, by any number of processes and hosts. Then each host
sorts all hashes in memory, which takes about 60 bytes a document.
"""

import hashlib
import itertools
import pathlib
import typing

import numpy as np

from maelm_jax import config, storage
from maelm_jax.data import sources, waiting, workers
from maelm_jax.data.documents import BadFile

HASH_BYTES = 16  # two texts of a billion have the same hash with a probability of 1e-21


class HashJob(typing.NamedTuple):
    """A shard whose documents are hashed into a file."""

    path: pathlib.Path
    shard: sources.Shard


def hashes_path(folder: pathlib.Path, shard: int) -> pathlib.Path:
    """Returns the file of the hashes of a shard's documents, uint64 [documents, 2]."""
    return folder / f"{shard:06d}.hashes.npy"


def find(
    source: str,
    folder: pathlib.Path,
    shards: list[sources.Shard],
    host: int,
    hosts: int,
    is_complete: typing.Callable[[], bool],
) -> list[np.ndarray] | None:
    """Finds the duplicates of each shard, together with the other hosts.

    Args:
        source: Name of the source, for messages.
        folder: The folder of the blocks and hashes.
        shards: All shards of the source.
        host: Number of this host, from 0.
        hosts: Number of hosts that share the work.
        is_complete: Whether host 0 has written the store. It removes the hashes then.

    Returns:
        The result of `duplicates`, or None if the store is complete.
    """
    with waiting.beating(folder, host):
        write_hashes(folder, shards, host, hosts)
    waiting.for_hosts(source, folder, lambda: is_complete() or all_written(folder, len(shards)))
    return None if is_complete() else duplicates(folder, len(shards))


def write_hashes(folder: pathlib.Path, shards: list[sources.Shard], host: int = 0, hosts: int = 1):
    """Writes this host's share of the missing hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [
        HashJob(hashes_path(folder, number), shards[number])
        for number in range(host, len(shards), hosts)
        if not hashes_path(folder, number).is_file()
    ]
    if jobs:
        processes = min(workers.count(shards[0].corpus), len(jobs))
        for _ in workers.results(_write_hashes_of, jobs, processes):
            pass


def _write_hashes_of(job: HashJob):
    try:
        content = b"".join(_hash(text) for text in job.shard.documents())
    except BadFile:
        if not job.shard.corpus.skip_bad_files:
            raise
        content = b""  # the whole file is left out
    hashes = np.frombuffer(content, np.uint64).reshape(-1, 2)
    with storage.atomic_file(job.path) as file:
        np.save(file, hashes)


def _hash(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()


def all_written(folder: pathlib.Path, shards: int) -> bool:
    """Returns whether the hashes of all shards are written."""
    return all(hashes_path(folder, number).is_file() for number in range(shards))


def duplicates(folder: pathlib.Path, shards: int) -> list[np.ndarray]:
    """Returns the duplicates of each shard: positions of its documents, int64 [n], sorted."""
    hashes = [_read(hashes_path(folder, number)) for number in range(shards)]
    starts = np.cumsum([0, *map(len, hashes)])
    repeated = positions_repeated(np.concatenate(hashes))
    return [
        repeated[np.searchsorted(repeated, start) : np.searchsorted(repeated, end)] - start
        for start, end in itertools.pairwise(starts)
    ]


def _read(path: pathlib.Path) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise config.ConfigError(
            f"{path}: damaged ({' '.join(str(error).split())[:200]}); "
            "remove it and start prepare again"
        ) from error


def positions_repeated(hashes: np.ndarray) -> np.ndarray:
    """Returns the sorted positions of the hashes [n, 2] that equal an earlier one."""
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # equal hashes keep their order
    ordered = hashes[order]
    equal = (ordered[1:] == ordered[:-1]).all(axis=1)
    return np.sort(order[1:][equal])


def distinct(texts: typing.Iterable[str]) -> typing.Iterator[str]:
    """Yields each text once."""
    seen = set()
    for text in texts:
        key = _hash(text)
        if key not in seen:
            seen.add(key)
            yield text
