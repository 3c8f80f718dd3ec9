"""Models that have learned next tokens: their scores left to right, their exports, what is refused."""

import json

import numpy as np
import pytest
from flax import traverse_util

import maelm_jax
from maelm_jax import config, evaluate, export
from maelm_jax.encoders import opened
from maelm_jax.measuring import pairs
from maelm_jax.model import model_inputs

ROBERTA = {"Encoder.relative_buckets": "none"}
SHARE = {"Objective.causal_share": 0.25}
KINDS = {
    "mlm": ROBERTA | SHARE | {"Objective.name": "mlm"},
    "mae_lm": SHARE | {"Decoder.width": 16},
    "causal": ROBERTA | {"Objective.name": "causal"},
    "bert": ROBERTA | {"Objective.name": "causal", "Encoder.token_types": 2, "Encoder.family": "bert"},
    "mpnet": {"Objective.name": "causal"},
    "plain": {"Objective.name": "mlm"},
}
SENTENCES = ["The value of the object is a number.", "A class.", "Lists may be compared, and the order is that of the items."]


@pytest.fixture(scope="module")
def runs(make_workdir, tmp_path_factory):
    """{name of KINDS: workdir}."""
    root = tmp_path_factory.mktemp("left_to_right")
    return {name: make_workdir(root / name, settings) for name, settings in KINDS.items()}


def scores_of(folder, path, *flags):
    """What `evaluate` writes of one model."""
    assert evaluate.main([f"--models={path}", *flags, f"--output={folder / 'out.json'}"]) == 0
    (score,) = json.loads((folder / "out.json").read_text())["scores"]
    return score


def by_prefixes(encoder, sentence):
    """The log-likelihood of a sentence: each token from a row that ends with it."""
    row, total = [encoder.vocabulary.bos, *encoder.vocabulary.encode(sentence)], 0.0
    for slot in range(1, len(row)):
        ids, slots = np.full((1, 40), encoder.vocabulary.pad, np.int32), np.arange(40, dtype=np.int32)[None]
        ids[0, : slot + 1] = [*row[:slot], 7]  # what stands at the predicted token is not read
        inputs = ids, slots, (slots <= slot).astype(np.int32), slots == slot
        logits = np.asarray(encoder.compute_logits(*inputs, model_inputs.Budget(40, 1)))[0, 0].astype(np.float64)
        total += logits[row[slot]] - np.logaddexp.reduce(logits)
    return total


@pytest.mark.parametrize("kind", ["mlm", "mae_lm", "causal"])
def test_a_sentence_is_as_likely_as_its_tokens_one_by_one(runs, tmp_path, kind):
    encoder = opened.find_model(runs[kind]).read().left_to_right()
    values = pairs.log_likelihoods(encoder, SENTENCES)
    for sentence, value in zip(SENTENCES, values, strict=True):
        assert value == pytest.approx(by_prefixes(encoder, sentence), abs=1e-3)
    flags = [] if kind == "causal" else ["--left_to_right"]
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"sentence_good": SENTENCES[0], "sentence_bad": SENTENCES[2]}) + "\n")
    score = scores_of(tmp_path, runs[kind], f"--pairs={tmp_path}/pairs.jsonl", *flags)
    assert [score["nats"]["good"][0], score["nats"]["bad"][0]] == pytest.approx([values[0], values[2]], abs=1e-4)
    assert "by_word" not in score
    (tmp_path / "one.txt").write_text(SENTENCES[2] + "\n")
    score = scores_of(tmp_path, runs[kind], f"--text={tmp_path}/one.txt", *flags)
    assert score["masked"] == len(encoder.vocabulary.encode(SENTENCES[2])) and score["mask_rate"] is None
    assert score["loss"] * score["masked"] == pytest.approx(-values[2], rel=1e-5)


def torch_sum(model, vocabulary, sentence):
    import torch

    ids = torch.tensor([[vocabulary.bos, *vocabulary.encode(sentence), vocabulary.eos]])
    with torch.no_grad():
        nats = model(input_ids=ids).logits.double().log_softmax(-1)
    return nats[0, :-2].gather(1, ids[0, 1:-1, None]).sum().item()


