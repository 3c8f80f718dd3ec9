"""Checksums of a checkpoint: a file in its folder, written last, that every reader compares with what is there.

Orbax's own format does not cover the data: OCDBT checks its index nodes only, and neither zarr nor zstd the arrays' bytes.
"""

import base64
import concurrent.futures
import hashlib
import json

from maelm_jax import storage

FILE = "checksums.json"
UNCOVERED = (FILE, "_CHECKPOINT_METADATA", "commit_success.txt")  # Orbax writes the latter two when it commits; they hold times, no data
THREADS = 8


class Damaged(Exception):
    """What is on disk is not what was written: proven by a checksum, or by a file that is missing."""


def write(folder: str):
    """Writes the checksums of all files of a checkpoint into its folder (on this machine, or in a bucket)."""
    files, root = storage.file_system(folder)
    strict = {} if storage.in_bucket(folder) else {"on_error": "raise"}  # by default fsspec leaves out what it cannot list
    listed = {path[len(root) :].lstrip("/"): info for path, info in files.find(root, detail=True, **strict).items() if info["type"] == "file"}
    covered = [name for name in sorted(listed) if name not in UNCOVERED]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        entries = dict(zip(covered, pool.map(lambda name: _entry(files, root, name, listed[name]), covered), strict=True))
    content = {"files": entries, "sha256": _own_digest(entries)}
    files.pipe_file(f"{root}/{FILE}", json.dumps(content, indent=1).encode() + b"\n")


def verify(folder: str, part: int = 0, parts: int = 1) -> bool:
    """Compares a checkpoint's folder with its checksums; False when it has none (they were not kept before).

    Of several processes each reads its share of the files: `part` is the number of this one, from 0, of `parts`.
    Raises Damaged, naming the file, and whatever the storage raises (OSError, on a disk) when a file cannot be read.
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
    kept = _kept_by_bucket(info)
    checksum = {"md5": kept} if kept else {"sha256": _digest(files, f"{root}/{name}", "sha256")}
    return {"size": info["size"], **checksum}


def _compare(files, root: str, name: str, entry: dict):
    """Raises Damaged unless a file is there and is what it was."""
    try:
        info = files.info(f"{root}/{name}")
        if info["size"] != entry["size"]:
            raise Damaged(f"{name} holds {info['size']} bytes of {entry['size']}")
        if "md5" in entry:  # written in a bucket; the folder may have been copied out of it since
            same = entry["md5"] == (_kept_by_bucket(info) or _digest(files, f"{root}/{name}", "md5"))
        else:
            same = entry["sha256"] == _digest(files, f"{root}/{name}", "sha256")
    except FileNotFoundError as error:
        raise Damaged(f"{name} is missing") from error
    if not same:
        raise Damaged(f"{name} differs from its checksum")


def _kept_by_bucket(info: dict) -> str | None:
    """The MD5 of an object, in hex, that Google Cloud Storage computed when it took the object; nothing need be read for it."""
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
    """The entries of checksums.json. Raises Damaged unless they agree with their own checksum."""
    try:
        parsed = json.loads(content)
        entries, digest = parsed["files"], parsed["sha256"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damaged(f"{FILE} is not what was written") from error
    if digest != _own_digest(entries):
        raise Damaged(f"{FILE} is not what was written")
    return entries
