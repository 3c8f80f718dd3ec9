"""Tables of names: every format is a list of rows (name there, our path, what lies between), followed in either direction.

Our parameters are {path: array}, as encoder/blocks/query/kernel [layers, in, out]; theirs one tensor a layer, linear weights [out, in].
"""

import collections.abc
import contextlib
import json
import os
import pathlib
import typing

import numpy as np

from maelm_jax.config import ConfigError

VOCABULARY = (
    "encoder/token_embedding",
    "head/bias",
)  # one row an id; ours are padded, theirs are not
LISTED = 8  # faults that a message names
Tensors = collections.abc.Mapping[str, np.ndarray]


class TensorMapping(typing.NamedTuple):
    """One tensor of another format."""

    name: str
    path: str
    layer: int | None = None  # of a parameter that is stacked over the layers
    transposed: bool = False
    offset: int = 0  # rows in front that have no meaning here (position tables of MPNet and RoBERTa); written as 0


def linear(name: str, path: str, layer: int | None = None) -> list[TensorMapping]:
    return [
        TensorMapping(f"{name}.weight", f"{path}/kernel", layer, True),
        TensorMapping(f"{name}.bias", f"{path}/bias", layer),
    ]


def norm(name: str, path: str, layer: int | None = None) -> list[TensorMapping]:
    return [
        TensorMapping(f"{name}.weight", f"{path}/scale", layer),
        TensorMapping(f"{name}.bias", f"{path}/bias", layer),
    ]


def blocks(prefix: str, room: str, layers: int, names: dict[str, str]) -> list[TensorMapping]:
    """The rows of `layers` blocks; `names` is {our part, as query or attention_norm: what it is called behind `prefix` and the layer's number}."""
    rows = []
    for layer in range(layers):
        for part, theirs in names.items():
            rows += (norm if part.endswith("norm") else linear)(
                f"{prefix}{layer}.{theirs}", f"{room}/blocks/{part}", layer
            )
    return rows


def depth(paths: collections.abc.Mapping[str, typing.Any], room: str) -> int:
    """The number of layers of "encoder" or "decoder" among {path: array}; 0 where there is none."""
    stacked = paths.get(f"{room}/blocks/query/kernel")
    return stacked.shape[0] if stacked is not None else 0


def give(
    params: dict[str, np.ndarray], rows: list[TensorMapping], vocabulary_size: int
) -> dict[str, np.ndarray]:
    """{their name: array}: views of `params` wherever possible, so nothing is copied until it is written."""
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
    """{our path: float32 array} of `tensors`, checked name by name against `rows` and `shapes` ({path: our shape}).

    Tables of the vocabulary may have fewer rows than `shapes` says (ours are padded), all the same number. `copies` are names that may be there
    as well, {name: name of the tensor that it must equal}. Raises ConfigError that lists every tensor missing, left over, misshapen or unequal.
    """
    result: dict[str, np.ndarray] = {}
    left, wrong = set(tensors), []
    table = (
        tensors[rows[0].name] if rows[0].name in tensors else np.zeros((0, 0))
    )  # the first row is the token table
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
    """Why a tensor cannot be a weight, in words; "" of finite floating-point numbers."""
    if value.dtype.kind != "f" and not value.dtype.name.startswith(("bfloat16", "float8")):
        return f"holds {value.dtype}, not floating-point numbers"
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.isfinite(value.astype(np.float32, copy=False)).all()
    return "" if finite else "holds numbers that are not finite"


def listed(wrong: list[str]) -> str:
    """The first few of a list of faults."""
    return "; ".join(wrong[:LISTED]) + (
        f"; and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
    )


class Safetensors(collections.abc.Mapping):
    """The tensors of a .safetensors file, each read when it is asked for. Raises ConfigError for any other file."""

    def __init__(self, path: str | os.PathLike):
        import ml_dtypes  # noqa: F401  (makes bfloat16 known to numpy)
        import safetensors

        self._path = path
        with self._reading():
            self._file = safetensors.safe_open(str(path), framework="np")
            self._names = list(self._file.keys())

    @contextlib.contextmanager
    def _reading(self):
        try:
            yield
        except (
            Exception
        ) as error:  # the library raises its own, OSError, and others for a type that NumPy lacks
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
    """Writes float32 tensors one by one, in the order given: beside `tensors` itself one of them is in memory at a time.

    The library's own writer holds all of them twice. The format: 8 bytes of header length, a JSON header, the numbers.
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
