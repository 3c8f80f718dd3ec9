"""Checksums of a checkpoint, in a file of its folder that is written last.

Orbax does not cover the data: OCDBT has checksums for its index nodes only, and zarr and zstd
have none for the bytes of the arrays.
"""

import base64
import concurrent.futures
import hashlib
import json

from maelm_jax import storage

FILE = "checksums.json"
# Without a checksum: Orbax writes the last two when it commits. They hold times, no data.
UNCOVERED = (FILE, "_CHECKPOINT_METADATA", "commit_success.txt")
THREADS = 8


class Damaged(Exception):
    """A file differs from what was written: a checksum differs, or the file is missing."""


def write(folder: str):
    """Writes the checksums of all files of a checkpoint into its folder.

    Args:
        folder: The folder of one step, on this machine or in a bucket.
    """
    files, root = storage.file_system(folder)
    # By default fsspec omits what it cannot list.
    strict = {} if storage.in_bucket(folder) else {"on_error": "raise"}
    listed = {
        path[len(root) :].lstrip("/"): info
        for path, info in files.find(root, detail=True, **strict).items()
        if info["type"] == "file"
    }
    covered = [name for name in sorted(listed) if name not in UNCOVERED]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        entries = dict(
            zip(
                covered,
                pool.map(lambda name: _entry(files, root, name, listed[name]), covered),
                strict=True,
            )
        )
    content = {"files": entries, "sha256": _own_digest(entries)}
    files.pipe_file(f"{root}/{FILE}", json.dumps(content, indent=1).encode() + b"\n")


def verify(folder: str, part: int = 0, parts: int = 1) -> bool:
    """Compares the files of a checkpoint with their checksums.

    In a multi-process run each process reads its share of the files.

    Args:
        folder: The folder of one step, on this machine or in a bucket.
        part: Number of this process, from 0.
        parts: Number of processes.

    Returns:
        False if the folder has no checksums, because an older version wrote it.

    Raises:
        Damaged: A file is missing or differs. The message names it.
        OSError: A file cannot be read. Libraries for buckets raise exceptions of their own.
    """
    files, root = storage.file_system(folder)
    try:
        entries = _read(files.cat_file(f"{root}/{FILE}"))
    except FileNotFoundError:
        return False
    mine = sorted(entries)[part::parts]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(lambda name: _compare(files, root, name, entries[name]), mine):
            pass
    return True


def _entry(files, root: str, name: str, info: dict) -> dict:
    md5 = _md5_in_bucket(info)
    checksum = {"md5": md5} if md5 else {"sha256": _digest(files, f"{root}/{name}", "sha256")}
    return {"size": info["size"], **checksum}


def _compare(files, root: str, name: str, entry: dict):
    """Raises Damaged if a file is missing or differs from its entry."""
    try:
        info = files.info(f"{root}/{name}")
        if info["size"] != entry["size"]:
            raise Damaged(f"{name} holds {info['size']} bytes of {entry['size']}")
        # An entry made in a bucket holds MD5. The folder may have been copied to a disk since.
        if "md5" in entry:
            is_equal = entry["md5"] == (
                _md5_in_bucket(info) or _digest(files, f"{root}/{name}", "md5")
            )
        else:
            is_equal = entry["sha256"] == _digest(files, f"{root}/{name}", "sha256")
    except FileNotFoundError as error:
        raise Damaged(f"{name} is missing") from error
    if not is_equal:
        raise Damaged(f"{name} differs from its checksum")


def _md5_in_bucket(info: dict) -> str | None:
    """Returns the MD5 (hex) that Google Cloud Storage keeps of an object. Reads no data."""
    return base64.b64decode(info["md5Hash"]).hex() if info.get("md5Hash") else None


def _digest(files, path: str, algorithm: str) -> str:
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with files.open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _own_digest(entries: dict) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _read(content: bytes) -> dict[str, dict]:
    """Returns the entries of checksums.json. Raises Damaged if their own checksum differs."""
    try:
        parsed = json.loads(content)
        entries, digest = parsed["files"], parsed["sha256"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damaged(f"{FILE} is not what was written") from error
    if digest != _own_digest(entries):
        raise Damaged(f"{FILE} is not what was written")
    return entries
