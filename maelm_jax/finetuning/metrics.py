"""Metrics: GLUE's (scikit-learn, SciPy), entities' (seqeval), SQuAD's (as its two evaluations)."""

import collections
import functools
import re
import string
import typing

import numpy as np
import scipy.stats
import sklearn.metrics
from seqeval.metrics import sequence_labeling

from maelm_jax.encoders.results import ClassReport, ClassScore

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def _correlation(function, truth, predicted) -> float:
    """A correlation of SciPy; 0 for constant values, where SciPy gives NaN."""
    varies = np.ptp(predicted) > 0 and np.ptp(truth) > 0
    return function(truth, predicted).statistic if varies else 0.0


# Functions (truth, predicted) -> value.
METRICS = {
    "accuracy": sklearn.metrics.accuracy_score,
    "f1": functools.partial(sklearn.metrics.f1_score, zero_division=0.0),
    "micro_f1": functools.partial(sklearn.metrics.f1_score, average="micro", zero_division=0.0),
    "macro_f1": functools.partial(sklearn.metrics.f1_score, average="macro", zero_division=0.0),
    "exact_match": sklearn.metrics.accuracy_score,
    "mcc": sklearn.metrics.matthews_corrcoef,
    "pearson": functools.partial(_correlation, scipy.stats.pearsonr),
    "spearman": functools.partial(_correlation, scipy.stats.spearmanr),
}


