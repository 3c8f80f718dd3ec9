"""Reads and writes PyTorch checkpoint files (.pt, .bin). Both need PyTorch, the [torch] extra."""

import argparse
import importlib.util
import os
import typing

import numpy as np

from maelm_jax.config import ConfigError

INSTALL = "pip install torch==2.13.0 transformers==5.23.0"
# Beginnings of the names of classes that published checkpoints hold beside their tensors: settings
# and training state. `read` puts a `_Placeholder` in their place.
REPLACED = (
    "fairseq.",
    "omegaconf.",
    "numpy.",
    "enum.",
    "typing.",
    "builtins.set",
    "_codecs.encode",
)


class _Placeholder:
    """Stands for an object of a checkpoint that is not needed."""

    def __new__(cls, *_, **__):
        return super().__new__(cls)

    def __init__(self, *_, **__):
        pass

    def __setstate__(self, _):
        pass


def is_installed() -> bool:
    """Returns whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def require_torch(purpose: str):
    """Raises ConfigError if PyTorch is not installed. `purpose` begins the message."""
    if not is_installed():
        raise ConfigError(f"{purpose} needs PyTorch, which is not installed: {INSTALL}")


def read(path: str | os.PathLike) -> typing.Any:
    """Reads a file that torch.save wrote, with tensors as NumPy arrays. Runs no code of the file.

    Raises:
        ConfigError: PyTorch is not installed, or the file is damaged, is of another format or holds
            an object of a class that is not allowed.
    """
    require_torch(f"reading {path}")
    import torch

    try:
        with torch.serialization.safe_globals([argparse.Namespace, *_replacements(path)]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for a damaged file
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"{path} cannot be read as a PyTorch checkpoint: {reason}") from error
    return _as_arrays(content)


def _replacements(path: str | os.PathLike) -> list[tuple[type, str]]:
    """Returns a placeholder for each class of REPLACED in a file of torch >= 1.6."""
    import torch

    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except ValueError:  # the older format, of which torch does not list the classes
        return []
    # One class for each name: torch keeps a table from class to name.
    return [(type("Placeholder", (_Placeholder,), {}), n) for n in names if n.startswith(REPLACED)]


def _as_arrays(value: typing.Any) -> typing.Any:
    import torch

    if isinstance(value, dict):
        return {key: _as_arrays(item) for key, item in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def write(
    path: str | os.PathLike,
    tensors: dict[str, np.ndarray],
    shared: dict[str, str],
    args: dict[str, typing.Any],
):
    """Writes {"args": Namespace(**args), "model": tensors} with torch.save.

    Args:
        path: The file to write.
        tensors: {name: float32 array}.
        shared: {name of a further tensor: name in `tensors` of the tensor whose storage it shares}.
        args: The fields of the Namespace.

    Raises:
        ConfigError: PyTorch is not installed.
    """
    require_torch(f"writing {path}")
    import torch

    model = {name: torch.from_numpy(np.array(value, order="C")) for name, value in tensors.items()}
    model |= {name: model[original] for name, original in shared.items()}
    torch.save(
        {"args": argparse.Namespace(**args), "model": dict(sorted(model.items()))}, os.fspath(path)
    )
