"""Batches of tokenised examples.

Batches are padded to a few lengths, so that little of a batch is padding and few shapes are
compiled. A batch depends on the seed and the step alone, so that a resumed run sees the same
batches as an uninterrupted one.
"""

import functools
import typing

import numpy as np

from maelm_jax.finetuning.features import NO_LABEL, Features

MOST_LENGTHS = 10  # largest number of padded lengths: each compiles the training step once
ENOUGH = 0.12  # share of padding below which no further length is added


class Batch(typing.NamedTuple):
    """B rows padded to T slots. Rows of weight 0 fill up a batch that is too short.

    The batch has the seed of the run, so that one compiled step serves runs with all seeds.
    """

    ids: np.ndarray  # int32 [B, T]
    lengths: np.ndarray  # int32 [B]
    targets: np.ndarray  # [B], [B, classes], [B, 2] or [B, T]
    context: np.ndarray  # int32 [B]
    weights: np.ndarray  # float32 [B]
    seed: np.ndarray  # uint32 [B], the same value in every row


class _Choice(typing.NamedTuple):
    """Lengths to pad to, and the share of padding that they leave."""

    lengths: list[int]  # ascending
    padding: float


def padded_lengths(lengths: np.ndarray, longest: int) -> list[int]:
    """Chooses the lengths that batches are padded to, by dynamic programming.

    There are at most MOST_LENGTHS. The lengths are multiples of 8, or of 4, 2 or 1 if multiples of
    8 leave too much padding. The choice is the smallest number of lengths whose share of padding is
    below ENOUGH; if there is none, the lengths with the least padding.

    Args:
        lengths: Tokens of each example, int [n].
        longest: Largest allowed length. It need not be a multiple of 8. The encoder has no
            positions beyond it.

    Returns:
        The lengths in ascending order. The last one fits every example.
    """
    best = None
    for grain in (8, 4, 2, 1):
        choice = _choose_multiples(lengths, longest, grain)
        if best is None or choice.padding < best.padding:
            best = choice
        if best.padding < ENOUGH:
            break
    return best.lengths


