"""The module file that goes with --format=pytorch, against the reference implementation's own numbers and against JAX."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import unflatten

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")

from maelm_jax import config, export, gin_files  # noqa: E402
from maelm_jax.encoders import (  # noqa: E402
    inference,
    maelm_torch,
    pytorch,
    source,
    verify,
)
from maelm_jax.encoders.layouts import Weights  # noqa: E402
from maelm_jax.model import maelm, model_inputs  # noqa: E402

CASES = pathlib.Path(__file__).parents[1] / "data" / "reference"


@pytest.mark.parametrize("path", sorted(CASES.glob("*.npz")), ids=lambda path: path.stem)
def test_the_reference_itself(path, tmp_path):
    """An independent check: weights of the reference, through our import, into PyTorch; loss, hidden states, logits and gradients are its own."""
    data = np.load(path)
    case = json.loads(str(data["config"]))
    encoder_source = source.find(str(path))
    model = encoder_source.model(config.Model(dropout=0.0, attention_dropout=0.0))
    pytorch.write(tmp_path, Weights(encoder_source.read(model), model, case["vocab_size"], config.SpecialIds.of_size(case["vocab_size"])))
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
    names |= {"encoder.blocks.1.up.weight": "encoder.sentence_encoder.layers.1.fc1.weight"}
    for ours, name in names.items():
        expected = data[f"expected/grad/{name}"]
        assert np.abs(theirs.get_parameter(ours).grad.numpy() - expected).max() < 1e-4 * np.abs(expected).max(), name


@pytest.mark.parametrize("name", ["mpnet", "mpnet-mlm", "roberta", "reference"])
def test_every_kind_of_run_verifies(workdirs, tmp_path, name, capsys):
    assert export.main([f"--workdir={workdirs[name]}", f"--output={tmp_path / 'out'}", "--format=pytorch", "--verify"]) == 0
    reports = json.loads((tmp_path / "out" / "verification.json").read_text())
    assert [report["of"] for report in reports] == ["hidden states of maelm.MaeLm", "logits of maelm.MaeLm"]
    assert all(0 < report["largest_difference"] < 1e-5 for report in reports)
    assert "verified: hidden states" in capsys.readouterr().out


def test_a_decoder_can_have_relative_positions_that_the_encoder_lacks(make_workdir, tmp_path):
    run = make_workdir(tmp_path / "run", {"Model.relative_buckets": "none", "Model.decoder_relative_bias": True})
    params = source.find(str(run)).read(config.Model())
    assert "decoder/relative_bias/table" in params and "encoder/relative_bias/table" not in params
    assert export.main([f"--workdir={run}", f"--output={tmp_path / 'out'}", "--format=pytorch", "--verify"]) == 0


def test_token_types_are_added(make_workdir, tmp_path):
    run = make_workdir(tmp_path / "run", {"Model.token_types": 2, "Model.relative_buckets": "none", "Model.decoder_relative_bias": False})
    assert export.main([f"--workdir={run}", f"--output={tmp_path / 'out'}", "--format=pytorch", "--verify"]) == 0


@pytest.mark.parametrize("refills", [True, False])
def test_masks_let_into_the_encoder(workdirs, vocabulary, refills):
    """Between MAE-LM and MLM: some [MASK]s in the encoder's input, the others put back by the decoder."""
    encoder_source = source.find(str(workdirs["reference"]))
    model = encoder_source.model(config.Model(dropout=0.0, attention_dropout=0.0, decoder_refills_mask=refills))
    params = encoder_source.read(model)
    content = {"model": {name: getattr(model, name) for name in pytorch.FIELDS}, "vocabulary_size": 600, "special_ids": {"pad": 1, "mask": 599}}
    theirs = maelm_torch.MaeLm(content).eval()
    theirs.load_state_dict({row: torch.tensor(value) for row, value in pytorch.state_dict(params, model, 600).items()})
    ids = inference.batch(verify.sample_lines()[-10:], vocabulary, 40)
    masked = verify.every_seventh(ids, vocabulary)
    visible_to_encoder = masked & (np.arange(40) % 2 == 0)[None]
    segments = (ids != vocabulary.pad).astype(np.int32)
    positions = np.broadcast_to(np.arange(40, dtype=np.int32), ids.shape)
    inputs = model_inputs.split(
        *map(jnp.asarray, (ids, segments, positions, masked, visible_to_encoder)), model_inputs.Budget(40, int(masked.sum(1).max())), 599
    )
    graph, _ = maelm.create(model, 600, vocabulary.special)
    ours = np.asarray(jax.jit(lambda p, i: maelm.apply(graph, p)(i))(unflatten(params), inputs))
    with torch.no_grad():
        logits = theirs.predict(torch.tensor(ids), torch.tensor(masked), visible_to_encoder=torch.tensor(visible_to_encoder)).numpy()
        default = theirs.predict(torch.tensor(ids), torch.tensor(masked)).numpy()
    for row, mask, a, b in zip(logits, masked, ours, default, strict=True):
        assert np.abs(row[mask] - a[: mask.sum(), :600]).max() < 1e-5 * np.abs(ours).max()
        assert mask.sum() == 0 or np.abs(row[mask] - b[mask]).max() > 1e-3


def test_a_folder_that_computes_something_else_is_not_kept(workdirs, tmp_path, monkeypatch):
    wrong = dataclasses.replace(gin_files.load([str(workdirs["reference"] / "config.gin")]).model, num_buckets=64, max_distance=200)
    original = pytorch.write
    monkeypatch.setattr(pytorch, "write", lambda folder, weights, *masks: original(folder, weights._replace(model=wrong), *masks))
    with pytest.raises(config.RunError, match="verification failed: hidden states of maelm.MaeLm differ by"):
        export.main([f"--workdir={workdirs['reference']}", f"--output={tmp_path / 'out'}", "--format=pytorch"])
    assert list(tmp_path.iterdir()) == []
