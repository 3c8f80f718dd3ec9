"""PyTorch's files without PyTorch: what is written reads back, and nothing that a file names is ever run."""

import os
import pathlib
import pickle
import struct
import zipfile

import numpy as np
import pytest

from maelm_jax import config
from maelm_jax.encoders import torch_file

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(24, dtype=np.float32).reshape(4, 6).T,
    "s": np.float32(3).reshape(()),
}


def test_round_trip(tmp_path):
    torch_file.write(tmp_path / "a.pt", TENSORS, {"tied": "a.weight"}, {"layers": 3, "arch": "ae", "none": None})
    found = torch_file.read(tmp_path / "a.pt")
    assert vars(found["args"]) == {"layers": 3, "arch": "ae", "none": None}
    assert set(found["model"]) == {*TENSORS, "tied"}
    for name, value in found["model"].items():
        assert value.dtype == np.float32 and np.array_equal(value, TENSORS.get(name, TENSORS["a.weight"]))
    assert zipfile.ZipFile(tmp_path / "a.pt").namelist().count("checkpoint/data/0") == 1, "a tied copy is stored once"


def test_torch_reads_what_we_write_and_we_what_torch_writes(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import argparse

    torch_file.write(tmp_path / "a.pt", TENSORS, {"tied": "a.weight"}, {"layers": 3})
    with torch.serialization.safe_globals([argparse.Namespace]):
        theirs = torch.load(tmp_path / "a.pt", weights_only=True)
    assert theirs["args"].layers == 3
    assert all(np.array_equal(theirs["model"][name].numpy(), value) for name, value in TENSORS.items())
    assert theirs["model"]["tied"].data_ptr() == theirs["model"]["a.weight"].data_ptr()
    layer = torch.nn.Linear(3, 4)
    saved = {
        "model": layer.state_dict(), "parameter": layer.weight, "half": torch.randn(3).half(), "brain": torch.randn(3).bfloat16(),
        "turned": torch.arange(6).view(2, 3).T, "args": argparse.Namespace(a=1), "numpy": np.float64(3), "array": np.arange(3),
        "state": torch.optim.Adam(layer.parameters()).state_dict(), "dtype": torch.float32, "device": torch.device("cpu"),
    }  # fmt: skip
    for zipped in (True, False):
        torch.save(saved, tmp_path / "b.pt", _use_new_zipfile_serialization=zipped)
        found = torch_file.read(tmp_path / "b.pt")
        assert np.array_equal(found["model"]["weight"], layer.weight.detach().numpy())
        assert np.array_equal(found["turned"], saved["turned"].numpy())
        assert np.array_equal(found["brain"].astype(np.float32), saved["brain"].float().numpy())
        assert np.array_equal(found["half"], saved["half"].numpy()) and found["args"].a == 1


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def archive(path: pathlib.Path, pickled: bytes, **files: bytes):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", pickled)
        for name, content in files.items():
            file.writestr(f"x/data/{name}", content)


def save(path: pathlib.Path, pickled: bytes, zipped: bool):
    if zipped:
        archive(path, pickled)
    else:
        path.write_bytes(pickle.dumps(torch_file.LEGACY_MAGIC, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2) + pickled + pickle.dumps([], 2))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("function", [os.mkdir, eval, pathlib.Path, getattr], ids=lambda function: function.__name__)
def test_a_name_outside_the_list_is_refused(tmp_path, function, zipped):
    trap = tmp_path / "trap"
    arguments = {eval: (f"__import__('os').mkdir({str(trap)!r})",), getattr: (TENSORS, "clear")}.get(function, (str(trap),))
    save(tmp_path / "evil.pt", pickle.dumps({"model": {}, "other": Call(function, *arguments)}), zipped)
    with pytest.raises(config.ConfigError, match="has no place in a checkpoint; nothing of it was executed"):
        torch_file.read(tmp_path / "evil.pt")
    assert not trap.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_name_of_no_interest_stands_for_nothing(tmp_path, zipped):
    trap = tmp_path / "trap"
    save(tmp_path / "x.pt", pickle.dumps({"model": {}, "other": Call(np.memmap, str(trap), "u1", "w+", 0, 8)}), zipped)
    assert torch_file.read(tmp_path / "x.pt")["model"] == {}
    assert not trap.exists(), "numpy.memmap was called"


def test_a_tensor_stays_inside_its_storage(tmp_path):
    body = torch_file._pickled_tensor((1000,), 0)
    archive(tmp_path / "wide.pt", b"\x80\x02" + body.replace(struct.pack("<i", 1000), struct.pack("<i", 4), 1) + b".", **{"0": bytes(16)})
    with pytest.raises(config.ConfigError, match="outside its storage"):
        torch_file.read(tmp_path / "wide.pt")


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04", pickle.dumps([1, 2])], ids=["empty", "text", "half a zip", "a pickle"])
def test_other_files_are_one_line(tmp_path, content):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(config.ConfigError, match="cannot be read as a PyTorch checkpoint"):
        torch_file.read(tmp_path / "x.pt")
