"""Converts parameters between the layout of this project and the layouts of other software.

A format is a list of `TensorMapping`, which works in both directions (`give` and `take`).
The parameters here are {path: array}, stacked over the layers:
encoder/blocks/feed_forward/up/kernel is [layers, in, out]. Other software has one tensor for each
layer, with linear weights [out, in].
"""

import collections.abc
import contextlib
import json
import os
import pathlib
import typing

import numpy as np

from maelm_jax.config import ConfigError

# Tables with one row for each id. They are padded with further rows here, but not in other layouts.
VOCABULARY = ("encoder/token_embedding", "head/bias")
LISTED = 8  # the number of faults that an error message names
Tensors = collections.abc.Mapping[str, np.ndarray]


class TensorMapping(typing.NamedTuple):
    """The correspondence of one tensor of another format and a parameter here.

    Attributes:
        name: The name in the other format.
        path: The parameter path here.
        layer: The index into a parameter that is stacked over the layers; None if it is not.
        transposed: Whether the other format has the transposed matrix.
        offset: The number of unused rows at the start of the other tensor (position tables of MPNet
            and RoBERTa). They are written as 0.
    """

    name: str
    path: str
    layer: int | None = None
    transposed: bool = False
    offset: int = 0


def linear(name: str, path: str, layer: int | None = None) -> list[TensorMapping]:
    """Returns the mappings of a linear layer: weight and bias."""
    return [
        TensorMapping(f"{name}.weight", f"{path}/kernel", layer, True),
        TensorMapping(f"{name}.bias", f"{path}/bias", layer),
    ]


def norm(name: str, path: str, layer: int | None = None) -> list[TensorMapping]:
    """Returns the mappings of a LayerNorm: weight and bias."""
    return [
        TensorMapping(f"{name}.weight", f"{path}/scale", layer),
        TensorMapping(f"{name}.bias", f"{path}/bias", layer),
    ]


def blocks(prefix: str, room: str, layers: int, names: dict[str, str]) -> list[TensorMapping]:
    """Returns the mappings of a stack of Transformer blocks.

    Args:
        prefix: The start of the names in the other format. The number of the layer follows it.
        room: "encoder" or "decoder".
        layers: The number of blocks.
        names: {part of a block here, such as attention/query: its name in the other format,
            after `prefix` and the number of the layer}.
    """
    rows = []
    for layer in range(layers):
        for part, theirs in names.items():
            rows += (norm if part.endswith("norm") else linear)(
                f"{prefix}{layer}.{theirs}", f"{room}/blocks/{part}", layer
            )
    return rows


def depth(paths: collections.abc.Mapping[str, typing.Any], room: str) -> int:
    """Returns the number of layers of `room` ("encoder" or "decoder") in {path: array}, or 0."""
    stacked = paths.get(f"{room}/blocks/attention/query/kernel")
    return stacked.shape[0] if stacked is not None else 0


def give(
    params: dict[str, np.ndarray], rows: list[TensorMapping], vocabulary_size: int
) -> dict[str, np.ndarray]:
    """Converts parameters to another format.

    Args:
        params: {parameter path: array}.
        rows: The mappings of the format.
        vocabulary_size: The number of ids; further rows of tables over the vocabulary are cut.

    Returns:
        {name in the other format: array}. The arrays are views of `params` except where rows are
        added, so that writing them needs little memory.
    """
    result = {}
    for row in rows:
        value = params[row.path] if row.layer is None else params[row.path][row.layer]
        value = value[:vocabulary_size] if row.path in VOCABULARY else value
        if row.offset:
            value = np.concatenate([np.zeros((row.offset, *value.shape[1:]), value.dtype), value])
        result[row.name] = value.T if row.transposed else value
    return result


