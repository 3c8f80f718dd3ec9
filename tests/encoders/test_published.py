"""Checkpoints in the layout of the published code, in and out."""

import json
import pathlib

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")

from maelm_jax import config, export, gin_files  # noqa: E402
from maelm_jax.encoders import published, source, weight_files  # noqa: E402

CASES = pathlib.Path(__file__).parents[1] / "data" / "reference"


@pytest.fixture(scope="module")
def published_folders(workdirs, tmp_path_factory) -> dict[str, pathlib.Path]:
    """{kind: folder in the reference's layout}."""
    root = tmp_path_factory.mktemp("published")
    for name in ("reference", "roberta-mlm"):
        assert export.main([f"--workdir={workdirs[name]}", f"--output={root / name}", "--format=reference", "--verify"]) == 0
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize("name", ["reference", "roberta-mlm"])
def test_an_export_in_the_published_layout_comes_in_as_it_was(published_folders, workdirs, name):
    original, imported = (source.find_encoder(folders[name]).read_params() for folders in (workdirs, published_folders))
    assert imported.keys() == original.keys()
    assert all(np.array_equal(imported[path], original[path]) for path in original)


def test_the_config_that_the_message_names_makes_any_run_exportable(make_workdir, tmp_path):
    for size in ("tiny.gin", "small.gin", "base.gin", "miniature.gin"):
        assert "relative_buckets" in " ".join(published.list_misfits(gin_files.load([size]).model))
        assert not published.list_misfits(gin_files.load([size, published.CONFIG]).model)
        assert not published.list_misfits(gin_files.load([size, "mlm.gin", published.CONFIG]).model)
    model = gin_files.load(["tiny.gin", published.CONFIG]).model
    assert model.encoder.relative_buckets == "reference"
    run = make_workdir(tmp_path / "run", {"Encoder.relative_buckets": "reference", "Decoder.relative_bias": model.decoder.relative_bias})
    assert export.main([f"--workdir={run}", f"--output={tmp_path / 'out'}", "--format=reference", "--no-verify"]) == 0
    assert weight_files.read_pytorch(tmp_path / "out" / "model.pt")["args"].rel_pos == 1


@pytest.mark.parametrize("path", sorted(CASES.glob("*.npz")), ids=lambda path: path.stem)
def test_a_case_of_the_reference_as_a_checkpoint(path, tmp_path):
    data = np.load(path)
    case, weights = json.loads(str(data["config"])), {key.removeprefix("weights/"): data[key] for key in data.files if key.startswith("weights/")}
    args = {"encoder_attention_heads": case["heads"], "max_rel_pos": case["max_rel_pos"]}
    weight_files.write_pytorch(tmp_path / "case.pt", weights, {}, args)
    found = source.find_encoder(tmp_path / "case.pt")
    expected = {"layers": case["layers"], "width": case["dim"], "heads": case["heads"], "num_buckets": case["rel_pos_bins"]}
    assert expected.items() <= found.settings.items() and found.settings["max_distance"] == case["max_rel_pos"]
    values = found.read_params()
    assert np.array_equal(values["encoder/blocks/feed_forward/up/kernel"][1], weights["encoder.sentence_encoder.layers.1.fc1.weight"].T)
    published.write(tmp_path / "model.pt", values, found.model, case["vocab_size"], 8)
    stored = weight_files.read_pytorch(tmp_path / "model.pt")
    head = "gen_decoder" if found.decoder else "encoder"
    assert np.array_equal(stored["model"][f"{head}.lm_head.weight"], weights[published.TOKENS]), "tied copies are there"
    assert stored["args"].rel_pos_bins == case["rel_pos_bins"]
    again = source.find_encoder(tmp_path / "model.pt")
    assert again.settings == found.settings and again.length == 8
    assert all(np.array_equal(value, values[name]) for name, value in again.read_params().items())
    # Without `args`, the number of heads is that of the table of relative biases.
    weight_files.write_pytorch(tmp_path / "bare.pt", stored["model"], {}, {})
    assert source.find_encoder(tmp_path / "bare.pt").model.encoder.heads == found.model.encoder.heads


def test_a_reference_checkpoint_that_does_not_fit_is_listed(published_folders, tmp_path):
    tensors = weight_files.read_pytorch(published_folders["reference"] / "model.pt")["model"]
    tensors["surplus"] = tensors.pop("encoder.sentence_encoder.layers.1.fc2.bias")
    tensors["gen_decoder.lm_head.weight"] = tensors["gen_decoder.lm_head.weight"] + 1
    weight_files.write_pytorch(tmp_path / "broken.pt", tensors, {}, {"encoder_attention_heads": 4})
    with pytest.raises(config.ConfigError) as error:
        source.find_encoder(tmp_path / "broken.pt").read_params()
    for what in ("fc2.bias is missing", "surplus is not a tensor", "lm_head.weight is not the same"):
        assert what in str(error.value)
    for number, content in enumerate(({"model": {"layer.weight": torch.zeros(2, 2)}}, {"model": 3}, {}, [], None)):
        torch.save(content, tmp_path / f"{number}.pt")
        with pytest.raises(config.ConfigError, match=rf"{number}\.pt"):
            source.find_encoder(tmp_path / f"{number}.pt")


def test_reading_without_pytorch_says_how_to_get_it(published_folders, monkeypatch):
    monkeypatch.setattr(weight_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(config.ConfigError, match=r"model\.pt needs PyTorch.*pip install torch"):
        source.find_encoder(published_folders["reference"])
