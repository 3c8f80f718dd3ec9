"""Metrics of GLUE (from scikit-learn and SciPy) and SQuAD (as its official evaluation, 2.0)."""

import collections
import re
import string
import typing

import numpy as np
import scipy.stats
import sklearn.metrics

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def _correlation(function):
    """A metric from a function of SciPy. It is 0 for constant values, where SciPy gives NaN."""

    def value(truth, predicted) -> float:
        varies = np.ptp(predicted) > 0 and np.ptp(truth) > 0
        return float(function(truth, predicted).statistic) if varies else 0.0

    return value


METRICS = {
    "accuracy": lambda truth, predicted: float(sklearn.metrics.accuracy_score(truth, predicted)),
    "f1": lambda truth, predicted: float(
        sklearn.metrics.f1_score(truth, predicted, zero_division=0.0)
    ),
    "mcc": lambda truth, predicted: float(sklearn.metrics.matthews_corrcoef(truth, predicted)),
    "pearson": _correlation(scipy.stats.pearsonr),
    "spearman": _correlation(scipy.stats.spearmanr),
}


def glue(names: tuple[str, ...], truth: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    """Computes metrics of a task of GLUE.

    Args:
        names: Keys of METRICS.
        truth: int32 [n] classes, or float32 [n] scores.
        scores: Output of the model, float [n, classes], or [n, 1] in a regression.

    Returns:
        {metric: value from -1 to 1}.
    """
    predicted = scores[:, 0] if truth.dtype == np.float32 else scores.argmax(axis=1)
    return {name: METRICS[name](truth, predicted) for name in names}


def normalise(answer: str) -> str:
    """Makes an answer comparable: lower case, no punctuation, no articles, single spaces.

    The order of the operations is that of SQuAD's official evaluation.
    """
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def exact(gold: str, answer: str) -> float:
    """1 if the normalised answers are equal, else 0."""
    return float(normalise(gold) == normalise(answer))


def f1(gold: str, answer: str) -> float:
    """F1 of the bags of words. If an answer is empty: 1 if both are, else 0."""
    wanted, given = normalise(gold).split(), normalise(answer).split()
    if not wanted or not given:
        return float(wanted == given)
    same = sum((collections.Counter(wanted) & collections.Counter(given)).values())
    return 2.0 * same / (len(wanted) + len(given))


def best_threshold(
    scores: np.ndarray, given: np.ndarray, answerable: np.ndarray, margins: np.ndarray
) -> tuple[float, float]:
    """Chooses the threshold of "no answer" that gives the highest mean score on the same questions.

    An answer whose null margin is above the threshold becomes "no answer". This is
    `find_best_thresh` of SQuAD's official evaluation, with the same choice among ties.

    Args:
        scores: Scores of the answers before the threshold, float [n].
        given: Which answers are not empty, bool [n].
        answerable: Which questions have an answer, bool [n].
        margins: Null margins, float [n].

    Returns:
        The highest mean score and its threshold.
    """
    order = np.argsort(margins, kind="stable")
    gain = np.where(answerable, scores, -given.astype(np.float64))[order]
    totals = np.concatenate([[0.0], np.cumsum(gain)]) + (~answerable).sum()
    best = int(totals.argmax())
    # The threshold that removes every answer: 0, as in the official evaluation, if all margins are
    # above 0; else the largest number below all margins.
    nothing = min(0.0, float(np.nextafter(margins.min(), -np.inf)))
    return float(totals[best] / len(scores)), float(margins[order[best - 1]]) if best else nothing


class Answered(typing.NamedTuple):
    """A question's right answers and the answer of the model."""

    golds: tuple[str, ...]  # empty: the question is unanswerable
    text: str  # the best span
    null_margin: float  # score of "no answer" minus score of the span


def squad(answers: list[Answered], unanswerable: bool) -> dict[str, float]:
    """Computes the metrics of SQuAD.

    Args:
        answers: One for each question.
        unanswerable: Whether questions can be unanswerable (SQuAD 2.0).

    Returns:
        "exact" and "f1" in percent. With `unanswerable`, an answer counts as empty in them when its
        null margin is above 0. Then the result also has both for the questions with and without an
        answer ("exact_answerable"), and both with the best threshold ("best_exact"), with that
        threshold ("best_exact_threshold"). See `best_threshold`.
    """
    # A gold answer that normalises to nothing is ignored. If no other is left, "" is right.
    golds = [tuple(gold for gold in answer.golds if normalise(gold)) or ("",) for answer in answers]
    answerable = np.asarray([bool(answer.golds) for answer in answers])
    score = lambda measure, texts: np.asarray(  # noqa: E731
        [max(measure(g, t) for g in gold) for gold, t in zip(golds, texts, strict=True)]
    )
    texts = [answer.text for answer in answers]
    if not unanswerable:
        return {
            "exact": 100 * float(score(exact, texts).mean()),
            "f1": 100 * float(score(f1, texts).mean()),
        }
    margins = np.asarray([answer.null_margin for answer in answers])
    given = np.asarray([bool(text) for text in texts])
    shown = ["" if margin > 0 else text for text, margin in zip(texts, margins, strict=True)]
    result = {}
    for name, measure in (("exact", exact), ("f1", f1)):
        values = score(measure, shown)
        result[name] = 100 * float(values.mean())
        for which, chosen in (("answerable", answerable), ("unanswerable", ~answerable)):
            if chosen.any():
                result[f"{name}_{which}"] = 100 * float(values[chosen].mean())
        best, threshold = best_threshold(score(measure, texts), given, answerable, margins)
        result |= {f"best_{name}": 100 * best, f"best_{name}_threshold": threshold}
    return result
