"""The module file that goes with --format=pytorch, against the reference implementation's own numbers and against JAX."""

import dataclasses
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import padded_ids, unflatten

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")

from maelm_jax import config, export, gin_files  # noqa: E402
from maelm_jax.encoders import maelm_torch, published, pytorch, source, verify, weight_files  # noqa: E402
from maelm_jax.encoders.encoder import Encoder  # noqa: E402
from maelm_jax.model import maelm, model_inputs  # noqa: E402

CASES = pathlib.Path(__file__).parents[1] / "data" / "reference"


def read_case(path: pathlib.Path, folder: pathlib.Path) -> source.EncoderSource:
    """The weights of a test case of the reference as a checkpoint of it."""
    data = np.load(path)
    case = json.loads(str(data["config"]))
    weights = {key.removeprefix("weights/"): data[key] for key in data.files if key.startswith("weights/")}
    args = {"encoder_attention_heads": case["heads"], "max_rel_pos": case["max_rel_pos"]}
    weight_files.write_pytorch(folder / "case.pt", weights, {}, args)
    return source.find_encoder(folder / "case.pt")


@pytest.mark.parametrize("path", sorted(CASES.glob("*.npz")), ids=lambda path: path.stem)
def test_the_reference_itself(path, tmp_path):
    """An independent check: weights of the reference, through our import, into PyTorch; loss, hidden states, logits and gradients are its own."""
    data = np.load(path)
    case = json.loads(str(data["config"]))
    found = read_case(path, tmp_path)
    model = dataclasses.replace(found.model, dropout=0.0, attention_dropout=0.0)
    vocabulary = types.SimpleNamespace(size=case["vocab_size"], special=config.SpecialIds.of_size(case["vocab_size"]))
    pytorch.write(tmp_path, Encoder(found.read_params(), model, vocabulary, 48, mask_fraction=found.mask_fraction))
    theirs = maelm_torch.MaeLm.from_folder(tmp_path)
    ids, masked = torch.tensor(data["batch/tokens"]).long(), torch.tensor(data["batch/masked"]).bool()
    present = ~torch.tensor(data["batch/padding"]).bool()
    logits = theirs.predict(ids, masked, present)
    rows, slots = torch.tensor(data["expected/masked_b"]).long(), torch.tensor(data["expected/masked_pos"]).long()
    assert np.abs(logits[rows, slots].detach().numpy() - data["expected/logits"]).max() < 1e-5 * np.abs(data["expected/logits"]).max()
    loss = torch.nn.functional.cross_entropy(logits[masked], ids[masked])
    assert abs(loss.item() - data["expected/loss"]) < 1e-5 * data["expected/loss"]
    loss.backward()
    names = {"encoder.token_embedding.weight": "encoder.sentence_encoder.embed_tokens.weight"}
    names |= {"encoder.relative_bias.weight": "encoder.sentence_encoder.relative_attention_bias.weight"}
    names |= {"encoder.blocks.1.feed_forward.up.weight": "encoder.sentence_encoder.layers.1.fc1.weight"}
    for ours, name in names.items():
        expected = data[f"expected/grad/{name}"]
        assert np.abs(theirs.get_parameter(ours).grad.numpy() - expected).max() < 1e-4 * np.abs(expected).max(), name


@pytest.mark.parametrize("name", ["mpnet", "mpnet-mlm", "roberta", "reference"])
def test_every_kind_of_run_verifies(workdirs, tmp_path, name, capsys):
    assert export.main([f"--workdir={workdirs[name]}", f"--output={tmp_path / 'out'}", "--format=pytorch", "--verify"]) == 0
    printed = capsys.readouterr().out
    assert "verified: hidden states of maelm.MaeLm" in printed and "verified: logits of maelm.MaeLm" in printed


def test_a_decoder_can_have_relative_positions_that_the_encoder_lacks(make_workdir, tmp_path):
    run = make_workdir(tmp_path / "run", {"Model.relative_buckets": "none", "Model.decoder_relative_bias": True})
    params = source.find_encoder(run).read_params()
    assert "decoder/relative_bias/table" in params and "encoder/relative_bias/table" not in params
    assert export.main([f"--workdir={run}", f"--output={tmp_path / 'out'}", "--format=pytorch", "--verify"]) == 0


def test_token_types_are_added(make_workdir, tmp_path):
    run = make_workdir(tmp_path / "run", {"Model.token_types": 2, "Model.relative_buckets": "none", "Model.decoder_relative_bias": False})
    assert export.main([f"--workdir={run}", f"--output={tmp_path / 'out'}", "--format=pytorch", "--verify"]) == 0


