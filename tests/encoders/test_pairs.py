"""Minimal pairs: the pseudo-log-likelihoods of stock models and of ours, what counts, which files are read."""

import gzip
import json

import numpy as np
import pytest

from maelm_jax import config, evaluate
from maelm_jax.encoders.encoder import Encoder
from maelm_jax.model import model_inputs
from maelm_jax.pretraining import pairs

SENTENCES = [
    "The value of the object is a number.",
    "A class.",
    "The value of the objects are a number.",
    "Lists may be compared, and the order of the comparison is that of the items in the lists which are compared.",
    "A class.",
]


def write_pairs(path, couples, **fields):
    path.write_text("".join(json.dumps({"sentence_good": good, "sentence_bad": bad, **fields}) + "\n" for good, bad in couples))
    return path


@pytest.mark.parametrize("name", ["bert", "modernbert-local"])
def test_sums_of_stock_models_are_those_of_transformers(name, vocabulary, copy_stock, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")
    transformers = pytest.importorskip("transformers")
    auto = "AutoModelForPreTraining" if name == "bert" else "AutoModelForMaskedLM"  # with a pooler, as published
    folder = copy_stock(name, auto, tmp_path / "stock")
    ours = pairs.log_likelihoods(Encoder.load(folder), SENTENCES)
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    for sentence, value in zip(SENTENCES, ours, strict=True):
        ids = torch.tensor([vocabulary.bos, *vocabulary.encode(sentence), vocabulary.eos])
        slots = torch.arange(1, len(ids) - 1)
        copies = ids.repeat(len(slots), 1)
        copies[slots - 1, slots] = vocabulary.mask
        with torch.no_grad():
            logits = model(input_ids=copies).logits[slots - 1, slots]
        theirs = logits.double().log_softmax(1)[slots - 1, ids[slots]].sum().item()
        assert value == pytest.approx(theirs, abs=1e-3)
    assert ours[1] == ours[4]


def test_sums_of_our_models_are_those_of_the_full_length_encoder(workdirs):
    for kind in ("mpnet", "mpnet-mlm"):
        encoder = Encoder.load(workdirs[kind])
        sentences = [SENTENCES[0][:end] for end in range(1, 12, 3)]  # with and without padding
        assert any((len(encoder.vocabulary.encode(sentence)) + 2) % pairs.LENGTH_STEP == 0 for sentence in sentences)
        for sentence, value in zip(sentences, pairs.log_likelihoods(encoder, sentences), strict=True):
            ids = np.array([[encoder.vocabulary.bos, *encoder.vocabulary.encode(sentence), encoder.vocabulary.eos]], np.int32)
            positions, expected = np.arange(ids.shape[1], dtype=np.int32)[None], 0.0
            for slot in range(1, ids.shape[1] - 1):
                masked = np.arange(ids.shape[1])[None] == slot
                inputs = ids, positions, np.ones_like(ids), masked
                logits = np.asarray(encoder.compute_logits(*inputs, model_inputs.Budget(ids.shape[1], 1)))[0, 0]
                expected += logits[ids[0, slot]] - np.logaddexp.reduce(logits)
            assert value == pytest.approx(expected, abs=1e-3)


def test_a_tie_counts_one_half_and_exchanged_sentences_the_rest(workdirs, tmp_path, capsys):
    couples = [("The value is a number.", "The value are a number."), ("A class.", "Class a."), ("A class.", "A  class.")]
    write_pairs(tmp_path / "one.jsonl", couples, UID="agreement", linguistics_term="morphology", field="ignored")
    write_pairs(tmp_path / "two.jsonl", [(bad, good) for good, bad in couples], UID="exchanged", linguistics_term="morphology")
    (tmp_path / "three.jsonl.gz").write_bytes(gzip.compress(write_pairs(tmp_path / "three", couples[2:] * 2).read_bytes()))
    run = workdirs["mpnet"]
    assert evaluate.main([f"--models={run}", f"--pairs={tmp_path}/*.jsonl*", f"--output={tmp_path / 'new' / 'out.json'}"]) == 0
    (score,) = json.loads((tmp_path / "new" / "out.json").read_text())["scores"]
    accuracies = score["paradigms"]
    assert accuracies["agreement"] + accuracies["exchanged"] == pytest.approx(1) and accuracies["three"] == 0.5
    assert score["phenomena"] == pytest.approx({"morphology": 0.5, "three": 0.5}) and score["accuracy"] == pytest.approx(0.5)
    assert "mean over paradigms" in capsys.readouterr().out


def test_the_interval_covers_the_mean_over_paradigms():
    draw, shares, sizes = np.random.default_rng(0), np.array([0.3, 0.6, 0.95]), [40, 80, 20]
    covered = []
    for _ in range(2000):
        samples = [(draw.random(size) < share).astype(float) for share, size in zip(shares, sizes, strict=True)]
        accuracy = pairs.mean_accuracy([pairs.Paradigm("", "", len(x), x.mean(), x.var()) for x in samples])
        covered.append(abs(accuracy.mean - shares.mean()) <= accuracy.half)
    assert np.mean(covered) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("content", ['{"sentence_good": "A."}', '{"sentence_good": "A.", "sentence_bad": 2}', "[1]", "{", "\x00"])
def test_a_line_of_another_form_is_named(content, tmp_path):
    path = write_pairs(tmp_path / "pairs.jsonl", [SENTENCES[:2]])
    path.write_text(path.read_text() + content + "\n")
    with pytest.raises(config.ConfigError, match=r"pairs\.jsonl:2"):
        pairs.read(str(path))


def test_what_cannot_be_scored_is_refused(workdirs, tmp_path):
    long = write_pairs(tmp_path / "long.jsonl", [("The value " * 200, "A class.")])
    short = write_pairs(tmp_path / "short.jsonl", [("A value.", "A class.")])
    for models, more, message in (
        (workdirs["mpnet"], [f"--pairs={long}"], "tokens"),
        (workdirs["mpnet"], [f"--pairs={tmp_path}/nothing*"], "nothing"),
        (workdirs["mpnet"], [f"--pairs={short}", "--rate=0.2"], "--rate"),
        (tmp_path, [f"--pairs={short}"], str(tmp_path)),
        (workdirs["mpnet"], [f"--pairs={short}", f"--output={tmp_path}"], "is a folder"),
    ):
        with pytest.raises(config.ConfigError, match=message):
            evaluate.main([f"--models={models}", *more])