def take(
    tensors: Tensors,
    rows: list[TensorMapping],
    shapes: dict[str, tuple[int, ...]],
    where: str,
    copies: dict[str, str] | None = None,
) -> dict[str, np.ndarray]:
    """Converts the tensors of another format to parameters, and checks each of them.

    Args:
        tensors: {name in the other format: array}.
        rows: The mappings of the format; the first one is the token table.
        shapes: {parameter path: shape} of the model. Tables over the vocabulary may have fewer
            rows than this, all of them the same number.
        where: The file or folder, for error messages.
        copies: {name of an optional tied tensor: name of the tensor that it must equal}.

    Returns:
        {parameter path: float32 array}.

    Raises:
        ConfigError: Tensors are missing, unknown, of the wrong shape, not finite or not equal to
            the tensor they are tied to. The message lists them.
    """
    result: dict[str, np.ndarray] = {}
    left, wrong = set(tensors), []
    table = tensors[rows[0].name] if rows[0].name in tensors else np.zeros((0, 0))
    ids = table.shape[0] if table.ndim else 0
    for row in rows:
        if row.name not in tensors:
            wrong.append(f"{row.name} is missing")
            continue
        left.discard(row.name)
        value = tensors[row.name]
        expected = shapes[row.path] if row.layer is None else shapes[row.path][1:]
        if row.path in VOCABULARY and 0 < ids <= expected[0]:
            expected = (ids, *expected[1:])
        expected = (expected[0] + row.offset, *expected[1:])
        expected = expected[::-1] if row.transposed else expected
        if tuple(value.shape) != expected:
            wrong.append(f"{row.name} has shape {tuple(value.shape)}, expected {expected}")
            continue
        value = value.T if row.transposed else value[row.offset :]
        if reason := not_finite(value):
            wrong.append(f"{row.name} {reason}")
            continue
        value = value.astype(np.float32)
        if row.layer is None:
            result[row.path] = np.ascontiguousarray(value)
        else:
            result.setdefault(row.path, np.empty(shapes[row.path], np.float32))[row.layer] = value
    for name, source in (copies or {}).items():
        if name in left and source in tensors:
            left.discard(name)
            if not np.array_equal(tensors[name], tensors[source]):
                wrong.append(f"{name} is not the same as {source}, to which it is tied")
    wrong += [f"{name} is not a tensor of this model" for name in sorted(left)]
    if wrong:
        raise ConfigError(f"{where}: the weights do not fit the model: " + listed(wrong))
    return result


def not_finite(value: np.ndarray) -> str:
    """Returns why a tensor cannot be a weight, in words; "" if its floats are all finite."""
    if value.dtype.kind != "f" and not value.dtype.name.startswith(("bfloat16", "float8")):
        return f"holds {value.dtype}, not floating-point numbers"
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.isfinite(value.astype(np.float32, copy=False)).all()
    return "" if finite else "holds numbers that are not finite"


def listed(wrong: list[str]) -> str:
    """Returns the first LISTED faults as one text."""
    return "; ".join(wrong[:LISTED]) + (
        f"; and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
    )


class Safetensors(collections.abc.Mapping):
    """The tensors of a .safetensors file: a mapping that reads a tensor when it is looked up.

    Raises:
        ConfigError: The file is damaged or is not a .safetensors file.
    """

    def __init__(self, path: str | os.PathLike):
        import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
        import safetensors

        self._path = path
        with self._reading():
            self._file = safetensors.safe_open(str(path), framework="np")
            self._names = list(self._file.keys())

    @contextlib.contextmanager
    def _reading(self):
        try:
            yield
        except Exception as error:  # SafetensorError, OSError, others for a type NumPy lacks
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"{self._path} cannot be read as safetensors: {reason}") from error

    def __getitem__(self, name):
        if name not in self._names:
            raise KeyError(name)
        with self._reading():
            return self._file.get_tensor(name)

    def __iter__(self):
        return iter(self._names)

    def __len__(self):
        return len(self._names)


def write_safetensors(path: pathlib.Path, tensors: dict[str, np.ndarray]):
    """Writes a .safetensors file of float32 tensors, in the order of `tensors`.

    Besides `tensors`, only one tensor is in memory at a time. The writer of the safetensors library
    needs memory for all of them. The file holds the length of the header (8 bytes), a JSON header
    and the numbers.
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
