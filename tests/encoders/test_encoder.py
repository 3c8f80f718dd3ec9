"""`load_encoder(...).fill_mask`: what stands at [MASK]."""

import itertools
import json

import numpy as np
import pytest

import maelm_jax
from maelm_jax import config, export
from maelm_jax.encoders import inference
from maelm_jax.model import attention

TEXTS = ["The value of the <mask> is used.", "[MASK] is a <mask> of an object, and an object has a value.", "the<mask>"]


@pytest.fixture(scope="module", params=["mpnet", "mpnet-mlm", "roberta", "modernbert"])
def encoder(request, workdirs):
    return maelm_jax.load_encoder(workdirs[request.param])


def test_masked_tokens_are_predicted_from_the_other_tokens(encoder, vocabulary):
    """Each text alone, without padding, gives the probabilities that a batch of all gives."""
    predicted = encoder.fill_mask(TEXTS, top=3)
    assert [len(masks) for masks in predicted] == [1, 2, 1]
    tree = {}
    for path, value in encoder.params.items():
        *modules, name = path.split("/")
        node = tree
        for module in modules:
            node = node.setdefault(module, {})
        node[name] = value
    for text, masks in zip(TEXTS, predicted, strict=True):
        ids = np.asarray([[vocabulary.bos, *vocabulary.encode_masked(text), vocabulary.eos]], np.int32)
        logits = inference.logits(tree, encoder.model, vocabulary, ids, ids == vocabulary.mask, encoder.mask_fraction > 0.5)
        for of_mask, scores in zip(masks, logits, strict=True):
            probabilities = np.exp(scores) / np.exp(scores).sum()
            order = np.argsort(-probabilities)[:3]
            np.testing.assert_allclose([one.probability for one in of_mask], probabilities[order], rtol=1e-4)
            assert [one.token for one in of_mask] == [vocabulary.decode([index]) or vocabulary.pieces()[index] for index in order]


def test_more_texts_than_a_batch_keep_their_order(encoder):
    texts = [f"{'a value ' * (number % 5)}<mask>" for number in range(11)]
    alone = [encoder.fill_mask([text], top=1)[0] for text in texts[:6]]
    together = encoder.fill_mask(texts, top=1)
    assert len(together) == 11
    for one, other in zip(alone, together, strict=False):
        assert one[0][0].token == other[0][0].token
        assert one[0][0].probability == pytest.approx(other[0][0].probability, rel=1e-4)


def test_the_probabilities_of_all_ids_sum_to_one(encoder, vocabulary):
    [[candidates]] = encoder.fill_mask(["the <mask>"], top=vocabulary.size)
    assert sum(one.probability for one in candidates) == pytest.approx(1)
    assert all(one.probability >= other.probability for one, other in itertools.pairwise(candidates))
    assert "<mask>" in [one.token for one in candidates]


@pytest.mark.parametrize(
    ("texts", "top", "message"),
    [
        (["no mask"], 5, r"texts\[0\] has no \[MASK\]: 'no mask'"),
        (["<mask>", "<mask> " + "a " * 200], 5, r"texts\[1\] has 203 tokens, and the encoder reads 48: shorten it"),
        ("<mask>", 5, "texts is one string"),
        (["<mask>"], 0, "top must be from 1 to 600, got 0"),
        (["<mask>"], 601, "top must be from 1 to 600, got 601"),
    ],
)
def test_wrong_input_is_refused(encoder, texts, top, message):
    with pytest.raises(config.ConfigError, match=message):
        encoder.fill_mask(texts, top)


def test_an_export_without_head_says_what_to_load(workdirs, tmp_path):
    assert export.main([f"--workdir={workdirs['mpnet']}", f"--output={tmp_path / 'out'}"]) == 0
    with pytest.raises(config.ConfigError, match="has no head, so it predicts no tokens: load the workdir"):
        maelm_jax.load_encoder(tmp_path / "out").fill_mask(["<mask>"])


