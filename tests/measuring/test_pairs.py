"""Minimal pairs: the pseudo-log-likelihoods of stock models and of ours, what counts, which files are read."""

import gzip
import json

import numpy as np
import pytest
import scipy.stats

from maelm_jax import config, evaluate
from maelm_jax.encoders.opened import load_model
from maelm_jax.measuring import likelihoods, pairs, scoring
from maelm_jax.model import model_inputs

pytestmark = pytest.mark.long

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
    ours = pairs.log_likelihoods(load_model(folder), SENTENCES)
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


def masked_sum(encoder, row: list[int], masks: list[list[int]]) -> float:
    """The sum of log p of the first of some slots that are masked together, by the full-length encoder. One program serves all rows."""
    copies = (encoder.length, encoder.length)
    ids, masked = np.full(copies, encoder.vocabulary.pad, np.int32), np.zeros(copies, bool)
    ids[:, : len(row)] = row
    for number, chosen in enumerate(masks):
        masked[number, chosen] = True
    positions, segments = np.broadcast_to(np.arange(encoder.length, dtype=np.int32), copies), (ids != encoder.vocabulary.pad).astype(np.int32)
    logits = encoder.compute_logits(ids, positions, segments, masked, model_inputs.Budget(encoder.length, encoder.length))
    logits, targets = np.asarray(logits)[: len(masks), 0], [row[chosen[0]] for chosen in masks]
    return float((logits[np.arange(len(masks)), targets] - np.logaddexp.reduce(logits, axis=1)).sum())


def test_sums_of_our_models_are_those_of_the_full_length_encoder(workdirs):
    for kind in ("mpnet", "mpnet-mlm"):
        encoder = load_model(workdirs[kind])
        sentences = [SENTENCES[0][:end] for end in range(1, 12, 3)]  # with and without padding
        assert any((len(encoder.vocabulary.encode(sentence)) + 2) % likelihoods.LENGTH_STEP == 0 for sentence in sentences)
        for sentence, value in zip(sentences, pairs.log_likelihoods(encoder, sentences), strict=True):
            row = [encoder.vocabulary.bos, *encoder.vocabulary.encode(sentence), encoder.vocabulary.eos]
            assert value == pytest.approx(masked_sum(encoder, row, [[slot] for slot in range(1, len(row) - 1)]), abs=1e-3)


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


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_interval_covers_the_mean_with_few_pairs_a_paradigm(count):
    draw, shares = np.random.default_rng(0), np.linspace(0.3, 0.9, 54)
    sample = [pairs.Pair("", "", f"{number}", "") for number in range(54) for _ in range(count)]
    covered = []
    for _ in range(400):
        good = draw.random(54 * count) < np.repeat(shares, count)
        accuracy = pairs.mean_accuracy(pairs.by_paradigm(sample, np.stack([good, 1 - good], axis=1)))
        covered.append(abs(accuracy.mean - shares.mean()) <= accuracy.half)
    assert np.mean(covered) > 0.92


@pytest.mark.parametrize("is_right", [True, False])
def test_pairs_that_are_all_right_or_all_wrong_have_an_interval(is_right):
    sample = [pairs.Pair("", "", f"{number % 5}", "") for number in range(100)]
    score = pairs.Score(np.tile([1.0, 0.0] if is_right else [0.0, 1.0], (100, 1)), None)
    accuracy = pairs.mean_accuracy(pairs.by_paradigm(sample, score.plain))
    wilson = scipy.stats.binomtest(100 * is_right, 100).proportion_ci(method="wilson")
    assert accuracy.mean == is_right and accuracy.half == pytest.approx(wilson.high - wilson.low, abs=1e-4)
    mean, half = pairs.difference(sample, score, score)
    assert mean == 0 and half > 0.03, "other pairs could differ"


