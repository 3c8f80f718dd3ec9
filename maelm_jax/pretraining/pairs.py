"""Scores models on minimal pairs, such as BLiMP: which of two sentences is the likelier one.

The likelihood of a sentence is its pseudo-log-likelihood (Salazar et al. 2020, arXiv 1910.14659):
each of its tokens is masked in turn, and the log-probabilities of the masked tokens are summed.
`<s>` and `</s>` are never masked. Source of BLiMP: Warstadt et al. 2020, arXiv 1912.00582.

Axis letters: B copies of sentences, each with one masked token; T tokens.
"""

import json
import math
import pathlib
import typing

import jax
import numpy as np
import optax
import tqdm

from maelm_jax import config, tables
from maelm_jax.data import readers
from maelm_jax.encoders.encoder import Encoder
from maelm_jax.model import model_inputs

TOKENS = 4096  # of a batch, with padding
LENGTH_STEP = 4  # lengths of batches are multiples of it: little padding, few programs to compile
ACCELERATOR_LENGTH_STEP = 16  # a GPU takes minutes to compile and seconds to compute
TWO_SIDED_95 = 1.96  # standard errors on each side of a mean
# In one program: the logits are large.
_cross_entropy = jax.jit(optax.softmax_cross_entropy_with_integer_labels)


class Pair(typing.NamedTuple):
    """Two sentences that differ in one point. Only the first is grammatical."""

    good: str
    bad: str
    paradigm: str  # a set of pairs that differ in the same point
    phenomenon: str  # a set of paradigms


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


def read(pattern: str) -> list[Pair]:
    """Reads minimal pairs.

    Args:
        pattern: A glob of files of JSON lines, also packed (.gz, .xz, .zst). Each line has
            `sentence_good` and `sentence_bad`, and may have `UID` (its paradigm) and
            `linguistics_term` (its phenomenon). A paradigm is by default named as its file.

    Raises:
        ConfigError: No file matches, or a file is damaged or has another form.
    """
    pairs = [pair for file in readers.list_files(pattern) for pair in _read_file(file.path)]
    if not pairs:
        raise config.ConfigError(f"--pairs={pattern}: no pairs there. Name files of JSON lines")
    return pairs