def _choose_multiples(lengths: np.ndarray, longest: int, grain: int) -> _Choice:
    """The best choice among multiples of `grain`.

    In round k, slots[j] is the smallest number of slots of all rows up to sizes[j] when they are
    padded to k lengths of which sizes[j] is the last. before[k][j] is then the index of the length
    below sizes[j], or -1.
    """
    rounded = np.minimum(-(-lengths // grain) * grain, longest)
    sizes, counts = np.unique(rounded, return_counts=True)
    rows = np.cumsum(counts)
    slots = rows * sizes
    before: list[np.ndarray] = []
    best = None
    for k in range(1, MOST_LENGTHS + 1):
        padding = 1 - lengths.sum() / slots[-1]
        if best is None or padding < best.padding:
            best = _Choice(_trace_back(sizes, before), padding)
        if padding < ENOUGH or k in (len(sizes), MOST_LENGTHS):
            break
        slots, previous = _add_length(sizes, rows, slots)
        before.append(previous)
    return best


def _trace_back(sizes: np.ndarray, before: list[np.ndarray]) -> list[int]:
    """The chosen lengths, from the longest down to the shortest, in ascending order."""
    picked = [len(sizes) - 1]
    for previous in reversed(before):
        picked.append(previous[picked[-1]])
    return sorted({int(sizes[index]) for index in picked if index >= 0})


class _Round(typing.NamedTuple):
    slots: np.ndarray
    before: np.ndarray


def _add_length(sizes: np.ndarray, rows: np.ndarray, slots: np.ndarray) -> _Round:
    """One more padded length. See _choose_multiples for the arrays."""
    # table[j, i + 1]: slots when sizes[j] is the last length and sizes[i] the one before it.
    # i = -1: there is none before it.
    slots_before, rows_before = (np.concatenate([[0], array]) for array in (slots, rows))
    table = slots_before[None, :] + (rows[:, None] - rows_before[None, :]) * sizes[:, None]
    is_shorter = np.arange(len(sizes) + 1)[None, :] <= np.arange(len(sizes))[:, None]
    table = np.where(is_shorter, table, np.iinfo(np.int64).max)
    return _Round(table.min(axis=1), table.argmin(axis=1) - 1)


class PlannedBatch(typing.NamedTuple):
    """One batch of an epoch."""

    size: int  # padded length
    indices: np.ndarray  # of its examples


class Batches:
    """The training batches of one run.

    Each epoch shuffles the examples, groups them by padded length, cuts each group into batches and
    shuffles the batches. The examples that do not fill a batch move to the next longer group, so
    that at most one batch of an epoch is short.
    """

    def __init__(self, features: Features, sizes: list[int], batch_size: int, pad: int, seed: int):
        self.features, self.sizes, self.batch_size, self.pad, self.seed = (
            features,
            sizes,
            batch_size,
            pad,
            seed,
        )
        self.per_epoch = -(-len(features.ids) // batch_size)
        self._epoch = functools.lru_cache(maxsize=2)(self._plan)

    def _plan(self, epoch: int) -> list[PlannedBatch]:
        """The batches of an epoch, in order."""
        draw = np.random.default_rng((self.seed, epoch))
        order = draw.permutation(len(self.features.ids))
        group = np.searchsorted(self.sizes, self.features.lengths[order])
        plan, left_over = [], order[:0]
        for number, size in enumerate(self.sizes):
            indices = np.concatenate([left_over, order[group == number]])
            full = len(indices) // self.batch_size * self.batch_size
            plan += [
                PlannedBatch(size, part) for part in indices[:full].reshape(-1, self.batch_size)
            ]
            left_over = indices[full:]
        if len(left_over):
            plan.append(PlannedBatch(self.sizes[-1], left_over))
        return [plan[i] for i in draw.permutation(len(plan))]

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0."""
        size, indices = self._epoch(step // self.per_epoch)[step % self.per_epoch]
        return pack(self.features.select(indices), size, self.batch_size, self.pad, self.seed)

    def padding(self) -> float:
        """Share of the slots of the first epoch that hold no token."""
        slots = sum(batch.size * self.batch_size for batch in self._epoch(0))
        return 1 - float(self.features.lengths.sum()) / slots


def pack(features: Features, size: int, rows: int, pad: int, seed: int) -> Batch:
    """Makes a batch of `rows` rows of `size` slots.

    Args:
        features: At most `rows` examples. Missing rows get length 1 and weight 0.
        size: Slots of a row, at least the tokens of the longest example.
        rows: Rows of the batch.
        pad: Token id of the padding.
        seed: Seed of the run.
    """
    ids = np.full((rows, size), pad, np.int32)
    for row, tokens in zip(ids, features.ids, strict=False):
        row[: len(tokens)] = tokens
    targets = features.targets
    if features.has_slot_targets:
        targets = _fit_slots(targets, size)
    return Batch(
        ids,
        np.maximum(_fill_up(features.lengths, rows), 1),
        _fill_up(targets, rows),
        _fill_up(features.context, rows),
        _fill_up(np.ones(len(features.ids), np.float32), rows),
        np.full(rows, seed, np.uint32),
    )


def _fill_up(values: np.ndarray, rows: int) -> np.ndarray:
    """`values` with zeros added up to `rows` rows."""
    missing = np.zeros((rows - len(values), *values.shape[1:]), values.dtype)
    return np.concatenate([values, missing])


def _fit_slots(targets: np.ndarray, size: int) -> np.ndarray:
    """Targets of slots [n, any number], cut or padded with NO_LABEL to [n, size]."""
    missing = max(size - targets.shape[1], 0)
    return np.pad(targets[:, :size], [(0, 0), (0, missing)], constant_values=NO_LABEL)


class EvaluationBatch(typing.NamedTuple):
    """One batch of `in_order`."""

    indices: np.ndarray  # of its examples
    batch: Batch


def in_order(
    features: Features, sizes: list[int], rows: int, pad: int
) -> typing.Iterator[EvaluationBatch]:
    """Yields batches of all examples for evaluation, the shortest examples first.

    Args:
        features: The examples.
        sizes: Lengths to pad to, in ascending order.
        rows: Rows of a batch.
        pad: Token id of the padding.
    """
    order = np.argsort(features.lengths, kind="stable")
    for start in range(0, len(order), rows):
        indices = order[start : start + rows]
        fitting = int(np.searchsorted(sizes, features.lengths[indices].max()))
        size = sizes[min(fitting, len(sizes) - 1)]
        yield EvaluationBatch(indices, pack(features.select(indices), size, rows, pad, 0))
