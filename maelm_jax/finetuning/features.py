"""Tokenised examples, and batches of them.

Batches are padded to a few lengths, so that little of a batch is padding and few shapes are
compiled. A batch depends on the seed and the step alone, so that a resumed run sees the same
batches as an uninterrupted one.
"""

import dataclasses
import functools
import typing

import numpy as np
import tqdm

from maelm_jax.data.vocabulary import Vocabulary

MOST_LENGTHS = 10  # largest number of padded lengths: each compiles the training step once
ENOUGH = 0.12  # share of padding below which no further length is added


@dataclasses.dataclass(frozen=True)
class Features:
    """n tokenised examples.

    Attributes:
        ids: n arrays of token ids, int32, without padding.
        targets: One of: classes, int32 [n]; scores from 0 to 1, float32 [n]; first and last slot of
            the answer, int32 [n, 2].
        context: SQuAD: the slot at which the context begins, int32 [n]. Zeros in other tasks.
    """

    ids: list[np.ndarray]
    targets: np.ndarray
    context: np.ndarray

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, int32 [n]."""
        return np.asarray([len(row) for row in self.ids], np.int32)

    def take(self, numbers: np.ndarray) -> "Features":
        """The examples with these indices, in this order."""
        return Features(
            [self.ids[i] for i in numbers], self.targets[numbers], self.context[numbers]
        )


class Batch(typing.NamedTuple):
    """B rows padded to T slots. Rows of weight 0 fill up a batch that is too short.

    The batch has the seed of the run, so that one compiled step serves runs with all seeds.
    """

    ids: np.ndarray  # int32 [B, T]
    lengths: np.ndarray  # int32 [B]
    targets: np.ndarray  # [B] or [B, 2]
    context: np.ndarray  # int32 [B]
    weights: np.ndarray  # float32 [B]
    seed: np.ndarray  # uint32 [B], the same value in every row


def encode(vocabulary: Vocabulary, texts: list[str]) -> list[list[int]]:
    """The token ids of each text. Shows a progress bar when there are many texts."""
    size = 10_000
    parts = range(0, len(texts), size)
    bar = tqdm.tqdm(parts, desc="tokenising", unit="0k texts", leave=False, disable=len(parts) < 3)
    return [ids for start in bar for ids in vocabulary.encode_batch(texts[start : start + size])]


def sentences(
    examples: list[tuple[str, ...]], vocabulary: Vocabulary, length: int
) -> tuple[list[np.ndarray], int]:
    """Encodes examples as `<s> A </s>`, those of two sentences as `<s> A </s> </s> B </s>`.

    Args:
        examples: One or two sentences each, all the same number.
        vocabulary: Encodes the sentences.
        length: Largest number of tokens. `keep` says what is cut off.

    Returns:
        Token ids of each example, and the number of examples that were cut.
    """
    count = len(examples[0])
    encoded = [encode(vocabulary, [example[i] for example in examples]) for i in range(count)]
    room, cut, rows = length - (2 if count == 1 else 4), 0, []
    for parts in zip(*encoded, strict=True):
        kept = keep(tuple(map(len, parts)), room)
        cut += sum(kept) < sum(map(len, parts))
        first, *second = (part[:size] for part, size in zip(parts, kept, strict=True))
        pair = [vocabulary.eos, *second[0], vocabulary.eos] if second else []
        rows.append(np.asarray([vocabulary.bos, *first, vocabulary.eos, *pair], np.int32))
    return rows, cut


def keep(sizes: tuple[int, ...], room: int) -> tuple[int, ...]:
    """How many tokens of each sentence are kept, `room` in all.

    The longer sentence loses its last token until both fit. Of equally long ones, the second does.
    """
    if sum(sizes) <= room:
        return sizes
    if len(sizes) == 1:
        return (room,)
    a, b = sizes
    if min(a, b) <= room // 2:  # the shorter one stays whole, the longer one gets the rest
        return (a, room - a) if a <= b else (room - b, b)
    return room - room // 2, room // 2


def padded_lengths(lengths: np.ndarray, longest: int) -> list[int]:
    """Chooses the lengths that batches are padded to, by dynamic programming.

    There are at most MOST_LENGTHS. The lengths are multiples of 8, or of 4, 2 or 1 if multiples of
    8 leave too much padding. The choice is the smallest number of lengths whose share of padding is
    below ENOUGH; if there is none, the lengths with the least padding.

    Args:
        lengths: Tokens of each example, int [n].
        longest: Largest length, a multiple or not. The encoder has no positions beyond it.

    Returns:
        The lengths in ascending order. The last one fits every example.
    """
    best = None
    for grain in (8, 4, 2, 1):
        sizes, counts = np.unique(
            np.minimum(-(-lengths // grain) * grain, longest), return_counts=True
        )
        # cost[j] in round k: the smallest number of slots of all rows up to sizes[j], padded to k
        # lengths of which sizes[j] is the last.
        rows = np.cumsum(counts)
        cost = rows * sizes
        choice = []
        for k in range(1, MOST_LENGTHS + 1):
            waste = 1 - lengths.sum() / cost[-1]
            if best is None or waste < best[0]:
                picked = [len(sizes) - 1]
                for before in reversed(choice):
                    picked.append(before[picked[-1]])
                best = waste, sorted({int(sizes[j]) for j in picked if j >= 0})
            if waste < ENOUGH or k == MOST_LENGTHS or k >= len(sizes):
                break
            # One more length: table[j, i + 1] is the cost when sizes[j] is the last length and
            # sizes[i] the one before it. i = -1: there is none before it.
            through = np.concatenate([[0], cost])
            rows_before = np.concatenate([[0], rows])
            table = through[None, :] + (rows[:, None] - rows_before[None, :]) * sizes[:, None]
            table = np.where(
                np.arange(len(sizes) + 1)[None, :] <= np.arange(len(sizes))[:, None],
                table,
                np.iinfo(np.int64).max,
            )
            choice.append(table.argmin(axis=1) - 1)
            cost = table.min(axis=1)
        if best[0] < ENOUGH:
            break
    return best[1]


class Batches:
    """The training batches of one run.

    Each epoch shuffles the examples, groups them by padded length, cuts each group into batches and
    shuffles the batches. The examples that do not fill a batch move to the next longer group, so
    that at most one batch of an epoch is short.
    """

    def __init__(self, features: Features, sizes: list[int], batch_size: int, pad: int, seed: int):
        self.features, self.sizes, self.batch_size, self.pad, self.seed = (
            features, sizes, batch_size, pad, seed)  # fmt: skip
        self.per_epoch = -(-len(features.ids) // batch_size)
        self._epoch = functools.lru_cache(maxsize=2)(self._plan)

    def _plan(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """(padded length, indices of the examples) of each batch of an epoch."""
        draw = np.random.default_rng((self.seed, epoch))
        order = draw.permutation(len(self.features.ids))
        room = np.searchsorted(self.sizes, self.features.lengths[order])
        plan, left = [], order[:0]
        for index, size in enumerate(self.sizes):
            numbers = np.concatenate([left, order[room == index]])
            full = len(numbers) // self.batch_size * self.batch_size
            plan += [(size, part) for part in numbers[:full].reshape(-1, self.batch_size)]
            left = numbers[full:]
        if len(left):
            plan.append((self.sizes[-1], left))
        return [plan[i] for i in draw.permutation(len(plan))]

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0."""
        size, numbers = self._epoch(step // self.per_epoch)[step % self.per_epoch]
        return pack(self.features.take(numbers), size, self.batch_size, self.pad, self.seed)

    def padding(self) -> float:
        """Share of the slots of the first epoch that hold no token."""
        slots = sum(size * self.batch_size for size, _ in self._epoch(0))
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
    fill = lambda x: np.concatenate(  # noqa: E731
        [x, np.zeros((rows - len(x), *x.shape[1:]), x.dtype)]
    )
    weights = fill(np.ones(len(features.ids), np.float32))
    return Batch(
        ids,
        np.maximum(fill(features.lengths), 1),
        fill(features.targets),
        fill(features.context),
        weights,
        np.full(rows, seed, np.uint32),
    )


def in_order(
    features: Features, sizes: list[int], rows: int, pad: int
) -> typing.Iterator[tuple[np.ndarray, Batch]]:
    """Batches of all examples for evaluation, the shortest examples first.

    Args:
        features: The examples.
        sizes: Lengths to pad to, in ascending order.
        rows: Rows of a batch.
        pad: Token id of the padding.

    Yields:
        Indices of the examples in the batch, and the batch.
    """
    order = np.argsort(features.lengths, kind="stable")
    for start in range(0, len(order), rows):
        numbers = order[start : start + rows]
        size = sizes[
            min(int(np.searchsorted(sizes, features.lengths[numbers].max())), len(sizes) - 1)
        ]
        yield numbers, pack(features.take(numbers), size, rows, pad, 0)
