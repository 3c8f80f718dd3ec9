"""Reads and writes files of tensors: .safetensors, and (with PyTorch) pytorch_model.bin."""

import collections.abc
import contextlib
import json
import os
import pathlib
import typing

import numpy as np

from maelm_jax import json_files
from maelm_jax.config import ConfigError
from maelm_jax.encoders import torch_checkpoint
from maelm_jax.encoders.layouts import Tensors

WEIGHTS = "model.safetensors"
PYTORCH_WEIGHTS = "pytorch_model.bin"  # as transformers wrote before safetensors
INDEX = ".index.json"  # after either name: lists the files of weights that are in several files
# Endings of names in Google's files of BERT. transformers renames them, too.
RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def open_folder(folder: pathlib.Path) -> Tensors:
    """Opens the tensors of a folder that transformers saved.

    The folder holds one .safetensors file, several with an index, or the same of an older
    pytorch_model.bin, in the order in which transformers looks for them. The names are those of
    present transformers (RENAMED).

    Raises:
        ConfigError: There is no such file, or a file is damaged.
    """
    for name, opened in ((WEIGHTS, Safetensors), (PYTORCH_WEIGHTS, _pytorch_weights)):
        if (folder / name).is_file():
            return opened(folder / name)
        index = folder / f"{name}{INDEX}"
        if index.is_file():
            parts = [opened(folder / file) for file in _indexed_files(index)]
            return {tensor: part[tensor] for part in parts for tensor in part}
    raise ConfigError(f"{folder} holds neither {WEIGHTS} nor {PYTORCH_WEIGHTS}")


def _indexed_files(index: pathlib.Path) -> list[str]:
    """Returns the file names that an index lists."""
    files = json_files.read_object(index).get("weight_map")
    if not isinstance(files, dict) or not json_files.is_texts(list(files.values())):
        raise ConfigError(
            f"{index} has no weight_map of file names. Download or save the folder again"
        )
    for name in files.values():
        if not name or "\0" in name or pathlib.PurePath(name).name != name:
            raise ConfigError(
                f"{index} names {json_files.shown(name)}, which is no file of its folder"
            )
    return sorted(set(files.values()))


def _pytorch_weights(path: pathlib.Path) -> Tensors:
    content = torch_checkpoint.read(path)
    if not isinstance(content, dict) or not json_files.is_texts(list(content)):
        raise ConfigError(f"{path} holds no tensors by name: it is no model of transformers")
    tensors = {name: value for name, value in content.items() if isinstance(value, np.ndarray)}
    return {name: tensors[stored] for name, stored in _stored_names(list(tensors)).items()}


def _stored_names(names: list[str]) -> dict[str, str]:
    """Returns {name in present transformers: name in the file}, in the order of the file."""
    stored = {}
    for name in names:
        present = name
        for ending, renamed in RENAMED.items():
            if name.endswith(ending):
                present = name.removesuffix(ending) + renamed
        stored[name if present in names else present] = name
    return stored


class Safetensors(collections.abc.Mapping):
    """The tensors of a .safetensors file: a mapping that reads a tensor when it is looked up.

    The names are those of present transformers (RENAMED).

    Raises:
        ConfigError: The file is damaged or is not a .safetensors file.
    """

    def __init__(self, path: str | os.PathLike):
        import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
        import safetensors

        self._path = path
        with self._reading():
            self._file = safetensors.safe_open(str(path), framework="np")
            self._stored_names = _stored_names(list(self._file.keys()))

    @contextlib.contextmanager
    def _reading(self):
        try:
            yield
        except Exception as error:  # SafetensorError, OSError, others for a type NumPy lacks
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"{self._path} cannot be read as safetensors: {reason}") from error

    def __getitem__(self, name):
        stored = self._stored_names[name]
        with self._reading():
            return self._file.get_tensor(stored)

    def __iter__(self):
        return iter(self._stored_names)

    def __len__(self):
        return len(self._stored_names)


def write_safetensors(path: pathlib.Path, tensors: dict[str, np.ndarray]):
    """Writes a .safetensors file of float32 tensors, in the order of `tensors`.

    Besides `tensors`, only one tensor is in memory at a time. safetensors.numpy.save_file would
    need a contiguous copy of every tensor at once. The file holds the length of the header
    (8 bytes), a JSON header and the numbers.
    """
    header: dict[str, typing.Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in tensors.items():
        start, end = end, end + 4 * value.size
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for value in tensors.values():
            file.write(np.ascontiguousarray(value, "<f4").data)
