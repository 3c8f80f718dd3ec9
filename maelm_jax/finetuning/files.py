"""Finds files of labelled data; reads JSON files and TFDS records.

Each file can be packed (data/readers.py).
"""

import os
import pathlib
import typing

from maelm_jax import config, json_files
from maelm_jax.data import readers


def locate(data_dir: str, *names: str) -> pathlib.Path | None:
    """Finds a file of a data set, packed or not.

    Args:
        data_dir: Folder to search, together with its folders glue/ and squad/.
        *names: Paths relative to these folders.

    Returns:
        The path of the first of `names` that exists; None when there is none.

    Raises:
        ConfigError: There is no folder `data_dir`.
    """
    root = pathlib.Path(os.path.expanduser(data_dir))
    if not os.path.isdir(root):
        raise config.ConfigError(
            f"DATA_DIR: no folder {data_dir}; give the folder that holds GLUE's folders "
            "or SQuAD's files, or None for TFDS"
        )
    candidates = [
        root / folder / (name + packing)
        for name in names
        for folder in ("", "glue", "squad")
        for packing in ("", *readers.PACKINGS)
    ]
    return next((path for path in candidates if os.path.isfile(path)), None)


def read_json(path: str | pathlib.Path) -> typing.Any:
    """The content of a JSON file.

    Raises:
        ConfigError: The file is not JSON, is nested too deeply, or holds an integer of thousands of
            digits. The message names the file, and the place if it is known.
    """
    text = "\n".join(
        readers.decode(line, str(path), offset) for offset, line in readers.lines(str(path))
    )
    return json_files.parse(text, str(path), "check the file")


def records(name: str, split: str, corpus: config.Corpus) -> list[dict] | None:
    """Reads all records of a split of a TFDS dataset.

    Args:
        name: Name of the dataset, for example "glue/rte".
        split: Name of the split.
        corpus: Settings of TFDS.

    Returns:
        The records, their byte strings decoded; None when the dataset has no such split.

    Raises:
        ConfigError: The dataset is not available.
    """
    from maelm_jax.data import seqio_tasks

    encoded = seqio_tasks.records(f"tfds:{name}", split)
    return None if encoded is None else [_decoded(record) for record in encoded]


def _decoded(value):
    """Part of a record with text for byte strings and lists for arrays."""
    if isinstance(value, dict):
        return {name: _decoded(item) for name, item in value.items()}
    if isinstance(value, bytes):
        return value.decode("utf-8")
    return [_decoded(item) for item in value.tolist()] if getattr(value, "ndim", 0) else value
