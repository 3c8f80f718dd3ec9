"""SHA-256 of files, computed by threads and kept, so that an unchanged file is read once."""

import concurrent.futures
import functools
import re
import time
import typing

import tqdm

from maelm_jax import config, json_files
from maelm_jax.data import file_access, rows_dir, workers

HASH = re.compile("[0-9a-f]{64}")
FILE = "file_hashes.json"
UNREADABLE = "0" * 64  # stands for the hash of a file that is left out
KEEP_SECONDS = 30.0  # a process that is killed loses the hashes of at most so long
BAR_AFTER_SECONDS = 2.0


def of_files(files: list[str], corpus: config.Corpus) -> dict[str, str]:
    """Returns {file: SHA-256 in hex}. Shows a progress bar if it takes long.

    The hashes are kept under `corpus.rows_dir`, in a file that is written every KEEP_SECONDS.

    Raises:
        BadFile: A file cannot be read, and `corpus.skip_bad_files` is off.
    """
    record = rows_dir.local_folder(corpus) / FILE
    known = {}
    if record.is_file():
        known = json_files.read(record, _are_hashes, f"remove {record}; it is made again")
    result, fresh, kept_at = {}, False, time.monotonic()
    pool = concurrent.futures.ThreadPoolExecutor(workers.count(corpus))
    outcomes = pool.map(functools.partial(_outcome, known), files)
    bar = tqdm.tqdm(
        outcomes, desc="checksums", total=len(files), unit="file", disable=None, leave=False,
        delay=BAR_AFTER_SECONDS)
    try:
        for path, outcome in zip(files, bar, strict=True):
            if isinstance(outcome, OSError):
                if not corpus.skip_bad_files:
                    raise file_access.unreadable(path, outcome) from outcome
                result[path] = UNREADABLE
                continue
            key, result[path] = outcome
            fresh |= key not in known
            known[key] = result[path]
            if fresh and time.monotonic() - kept_at > KEEP_SECONDS:
                rows_dir.remember(record, known)
                fresh, kept_at = False, time.monotonic()
    finally:
        bar.close()
        pool.shutdown(cancel_futures=True)  # after an error, files that wait are not read
        if fresh:
            rows_dir.remember(record, known)
    return result


def _outcome(known: typing.Mapping[str, str], path: str) -> tuple[str, str] | OSError:
    """Returns the key of a file's version and its hash, or why it cannot be read."""
    try:
        version = file_access.version(path)
        if version.key in known:
            return version.key, known[version.key]
        return version.key, version.content_hash or file_access.content_hash(path)
    except OSError as error:
        return error


def _are_hashes(value: typing.Any) -> bool:
    return json_files.is_text_map(value) and all(map(HASH.fullmatch, value.values()))