def by_word_masks(vocabulary, row: list[int], first: int = 1) -> list[list[int]]:
    """For each slot the slots that PLL-word-l2r masks: it, and what follows of its word."""
    continues, masks = vocabulary.special.continues_word, []
    for slot in range(first, len(row) - 1):
        end = slot + 1
        while end < len(row) - 1 and continues[row[end]]:
            end += 1
        masks.append(list(range(slot, end)))
    return masks


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("kind", ["mpnet", "mpnet-mlm"])
def test_by_word_masks_the_later_tokens_of_a_word(workdirs, kind, accelerator, monkeypatch):
    encoder = load_model(workdirs[kind])
    if accelerator:  # the shapes of one: two at most
        choose, seen = likelihoods._choose_shapes, []

        def choose_as_on_accelerator(lengths, masks, longest, _):
            seen.append(choose(lengths, masks, longest, True))
            return seen[-1]

        monkeypatch.setattr(likelihoods, "_choose_shapes", choose_as_on_accelerator)
    sentences = [*SENTENCES[1:3], "Incomprehensibilities."]
    sums = likelihoods.measure(encoder, [likelihoods.Text(text) for text in sentences])
    for sentence, plain, by_word in zip(sentences, *sums, strict=True):
        row = [encoder.vocabulary.bos, *encoder.vocabulary.encode(sentence), encoder.vocabulary.eos]
        masks = by_word_masks(encoder.vocabulary, row)
        assert by_word == pytest.approx(masked_sum(encoder, row, masks), abs=1e-3)
        assert plain == pytest.approx(masked_sum(encoder, row, [each[:1] for each in masks]), abs=1e-3)
    assert sums.plain[2] != sums.by_word[2], "a word of several tokens"
    if accelerator:
        assert len({tuple(shape) for shape in np.concatenate(seen).tolist()}) <= 2


