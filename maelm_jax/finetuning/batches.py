"""Batches of tokenised examples.

Batches are padded to a few lengths, so that little of a batch is padding and few shapes are
compiled. A batch depends on the seed and the step alone, so that a resumed run sees the same
batches as an uninterrupted one.
"""

import dataclasses
import functools
import typing

import numpy as np

NO_LABEL = -1  # target of a slot that is not predicted
# Lengths are multiples of the first, so that other data often has the same compiled shapes. Only a
# long run has multiples of the second too.
LENGTH_STEPS = (8, 4)
MOST_LENGTHS = 10


@dataclasses.dataclass(frozen=True)
class Features:
    """n tokenised examples.

    Attributes:
        ids: n arrays of token ids, int32, without padding.
        targets: [n, ...], of the form that `Task.loss` reads. Targets of slots, int32 [n, T], are
            cut and padded to the batch.
        context: The slot at which the second text begins, int32 [n]; 0 where there is one text.
        has_slot_targets: Whether `targets` are of slots.
    """

    ids: list[np.ndarray]
    targets: np.ndarray
    context: np.ndarray
    has_slot_targets: bool = False

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, int32 [n]."""
        return np.asarray([len(row) for row in self.ids], np.int32)

    def select(self, indices: np.ndarray) -> "Features":
        """Returns the examples with these indices, in this order."""
        return dataclasses.replace(
            self,
            ids=[self.ids[index] for index in indices],
            targets=self.targets[indices],
            context=self.context[indices],
        )


class Batch(typing.NamedTuple):
    """B rows padded to T slots. Rows of weight 0 fill up a batch that is too short.

    The batch has the seed of the run, so that one compiled step serves runs with all seeds.
    """

    ids: np.ndarray  # int32 [B, T]
    lengths: np.ndarray  # int32 [B]
    targets: np.ndarray  # [B, ...], or [B, T] where they are of slots
    context: np.ndarray  # int32 [B]
    weights: np.ndarray  # float32 [B]
    seed: np.ndarray  # uint32 [B], the same value in every row


def choose_lengths(lengths: np.ndarray, longest: int, worth: float) -> list[int]:
    """Chooses the lengths that batches are padded to. The training step is compiled for each.

    Begins with the length that fits every example. Adds the length that saves most, while it saves
    more than it costs.

    Args:
        lengths: Tokens of each example, int [n].
        longest: Largest allowed length. The encoder has no positions beyond it.
        worth: Compiling a shape costs as much as computing so many slots of an epoch.

    Returns:
        The lengths in ascending order: multiples of a step, and perhaps `longest`.
    """
    sizes, counts = np.unique(lengths, return_counts=True)

    def slots(chosen: list[int]) -> int:
        return int((np.asarray(chosen)[np.searchsorted(chosen, sizes)] * counts).sum())

    chosen = [min(-(-int(sizes[-1]) // LENGTH_STEPS[0]) * LENGTH_STEPS[0], longest)]
    for step in LENGTH_STEPS:
        while len(chosen) < MOST_LENGTHS:
            options = [sorted({*chosen, length}) for length in range(step, chosen[-1], step)]
            best = min(options, key=slots, default=chosen)
            if slots(chosen) - slots(best) <= worth:
                break
            chosen = best
    return chosen


class Batches:
    """The training batches of one run.

    Each epoch shuffles the examples, groups them by padded length, cuts each group into batches and
    shuffles the batches. The examples that do not fill a batch move to the next longer group, so
    that at most one batch of an epoch is short.
    """

    def __init__(
        self, features: Features, lengths: list[int], batch_size: int, pad: int, seed: int
    ):
        self.features, self.lengths = features, lengths
        self.batch_size, self.pad, self.seed = batch_size, pad, seed
        self.per_epoch = -(-len(features.ids) // batch_size)
        self._epoch = functools.lru_cache(maxsize=2)(self._plan)

    def _plan(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """Returns the length and the indices of the examples of each batch of an epoch."""
        draw = np.random.default_rng((self.seed, epoch))
        order = draw.permutation(len(self.features.ids))
        group = np.searchsorted(self.lengths, self.features.lengths[order])
        plan, left_over = [], order[:0]
        for number, length in enumerate(self.lengths):
            indices = np.concatenate([left_over, order[group == number]])
            full = len(indices) // self.batch_size * self.batch_size
            plan += [(length, part) for part in indices[:full].reshape(-1, self.batch_size)]
            left_over = indices[full:]
        if len(left_over):
            plan.append((self.lengths[-1], left_over))
        return [plan[i] for i in draw.permutation(len(plan))]

    def batch(self, step: int) -> Batch:
        """Returns the batch of a step, counted from 0."""
        length, indices = self._epoch(step // self.per_epoch)[step % self.per_epoch]
        return pack(self.features.select(indices), length, self.batch_size, self.pad, self.seed)

    def empty_batch(self, length: int) -> Batch:
        """Returns a batch of this length without examples, to compile with."""
        none = self.features.select(np.zeros(0, np.int64))
        return pack(none, length, self.batch_size, self.pad, self.seed)


def pack(features: Features, length: int, rows: int, pad: int, seed: int) -> Batch:
    """Makes a batch of `rows` rows of `length` slots. Missing rows get length 1 and weight 0."""
    ids = np.full((rows, length), pad, np.int32)
    for row, tokens in zip(ids, features.ids, strict=False):
        row[: len(tokens)] = tokens
    targets = features.targets
    if features.has_slot_targets:
        missing = max(length - targets.shape[1], 0)
        targets = np.pad(targets[:, :length], [(0, 0), (0, missing)], constant_values=NO_LABEL)
    return Batch(
        ids,
        np.maximum(_fill_up(features.lengths, rows), 1),
        _fill_up(targets, rows),
        _fill_up(features.context, rows),
        _fill_up(np.ones(len(features.ids), np.float32), rows),
        np.full(rows, seed, np.uint32),
    )


def _fill_up(values: np.ndarray, rows: int) -> np.ndarray:
    """Returns `values` with zeros added up to `rows` rows."""
    missing = np.zeros((rows - len(values), *values.shape[1:]), values.dtype)
    return np.concatenate([values, missing])


def in_order(
    features: Features, lengths: list[int], rows: int, pad: int
) -> typing.Iterator[tuple[np.ndarray, Batch]]:
    """Yields indices of examples and a batch of them, until all are evaluated, the shortest first.

    `lengths` are the lengths to pad to, in ascending order. The last one fits every example.
    """
    order = np.argsort(features.lengths, kind="stable")
    for start in range(0, len(order), rows):
        indices = order[start : start + rows]
        length = lengths[np.searchsorted(lengths, features.lengths[indices].max())]
        yield indices, pack(features.select(indices), length, rows, pad, 0)
