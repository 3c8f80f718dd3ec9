"""Samples of training and dev sets, in all kinds of tasks: the same examples for every seed, scored and written as in their file."""

import json

import numpy as np
import pytest
from testing import input_format

from maelm_jax import config
from maelm_jax.finetuning import samples, tasks, windows

UNITS = {"rte": "examples", "stsb": "examples", "squad1": "questions", "squad2": "questions"}


def load(name, data_dir, vocabulary, **settings):
    given = config.Finetune(data_dir=str(data_dir), max_length=64, **settings)
    return tasks.load(name, given, config.Corpus(), input_format(vocabulary, 64))


def test_a_sample_is_random_and_always_the_same():
    chosen = samples.numbers(300, 1000)
    assert (chosen == samples.numbers(300, 1000)).all() and (np.diff(chosen) > 0).all() and len(chosen) == 300
    assert 400 < chosen.mean() < 600 and (chosen != np.arange(300)).any()
    assert samples.numbers(None, 10) is None and samples.numbers(10, 10) is None and samples.numbers(11, 10) is None


@pytest.mark.parametrize("name", UNITS)
def test_a_sample_to_train_on(name, data_dir, vocabulary):
    whole = load(name, data_dir, vocabulary)
    part = load(name, data_dir, vocabulary, train_examples=7)
    numbers = samples.numbers(7, len(whole.train.ids))
    assert [list(row) for row in part.train.ids] == [list(whole.train.ids[number]) for number in numbers]
    assert (part.train.targets == whole.train.targets[numbers]).all()
    unit = "windows" if "squad" in name else "examples"
    assert f"trained on 7 of {len(whole.train.ids)} {unit}" in part.notes
    assert part.fingerprint["data"] != whole.fingerprint["data"]


def outputs_of(data, numbers):
    """Outputs of a model for the 32 examples of a dev set, and the same for those of a sample. Each question has one window."""
    draw = np.random.default_rng(3)
    if data.name not in ("squad1", "squad2"):
        logits = draw.normal(size=(32, max(len(data.labels), 1))).astype(np.float32)
        return logits, logits[numbers]
    scores = [np.sort(draw.normal(size=(32, windows.BEST)).astype(np.float32))[:, ::-1] for _ in range(2)]
    slots = [draw.integers(8, 20, (32, windows.BEST)).astype(np.int32) for _ in range(2)]
    spans = windows.Spans(scores[0], slots[0], scores[1], slots[1], draw.normal(size=32).astype(np.float32))
    assert len(data.dev[""].features.ids) == 32
    return spans, windows.Spans(*(one[numbers] for one in spans))


@pytest.mark.parametrize("name", UNITS)
def test_a_sample_to_evaluate_on(name, data_dir, vocabulary, tmp_path):
    """The score and the predictions are those of the same outputs for the whole dev set, at the sampled examples."""
    whole, part = load(name, data_dir, vocabulary), load(name, data_dir, vocabulary, dev_examples=7)
    everything, sample = whole.dev[""], part.dev[""]
    assert f"dev: scored on a sample of 7 of 32 {UNITS[name]}; do not compare with scores on all of them" in part.notes
    assert sample.count == f"7 {UNITS[name]}" and len(part.train.ids) == len(whole.train.ids)
    numbers = samples.numbers(7, 32)
    outputs, chosen = outputs_of(whole, numbers)
    everything.write(outputs, tmp_path, "all")
    sample.write(chosen, tmp_path, "part")
    if "squad" in name:
        answers = json.loads((tmp_path / "all.json").read_text())
        of_sample = json.loads((tmp_path / "part.json").read_text())
        assert len(of_sample) == 7 and set(of_sample) <= set(answers)
        assert name == "squad2" or all(answers[key] == text for key, text in of_sample.items())
    else:
        lines = (tmp_path / "all.tsv").read_text().splitlines()
        assert (tmp_path / "part.tsv").read_text().splitlines() == [lines[0], *(lines[1 + number] for number in numbers)]
    scores = sample.score(chosen)
    assert set(scores) == set(everything.score(outputs)) and all(map(np.isfinite, scores.values()))
    assert load(name, data_dir, vocabulary, dev_examples=32).dev[""].count == everything.count


def test_the_sentences_of_conll(tmp_path, vocabulary):
    for name, count in (("train", 20), ("dev", 12)):
        blocks = [f"word{number} O\nDublin B-LOC\n" for number in range(count)]
        (tmp_path / name).write_text("\n".join(blocks))
    conll = config.Conll(train_file=str(tmp_path / "train"), dev_file=str(tmp_path / "dev"))
    data = load("conll", tmp_path, vocabulary, conll=conll, dev_examples=5)
    assert "dev: scored on a sample of 5 of 12 sentences; do not compare with scores on all of them" in data.notes
    assert data.dev[""].count == "5 sentences"
    expected = [vocabulary.encode(f"word{number} Dublin") for number in samples.numbers(5, 12)]
    assert [list(row[1:-1]) for row in data.dev[""].features.ids] == expected
