"""Sentence tasks as training sees them: what the model reads, what is cut off, and what is written."""

import dataclasses
import itertools

import numpy as np
import pytest
import tokenizers
from testing import input_format, write_text

from maelm_jax import config
from maelm_jax.finetuning import glue, grid
from maelm_jax.finetuning.batches import Features
from maelm_jax.finetuning.sentence import SentenceTask, kept_sizes
from maelm_jax.finetuning.task import EvaluationSet


def task(**custom) -> SentenceTask:
    settings = {"columns": ("text",), "label": "topics"} | custom
    return grid.create_task("own", config.Finetune(tasks="own", train_file="a", custom=config.CustomTask(**settings)))


def rte() -> SentenceTask:
    return grid.create_task("rte", config.Finetune())


def dev_set(count: int) -> EvaluationSet:
    """A set of `count` examples, for writing."""
    return EvaluationSet([glue.Example(("a",), None, number) for number in range(count)], None, None, "")


def written(one: SentenceTask, outputs, folder) -> list[str]:
    one.write(dev_set(len(outputs)), np.asarray(outputs, np.float32), folder, "p")
    return [line.split("\t")[1] for line in (folder / "p.tsv").read_text().splitlines()[1:]]


def test_pairs_are_cut_as_the_tokenizers_of_exports_cut_them():
    theirs = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, "a"))
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for a, b, room in itertools.product(range(12), range(12), range(1, 15)):
        theirs.enable_truncation(room, strategy="longest_first")
        ids = theirs.encode("a " * a, "b " * b).ids
        assert kept_sizes((a, b), room) == (ids.count(0), ids.count(1)), (a, b, room)
    assert kept_sizes((9,), 4) == (4,)


def test_what_the_model_reads(vocabulary):
    bos, eos = vocabulary.bos, vocabulary.eos
    one = rte()
    pairs = [glue.Example(texts, 0, 0) for texts in (("the cat", "a dog"), ("the cat " * 20, "a dog"))]
    rows = one.encode(pairs, input_format(vocabulary, 16), "dev").features
    assert rows.ids[0].tolist() == [bos, *vocabulary.encode("the cat"), eos, eos, *vocabulary.encode("a dog"), eos]
    assert rows.context[0] == len(vocabulary.encode("the cat")) + 3
    assert len(rows.ids[1]) == 16 and rows.ids[1][-1] == eos and (rows.ids[1] == eos).sum() == 3
    assert one.notes == ["dev: 1 of 2 examples cut to 16 tokens"]
    rows = one.encode([glue.Example(("the cat",), 1, 0), glue.Example(("",), 0, 1)], input_format(vocabulary, 16), "dev").features
    assert rows.ids[0].tolist() == [bos, *vocabulary.encode("the cat"), eos] and rows.ids[1].tolist() == [bos, eos]


def test_predictions_and_probabilities(tmp_path):
    assert written(rte(), [[0.0, 1.0], [2.0, 1.0]], tmp_path) == ["not_entailment", "entailment"]
    assert rte().submission_table(dev_set(1), np.asarray([[0.0, 1.0]])) == "index\tprediction\n0\tnot_entailment\n"
    three = task(labels=("no", "yes", "unclear"))
    assert written(three, np.log([[1, 3, 4], [2, 1, 1]]), tmp_path) == ["unclear", "no"]
    header, first, _ = (tmp_path / "p.tsv").read_text().splitlines()
    assert header == "index\tprediction\tprobability\tprobability_no\tprobability_yes\tprobability_unclear"
    assert first == "0\tunclear\t0.500000\t0.125000\t0.375000\t0.500000"


def test_scores_are_learned_from_0_to_1_and_written_in_the_range_of_the_file(tmp_path, vocabulary):
    regression = task(score_range=(-1, 3))
    examples = [glue.Example(("a",), score, 0) for score in (3.0, -1.0, 0.0)]
    learned = regression.encode(examples, input_format(vocabulary, 16), "dev").features.targets
    assert learned.tolist() == [1.0, 0.0, 0.25] and learned.dtype == np.float32
    assert list(map(float, written(regression, np.append(learned, [1.5, -2.0])[:, None], tmp_path))) == [3.0, -1.0, 0.0, 3.0, -1.0]
    assert (regression.main_metric, regression.selected_by) == ("spearman", ("spearman", "pearson"))


TOPICS = {"labels": ("sport", "war", "art"), "label_separator": "|"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.tsv", "text\ttopics\nA match.\tsport\nNothing.\t\nA film about it.\tart | war\n"),
        ("a.csv", 'text,topics\nA match.,sport\nNothing.,""\nA film about it.,art|war\n'),
        ("a.jsonl", '{"text": "A match.", "topics": "sport|"}\n{"text": "Nothing.", "topics": []}\n{"text": "A film.", "topics": ["war", "art"]}\n'),
    ],
)
def test_a_text_can_have_several_labels_or_none(tmp_path, name, text, vocabulary):
    write_text(tmp_path / name, text)
    several = task(**TOPICS)
    examples = several.read_file(tmp_path / name, labelled=True)
    targets = several.encode(examples, input_format(vocabulary, 16), "dev").features.targets
    assert targets.tolist() == [[1, 0, 0], [0, 0, 0], [0, 1, 1]] and targets.dtype == np.float32
    assert written(several, 2 * targets - 1, tmp_path) == ["sport", "", "war|art"]
    written(several, np.log([[1.0, 3.0, 1 / 3]]), tmp_path)
    assert (tmp_path / "p.tsv").read_text().splitlines()[1] == "0\twar\t0.750000\t0.500000\t0.750000\t0.250000"