def test_mlm_predicts_as_the_fill_mask_of_transformers(workdirs, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("torch", reason="PyTorch is not installed")
    assert export.main([f"--workdir={workdirs['roberta-mlm']}", f"--output={tmp_path / 'out'}"]) == 0
    pipeline = transformers.pipeline("fill-mask", str(tmp_path / "out"), device="cpu")
    for folder in (workdirs["roberta-mlm"], tmp_path / "out"):
        for text, masks in zip(TEXTS, maelm_jax.load_encoder(folder).fill_mask(TEXTS, top=4), strict=True):
            theirs = pipeline(text.replace("[MASK]", "<mask>"), top_k=4)
            for ours, expected in zip(masks, theirs if len(masks) > 1 else [theirs], strict=True):
                np.testing.assert_allclose([one.probability for one in ours], [one["score"] for one in expected], rtol=1e-4)


@pytest.mark.parametrize("renumber", [False, True])
def test_the_decoder_predicts_as_the_exported_module(make_workdir, vocabulary, tmp_path, monkeypatch, renumber):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    workdir = make_workdir(tmp_path / "run", {"Masking.renumber": renumber})
    assert export.main([f"--workdir={workdir}", f"--output={tmp_path / 'out'}", "--format=pytorch"]) == 0
    monkeypatch.syspath_prepend(str(tmp_path / "out"))
    import maelm

    ids = torch.tensor([[vocabulary.bos, *vocabulary.encode_masked(TEXTS[0]), vocabulary.eos]])
    with torch.no_grad():
        logits = maelm.MaeLm.from_folder(tmp_path / "out").eval().predict(ids, ids == vocabulary.mask)
    expected = torch.softmax(logits[ids == vocabulary.mask][0], -1).topk(4).values.numpy()
    for folder in (workdir, tmp_path / "out"):
        [[candidates]] = maelm_jax.load_encoder(folder).fill_mask(TEXTS[:1], top=4)
        np.testing.assert_allclose([one.probability for one in candidates], expected, rtol=1e-4)


def test_masks_are_read_by_an_encoder_that_read_them_in_pretraining(make_workdir, tmp_path):
    """A decoder does not tell: the encoder of delta 1 reads all masks. The export keeps that."""
    hidden = make_workdir(tmp_path / "hidden", {})
    read = make_workdir(tmp_path / "read", {"Masking.encoder_mask_fraction": 1.0})
    random = make_workdir(tmp_path / "random", {"Masking.encoder_mask_fraction": 1.0, "Masking.random_fraction": 1.0})
    kept = make_workdir(tmp_path / "kept", {"Masking.encoder_mask_fraction": 1.0, "Model.decoder_refills_mask": False})
    renumbered = make_workdir(tmp_path / "renumbered", {"Masking.renumber": True})
    folders = {"hidden": hidden, "read": read, "random": random, "kept": kept, "renumbered": renumbered}
    of_mlm = {"Masking.encoder_mask_fraction": 1.0, "Model.decoder_layers": 0, "Model.decoder_relative_bias": False}
    mlm = make_workdir(tmp_path / "mlm", of_mlm | {"Masking.random_fraction": 1.0})
    assert maelm_jax.load_encoder(mlm).mask_fraction == 1  # nothing else predicts
    for name in ("hidden", "read", "kept", "renumbered"):
        folders[f"{name} exported"] = tmp_path / f"{name}-out"
        assert export.main([f"--workdir={folders[name]}", f"--output={tmp_path / f'{name}-out'}", "--format=pytorch", "--no-verify"]) == 0
    first = {name: maelm_jax.load_encoder(folder).fill_mask(TEXTS, top=1)[0][0][0].probability for name, folder in folders.items()}
    assert first["hidden"] == first["hidden exported"] == first["random"] != first["read"] == first["read exported"]
    assert first["kept"] == first["kept exported"] != first["read"], "the decoder reads the encoder's states of the masks"
    assert first["renumbered"] == first["renumbered exported"] != first["hidden"], "the encoder's positions skip the masks"


@pytest.mark.parametrize(
    "change,message",
    [
        ({"encoder_mask_fraction": "all"}, "encoder_mask_fraction is 'all', no number from 0 to 1. Export the run again"),
        ({"renumber": 1}, "renumber is 1, neither true nor false. Export the run again"),
    ],
)
def test_masks_that_config_json_states_wrong_are_refused(make_workdir, tmp_path, change, message):
    folder = make_workdir(tmp_path / "run", {})
    assert export.main([f"--workdir={folder}", f"--output={tmp_path / 'out'}", "--format=pytorch", "--no-verify"]) == 0
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(content | change))
    with pytest.raises(config.ConfigError, match=message):
        maelm_jax.load_encoder(tmp_path / "out")


def test_a_run_of_another_kind_of_device_is_loaded(make_workdir, tmp_path):
    """Its attention backend computes nothing here."""
    workdir = make_workdir(tmp_path / "run", {"Model.attention_backend": "'cudnn'"})
    assert maelm_jax.load_encoder(workdir).encode(["A text."]).shape == (1, 32)


def test_an_encoder_that_one_of_several_devices_computes_has_fused_attention(workdirs, monkeypatch):
    """The eight devices of this machine do not make XLA shard its arrays."""
    targets = []
    original = attention.choose_backend
    monkeypatch.setattr(attention, "choose_backend", lambda *call: targets.append(call[2]) or original(*call))
    maelm_jax.load_encoder(workdirs["mpnet"]).encode(["A text."])
    assert targets and {target.devices for target in targets} == {1}