def _read_file(path: str) -> typing.Iterator[Pair]:
    name = pathlib.Path(readers.without_packing(path)).stem
    for number, (offset, line) in enumerate(readers.lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(readers.decode(line, path, offset))
            good, bad = record["sentence_good"], record["sentence_bad"]
        except (ValueError, KeyError, TypeError) as error:
            raise config.ConfigError(
                f"{path}:{number}: no JSON object with sentence_good and sentence_bad ({error})"
            ) from error
        for sentence in (good, bad):
            if not isinstance(sentence, str):
                raise config.ConfigError(f"{path}:{number}: {sentence!r:.60} is no text. Quote it")
        paradigm = record.get("UID", name)
        yield Pair(good, bad, paradigm, record.get("linguistics_term", paradigm))


def score(encoder: Encoder, pairs: list[Pair], name: str = "pairs") -> list[Paradigm]:
    """Scores a model that has a prediction head on pairs. `name` is the title of the progress bar.

    Returns the score of each paradigm, in the order of phenomena and paradigms. Raises ConfigError
    if a sentence is longer than the model reads.
    """
    sentences = [sentence for pair in pairs for sentence in (pair.good, pair.bad)]
    good, bad = log_likelihoods(encoder, sentences, name).reshape(-1, 2).T
    counts: dict[tuple[str, str], list[float]] = {}
    for pair, credit in zip(pairs, np.where(good == bad, 0.5, good > bad), strict=True):
        counts.setdefault((pair.phenomenon, pair.paradigm), []).append(float(credit))
    return [
        Paradigm(paradigm, phenomenon, len(of_pairs), float(np.mean(of_pairs)), np.var(of_pairs))
        for (phenomenon, paradigm), of_pairs in sorted(counts.items())
    ]


def mean_accuracy(paradigms: list[Paradigm]) -> Accuracy:
    """Returns the mean over paradigms. Each has the same weight, whatever its number of pairs."""
    variance = sum(paradigm.variance / paradigm.pairs for paradigm in paradigms)
    return Accuracy(
        float(np.mean([paradigm.accuracy for paradigm in paradigms])),
        TWO_SIDED_95 * math.sqrt(variance) / len(paradigms),
    )


def table(scores: dict[str, list[Paradigm]]) -> str:
    """Returns the scores of models by phenomenon, by paradigm and in all, as an aligned table.

    Args:
        scores: {name of a model: its `score`}. All are of the same pairs.
    """
    by_model = {name: _by_phenomenon(paradigms) for name, paradigms in scores.items()}
    first = next(iter(by_model.values()))
    rows = []
    for phenomenon, paradigms in first.items():
        means = [mean_accuracy(groups[phenomenon]).mean for groups in by_model.values()]
        pairs = sum(paradigm.pairs for paradigm in paradigms)
        rows.append([phenomenon, f"{pairs:,}", *map(_percent, means)])
        for number, paradigm in enumerate(paradigms):
            accuracies = [groups[phenomenon][number].accuracy for groups in by_model.values()]
            rows.append([f"- {paradigm.name}", f"{paradigm.pairs:,}", *map(_percent, accuracies)])
    overall = map(mean_accuracy, scores.values())
    pairs = sum(paradigm.pairs for paradigms in first.values() for paradigm in paradigms)
    cells = [f"{_percent(accuracy.mean)} +- {_percent(accuracy.half)}" for accuracy in overall]
    rows.append(["mean over paradigms, 95% interval", f"{pairs:,}", *cells])
    return tables.plain(("phenomenon (%)", "pairs", *scores), rows)


def as_json(scores: dict[str, list[Paradigm]]) -> list[dict]:
    """Returns the numbers of `table`, for a JSON file."""
    return [
        {
            "model": name,
            "accuracy": mean_accuracy(paradigms).mean,
            "half": mean_accuracy(paradigms).half,
            "phenomena": {
                phenomenon: mean_accuracy(group).mean
                for phenomenon, group in _by_phenomenon(paradigms).items()
            },
            "paradigms": {paradigm.name: paradigm.accuracy for paradigm in paradigms},
        }
        for name, paradigms in scores.items()
    ]


def _by_phenomenon(paradigms: list[Paradigm]) -> dict[str, list[Paradigm]]:
    groups: dict[str, list[Paradigm]] = {}
    for paradigm in paradigms:
        groups.setdefault(paradigm.phenomenon, []).append(paradigm)
    return groups


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def log_likelihoods(encoder: Encoder, sentences: list[str], name: str = "pairs") -> np.ndarray:
    """Computes the pseudo-log-likelihood of each sentence, float64 [sentences], in nats.

    Sentences with the same ids have exactly the same value. Raises ConfigError if a sentence is
    longer than the model reads.
    """
    vocabulary = encoder.vocabulary
    rows = [
        (vocabulary.bos, *ids, vocabulary.eos) for ids in vocabulary.encode_batch(list(sentences))
    ]
    for row, sentence in zip(rows, sentences, strict=True):
        if len(row) > encoder.length:
            raise config.ConfigError(
                f"a sentence has {len(row)} tokens, and the model reads {encoder.length}: "
                f"{sentence!r:.60}. Leave it out"
            )
    distinct = sorted(set(rows), key=len)
    by_length: dict[int, list[tuple[int, ...]]] = {}
    multiple = LENGTH_STEP if jax.default_backend() == "cpu" else ACCELERATOR_LENGTH_STEP
    for row in distinct:
        length = min(-(-len(row) // multiple) * multiple, encoder.length)
        by_length.setdefault(length, []).append(row)
    sums: list[np.ndarray] = []  # in the order of `distinct`
    with tqdm.tqdm(
        total=sum(map(len, distinct)) - 2 * len(distinct), unit="token", desc=name
    ) as bar:
        for length, group in by_length.items():
            padding = (vocabulary.pad,) * length
            ids = np.array([(*row, *padding)[:length] for row in group], np.int32)
            counts = np.array([len(row) - 2 for row in group])
            sentence = np.repeat(np.arange(len(group)), counts)
            first = np.cumsum(counts) - counts  # copy of each sentence whose slot 1 is masked
            slot = np.arange(counts.sum()) - first[sentence] + 1
            size = min(max(TOKENS // length, 1), 1 << max(len(slot) - 1, 0).bit_length())
            values = np.zeros(len(slot))
            for start in range(0, len(slot), size):
                copies = np.arange(start, start + size) % len(slot)  # the last batch is filled up
                result = _log_probabilities(encoder, ids[sentence[copies]], slot[copies])
                values[start : start + size] = result[: len(slot) - start]
                bar.update(min(size, len(slot) - start))
            sums.append(np.bincount(sentence, values, len(group)))
    by_row = dict(zip(distinct, np.concatenate(sums), strict=True))
    return np.array([by_row[row] for row in rows])


def _log_probabilities(encoder: Encoder, ids: np.ndarray, slot: np.ndarray) -> np.ndarray:
    """Returns log p of the token in one slot of each copy of ids [B, T], float32 [B].

    The encoder reads [MASK] at the slot if it did in pretraining (MLM). Otherwise it reads the
    other T - 1 tokens.
    """
    length = ids.shape[1]
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
    segments, masked = (ids != encoder.vocabulary.pad).astype(np.int32), positions == slot[:, None]
    budget = model_inputs.Budget(length if encoder.reads_masks else length - 1, 1)
    logits = encoder.compute_logits(ids, positions, segments, masked, budget)
    return -np.asarray(_cross_entropy(logits, ids[masked][:, None]))[:, 0]
