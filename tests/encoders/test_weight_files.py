"""PyTorch's files: what is written reads back, and nothing that a file names is ever run."""

import argparse
import os
import pathlib
import re
import zipfile

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")

from maelm_jax import config  # noqa: E402
from maelm_jax.encoders import weight_files  # noqa: E402

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(24, dtype=np.float32).reshape(4, 6).T,
    "s": np.float32(3).reshape(()),
}


def test_round_trip(tmp_path):
    weight_files.write_pytorch(tmp_path / "a.pt", TENSORS, {"tied": "a.weight"}, {"layers": 3, "arch": "ae", "none": None})
    content = weight_files.read_pytorch(tmp_path / "a.pt")
    assert vars(content["args"]) == {"layers": 3, "arch": "ae", "none": None}
    assert set(content["model"]) == {*TENSORS, "tied"}
    for name, value in content["model"].items():
        assert value.dtype == np.float32 and np.array_equal(value, TENSORS.get(name, TENSORS["a.weight"]))
    with torch.serialization.safe_globals([argparse.Namespace]):
        theirs = torch.load(tmp_path / "a.pt", weights_only=True)["model"]
    assert theirs["tied"].data_ptr() == theirs["a.weight"].data_ptr(), "a tied copy is stored once"


@pytest.mark.parametrize("zipped", [True, False])
def test_what_checkpoints_hold_is_read(tmp_path, zipped):
    layer = torch.nn.Linear(3, 4)
    saved = {
        "model": layer.state_dict(),
        "parameter": layer.weight,
        "half": torch.randn(3).half(),
        "brain": torch.randn(3).bfloat16(),
        "turned": torch.arange(6).view(2, 3).T,
        "args": argparse.Namespace(a=1),
        "state": torch.optim.Adam(layer.parameters()).state_dict(),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    if zipped:  # torch lists the classes of these files only
        saved |= {"numpy": np.float64(3), "array": np.arange(3)}
    torch.save(saved, tmp_path / "b.pt", _use_new_zipfile_serialization=zipped)
    content = weight_files.read_pytorch(tmp_path / "b.pt")
    assert np.array_equal(content["model"]["weight"], layer.weight.detach().numpy())
    assert np.array_equal(content["turned"], saved["turned"].numpy())
    assert np.array_equal(content["brain"], saved["brain"].float().numpy())
    assert np.array_equal(content["half"], saved["half"].numpy()) and content["args"].a == 1


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("function", [os.mkdir, eval, pathlib.Path, getattr], ids=lambda function: function.__name__)
def test_a_class_outside_the_list_is_refused(tmp_path, function, zipped):
    trap = tmp_path / "trap"
    arguments = {eval: (f"__import__('os').mkdir({str(trap)!r})",), getattr: (TENSORS, "clear")}.get(function, (str(trap),))
    torch.save({"model": {}, "other": Call(function, *arguments)}, tmp_path / "evil.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(config.ConfigError, match=r"evil\.pt") as error:
        weight_files.read_pytorch(tmp_path / "evil.pt")
    assert "weights_only" not in str(error.value), "torch advises to run the file's code"
    assert not trap.exists()


def test_training_state_is_replaced_and_not_run(tmp_path):
    trap = tmp_path / "trap"
    torch.save({"model": {"a": torch.ones(2)}, "other": Call(np.memmap, str(trap), "u1", "w+", 0, 8)}, tmp_path / "x.pt")
    assert np.array_equal(weight_files.read_pytorch(tmp_path / "x.pt")["model"]["a"], np.ones(2))
    assert not trap.exists(), "numpy.memmap was called"


def test_classes_of_fairseq_need_not_be_installed(tmp_path):
    torch.save({"model": {"a": torch.ones(2)}, "cfg": argparse.Namespace(a=1)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        parts = {item.filename: archive.read(item) for item in archive.infolist()}
    with zipfile.ZipFile(tmp_path / "y.pt", "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, re.sub(rb"cargparse\nNamespace", rb"cfairseq.dataclass\nConfig", part))
    assert np.array_equal(weight_files.read_pytorch(tmp_path / "y.pt")["model"]["a"], np.ones(2))
