"""Reads and writes files of tensors: .safetensors, and with PyTorch .bin and .pt.

No code of a file runs: PyTorch reads with `weights_only` and a list of classes that it allows.
"""

import argparse
import importlib.util
import os
import pathlib
import pickle
import re
import typing

import numpy as np

from maelm_jax import storage
from maelm_jax.config import ConfigError
from maelm_jax.encoders.layouts import Tensors

WEIGHTS = "model.safetensors"
PYTORCH_WEIGHTS = "pytorch_model.bin"  # as transformers wrote before safetensors
INDEX = ".index.json"  # after either name: lists the files of weights that are in several files
INSTALL = "pip install torch==2.13.0 transformers==5.23.0"
# Beginnings of the names of classes that published checkpoints hold beside their tensors: settings
# and training state. A `_Placeholder` takes their place.
REPLACED = (
    "fairseq.",
    "omegaconf.",
    "numpy.",
    "enum.",
    "typing.",
    "builtins.set",
    "_codecs.encode",
)


def read_folder(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the tensors of a folder that transformers saved.

    The folder holds one .safetensors file, several with an index, or the same of an older
    pytorch_model.bin, in the order in which transformers looks for them. The names are those of
    present transformers.

    Raises:
        ConfigError: There is no such file, a file is damaged, or the index names a file outside.
    """
    for name, read in ((WEIGHTS, read_safetensors), (PYTORCH_WEIGHTS, _read_pytorch_weights)):
        index = folder / f"{name}{INDEX}"
        if (folder / name).is_file():
            return _rename(read(folder / name))
        if index.is_file():
            with storage.reading(index):
                names = sorted(set(storage.read_json(index)["weight_map"].values()))
                files = [storage.inside(folder, name).path for name in names]
            tensors = {}
            for file in files:
                if not file.is_file():
                    raise ConfigError(f"{index} names {file.name}, and no such file is there")
                tensors |= read(file)
            return _rename(tensors)
    raise ConfigError(f"{folder} holds neither {WEIGHTS} nor {PYTORCH_WEIGHTS}")


def _rename(tensors: Tensors) -> dict[str, np.ndarray]:
    """Renames what has other names in Google's files of BERT, as transformers does."""
    scale, bias = ("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")
    return {name.replace(*scale).replace(*bias): value for name, value in tensors.items()}


def read_safetensors(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Reads a .safetensors file. Raises ConfigError if it is damaged."""
    import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
    import safetensors.numpy

    errors = (safetensors.SafetensorError, LookupError)  # KeyError: a type that NumPy lacks
    with storage.reading(path, errors=errors):
        return safetensors.numpy.load_file(path)


def write_safetensors(
    path: str | os.PathLike, tensors: Tensors, dtype: str = "float32", **metadata: str
):
    """Writes tensors as a .safetensors file of `dtype` ("float32" or "bfloat16").

    Its metadata are `format="pt"` by default. Its mode is that of every new file (umask).
    """
    import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
    import safetensors.numpy

    contiguous = {name: np.ascontiguousarray(value, dtype) for name, value in tensors.items()}
    file = pathlib.Path(path)
    file.touch()
    mode = file.stat().st_mode
    safetensors.numpy.save_file(contiguous, path, metadata or {"format": "pt"})
    file.chmod(mode)  # the library replaces the file by one that only its owner can read


def _read_pytorch_weights(path: pathlib.Path) -> dict[str, np.ndarray]:
    content = read_pytorch(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no tensors by name: it is no model of transformers")
    return {name: value for name, value in content.items() if isinstance(value, np.ndarray)}


def require_torch(purpose: str):
    """Raises ConfigError if PyTorch is not installed. `purpose` begins the message."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"{purpose} needs PyTorch, which is not installed: {INSTALL}")


class _Placeholder:
    """Stands for an object of a checkpoint that is not needed."""

    def __new__(cls, *_, **__):
        return super().__new__(cls)

    def __init__(self, *_, **__):
        pass

    def __setstate__(self, _):
        pass


def read_pytorch(path: str | os.PathLike) -> typing.Any:
    """Reads a file that torch.save wrote, with tensors as NumPy arrays.

    Raises:
        ConfigError: PyTorch is not installed, or the file is damaged, is of another format or holds
            an object of a class that is not allowed.
    """
    require_torch(f"reading {path}")
    import torch

    # pickle documents that damaged bytes may raise any exception.
    with storage.reading(path, "is it a PyTorch checkpoint?", Exception):
        try:
            classes = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        except ValueError:  # a file of torch < 1.6, whose classes torch does not list
            classes = []
        # One class for each name: torch keeps a table from class to name.
        replacements = [
            (type("Placeholder", (_Placeholder,), {}), name)
            for name in classes
            if name.startswith(REPLACED)
        ]
        try:
            with torch.serialization.safe_globals([argparse.Namespace, *replacements]):
                content = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            # The message of torch advises to run the code in the file.
            refused = re.search(r"GLOBAL (\S+)", str(error))
            what = f"has an object of the class {refused[1]}" if refused else "is not a whole one"
            raise ConfigError(
                f"{path} {what}. A PyTorch checkpoint here holds tensors and plain values: save "
                "its state_dict() alone, best as .safetensors"
            ) from error
    return _as_arrays(content)


def _as_arrays(value: typing.Any) -> typing.Any:
    import torch

    if isinstance(value, dict):
        return {key: _as_arrays(item) for key, item in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def write_pytorch(
    path: str | os.PathLike, tensors: Tensors, shared: dict[str, str], args: dict[str, typing.Any]
):
    """Writes {"args": Namespace(**args), "model": tensors} with torch.save.

    `shared` is {name of a further tensor: name in `tensors` of the tensor whose storage it shares}.

    Raises:
        ConfigError: PyTorch is not installed.
    """
    require_torch(f"writing {path}")
    import torch

    model = {name: torch.from_numpy(np.array(value, order="C")) for name, value in tensors.items()}
    model |= {name: model[original] for name, original in shared.items()}
    content = {"args": argparse.Namespace(**args), "model": dict(sorted(model.items()))}
    torch.save(content, os.fspath(path))
