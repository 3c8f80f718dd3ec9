"""PyTorch checkpoint files, read and written without PyTorch.

Reading executes nothing that the file names: every name in its pickle is looked up in the lists below, and one that is in none of them is an
error. Formats: a zip of `data.pkl` and one raw file a storage (torch >= 1.6), and the older stream of pickles followed by the storages.
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
    "FloatStorage": np.float32, "DoubleStorage": np.float64, "HalfStorage": np.float16, "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64, "IntStorage": np.int32, "ShortStorage": np.int16, "CharStorage": np.int8, "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}  # fmt: skip
# Settings and training state that a checkpoint holds beside its tensors: replaced by an empty object, whatever they would have been.
INERT = (
    "fairseq.", "omegaconf.", "numpy.", "numpy ", "enum ", "typing ", "builtins set", "_codecs encode", "torch.serialization ", "torch device",
    "torch float", "torch bfloat16", "torch int", "torch bool",
)  # fmt: skip


class _Inert:
    """Stands where the file has an object of no interest here; takes whatever is done to it and does nothing."""

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
    """A view of a storage, refused where it would reach outside."""
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
    """Python's unpickler in Python: the one in C reserves as much memory as the file claims to need."""

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
    """What torch.save wrote, tensors as read-only numpy arrays. Raises ConfigError for anything else, and for names outside the lists above."""
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
    except (
        Exception
    ) as error:  # whatever a file of another kind, or one cut short, makes zipfile and pickle raise
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

    def storage(key, dtype, count):  # filled in below: the numbers come after the object
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
    """Writes {"args": Namespace(**args), "model": tensors} as torch.save would; float32, one tensor in memory at a time besides its source.

    `shared` names further tensors that are the same storage as one of `tensors`, {name: name in tensors}.
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
    """The call of torch's rebuilding function on storage `number`, a contiguous float32 tensor of `shape`."""
    count = int(np.prod(shape))
    strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    storage = [
        pickle.MARK,
        _text("storage"),
        _global("torch", "FloatStorage"),
        _text(str(number)),
        _text("cpu"),
        _integer(count),
        pickle.TUPLE,
    ]
    hooks = [_global("collections", "OrderedDict"), pickle.EMPTY_TUPLE, pickle.REDUCE]
    arguments = [
        pickle.MARK,
        *storage,
        pickle.BINPERSID,
        _integer(0),
        _integers(shape),
        _integers(strides),
        pickle.NEWFALSE,
        *hooks,
        pickle.TUPLE,
    ]
    return b"".join([_global("torch._utils", "_rebuild_tensor_v2"), *arguments, pickle.REDUCE])
