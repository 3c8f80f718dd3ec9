"""Scores models on minimal pairs, such as BLiMP: which of two sentences is the likelier one.

Also on pairs of continuations of a context (EWoK), and of contexts of a continuation (COMPS): only
the tokens of the continuation are scored there. likelihoods.py computes how likely a sentence is.
Source of BLiMP: Warstadt et al. 2020, arXiv 1912.00582.
"""

import collections
import json
import math
import os
import pathlib
import typing

import numpy as np

from maelm_jax import config, tables
from maelm_jax.data import readers
from maelm_jax.encoders.opened import OpenedModel
from maelm_jax.measuring import likelihoods

TWO_SIDED_95 = 1.96  # standard errors on each side of a mean
DIGITS = 5  # of the log-likelihoods in a JSON file
FORMS = (  # the fields of a line of a file
    ("sentence_good", "sentence_bad"),
    ("Context1", "Target1", "Target2"),
    ("prefix_acceptable", "prefix_unacceptable", "property_phrase"),
)
NAMES = ("UID", "linguistics_term", "Domain")  # fields that a line may lack


class Pair(typing.NamedTuple):
    """Two texts that differ in one point. The first is the right one."""

    good: str
    bad: str
    paradigm: str  # a set of pairs that differ in the same point
    phenomenon: str  # a set of paradigms
    good_context: str = ""  # the beginning of `good` that is not scored
    bad_context: str = ""


class Score(typing.NamedTuple):
    """Log-likelihoods in nats, float64 [pairs, 2]: of the good text of each pair, and of the bad.

    `by_word` is None for a model that masks no token: left to right, and unigram.
    """

    plain: np.ndarray
    by_word: np.ndarray | None


class Paradigm(typing.NamedTuple):
    """How a model does on the pairs of one paradigm."""

    name: str
    phenomenon: str
    pairs: int
    accuracy: float  # share of pairs with the likelier good sentence; a tie counts one half
    variance: float  # of what one pair counts: 1, 0.5 or 0


class Accuracy(typing.NamedTuple):
    """A mean over paradigms."""

    mean: float
    half: float  # half of its 95% interval over pairs, the paradigms being fixed