@pytest.mark.parametrize("refills", [True, False])
def test_masks_let_into_the_encoder(workdirs, vocabulary, tmp_path, refills):
    """Between MAE-LM and MLM: some [MASK]s in the encoder's input, the others put back by the decoder."""
    encoder = Encoder.load(workdirs["reference"])
    model = dataclasses.replace(encoder.model, dropout=0.0, attention_dropout=0.0, decoder_refills_mask=refills)
    pytorch.write(tmp_path, dataclasses.replace(encoder, model=model))
    theirs = maelm_torch.MaeLm.from_folder(tmp_path).eval()
    ids = padded_ids(verify.sample_texts()[-10:], vocabulary, 40)
    masked = ~np.isin(ids, (vocabulary.bos, vocabulary.eos, vocabulary.pad)) & (np.arange(40) % 7 == 3)[None]
    visible_to_encoder = masked & (np.arange(40) % 2 == 0)[None]
    segments = (ids != vocabulary.pad).astype(np.int32)
    positions = np.broadcast_to(np.arange(40, dtype=np.int32), ids.shape)
    inputs = model_inputs.split(
        *map(jnp.asarray, (ids, segments, positions, masked, visible_to_encoder)), model_inputs.Budget(40, int(masked.sum(1).max())), 599
    )
    graph, _ = maelm.create(model, 600, vocabulary.special)
    ours = np.asarray(jax.jit(lambda p, i: maelm.apply(graph, p)(i))(unflatten(encoder.params), inputs))
    with torch.no_grad():
        logits = theirs.predict(torch.tensor(ids), torch.tensor(masked), visible_to_encoder=torch.tensor(visible_to_encoder)).numpy()
        default = theirs.predict(torch.tensor(ids), torch.tensor(masked)).numpy()
    for row, mask, a, b in zip(logits, masked, ours, default, strict=True):
        assert np.abs(row[mask] - a[: mask.sum(), :600]).max() < 1e-5 * np.abs(ours).max()
        assert mask.sum() == 0 or np.abs(row[mask] - b[mask]).max() > 1e-3


def test_a_folder_that_computes_something_else_is_not_kept(workdirs, tmp_path, monkeypatch):
    original = pytorch.write

    def write_wrong(folder, encoder):
        return original(folder, dataclasses.replace(encoder, model=dataclasses.replace(encoder.model, max_distance=200)))

    monkeypatch.setattr(pytorch, "write", write_wrong)
    with pytest.raises(config.RunError, match="verification failed: hidden states"):
        export.main([f"--workdir={workdirs['reference']}", f"--output={tmp_path / 'out'}", "--format=pytorch"])
    assert list(tmp_path.iterdir()) == []


# Checkpoints in the layout of the published code.


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
    run = make_workdir(tmp_path / "run", {f"Model.{name}": getattr(model, name) for name in ("relative_buckets", "decoder_relative_bias")})
    assert export.main([f"--workdir={run}", f"--output={tmp_path / 'out'}", "--format=reference", "--no-verify"]) == 0
    assert weight_files.read_pytorch(tmp_path / "out" / "model.pt")["args"].rel_pos == 1


@pytest.mark.parametrize("path", sorted(CASES.glob("*.npz")), ids=lambda path: path.stem)
def test_a_case_of_the_reference_as_a_checkpoint(path, tmp_path):
    data = np.load(path)
    case, weights = json.loads(str(data["config"])), {key.removeprefix("weights/"): data[key] for key in data.files if key.startswith("weights/")}
    found = read_case(path, tmp_path)
    expected = {"layers": case["layers"], "width": case["dim"], "heads": case["heads"], "num_buckets": case["rel_pos_bins"]}
    assert expected.items() <= found.settings.items() and found.settings["max_distance"] == case["max_rel_pos"]
    values = found.read_params()
    assert np.array_equal(values["encoder/blocks/feed_forward/up/kernel"][1], weights["encoder.sentence_encoder.layers.1.fc1.weight"].T)
    published.write(tmp_path / "model.pt", values, found.model, case["vocab_size"])
    stored = weight_files.read_pytorch(tmp_path / "model.pt")
    head = "gen_decoder" if found.model.decoder_layers else "encoder"
    assert np.array_equal(stored["model"][f"{head}.lm_head.weight"], weights[published.TOKENS]), "tied copies are there"
    assert stored["args"].rel_pos_bins == case["rel_pos_bins"]
    again = source.find_encoder(tmp_path / "model.pt")
    assert again.settings == found.settings
    assert all(np.array_equal(value, values[name]) for name, value in again.read_params().items())
    # Without `args`, the number of heads is that of the table of relative biases.
    weight_files.write_pytorch(tmp_path / "bare.pt", stored["model"], {}, {})
    assert source.find_encoder(tmp_path / "bare.pt").model.heads == found.model.heads


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
