"""Figures worked out by hand; SQuAD's also where the official evaluation has its corners."""

import numpy as np
import pytest

from maelm_jax.finetuning import metrics


def test_glue_figures():
    truth, scores = np.asarray([1, 1, 0, 0, 1, 0], np.int32), np.asarray([[0, 1], [0, 1], [0, 1], [1, 0], [1, 0], [1, 0]], np.float32)
    found = metrics.sentences(("accuracy", "f1", "mcc"), truth, scores.argmax(axis=1))  # 2 true, 1 false positive; 1 false, 2 true negatives
    assert found == pytest.approx({"accuracy": 4 / 6, "f1": 2 / 3, "mcc": (2 * 2 - 1 * 1) / 9})
    assert metrics.sentences(("mcc", "f1"), truth, np.zeros(6, int)) == {"mcc": 0.0, "f1": 0.0}


def test_correlations():
    truth, predicted = np.asarray([0.0, 0.1, 0.2, 0.9], np.float32), np.asarray([1.0, 2.0, 3.0, 4.0], np.float32)
    found = metrics.sentences(("spearman", "pearson"), truth, predicted)
    assert found["spearman"] == pytest.approx(1.0)
    assert found["pearson"] == pytest.approx(np.corrcoef(truth, predicted)[0, 1], abs=1e-6)
    assert metrics.sentences(("spearman",), truth, np.ones(4, np.float32)) == {"spearman": 0.0}


@pytest.mark.parametrize(
    "gold,predicted,precision,recall",
    [
        ("B-A I-A O B-B", "B-A I-A O B-B", 1, 1),
        ("B-A I-A O B-B", "B-A O O B-B", 1 / 2, 1 / 2),  # half an entity is a wrong one
        ("B-A I-A O O", "B-A I-A O B-A", 1 / 2, 1),
        ("B-A B-A", "B-A I-A", 0, 0),  # two entities are not one of two words
        ("I-A I-A O", "B-A I-A O", 1, 1),  # IOB1 means the same
        ("B-A I-A O S-B", "B-A L-A O U-B", 1, 1),  # BIOES and BILOU do
        ("O O", "O B-A", 0, 0),
        ("O B-A", "O O", 0, 0),
    ],
)
def test_entities_are_right_as_a_whole(gold, predicted, precision, recall):
    sentences = [[labels.split(), ["O"]] for labels in (gold, predicted)]
    scores = metrics.words(*sentences, entities=True)
    assert (scores["precision"], scores["recall"]) == pytest.approx((precision, recall))
    total = precision + recall
    assert scores["f1"] == pytest.approx(2 * precision * recall / total if total else 0.0)


def test_labels_that_are_no_entities_have_an_accuracy_only():
    assert metrics.words([["NN", "VB"], ["NN"]], [["NN", "NN"], ["NN"]], entities=False) == {"accuracy": 2 / 3}
    assert all(map(metrics.is_of_entity, ["O", "B-A", "I-B-C", "U-A"]))
    assert not any(map(metrics.is_of_entity, ["NN", "B-", "B", "NN-A", "", "-A"]))


@pytest.mark.parametrize(
    "gold,answer,exact,f1",
    [
        ("the Denver Broncos", "Denver Broncos!", 1, 1.0),
        ("Denver Broncos", "denver  the broncos", 1, 1.0),
        ("U.S.", "us", 1, 1.0),
        ("well-known", "well known", 0, 0.0),  # punctuation goes without a space in its place
        ("in June 1999", "June", 0, 0.5),
        ("a b b c", "b b d", 0, 2 * 2 / (3 + 3)),  # "a" is an article
        ("", "", 1, 1.0),
        ("", "x", 0, 0.0),
        ("the", "a", 1, 1.0),  # both normalise to nothing
    ],
)
def test_exact_and_f1(gold, answer, exact, f1):
    assert metrics.exact(gold, answer) == exact
    assert metrics.f1(gold, answer) == pytest.approx(f1)


def test_squad1_takes_the_best_gold():
    answers = [metrics.Answered(("in 1999", "1999"), "1999", 9.0), metrics.Answered(("x y",), "x", 0.0)]
    assert metrics.questions(answers, unanswerable=False) == pytest.approx({"exact": 50.0, "f1": 100 * (1 + 2 / 3) / 2})


def test_squad2_thresholds():
    # Sorted by margin: right answer, wrong answer to an unanswerable question, right answer, wrong answer.
    answers = [
        metrics.Answered((), "moon", -1.0),
        metrics.Answered(("sun",), "sun", -3.0),
        metrics.Answered(("rain",), "rain", 0.5),
        metrics.Answered(("snow",), "ice", 2.0),
        metrics.Answered((), "fog", 4.0),
    ]
    found = metrics.questions(answers, unanswerable=True)
    # Margin above 0 is "no answer": sun right, moon wrong, rain and snow missed, fog right.
    assert found["exact"] == found["f1"] == 40.0
    assert found["exact_answerable"] == pytest.approx(100 / 3) and found["exact_unanswerable"] == 50.0
    # From 2 (nothing answered): sun 3, moon 2, rain 3, ice 3, fog 2: the best is 3 of 5, first reached at sun.
    assert found["best_exact"] == 60.0 and found["best_exact_threshold"] == -3.0


