"""Reads and writes PyTorch checkpoint files without PyTorch.

`read` executes no function of the file: it looks up every name of the pickle in the lists below,
and a name that is in none of them is an error. It reads two formats: a zip of `data.pkl` and one
raw file for each storage (torch >= 1.6), and the older stream of pickles followed by the storages.
"""

import argparse
import collections
import math
import os
import pathlib
import pickle
import struct
import typing
import zipfile

import ml_dtypes
import numpy as np

from maelm_jax.config import ConfigError

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
STORAGES = {
    "FloatStorage": np.float32, "DoubleStorage": np.float64, "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16, "LongStorage": np.int64, "IntStorage": np.int32,
    "ShortStorage": np.int16, "CharStorage": np.int8, "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}  # fmt: skip
# Prefixes of "module name" for the settings and the training state beside the tensors. `read`
# replaces these objects by empty ones.
INERT = (
    "fairseq.", "omegaconf.", "numpy.", "numpy ", "enum ", "typing ", "builtins set",
    "_codecs encode", "torch.serialization ", "torch device", "torch float", "torch bfloat16",
    "torch int", "torch bool",
)  # fmt: skip


class _Inert:
    """Replaces an object of the file that is not needed. All its operations do nothing."""

    def __new__(cls, *_, **__):
        return super().__new__(cls)

    def __init__(self, *_, **__):
        pass

    def __setstate__(self, _):
        pass

    def __setitem__(self, *_):
        pass

    def append(self, _):
        pass

    def extend(self, _):
        pass


def _tensor(storage: np.ndarray, offset: int, size: tuple, stride: tuple, *_) -> np.ndarray:
    """Returns a view of a storage. Raises ConfigError if the view would leave the storage."""
    last = (
        offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if all(size)
        else offset
    )
    if (
        min((offset, *size, *stride), default=0) < 0
        or last >= max(storage.size, 1)
        or math.prod(size) > storage.size
    ):
        raise ConfigError("a tensor reaches outside its storage")
    return np.lib.stride_tricks.as_strided(
        storage[offset:], size, [step * storage.itemsize for step in stride], writeable=False
    )


_KNOWN = {
    "torch._utils _rebuild_tensor_v2": _tensor,
    "torch._utils _rebuild_parameter": lambda data, *_: data,
    "torch Size": lambda values: tuple(values),
    "collections OrderedDict": collections.OrderedDict,
    "argparse Namespace": argparse.Namespace,
    **{f"torch {name}": dtype for name, dtype in STORAGES.items()},
}


class _Unpickler(pickle._Unpickler):
    """Unpickler with a list of allowed names.

    It extends the Python implementation, because the C implementation allocates as much memory as
    the file claims to need.
    """

    def __init__(
        self, file: typing.BinaryIO, storage: typing.Callable[[str, np.dtype, int], np.ndarray]
    ):
        super().__init__(file, encoding="latin1")
        self._storage = storage

    def find_class(self, module: str, name: str):
        full = f"{module} {name}"
        if full in _KNOWN:
            return _KNOWN[full]
        if full.startswith(INERT):
            return _Inert
        raise ConfigError(
            f"it names {module}.{name}, which has no place in a checkpoint; nothing of it was "
            "executed"
        )

    def persistent_load(self, pid: tuple) -> np.ndarray:
        kind, dtype, key, _, count, *_ = pid
        if kind != "storage" or dtype not in STORAGES.values():
            raise ConfigError(f"it refers to {kind} {dtype}, which is no storage of numbers")
        return self._storage(str(key), np.dtype(dtype), int(count))


def read(path: str | os.PathLike) -> typing.Any:
    """Reads a file that torch.save wrote, with tensors as read-only NumPy arrays.

    Raises:
        ConfigError: The file is damaged, is of another format, or uses a name that is not listed.
    """
    path = pathlib.Path(path)
    try:
        with path.open("rb") as file:
            return (
                _read_zip(file)
                if zipfile.is_zipfile(file)
                else _read_legacy(file, path.stat().st_size)
            )
    except ConfigError as error:
        raise ConfigError(f"{path} cannot be read as a PyTorch checkpoint: {error}") from error
    except Exception as error:  # zipfile and pickle raise many types for a damaged file
        raise ConfigError(
            f"{path} cannot be read as a PyTorch checkpoint: "
            f"{' '.join(str(error).split())[:200] or type(error).__name__}"
        ) from error


def _read_zip(file: typing.BinaryIO) -> typing.Any:
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        if any(item.compress_type != zipfile.ZIP_STORED for item in archive.infolist()):
            raise ConfigError("its parts are compressed, which torch.save does not do")
        [root] = [name.removesuffix("data.pkl") for name in names if name.endswith("/data.pkl")]
        if root + "byteorder" in names and archive.read(root + "byteorder").strip() != b"little":
            raise ConfigError("its numbers are big-endian")
        storages: dict[str, np.ndarray] = {}

        def storage(key, dtype, count):
            if key not in storages:
                storages[key] = np.frombuffer(archive.read(f"{root}data/{key}"), dtype, count)
            return storages[key]

        with archive.open(root + "data.pkl") as pickled:
            return _Unpickler(pickled, storage).load()


def _read_legacy(file: typing.BinaryIO, size: int) -> typing.Any:
    file.seek(0)
    storages: dict[str, np.ndarray] = {}

    def storage(key, dtype, count):  # filled below, as the numbers follow the object
        if count * dtype.itemsize > size:
            raise ConfigError("a storage is larger than the file")
        return storages.setdefault(key, np.zeros(count, dtype))

    magic, _, _ = (_Unpickler(file, storage).load() for _ in range(3))
    if magic != LEGACY_MAGIC:
        raise ConfigError("it is neither a zip nor begins with torch's number")
    result = _Unpickler(file, storage).load()
    for key in _Unpickler(file, storage).load():
        [count] = struct.unpack("<q", file.read(8))
        values = storages[str(key)]
        values[:] = np.frombuffer(file.read(count * values.itemsize), values.dtype, values.size)
    return result


def write(
    path: str | os.PathLike,
    tensors: dict[str, np.ndarray],
    shared: dict[str, str],
    args: dict[str, typing.Any],
):
    """Writes {"args": Namespace(**args), "model": tensors} in the format of torch.save.

    Besides `tensors`, only one tensor is in memory at a time.

    Args:
        path: The file to write.
        tensors: {name: float32 array}.
        shared: {name of a further tensor: name in `tensors` of the tensor whose storage it shares}.
        args: The fields of the Namespace.

    Raises:
        ValueError: A tensor is not float32.
    """
    if any(value.dtype != np.float32 for value in tensors.values()):
        raise ValueError("float32 tensors only")
    numbers = {name: number for number, name in enumerate(tensors)}
    names = sorted([*tensors, *shared])
    body = [pickle.PROTO + b"\x02", pickle.EMPTY_DICT, pickle.MARK]
    body += [_text("args"), _global("argparse", "Namespace"), pickle.EMPTY_TUPLE, pickle.REDUCE]
    body += [
        pickle.dumps(args, protocol=2)[2:-1],
        pickle.BUILD,
        _text("model"),
        pickle.EMPTY_DICT,
        pickle.MARK,
    ]
    for name in names:
        source = shared.get(name, name)
        body += [_text(name), _pickled_tensor(tensors[source].shape, numbers[source])]
    body += [pickle.SETITEMS, pickle.SETITEMS, pickle.STOP]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo("checkpoint/data.pkl"), b"".join(body))
        archive.writestr(zipfile.ZipInfo("checkpoint/byteorder"), b"little")
        for name, number in numbers.items():
            archive.writestr(
                zipfile.ZipInfo(f"checkpoint/data/{number}"),
                np.ascontiguousarray(tensors[name]).data.cast("B"),
            )
        archive.writestr(zipfile.ZipInfo("checkpoint/version"), b"3\n")


def _text(value: str) -> bytes:
    encoded = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded


def _integer(value: int) -> bytes:
    return pickle.BININT + struct.pack("<i", value)


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _integers(values: typing.Iterable[int]) -> bytes:
    return pickle.MARK + b"".join(map(_integer, values)) + pickle.TUPLE


def _pickled_tensor(shape: tuple[int, ...], number: int) -> bytes:
    """Returns the pickled call that rebuilds a contiguous float32 tensor from storage `number`."""
    count = int(np.prod(shape))
    strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    storage = [
        pickle.MARK, _text("storage"), _global("torch", "FloatStorage"), _text(str(number)),
        _text("cpu"), _integer(count), pickle.TUPLE,
    ]  # fmt: skip
    hooks = [_global("collections", "OrderedDict"), pickle.EMPTY_TUPLE, pickle.REDUCE]
    arguments = [
        pickle.MARK, *storage, pickle.BINPERSID, _integer(0), _integers(shape),
        _integers(strides), pickle.NEWFALSE, *hooks, pickle.TUPLE,
    ]  # fmt: skip
    return b"".join([_global("torch._utils", "_rebuild_tensor_v2"), *arguments, pickle.REDUCE])