def sentences(names: tuple[str, ...], truth: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Computes metrics of a sentence task.

    Args:
        names: Keys of METRICS. "exact_match" is the share of texts with all labels right.
        truth: Targets of a kind of labels (labels.py), [n, ...].
        predicted: The predictions, of the same form.

    Returns:
        {metric: value from -1 to 1}.
    """
    return {name: float(METRICS[name](truth, predicted)) for name in names}


def by_class(names: typing.Sequence[str], truth: np.ndarray, predicted: np.ndarray) -> ClassReport:
    """Computes the scores of each class.

    Args:
        names: The names of the classes.
        truth: Classes, int [n], or [n, classes] with 1 where the text has the label.
        predicted: The predictions, of the same form.
    """
    numbers = np.arange(len(names))
    precision, recall, f1, examples = sklearn.metrics.precision_recall_fscore_support(
        truth, predicted, labels=numbers, average=None, zero_division=0.0
    )
    confusion = []
    if truth.ndim == 1:
        confusion = sklearn.metrics.confusion_matrix(truth, predicted, labels=numbers).tolist()
    columns = (values.tolist() for values in (examples, recall, precision, f1))
    return ClassReport(list(map(ClassScore, names, *columns)), confusion)


def by_entity(gold: list[list[str]], predicted: list[list[str]]) -> ClassReport:
    """Computes the scores of each kind of entity. All labels are `is_of_entity`."""
    gold, predicted = _with_known_prefixes(gold), _with_known_prefixes(predicted)
    names = {name for name, _, _ in sequence_labeling.get_entities(gold)}
    names |= {name for name, _, _ in sequence_labeling.get_entities(predicted)}
    precision, recall, f1, examples = sequence_labeling.precision_recall_fscore_support(
        gold, predicted, average=None, zero_division=0
    )
    columns = (np.asarray(values).tolist() for values in (examples, recall, precision, f1))
    return ClassReport(list(map(ClassScore, sorted(names), *columns)))


# Prefixes of entity labels, in the forms that seqeval knows: BIOES for BILOU.
PREFIXES = {"B": "B", "I": "I", "E": "E", "S": "S", "L": "E", "U": "S"}
OUTSIDE = "O"  # label of a word that is in no entity


def is_of_entity(label: str) -> bool:
    """Whether a label has the form B-X or I-X (also that of BIOES and BILOU), or is OUTSIDE."""
    prefix, dash, name = label.partition("-")
    return label == OUTSIDE or bool(prefix in PREFIXES and dash and name)


def words(
    gold: list[list[str]], predicted: list[list[str | None]], entities: bool
) -> dict[str, float]:
    """Computes metrics of labels of words, by sentence.

    A prediction of None is wrong. With `entities`, all labels are `is_of_entity`, and none is None.

    Returns:
        "accuracy" of words. With `entities` also "f1", "precision" and "recall" of whole entities,
        as conlleval has them.
    """
    right = [
        gold_label == label
        for sentence in zip(gold, predicted, strict=True)
        for gold_label, label in zip(*sentence, strict=True)
    ]
    result = {"accuracy": sum(right) / len(right)}
    if entities:
        measured = sequence_labeling.precision_recall_fscore_support(
            _with_known_prefixes(gold),
            _with_known_prefixes(predicted),
            average="micro",
            zero_division=0,
        )
        result |= dict(zip(("precision", "recall", "f1"), map(float, measured), strict=False))
    return result


def _with_known_prefixes(sentences: list[list[str]]) -> list[list[str]]:
    """Labels of entities with the prefixes of BIOES."""
    return [
        [label if label == OUTSIDE else PREFIXES[label[0]] + label[1:] for label in labels]
        for labels in sentences
    ]


def normalise(answer: str) -> str:
    """Makes an answer comparable: lower case, no punctuation, no articles, single spaces.

    The order of the operations is that of SQuAD's official evaluation.
    """
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def exact(gold: str, answer: str) -> float:
    """Returns 1 if the normalised answers are equal, else 0."""
    return float(normalise(gold) == normalise(answer))


def f1(gold: str, answer: str) -> float:
    """Returns F1 of the bags of words. If an answer is empty: 1 if both are, else 0."""
    gold_words, words = normalise(gold).split(), normalise(answer).split()
    if not gold_words or not words:
        return float(gold_words == words)
    shared = sum((collections.Counter(gold_words) & collections.Counter(words)).values())
    return 2.0 * shared / (len(gold_words) + len(words))


def f1_of_squad1(gold: str, answer: str) -> float:
    """Returns `f1` as the evaluation of SQuAD 1.1 has it: 0 if an answer is empty."""
    return f1(gold, answer) if normalise(answer) else 0.0


class Threshold(typing.NamedTuple):
    """A threshold of "no answer", and the mean score with it."""

    score: float
    threshold: float


def best_threshold(
    scores: np.ndarray, answered: np.ndarray, answerable: np.ndarray, margins: np.ndarray
) -> Threshold:
    """Chooses the threshold of "no answer" that gives the highest mean score on the same questions.

    An answer whose null margin is above the threshold becomes "no answer". This is
    `find_best_thresh` of SQuAD's official evaluation, with the same choice among ties.

    All arrays are [n]: scores of the answers before the threshold, which answers are not empty
    (bool), which questions have an answer (bool), and null margins.
    """
    order = np.argsort(margins, kind="stable")
    gain = np.where(answerable, scores, -answered.astype(np.float64))[order]
    totals = np.concatenate([[0.0], np.cumsum(gain)]) + (~answerable).sum()
    best = int(totals.argmax())
    if best:
        threshold = float(margins[order[best - 1]])
    else:
        # The threshold that removes every answer: 0, as in the official evaluation, if all margins
        # are above 0; else the largest number below all margins.
        threshold = min(0.0, float(np.nextafter(margins.min(), -np.inf)))
    return Threshold(float(totals[best] / len(scores)), threshold)


class Answered(typing.NamedTuple):
    """A question's right answers and the answer of the model."""

    golds: tuple[str, ...]  # empty: the question is unanswerable
    text: str  # the best span, however low its score is
    null_margin: float  # score of "no answer" minus score of the span
    probability: float = 0.0  # of the span in its window, as in the pipeline of transformers
    null_probability: float = 0.0  # of "no answer" in the window where it is least likely


def _best_scores(measure, golds: list[tuple[str, ...]], texts: list[str]) -> np.ndarray:
    """The highest score of each text against its right answers."""
    return np.asarray(
        [
            max(measure(gold, text) for gold in golds_of_text)
            for golds_of_text, text in zip(golds, texts, strict=True)
        ]
    )


def questions(
    answers: list[Answered], unanswerable: bool, threshold: float = 0.0
) -> dict[str, float]:
    """Computes the metrics of SQuAD from an answer for each question.

    With `unanswerable` (SQuAD 2.0), an answer with a null margin above `threshold` counts as empty.

    Returns:
        "exact" and "f1" in percent. With `unanswerable`, the result also has both for the questions
        with and without an answer ("exact_answerable"), and both with the best threshold
        ("best_exact"), with that threshold ("best_exact_threshold"). See `best_threshold`.
    """
    golds, texts = [answer.golds for answer in answers], [answer.text for answer in answers]
    if not unanswerable:
        return {
            "exact": 100 * float(_best_scores(exact, golds, texts).mean()),
            "f1": 100 * float(_best_scores(f1_of_squad1, golds, texts).mean()),
        }
    # A gold answer that normalises to nothing is ignored. If no other is left, "" is right.
    golds = [tuple(filter(normalise, of_question)) or ("",) for of_question in golds]
    answerable = np.asarray([bool(answer.golds) for answer in answers])
    margins = np.asarray([answer.null_margin for answer in answers])
    answered = np.asarray([bool(text) for text in texts])
    confident = ["" if answer.null_margin > threshold else answer.text for answer in answers]
    result = {}
    for name, measure in (("exact", exact), ("f1", f1)):
        values = _best_scores(measure, golds, confident)
        result[name] = 100 * float(values.mean())
        for part, chosen in (("answerable", answerable), ("unanswerable", ~answerable)):
            if chosen.any():
                result[f"{name}_{part}"] = 100 * float(values[chosen].mean())
        scores = _best_scores(measure, golds, texts)
        best = best_threshold(scores, answered, answerable, margins)
        result[f"best_{name}"] = 100 * best.score
        result[f"best_{name}_threshold"] = best.threshold
    return result