def test_only_the_continuation_of_a_context_is_scored(workdirs, tmp_path):
    lines = [
        {"Context1": "The value is", "Context2": "x", "Target1": "a number.", "Target2": "a class.", "Domain": "values"},
        {"prefix_acceptable": "A list", "prefix_unacceptable": "A class", "property_phrase": "holds items."},
    ]
    (tmp_path / "comps_base.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = pairs.read(f"{tmp_path}/*")
    assert [(pair.good, pair.bad, pair.paradigm) for pair in read] == [
        ("The value is a number.", "The value is a class.", "values"),
        ("A list holds items.", "A class holds items.", "comps_base"),
    ]
    encoder = load_model(workdirs["mpnet"])
    scored = pairs.score(encoder, read)
    for pair, (good, bad) in zip(read, scored.plain, strict=True):
        for text, context, value in ((pair.good, pair.good_context, good), (pair.bad, pair.bad_context, bad)):
            row = [encoder.vocabulary.bos, *encoder.vocabulary.encode(text), encoder.vocabulary.eos]
            first = 1 + len(encoder.vocabulary.encode(context))
            assert value == pytest.approx(masked_sum(encoder, row, [[slot] for slot in range(first, len(row) - 1)]), abs=1e-3)


def test_a_sample_is_spread_over_each_paradigm(tmp_path):
    write_pairs(tmp_path / "a.jsonl", [(f"{number}", "x") for number in range(100)])
    write_pairs(tmp_path / "b.jsonl", [("y", "x")])
    assert [pair.good for pair in pairs.read(f"{tmp_path}/*", 4)] == ["0", "25", "50", "75", "y"]


def test_the_interval_of_a_difference_is_that_of_pairs():
    """Of two models that fail at the same hard pairs, but for a few."""
    draw, few = np.random.default_rng(0), [pairs.Pair("", "", "one", "one")] * 200
    good = (draw.random(200) < 0.6).astype(float)
    better = np.maximum(good, np.arange(200) < 4)
    one, other = (pairs.Score(np.stack([values, np.full(200, 0.5)], 1), None) for values in (better, good))
    mean, half = pairs.difference(few, one, other)
    assert mean == pytest.approx(better.mean() - good.mean()) and half < pairs.mean_accuracy(pairs.by_paradigm(few, good[:, None] * [1, 0])).half / 2


def test_the_floor_and_every_pair_are_beside_the_models(workdirs, uninterrupted, tmp_path, capsys):
    path, run = write_pairs(tmp_path / "one.jsonl", [SENTENCES[:2], SENTENCES[1:3]]), uninterrupted
    flags = [f"--models={run},{workdirs['mpnet-mlm']}", f"--pairs={path}", "--floor", f"--output={tmp_path / 'out.json'}"]
    assert evaluate.main([*flags, "--temperature=2"]) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    first, _, unigram, fresh = written["scores"]
    assert [one["good"] for one in written["texts"]] == [SENTENCES[0], SENTENCES[1]]
    frequencies = scoring.token_frequencies(str(run))
    ids = load_model(run).vocabulary.encode(SENTENCES[0])
    assert unigram["model"] == "unigram" and unigram["nats"]["good"][0] == pytest.approx(-frequencies[ids].sum(), abs=1e-4)
    assert fresh["nats"]["good"] != first["nats"]["good"] and len(first["nats"]["bad_by_word"]) == 2
    assert first["nats"]["good"][0] != pytest.approx(pairs.log_likelihoods(load_model(run), SENTENCES[:1])[0], abs=1e-3)
    header = capsys.readouterr().out.split("\n")[0]
    assert "mpnet-mlm" in header and str(run.parent) not in header
    with pytest.raises(config.ConfigError, match="--pairs"):
        evaluate.main([f"--models={run}", "--floor"])


OF_WRONG_TYPES = [
    '{"sentence_good": "A.", "sentence_bad": "B.", "UID": 1}',
    '{"sentence_good": "A.", "sentence_bad": "B.", "linguistics_term": ["a"]}',
    '{"sentence_good": "A.", "sentence_bad": " "}',
]


@pytest.mark.parametrize("content", [*OF_WRONG_TYPES, '{"sentence_good": "A."}', '{"sentence_good": "A.", "sentence_bad": 2}', "[1]", "{", "\x00"])
def test_a_line_of_another_form_is_named(content, tmp_path):
    path = write_pairs(tmp_path / "pairs.jsonl", [SENTENCES[:2]])
    path.write_text(path.read_text() + content + "\n")
    with pytest.raises(config.ConfigError, match=r"pairs\.jsonl:2"):
        pairs.read(str(path))


def test_paradigms_of_one_name_are_told_apart(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_pairs(tmp_path / folder / "test.jsonl", [SENTENCES[:2]] * 3, UID=None)
    write_pairs(tmp_path / "other.jsonl", [("\ud83d A.", "B.")])
    found = pairs.read(str(tmp_path / "**" / "*.jsonl"))
    assert [pair.paradigm for pair in found] == ["a/test.jsonl"] * 3 + ["b/test.jsonl"] * 3 + ["other"] and found[-1].good == "? A."
    same = [pair._replace(paradigm="x", phenomenon=term) for term, pair in zip("AB", found, strict=False)]
    values = np.array([[0.0, -1.0], [-1.0, 0.0]])
    (scored,) = pairs.as_json(same, {"model": pairs.Score(values, None)})
    assert scored["paradigms"] == {"A/x": 1.0, "B/x": 0.0}


def test_the_same_tokens_in_another_order_are_a_tie(vocabulary):
    nll = np.random.default_rng(0).uniform(0.1, 15.0, vocabulary.size)
    words = "the value of an object is the number that the list of it returns".split()
    texts = [likelihoods.Text(" ".join(np.random.default_rng(seed).permutation(words))) for seed in range(50)]
    assert len(set(likelihoods.measure_unigram(vocabulary, nll, texts))) == 1


def test_what_cannot_be_scored_is_refused(workdirs, tmp_path):
    long = write_pairs(tmp_path / "long.jsonl", [("The value " * 200, "A class.")])
    short = write_pairs(tmp_path / "short.jsonl", [("A value.", "A class.")])
    for models, more, message in (
        (workdirs["mpnet"], [f"--pairs={long}"], "tokens"),
        (workdirs["mpnet"], [f"--pairs={tmp_path}/nothing*"], "nothing"),
        (workdirs["mpnet"], [f"--pairs={short}", "--rate=0.2"], "--rate"),
        (workdirs["mpnet"], [f"--pairs={short}", "--temperature=0"], "--temperature=0"),
        (workdirs["mpnet"], [f"--pairs={short}", "--temperature=nan"], "--temperature=nan"),
        (tmp_path, [f"--pairs={short}"], str(tmp_path)),
        (workdirs["mpnet"], [f"--pairs={short}", f"--output={tmp_path}"], str(tmp_path)),
    ):
        with pytest.raises(config.ConfigError, match=message):
            evaluate.main([f"--models={models}", *more])
