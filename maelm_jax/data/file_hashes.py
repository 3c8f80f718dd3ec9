"""SHA-256 of files, computed by threads and kept, so that an unchanged file is read once."""

import concurrent.futures
import contextlib
import pathlib
import re
import time
import typing

import tqdm

from maelm_jax import config, json_files
from maelm_jax.data import file_access, rows_dir, waiting, workers
from maelm_jax.data.documents import BadFile

HASH = re.compile("[0-9a-f]{64}")
FILE = "file_hashes.json"
UNREADABLE = "0" * 64  # stands for the hash of a file that is left out
KEEP_SECONDS = 30.0  # a process that is killed loses the hashes of at most so long
BAR_AFTER_SECONDS = 2.0


def of_files(files: list[str], corpus: config.Corpus) -> dict[str, str]:
    """Returns {file: SHA-256 in hex}. Shows a progress bar if it takes long.

    The hashes of local files are kept under `corpus.rows_dir`, in a file that is written every
    KEEP_SECONDS. Of several processes that start together, one reads the files.

    Raises:
        BadFile: A file cannot be read, and `corpus.skip_bad_files` is off.
        RunError: A file cannot be read at the moment.
    """
    record = rows_dir.local_folder(corpus) / FILE
    known = _kept(record)
    pool = concurrent.futures.ThreadPoolExecutor(workers.count(corpus))
    try:
        versions, failed = {}, set()
        for path, version in zip(files, pool.map(_version, files), strict=True):
            if isinstance(version, OSError):
                failed.add(_left_out(path, version, corpus))
            else:
                versions[path] = version
        if _unread(versions, known):
            with _alone(record):
                known |= _kept(record)
                failed |= _read(_unread(versions, known), known, record, pool, corpus)
    finally:
        pool.shutdown(cancel_futures=True)  # after an error, files that wait are not read
    return {
        path: UNREADABLE
        if path in failed
        else versions[path].content_hash or known[versions[path].key]
        for path in files
    }


def _kept(record: pathlib.Path) -> dict[str, str]:
    """Returns {key of a version: hash} of a file of hashes, {} if there is none."""
    if not record.is_file():
        return {}
    return json_files.read(record, _are_hashes, f"remove {record}; it is made again")


def _are_hashes(value: typing.Any) -> bool:
    return json_files.is_text_map(value) and all(map(HASH.fullmatch, value.values()))


def _version(path: str) -> file_access.Version | OSError:
    try:
        return file_access.version(path)
    except OSError as error:
        return error


def _left_out(path: str, error: OSError, corpus: config.Corpus) -> str:
    """Returns the path of a file that may be left out. Else raises BadFile or RunError."""
    meaning = file_access.unreadable(path, error)
    if corpus.skip_bad_files and isinstance(meaning, BadFile):
        return path
    raise meaning from error


def _unread(versions: dict[str, file_access.Version], known: dict[str, str]) -> dict[str, str]:
    """Returns {file: key of its version} of the files whose hash must be computed."""
    return {
        path: version.key
        for path, version in versions.items()
        if version.content_hash is None and version.key not in known
    }


@contextlib.contextmanager
def _alone(record: pathlib.Path) -> typing.Iterator[None]:
    """Context manager that waits while another process computes hashes for the same file."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a read-only disk: nobody can keep hashes there
            lock = record.with_suffix(".lock")
            stack.enter_context(waiting.only_process(lock, "computes checksums of the text"))
        yield


def _read(
    keys: dict[str, str],
    known: dict[str, str],
    record: pathlib.Path,
    pool: concurrent.futures.ThreadPoolExecutor,
    corpus: config.Corpus,
) -> set[str]:
    """Computes hashes, adds them to `known` and keeps them. Returns the files that failed.

    Args:
        keys: {file: key of its version}.
        known: {key: hash}.
        record: The file that keeps `known`.
        pool: The threads.
        corpus: Says whether a file may fail.
    """
    failed, kept_at = set(), time.monotonic()
    with tqdm.tqdm(
        desc="checksums",
        total=len(keys),
        unit="file",
        disable=None,
        leave=False,
        delay=BAR_AFTER_SECONDS,
    ) as bar:
        try:
            for path, outcome in zip(keys, pool.map(_hash, keys), strict=True):
                bar.update()
                if isinstance(outcome, OSError):
                    failed.add(_left_out(path, outcome, corpus))
                    continue
                known[keys[path]] = outcome
                if time.monotonic() - kept_at > KEEP_SECONDS:
                    rows_dir.remember(record, known)
                    kept_at = time.monotonic()
        finally:
            rows_dir.remember(record, known)
    return failed


def _hash(path: str) -> str | OSError:
    try:
        return file_access.content_hash(path)
    except OSError as error:
        return error
