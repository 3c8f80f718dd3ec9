"""Checkpoints in the layout of the published code: export, import, and damaged ones. PyTorch reads and writes them."""

import json
import pathlib
import pickletools
import re
import shutil
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")

from maelm_jax import config, export, gin_files
from maelm_jax.encoders import published, source, torch_checkpoint

CASES = pathlib.Path(__file__).parents[1] / "data" / "reference"
OPCODES = [opcode.code.encode("latin1") for opcode in pickletools.opcodes]


def outcome(path) -> str:
    """ "read", or the one line that says why not."""
    try:
        source.find(str(path)).read(config.Model())
    except config.ConfigError as error:
        line = str(error)
        assert line and "\n" not in line and len(line) < 3000, line
        return line
    return "read"


@pytest.fixture(scope="module")
def exported(workdirs, tmp_path_factory) -> dict[str, pathlib.Path]:
    """{kind: folder in the reference's layout}."""
    root = tmp_path_factory.mktemp("published")
    for name in ("reference", "roberta-mlm"):
        argv = [f"--workdir={workdirs[name]}", f"--output={root / name}", "--format=reference"]
        assert export.main([*argv, "--verify"]) == 0
    return {path.name: path for path in root.iterdir()}


@pytest.fixture
def checkpoint(exported, tmp_path) -> pathlib.Path:
    """A copy of an exported checkpoint."""
    return pathlib.Path(shutil.copy(exported["reference"] / "model.pt", tmp_path))


@pytest.mark.parametrize("name", ["reference", "roberta-mlm"])
def test_an_export_comes_in_as_it_was(exported, workdirs, name):
    original = source.find(str(workdirs[name])).read(config.Model())
    model = gin_files.load([str(workdirs[name] / "config.gin")]).model
    imported = source.find(str(exported[name])).read(model)
    assert imported.keys() == original.keys()
    assert all(np.array_equal(imported[path], original[path]) for path in original)


def test_the_config_that_the_message_names_makes_any_run_exportable():
    for size in ("tiny.gin", "small.gin", "base.gin", "miniature.gin"):
        with pytest.raises(config.ConfigError) as error:
            published.check(gin_files.load([size]).model)
        [named] = re.findall(r"--gin_file=(\S+)", str(error.value))
        assert "Model.relative_buckets is 't5'" in str(error.value)
        published.check(gin_files.load([size, named]).model)
        published.check(gin_files.load([size, "mlm.gin", named]).model)


def test_a_run_with_that_config_is_exported(make_workdir, tmp_path):
    model = gin_files.load(["tiny.gin", published.CONFIG]).model
    fields = ("relative_buckets", "decoder_relative_bias")
    run = make_workdir(tmp_path / "run", {f"Model.{name}": getattr(model, name) for name in fields})
    argv = [f"--workdir={run}", f"--output={tmp_path / 'out'}", "--format=reference", "--no-verify"]
    assert export.main(argv) == 0
    assert torch_checkpoint.read(tmp_path / "out" / "model.pt")["args"].rel_pos == 1


@pytest.mark.parametrize("path", sorted(CASES.glob("*.npz")), ids=lambda path: path.stem)
def test_a_case_of_the_reference_as_a_checkpoint(path, tmp_path):
    data = np.load(path)
    case, weights = json.loads(str(data["config"])), {key.removeprefix("weights/"): data[key] for key in data.files if key.startswith("weights/")}
    encoder_source = source.find(str(path))
    values = encoder_source.read(config.Model())
    assert np.array_equal(values["encoder/blocks/feed_forward/up/kernel"][1], weights["encoder.sentence_encoder.layers.1.fc1.weight"].T)
    model = encoder_source.model(config.Model(dropout=0.1))
    published.write(tmp_path / "model.pt", values, model, case["vocab_size"])
    stored = torch_checkpoint.read(tmp_path / "model.pt")
    head = "gen_decoder" if "decoder_layers" in case and case["mode"] != "mlm" else "encoder"
    assert np.array_equal(stored["model"][f"{head}.lm_head.weight"], weights[published.TOKENS]), "tied copies are there"
    assert stored["args"].rel_pos_bins == case["rel_pos_bins"]
    again = source.find(str(tmp_path / "model.pt"))
    assert again.settings == encoder_source.settings
    assert all(np.array_equal(value, values[name]) for name, value in again.read(config.Model()).items())


