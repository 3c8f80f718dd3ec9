"""Finds documents whose exact text came before, in the order of a source's shards.

Each shard's documents are hashed into a file, by any number of processes and hosts. Then each host
sorts all hashes. The 16 bytes a document fit into memory for a billion documents.
"""

import concurrent.futures
import hashlib
import itertools
import multiprocessing
import os
import pathlib
import typing

import numpy as np

from maelm_jax import config, storage
from maelm_jax.data import sources
from maelm_jax.data.documents import BadFile

HASH_BYTES = 16  # two texts of a billion have the same hash with a probability of 1e-21


def hashes_path(folder: pathlib.Path, shard: int) -> pathlib.Path:
    """Returns the file of the hashes of a shard's documents, uint64 [documents, 2]."""
    return folder / f"{shard:06d}.hashes.npy"


def write_hashes(
    folder: pathlib.Path, shards: list[sources.Shard], host: int = 0, hosts: int = 1
):
    """Writes this host's share of the missing hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [
        number for number in range(host, len(shards), hosts)
        if not hashes_path(folder, number).is_file()]
    if not missing:
        return
    processes = shards[0].corpus.processes or len(os.sched_getaffinity(0))
    if min(processes, len(missing)) == 1:
        for number in missing:
            _write_hashes_of(hashes_path(folder, number), shards[number])
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        paths = [hashes_path(folder, number) for number in missing]
        list(pool.map(_write_hashes_of, paths, [shards[number] for number in missing]))


def _write_hashes_of(path: pathlib.Path, shard: sources.Shard):
    try:
        content = b"".join(_hash(text) for text in shard.documents())
    except BadFile:
        if not shard.corpus.skip_bad_files:
            raise
        content = b""  # the whole file is left out
    hashes = np.frombuffer(content, np.uint64).reshape(-1, 2)
    with storage.atomic_file(path) as file:
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
    repeated = repeated_rows(np.concatenate(hashes))
    return [
        repeated[np.searchsorted(repeated, start) : np.searchsorted(repeated, end)] - start
        for start, end in itertools.pairwise(starts)]


def _read(path: pathlib.Path) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise config.ConfigError(
            f"{path}: damaged ({' '.join(str(error).split())[:200]}); "
            "remove it and start prepare again") from error


def repeated_rows(rows: np.ndarray) -> np.ndarray:
    """Returns the positions of the rows of a table [n, 2] that stand further up as well, sorted."""
    order = np.lexsort((rows[:, 1], rows[:, 0]))  # equal rows keep their order
    ordered = rows[order]
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