@pytest.mark.parametrize("kind,architecture", [("mlm", "RobertaForMaskedLM"), ("causal", "RobertaForCausalLM"), ("bert", "BertLMHeadModel")])
def test_stock_classes_of_next_tokens_score_an_export_as_here(runs, tmp_path, capsys, kind, architecture):
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "out"
    assert export.main([f"--workdir={runs[kind]}", f"--output={folder}"]) == 0
    printed = capsys.readouterr().out
    assert f"verified: logits of {architecture}" in printed and ("CausalLM" in printed or kind == "bert")
    assert json.loads((folder / "config.json").read_text())["architectures"] == [architecture]
    entries = {"is_decoder": True} if kind == "mlm" else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **entries).eval()
    encoder = opened.find_model(folder).read().left_to_right()
    for sentence, value in zip(SENTENCES, pairs.log_likelihoods(encoder, SENTENCES), strict=True):
        assert value == pytest.approx(torch_sum(model, encoder.vocabulary, sentence), abs=1e-3)
    run = opened.find_model(runs[kind]).read().left_to_right()
    assert (pairs.log_likelihoods(encoder, SENTENCES) == pairs.log_likelihoods(run, SENTENCES)).all()
    assert "AutoModelForCausalLM" in (folder / "README.md").read_text()


def test_an_export_with_a_decoder_scores_both_ways_as_its_run(runs, tmp_path):
    """Masked, PyTorch agrees with it too, where it is installed: the command verifies the folder."""
    folder = tmp_path / "out"
    assert export.main([f"--workdir={runs['mae_lm']}", f"--output={folder}"]) == 0
    found = opened.find_model(folder)
    assert found.objective.causal_share == 0.25 and found.model.decoder is not None
    ours, theirs = found.read(), opened.find_model(runs["mae_lm"]).read()
    for one, other in ((ours, theirs), (ours.left_to_right(), theirs.left_to_right())):
        assert (pairs.log_likelihoods(one, SENTENCES) == pairs.log_likelihoods(other, SENTENCES)).all()
    assert "--left_to_right" in (folder / "README.md").read_text()


def test_a_head_that_resizes_the_decoder_s_states_reads_the_encoder_without(runs):
    params = traverse_util.unflatten_dict(opened.find_model(runs["mae_lm"]).read().params, sep="/")
    assert "resize" in params["head"]
    encoder = opened.find_model(runs["mae_lm"]).read().left_to_right()
    assert not any(path.startswith(("decoder/", "head/resize")) for path in encoder.params)


def test_what_does_not_score_left_to_right_is_refused(runs, tmp_path):
    output = f"--output={tmp_path / 'out'}"
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"sentence_good": "a", "sentence_bad": "b"}) + "\n")
    for command, argv, message in (
        (export, [f"--workdir={runs['mpnet']}", output], "MPNet"),
        (export, [f"--workdir={runs['causal']}", output, "--format=reference"], "causal|PyTorch"),
        (evaluate, [f"--models={runs['plain']}", f"--pairs={tmp_path}/pairs.jsonl", "--left_to_right"], "Objective.causal_share"),
        (evaluate, [f"--models={runs['plain']}", f"--text={tmp_path}/pairs.jsonl", "--left_to_right"], "Objective.causal_share"),
        (evaluate, [f"--models={runs['mlm']}", f"--text={tmp_path}/pairs.jsonl", "--left_to_right", "--rate=0.2"], "--rate"),
        (evaluate, [f"--models={runs['mlm']}", "--probe=somewhere", "--left_to_right"], "--probe"),
    ):
        with pytest.raises(config.ConfigError, match=message):
            command.main(argv)
    assert not (tmp_path / "out").exists()
    with pytest.raises(config.ConfigError, match=str(runs["causal"])):
        maelm_jax.load_encoder(runs["causal"])
