"""Checkpoints in the layout of the published code, in and out."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest
from testing import SMALL_ENCODER, change_setting, random_encoder

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")

import maelm_jax  # noqa: E402
from maelm_jax import config, export, gin_files  # noqa: E402
from maelm_jax.encoders import layouts, opened, published, read_back, verify, weight_files  # noqa: E402

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
    original, imported = (opened.find_model(folders[name]).read_params() for folders in (workdirs, published_folders))
    assert imported.keys() == original.keys()
    assert all(np.array_equal(imported[path], original[path]) for path in original)


def test_a_checkpoint_is_read_with_the_names_of_the_published_scripts(published_folders, tmp_path):
    folder = shutil.copytree(published_folders["reference"], tmp_path / "published")
    expected = opened.find_model(folder)
    (folder / "vocabulary.sha256").unlink(missing_ok=True)
    (folder / "sentencepiece.model").rename(folder / "sp.model")
    pieces = expected.vocabulary.pieces
    (folder / "dict.txt").write_text("".join(f"{piece} 1\n" for piece in pieces[4:-1]), encoding="utf-8")
    found = opened.find_model(folder)
    assert found.vocabulary.pieces == pieces
    assert np.array_equal(found.read_params()["encoder/token_embedding"], expected.read_params()["encoder/token_embedding"])


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
    found = opened.find_model(tmp_path / "case.pt")
    expected = {"layers": case["layers"], "width": case["dim"], "heads": case["heads"], "num_buckets": case["rel_pos_bins"]}
    assert expected.items() <= found.settings.items() and found.settings["max_distance"] == case["max_rel_pos"]
    values = found.read_params()
    assert np.array_equal(values["encoder/blocks/feed_forward/up/kernel"][1], weights["encoder.sentence_encoder.layers.1.fc1.weight"].T)
    published.write(tmp_path / "model.pt", values, found.model, case["vocab_size"], 8)
    stored = weight_files.read_pytorch(tmp_path / "model.pt")
    head = "gen_decoder" if found.model.decoder else "encoder"
    assert np.array_equal(stored["model"][f"{head}.lm_head.weight"], weights[published.TOKENS]), "tied copies are there"
    assert stored["args"].rel_pos_bins == case["rel_pos_bins"]
    again = opened.find_model(tmp_path / "model.pt")
    assert again.settings == found.settings and again.length == 8
    assert all(np.array_equal(value, values[name]) for name, value in again.read_params().items())
    # Without `args`, the number of heads is that of the table of relative biases.
    weight_files.write_pytorch(tmp_path / "bare.pt", stored["model"], {}, {})
    assert opened.find_model(tmp_path / "bare.pt").model.encoder.heads == found.model.encoder.heads


@pytest.mark.parametrize("field", config.field_names(config.Encoder))
@pytest.mark.parametrize("buckets", ["reference", "none"])
def test_the_published_layout_carries_a_setting_or_refuses_it(tmp_path, vocabulary, field, buckets):
    base = config.Encoder(**SMALL_ENCODER | published.FIXED | {"relative_buckets": buckets})
    try:
        model = config.Model(change_setting(base, field), config.Decoder(layers=2))
    except config.ConfigError:
        return
    if published.list_misfits(model):
        return
    usual = random_encoder(model, vocabulary)
    published.write(tmp_path / "model.pt", usual.params, model, vocabulary.size, 8)
    found = opened.find_model(tmp_path / "model.pt").model
    assert found.encoder.canonical == dataclasses.replace(model.encoder, family=None).canonical and found.decoder == model.decoder
    if field != "family" and model.encoder.canonical == base.canonical:
        assert field in config.idle_names(config.Encoder, dataclasses.asdict(model.encoder)), "it was dropped"


def swap(tensors: dict, one: str, other: str):
    tensors[one], tensors[other] = tensors[other], tensors[one]


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda tensors: tensors.pop("encoder.sentence_encoder.layers.1.fc2.bias"), "encoder/blocks/feed_forward/down/bias"),
        (lambda tensors: tensors.update({"gen_decoder.sentence_encoder.layers.0.self_attn.gain": np.ones(3, np.float32)}), "gain"),
        (lambda tensors: swap(tensors, *(f"encoder.sentence_encoder.layers.1.self_attn.{x}_proj.weight" for x in "qk")), "q_proj"),
        (lambda tensors: swap(tensors, *(f"encoder.sentence_encoder.layers.{x}.fc1.bias" for x in "01")), "fc1.bias"),
        (lambda tensors: tensors.update({"gen_decoder.lm_head.dense.weight": tensors["gen_decoder.lm_head.dense.weight"].T}), "dense.weight"),
        (lambda tensors: tensors.update({"gen_decoder.lm_head.weight": tensors["gen_decoder.lm_head.weight"] + 1}), "lm_head.weight"),
    ],
)
def test_a_verification_finds_what_differs_in_a_checkpoint(published_folders, workdirs, tmp_path, spoil, named):
    ours = maelm_jax.load_encoder(workdirs["reference"])
    verify.verify("reference", published_folders["reference"], ours)
    tensors = weight_files.read_pytorch(published_folders["reference"] / "model.pt")["model"]
    spoil(tensors)
    weight_files.write_pytorch(tmp_path / "model.pt", tensors, {}, {})
    with pytest.raises(config.RunError) as error:
        verify.verify("reference", tmp_path, ours)
    assert named in str(error.value)


def test_a_parameter_that_the_published_layout_does_not_have_is_found(workdirs, tmp_path, monkeypatch):
    """When it is written, else when it is read back, else when it is verified."""
    ours, gain = maelm_jax.load_encoder(workdirs["reference"]), "encoder/blocks/attention/gain"
    ours = ours.replace(params=ours.params | {gain: np.full((2, 32), 0.5, np.float32)})

    def refuse() -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        with pytest.raises((config.ConfigError, config.RunError)) as error:
            ours.write("reference", folder)
            verify.verify("reference", folder, ours)
        return str(error.value)

    assert gain in refuse()
    monkeypatch.setattr(layouts, "_list_unmapped", lambda *_: [])
    assert gain in refuse()
    monkeypatch.setattr(read_back, "check", lambda *_: None)
    assert "verification" in refuse() and gain in refuse()


def test_a_head_of_the_objective_is_left_out_by_its_name(workdirs, tmp_path, capsys):
    ours = maelm_jax.load_encoder(workdirs["reference"])
    with_head = ours.replace(params=ours.params | {"own_head/kernel": np.ones((32, 1), np.float32)})
    with_head.write("reference", tmp_path)
    assert "own_head/kernel" in capsys.readouterr().out
    verify.verify("reference", tmp_path, with_head)
    assert maelm_jax.load_encoder(tmp_path).params.keys() == ours.params.keys()


def test_a_reference_checkpoint_that_does_not_fit_is_listed(published_folders, tmp_path):
    tensors = weight_files.read_pytorch(published_folders["reference"] / "model.pt")["model"]
    tensors["surplus"] = tensors.pop("encoder.sentence_encoder.layers.1.fc2.bias")
    tensors["gen_decoder.lm_head.weight"] = tensors["gen_decoder.lm_head.weight"] + 1
    weight_files.write_pytorch(tmp_path / "broken.pt", tensors, {}, {"encoder_attention_heads": 4})
    with pytest.raises(config.ConfigError) as error:
        opened.find_model(tmp_path / "broken.pt").read_params()
    for what in ("fc2.bias is missing", "surplus is not a tensor", "lm_head.weight is not the same"):
        assert what in str(error.value)
    for number, content in enumerate(({"model": {"layer.weight": torch.zeros(2, 2)}}, {"model": 3}, {}, [], None)):
        torch.save(content, tmp_path / f"{number}.pt")
        with pytest.raises(config.ConfigError, match=rf"{number}\.pt"):
            opened.find_model(tmp_path / f"{number}.pt")


def test_reading_without_pytorch_says_how_to_get_it(published_folders, monkeypatch):
    monkeypatch.setattr(weight_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(config.ConfigError, match="PyTorch"):
        opened.find_model(published_folders["reference"])
