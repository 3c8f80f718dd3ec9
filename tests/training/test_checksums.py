"""Checksums of a checkpoint."""

import json

import checkpoint_folders

from maelm_jax import storage
from maelm_jax.training import checksums


def test_checksums_written_in_a_bucket_hold_for_a_copy_of_it(workdir):
    """Google Cloud Storage keeps the MD5 of an object; a folder copied out of it is checked by the same sums."""
    path = workdir / "checkpoints" / "2" / "checksums.json"
    entries = json.loads(path.read_text())["files"]
    files, root = storage.file_system(str(path.parent))
    entries = {name: {"size": entry["size"], "md5": checksums._digest(files, f"{root}/{name}", "md5")} for name, entry in entries.items()}
    path.write_text(json.dumps({"files": entries, "sha256": checksums._own_digest(entries)}))
    assert checkpoint_folders.restore(workdir)[0] == 2
    checkpoint_folders.flip(path.parent / max(entries, key=lambda name: entries[name]["size"]), 8)
    assert checkpoint_folders.restore(workdir)[0] == 1