def test_nothing_answered_is_the_best_threshold_zero():
    answers = [metrics.Answered((), "moon", 1.0), metrics.Answered(("sun",), "ice", 2.0)]
    found = metrics.questions(answers, unanswerable=True)
    assert (found["best_f1"], found["best_f1_threshold"]) == (50.0, 0.0)
    # Where 0 would let an answer through, the threshold lies under all margins: what is written is what was scored.
    answers = [metrics.Answered((), "moon", -1.0), metrics.Answered((), "fog", -0.5), metrics.Answered(("sun",), "ice", 3.0)]
    found = metrics.questions(answers, unanswerable=True)
    assert found["best_f1"] == pytest.approx(200 / 3) and found["best_f1_threshold"] < -1.0


def test_an_empty_answer_costs_an_unanswerable_question_nothing():
    answers = [metrics.Answered((), "", -1.0), metrics.Answered(("sun",), "sun", 0.5)]
    found = metrics.questions(answers, unanswerable=True)
    assert (found["best_exact"], found["best_exact_threshold"]) == (100.0, 0.5)


def test_several_labels_are_scored_together_and_by_label():
    truth = np.asarray([[1, 0, 1], [0, 0, 0], [1, 0, 0], [0, 0, 1]], np.float32)
    scores = np.asarray([[2, -1, 1], [-1, -1, -1], [-3, -1, 1], [-1, -1, 5]], np.float32)
    measured = metrics.sentences(("micro_f1", "macro_f1", "exact_match"), truth, (scores > 0).astype(np.float32))
    # Right: 3 of 4 labels, with one too many. By label: F1 of 2/3, of 0 (it never occurs), of 4/5.
    assert measured == pytest.approx({"micro_f1": 0.75, "macro_f1": (2 / 3 + 0 + 0.8) / 3, "exact_match": 0.75})


@pytest.mark.parametrize(
    "golds,answer,one,two",
    [
        (("the",), "", (100, 0), (100, 100)),  # 1.1: equal, but F1 of nothing is 0
        (("the",), "a", (100, 0), (100, 100)),
        (("the",), "cat", (0, 0), (0, 0)),
        (("the", "cat"), "", (100, 0), (0, 0)),  # 2.0 ignores a gold answer that is nothing
        (("the", "cat"), "cat", (100, 100), (100, 100)),
    ],
)
def test_gold_answers_that_normalise_to_nothing_are_scored_as_by_each_version(golds, answer, one, two):
    """By evaluate-v1.1.py and evaluate-v2.0.py."""
    answers = [metrics.Answered(golds, answer, -1.0)]
    for unanswerable, expected in ((False, one), (True, two)):
        found = metrics.questions(answers, unanswerable)
        assert (found["exact"], found["f1"]) == expected


def test_a_class_that_is_never_predicted_is_seen():
    report = metrics.by_class(("a", "b", "c"), np.asarray([0, 0, 0, 1, 2]), np.asarray([0, 0, 1, 1, 0]))
    assert report.confusion == [[2, 1, 0], [0, 1, 0], [1, 0, 0]]
    assert [(one.name, one.examples) for one in report.classes] == [("a", 3), ("b", 1), ("c", 1)]
    assert [one.f1 for one in report.classes] == pytest.approx([2 / 3, 2 / 3, 0])
    assert (report.classes[1].precision, report.classes[1].recall) == (0.5, 1.0)
    assert "c" in report.tables() and "0.0000" in report.tables()


def test_a_confusion_matrix_of_long_names_fits_a_terminal():
    names = [f"a department with a long name {number}" for number in range(12)]
    truth = np.arange(12)
    report = metrics.by_class(names, truth, np.roll(truth, 1))
    assert report.shows_confusion and all(name in report.tables().split("by prediction")[1] for name in names)
    assert max(map(len, report.tables().splitlines())) < 100


def test_classes_of_several_labels_and_of_entities():
    several = metrics.by_class(("x", "y"), np.asarray([[1, 0], [1, 1]], np.float32), np.asarray([[1, 0], [0, 1]], np.float32))
    assert [(one.recall, one.precision) for one in several.classes] == [(0.5, 1.0), (1.0, 1.0)] and not several.confusion
    entities = metrics.by_entity([["B-A", "I-A", "O", "B-B"]], [["B-A", "I-A", "O", "B-C"]])
    assert [(one.name, one.examples, one.f1) for one in entities.classes] == [("A", 1, 1.0), ("B", 1, 0.0), ("C", 0, 0.0)]