def read(pattern: str, most: int | None = None) -> list[Pair]:
    """Reads minimal pairs.

    Args:
        pattern: A glob of files of JSON lines, also packed (.gz, .xz, .zst). Each line has
            `sentence_good` and `sentence_bad`, and may have `UID` (its paradigm) and
            `linguistics_term` (its phenomenon). Or it has the fields of EWoK (`Context1`,
            `Target1`, `Target2`, `Domain`), or of COMPS (`prefix_acceptable`,
            `prefix_unacceptable`, `property_phrase`). A paradigm is by default named as its file,
            and by its path if another file has the same name.
        most: Number of pairs of each paradigm, spread evenly over them. None: all.

    Raises:
        ConfigError: No file matches, or a file is damaged or has another form.
    """
    files = readers.list_files(pattern)
    stems = [pathlib.Path(readers.without_packing(file.path)).stem for file in files]
    folder = os.path.commonpath([file.path for file in files])
    pairs = []
    for file, stem in zip(files, stems, strict=True):
        name = stem if stems.count(stem) == 1 else os.path.relpath(file.path, folder)
        pairs += _read_file(file.path, name)
    if not pairs:
        raise config.ConfigError(f"--pairs={pattern}: no pairs there. Name files of JSON lines")
    if most is None:
        return pairs
    numbers: dict[tuple[str, str], list[int]] = {}
    for number, pair in enumerate(pairs):
        numbers.setdefault((pair.phenomenon, pair.paradigm), []).append(number)
    chosen = [
        of_paradigm[index * len(of_paradigm) // min(most, len(of_paradigm))]
        for of_paradigm in numbers.values()
        for index in range(min(most, len(of_paradigm)))
    ]
    return [pairs[number] for number in sorted(chosen)]


def _read_file(path: str, name: str) -> typing.Iterator[Pair]:
    """Yields the pairs of a file. `name` is that of its paradigm by default."""
    for number, (offset, line) in enumerate(readers.lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(readers.decode(line, path, offset))
        except ValueError as error:
            raise config.ConfigError(f"{path}:{number}: this line is no JSON ({error})") from error
        known = record.keys() if isinstance(record, dict) else set()
        fields = next((form for form in FORMS if known >= set(form)), None)
        if fields is None:
            forms = ", or ".join(" and ".join(form) for form in FORMS)
            raise config.ConfigError(f"{path}:{number}: no JSON object with {forms}")
        # JSON can hold a lone surrogate, which no tokenizer takes.
        texts = {
            field: value.encode("utf-8", "replace").decode("utf-8")
            for field, value in record.items()
            if isinstance(value, str)
        }
        for field in (*fields, *NAMES):
            value = record.get(field)
            may_lack = field in NAMES and value is None
            if not may_lack and not texts.get(field, "").strip():
                raise config.ConfigError(f"{path}:{number}: {field} is {value!r:.60}. Give text")
        yield _make_pair(fields, [texts[field] for field in fields], texts, name)


def _make_pair(
    fields: tuple[str, ...], values: list[str], record: dict[str, str], name: str
) -> Pair:
    """Returns the pair of one line. `name` is that of its paradigm by default."""
    if fields == FORMS[0]:
        paradigm = record.get("UID", name)
        return Pair(*values, paradigm, record.get("linguistics_term", paradigm))
    if fields == FORMS[1]:
        context, right, wrong = values
        paradigm = record.get("Domain", name)
        good, bad = f"{context} {right}", f"{context} {wrong}"
        return Pair(good, bad, paradigm, "EWoK", context, context)
    right, wrong, phrase = values
    return Pair(f"{right} {phrase}", f"{wrong} {phrase}", name, "COMPS", right, wrong)


def score(
    encoder: OpenedModel, pairs: list[Pair], name: str = "pairs", temperature: float = 1.0
) -> Score:
    """Scores a model that has a prediction head on pairs.

    `name` is the title of the progress bar. Logits are divided by `temperature`. Raises ConfigError
    if a sentence is longer than the model reads.
    """
    sums = likelihoods.measure(encoder, _texts(pairs), name, temperature)
    by_word = None if sums.by_word is None else sums.by_word.reshape(-1, 2)
    return Score(sums.plain.reshape(-1, 2), by_word)


def score_unigram(encoder: OpenedModel, pairs: list[Pair], token_nll: np.ndarray) -> Score:
    """Scores the frequencies of a model's tokens on pairs. `token_nll` is that of `Unigram`."""
    sums = likelihoods.measure_unigram(encoder.vocabulary, token_nll, _texts(pairs))
    return Score(sums.reshape(-1, 2), None)


def log_likelihoods(encoder: OpenedModel, sentences: list[str], name: str = "pairs") -> np.ndarray:
    """Returns the pseudo-log-likelihood of each sentence, float64 [sentences], in nats."""
    return likelihoods.measure(encoder, [likelihoods.Text(text) for text in sentences], name).plain


def _texts(pairs: list[Pair]) -> list[likelihoods.Text]:
    return [
        text
        for pair in pairs
        for text in (
            likelihoods.Text(pair.good, pair.good_context),
            likelihoods.Text(pair.bad, pair.bad_context),
        )
    ]


def _credits(values: np.ndarray) -> np.ndarray:
    """Returns what each pair counts: 1 if the good text is likelier, 0.5 for a tie, else 0."""
    good, bad = values.T
    return np.where(good == bad, 0.5, good > bad)


def by_paradigm(pairs: list[Pair], values: np.ndarray) -> list[Paradigm]:
    """Returns the score of each paradigm, in the order of phenomena and paradigms.

    `values` are log-likelihoods as in `Score`.
    """
    return _group(pairs, _credits(values))


def _group(pairs: list[Pair], counted: np.ndarray) -> list[Paradigm]:
    """Returns mean and variance of what the pairs of each paradigm count [pairs]."""
    counts: dict[tuple[str, str], list[float]] = {}
    for pair, credit in zip(pairs, counted.tolist(), strict=True):
        counts.setdefault((pair.phenomenon, pair.paradigm), []).append(credit)
    # One pair says nothing of the variance of its paradigm: that of all pairs stands in.
    of_all = counted.var(ddof=1) if len(counted) > 1 else 0.0
    return [
        Paradigm(
            paradigm,
            phenomenon,
            len(of_pairs),
            float(np.mean(of_pairs)),
            float(np.var(of_pairs, ddof=1) if len(of_pairs) > 1 else of_all),
        )
        for (phenomenon, paradigm), of_pairs in sorted(counts.items())
    ]


def mean_accuracy(paradigms: list[Paradigm]) -> Accuracy:
    """Returns the mean over paradigms. Each has the same weight, whatever its number of pairs.

    Pairs that all count the same have no variance: the interval is then that of Wilson.
    """
    variance = sum(paradigm.variance / paradigm.pairs for paradigm in paradigms)
    half = TWO_SIDED_95 * math.sqrt(variance) / len(paradigms)
    if variance == 0:  # all pairs are right, or all wrong: the end of Wilson's interval
        pairs = len(paradigms) ** 2 / sum(1 / paradigm.pairs for paradigm in paradigms)
        half = TWO_SIDED_95**2 / (pairs + TWO_SIDED_95**2)
    return Accuracy(float(np.mean([paradigm.accuracy for paradigm in paradigms])), half)


def difference(pairs: list[Pair], one: Score, other: Score) -> Accuracy:
    """Returns how far the mean of `one` is above that of `other`, on the same pairs.

    The interval is narrower than those of the two means say: a hard pair is hard for both.
    """
    return mean_accuracy(_group(pairs, _credits(one.plain) - _credits(other.plain)))


def table(pairs: list[Pair], scores: dict[str, Score]) -> str:
    """Returns the scores of models by phenomenon, by paradigm and in all, as an aligned table.

    Lines with the differences from the first model follow.

    Args:
        pairs: The pairs.
        scores: {name of a model: its `score`}.
    """
    names = shorten(list(scores))
    of_models = [by_paradigm(pairs, each.plain) for each in scores.values()]
    by_model = [_by_phenomenon(paradigms) for paradigms in of_models]
    first = by_model[0]
    rows = []
    for phenomenon, paradigms in first.items():
        means = [mean_accuracy(groups[phenomenon]).mean for groups in by_model]
        count = sum(paradigm.pairs for paradigm in paradigms)
        rows.append([phenomenon, f"{count:,}", *map(_percent, means)])
        for number, paradigm in enumerate(paradigms):
            accuracies = [groups[phenomenon][number].accuracy for groups in by_model]
            rows.append([f"- {paradigm.name}", f"{paradigm.pairs:,}", *map(_percent, accuracies)])
    cells = map(_with_interval, map(mean_accuracy, of_models))
    rows.append(["mean over paradigms, 95% interval", f"{len(pairs):,}", *cells])
    by_word = [
        "-" if each.by_word is None else _with_interval(mean_accuracy(by_paradigm(pairs, each[1])))
        for each in scores.values()
    ]
    rows.append(["the same, by word (PLL-word-l2r)", f"{len(pairs):,}", *by_word])
    lines = [tables.plain(("phenomenon (%)", "pairs", *names), rows)]
    (one, first_score), *others = zip(names, scores.values(), strict=True)
    for name, other in others:
        mean, half = difference(pairs, first_score, other)
        low, high = 100 * (mean - half), 100 * (mean + half)
        lines.append(
            f"{one} - {name}: {100 * mean:+.1f} points (95% interval {low:+.1f} to {high:+.1f})"
        )
    return "\n".join(lines)


def shorten(names: list[str]) -> list[str]:
    """Returns the ends of paths from which on they differ: a and b for runs/a and runs/b."""
    parts = [name.split("/") for name in names]
    for count in range(1, max(map(len, parts))):
        ends = ["/".join(part[-count:]) for part in parts]
        if len(set(ends)) == len(set(names)):
            return ends
    return names


def as_json(pairs: list[Pair], scores: dict[str, Score]) -> list[dict]:
    """Returns the numbers of `table`, and those of every pair, for a JSON file."""
    result = []
    for name, of_model in scores.items():
        nats = {"good": of_model.plain[:, 0], "bad": of_model.plain[:, 1]}
        entry = {"model": name, **_summary(by_paradigm(pairs, of_model.plain))}
        if of_model.by_word is not None:
            entry["by_word"] = _summary(by_paradigm(pairs, of_model.by_word))
            nats |= {"good_by_word": of_model.by_word[:, 0], "bad_by_word": of_model.by_word[:, 1]}
        entry["nats"] = {key: value.round(DIGITS).tolist() for key, value in nats.items()}
        first = next(iter(scores))
        if name != first:
            entry["first_minus_this"] = difference(pairs, scores[first], of_model)._asdict()
        result.append(entry)
    return result


def _summary(paradigms: list[Paradigm]) -> dict:
    mean, half = mean_accuracy(paradigms)
    named = collections.Counter(paradigm.name for paradigm in paradigms)
    return {
        "accuracy": mean,
        "half": half,
        "phenomena": {
            phenomenon: mean_accuracy(group).mean
            for phenomenon, group in _by_phenomenon(paradigms).items()
        },
        "paradigms": {
            each.name if named[each.name] == 1 else f"{each.phenomenon}/{each.name}": each.accuracy
            for each in paradigms
        },
    }


def _by_phenomenon(paradigms: list[Paradigm]) -> dict[str, list[Paradigm]]:
    groups: dict[str, list[Paradigm]] = {}
    for paradigm in paradigms:
        groups.setdefault(paradigm.phenomenon, []).append(paradigm)
    return groups


def _with_interval(accuracy: Accuracy) -> str:
    return f"{_percent(accuracy.mean)} +- {_percent(accuracy.half)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