def test_an_unknown_label_among_several_is_named(tmp_path):
    write_text(tmp_path / "a.tsv", "text\ttopics\nA match.\tsport|chess\n")
    with pytest.raises(config.ConfigError, match="a.tsv:2: .*'chess' in column topics.*sport, war, art"):
        task(**TOPICS).read_file(tmp_path / "a.tsv", labelled=True)
    write_text(tmp_path / "a.jsonl", '{"text": "A match.", "topics": [1, 3]}\n')
    assert task(labels=("1", "2", "3"), label_separator="|").read_file(tmp_path / "a.jsonl", labelled=True)[0].label == (0, 2)


def test_counts_of_labels_are_said_before_training(vocabulary):
    one = task(labels=("no", "yes"))
    train = one.encode_training([glue.Example(("a",), label, 0) for label in (1, 1, 1, 0)], input_format(vocabulary, 16))
    (line,) = one.describe_training(train)
    assert "yes 3 (75.0%), no 1 (25.0%)" in line
    many = tuple(f"label{number}" for number in range(40))
    (line,) = task(labels=many).describe_training(dataclasses.replace(train, targets=np.arange(4)))
    assert line.count("label") < 20 and "others" in line


def test_labels_that_no_training_example_has_are_named(vocabulary):
    one = task(labels=("no", "yes", "maybe"))
    one.encode_training([glue.Example(("a",), 0, 0)], input_format(vocabulary, 16))
    assert "'yes', 'maybe'" in one.notes[-1]


@pytest.mark.parametrize(
    "custom,targets,score",
    [
        ({"labels": ("no", "yes")}, np.asarray([1, 1, 0], np.int32), {"accuracy": 0.25, "macro_f1": 0.2, "f1": 0.4}),
        ({"score_range": (0.0, 1.0)}, np.asarray([0.1, 0.9, 0.2], np.float32), {"spearman": 0.0, "pearson": 0.0}),
        (TOPICS, np.asarray([[1, 0, 0], [1, 1, 0], [0, 0, 0]], np.float32), None),
    ],
)
def test_the_baseline_says_what_is_commonest_in_training(custom, targets, score):
    one = task(**custom)
    train = Features([np.zeros(1, np.int32)] * 3, targets, np.zeros(3, np.int32))
    outputs = one.constant_outputs(train, dev_set(4))
    assert outputs.shape == (4, max(len(one.labels), 1))
    if score is None:
        assert (outputs > 0).tolist() == [[True, False, False]] * 4
        return
    gold = np.asarray([0, 0, 1, 0], np.int32) if one.labels else np.asarray([0.1, 0.2, 0.3, 0.4], np.float32)
    dev = dev_set(4)._replace(features=Features([], gold, gold))
    assert one.score(dev, outputs) == pytest.approx(score)


@pytest.mark.parametrize("name,unit", [("rte", "examples"), ("stsb", "examples"), ("squad1", "questions"), ("conll", "sentences")])
def test_a_sample_is_random_always_the_same_and_alone_tokenised(name, unit, data_dir, vocabulary, tmp_path, monkeypatch):
    file = tmp_path / "words.txt"
    file.write_text("\n".join(f"word{number} O\nDublin B-LOC\n" for number in range(32)))
    files = {"tasks": name, "train_file": str(file), "dev_file": str(file)} if name == "conll" else {"data_dir": str(data_dir)}

    def load(**samples):
        one = grid.create_task(name, config.Finetune(**files, **samples))
        return one, one.load(input_format(vocabulary, 64))

    (_, whole), (one, part), (_, again) = load(), load(train_examples=7, dev_examples=7), load(train_examples=7, dev_examples=7)
    assert part.fingerprint() == again.fingerprint() != whole.fingerprint()
    assert (len(part.train.ids), part.dev[""].size) == (7, f"a sample of 7 of 32 {unit}")
    assert f"trained on 7 of 32 {unit}" in one.notes and any(part.dev[""].size in note for note in one.notes)
    positions = [whole.dev[""].examples.index(example) for example in part.dev[""].examples]
    assert positions == sorted(positions) != list(range(7)), "so that predictions keep the order and the numbers of their file"
    assert load(dev_examples=32)[1].dev[""].size == f"32 {unit}"
    counted = []
    monkeypatch.setattr(type(vocabulary), "encode_batch", lambda self, texts: counted.extend(texts) or [[5]] * len(texts))
    load(train_examples=2, dev_examples=3)
    assert 5 <= len(counted) <= 12, "of 32 and 32 examples"
