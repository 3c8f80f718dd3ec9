"""What predictions are worth: GLUE's figures from scikit-learn and SciPy, SQuAD's as its official evaluation (version 2.0) computes them."""

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
    def value(truth, predicted) -> float:
        varies = np.ptp(predicted) > 0 and np.ptp(truth) > 0
        return float(function(truth, predicted).statistic) if varies else 0.0  # undefined for constant predictions; a useless model scores 0

    return value


METRICS = {
    "accuracy": lambda truth, predicted: float(sklearn.metrics.accuracy_score(truth, predicted)),
    "f1": lambda truth, predicted: float(sklearn.metrics.f1_score(truth, predicted, zero_division=0.0)),
    "mcc": lambda truth, predicted: float(sklearn.metrics.matthews_corrcoef(truth, predicted)),
    "pearson": _correlation(scipy.stats.pearsonr),
    "spearman": _correlation(scipy.stats.spearmanr),
}


def glue(names: tuple[str, ...], truth: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    """{metric: value in -1..1} of float [n, classes] scores, or of [n, 1] for a regression."""
    predicted = scores[:, 0] if truth.dtype == np.float32 else scores.argmax(axis=1)
    return {name: METRICS[name](truth, predicted) for name in names}


def normalise(answer: str) -> str:
    """Lower case, without punctuation, articles and extra white space, in the official order."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def exact(gold: str, answer: str) -> float:
    return float(normalise(gold) == normalise(answer))


def f1(gold: str, answer: str) -> float:
    """Of the bags of words; an empty answer is right or wrong as a whole."""
    wanted, given = normalise(gold).split(), normalise(answer).split()
    if not wanted or not given:
        return float(wanted == given)
    same = sum((collections.Counter(wanted) & collections.Counter(given)).values())
    return 2.0 * same / (len(wanted) + len(given))


def best_threshold(scores: np.ndarray, given: np.ndarray, answerable: np.ndarray, margins: np.ndarray) -> tuple[float, float]:
    """(best mean score, threshold): answers whose null margin is above the threshold become "no answer", the threshold chosen after the fact.

    `scores` are those of the answers as they are, `given` says which are not empty; float and bool [n]. As `find_best_thresh` of the official
    evaluation, ties included.
    """
    order = np.argsort(margins, kind="stable")
    gain = np.where(answerable, scores, -given.astype(np.float64))[order]
    totals = np.concatenate([[0.0], np.cumsum(gain)]) + (~answerable).sum()
    best = int(totals.argmax())
    nothing = min(0.0, float(np.nextafter(margins.min(), -np.inf)))  # 0, as officially, where that leaves every answer out; under all margins else
    return float(totals[best] / len(scores)), float(margins[order[best - 1]]) if best else nothing


class Answered(typing.NamedTuple):
    golds: tuple[str, ...]  # none: unanswerable
    text: str  # the best span
    null_margin: float


def squad(answers: list[Answered], unanswerable: bool) -> dict[str, float]:
    """{exact, f1} in percent; with `unanswerable` (SQuAD 2.0) empty where the null margin is above 0, and besides best_exact, best_f1, their
    thresholds, and the figures of the questions with and without an answer."""
    # Golds that normalise to nothing do not count; a question left without any is unanswerable.
    golds = [tuple(gold for gold in answer.golds if normalise(gold)) or ("",) for answer in answers]
    answerable = np.asarray([bool(answer.golds) for answer in answers])
    score = lambda measure, texts: np.asarray([max(measure(g, t) for g in gold) for gold, t in zip(golds, texts, strict=True)])  # noqa: E731
    texts = [answer.text for answer in answers]
    if not unanswerable:
        return {"exact": 100 * float(score(exact, texts).mean()), "f1": 100 * float(score(f1, texts).mean())}
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