def test_a_reference_checkpoint_that_does_not_fit_is_listed(checkpoint, tmp_path):
    tensors = torch_checkpoint.read(checkpoint)["model"]
    tensors["surplus"] = tensors.pop("encoder.sentence_encoder.layers.1.fc2.bias")
    tensors["gen_decoder.lm_head.weight"] = tensors["gen_decoder.lm_head.weight"] + 1
    tensors["encoder.sentence_encoder.emb_layer_norm.bias"] = np.zeros(7, np.float32)
    torch_checkpoint.write(tmp_path / "broken.pt", tensors, {}, {"encoder_attention_heads": 4})
    with pytest.raises(config.ConfigError) as error:
        source.find(str(tmp_path / "broken.pt")).read(config.Model())
    for what in (
        "fc2.bias is missing",
        "surplus is not a tensor",
        "emb_layer_norm.bias has shape (7,), expected (32,)",
        "lm_head.weight is not the same",
    ):
        assert what in str(error.value)
    torch_checkpoint.write(tmp_path / "other.pt", {"layer.weight": np.zeros((2, 2), np.float32)}, {}, {})
    with pytest.raises(config.ConfigError, match="it holds layer.weight"):
        source.find(str(tmp_path / "other.pt"))


def test_any_pickle_ends_in_one_line_or_is_read(checkpoint):
    with zipfile.ZipFile(checkpoint) as archive:
        parts = {item.filename: archive.read(item) for item in archive.infolist()}
    [name_of_pickle] = [name for name in parts if name.endswith("/data.pkl")]
    pickled = parts[name_of_pickle]

    @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data):
        changed = bytearray(pickled)
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.integers(0, len(changed) - 1))
            replacement = st.binary(max_size=3) | st.sampled_from(OPCODES)
            changed[place : place + data.draw(st.integers(0, 3))] = data.draw(replacement)
        with zipfile.ZipFile(checkpoint, "w") as archive:
            for name, part in (parts | {name_of_pickle: bytes(changed)}).items():
                archive.writestr(name, part)
        outcome(checkpoint)

    check()


@pytest.mark.parametrize(
    "content",
    [
        {"model": {3: np.zeros(2, np.float32)}},
        {"model": 3},
        {},
        [],
        None,
        {"model": {}},
        {"model": {published.TOKENS: None}},
    ],
)
def test_a_checkpoint_without_tensors_by_name_is_one_line(tmp_path, monkeypatch, content):
    (tmp_path / "model.pt").write_bytes(b"x")
    monkeypatch.setattr(torch_checkpoint, "read", lambda _: content)
    assert "no tensors" in outcome(tmp_path / "model.pt") or "missing" in outcome(tmp_path / "model.pt")


@pytest.mark.parametrize(
    "args",
    [
        {"max_rel_pos": "128"},
        {"max_rel_pos": -1},
        {"max_rel_pos": 10**400},
        {"encoder_attention_heads": None},
        {"encoder_attention_heads": []},
    ],
)
def test_settings_of_another_type_in_a_checkpoint_are_one_line(checkpoint, tmp_path, args):
    tensors = torch_checkpoint.read(checkpoint)["model"]
    torch_checkpoint.write(
        tmp_path / "changed.pt",
        tensors,
        {},
        {"encoder_attention_heads": 4, "max_rel_pos": 128} | args,
    )
    assert outcome(tmp_path / "changed.pt") != "read"
