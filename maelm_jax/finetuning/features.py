"""Examples as the model reads them, and batches of them: rows of ids, cut into a few lengths so that little of a batch is padding.

batch(step) is a pure function of (seed, step), as in pretraining: a killed run goes on with the very batches it would have seen.
"""

import dataclasses
import functools
import typing

import numpy as np
import tqdm

from maelm_jax.data.vocabulary import Vocabulary

MOST_LENGTHS = 10  # compiled shapes of a step at most
ENOUGH = 0.12  # share of padding under which no further length is added


@dataclasses.dataclass(frozen=True)
class Features:
    """n examples. Targets are int32 [n] classes, float32 [n] scores in 0..1, or int32 [n, 2] (first, last) slots of an answer."""

    ids: list[np.ndarray]  # int32, without padding
    targets: np.ndarray
    context: np.ndarray  # int32 [n]: the slot at which SQuAD's context begins; 0 elsewhere

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        return np.asarray([len(row) for row in self.ids], np.int32)

    def take(self, numbers: np.ndarray) -> "Features":
        return Features([self.ids[i] for i in numbers], self.targets[numbers], self.context[numbers])


class Batch(typing.NamedTuple):
    """B rows padded to T. Rows of weight 0 fill up a batch. The run's seed travels with it, so that one compiled step serves all seeds."""

    ids: np.ndarray  # int32 [B, T]
    lengths: np.ndarray  # int32 [B]
    targets: np.ndarray  # [B] or [B, 2]
    context: np.ndarray  # int32 [B]
    weights: np.ndarray  # float32 [B]
    seed: np.ndarray  # uint32 [B], all alike


def encode(vocabulary: Vocabulary, texts: list[str]) -> list[list[int]]:
    """The ids of each text, with a progress bar where it takes long."""
    size = 10_000
    parts = range(0, len(texts), size)
    bar = tqdm.tqdm(parts, desc="tokenising", unit="0k texts", leave=False, disable=len(parts) < 3)
    return [ids for start in bar for ids in vocabulary.encode_batch(texts[start : start + size])]


def sentences(examples: list[tuple[str, ...]], vocabulary: Vocabulary, length: int) -> tuple[list[np.ndarray], int]:
    """(`<s> A </s>` or `<s> A </s> </s> B </s>` of each example, how many were cut). What does not fit is cut off, the longer sentence first."""
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
    """How many tokens of each sentence are kept in `room`: the last token of the longer one goes first, of the second where they are equal."""
    if sum(sizes) <= room:
        return sizes
    if len(sizes) == 1:
        return (room,)
    a, b = sizes
    if min(a, b) <= room // 2:  # the shorter one stays whole, the longer takes the rest
        return (a, room - a) if a <= b else (room - b, b)
    return room - room // 2, room // 2


def padded_lengths(lengths: np.ndarray, longest: int) -> list[int]:
    """The lengths T that batches are padded to: at most MOST_LENGTHS, placed where they waste least; the fewest, and the roundest, whose waste is
    under ENOUGH. None is above `longest`, the tokens that an example may have: the encoder has no positions there."""
    best = None
    for grain in (8, 4, 2, 1):
        sizes, counts = np.unique(np.minimum(-(-lengths // grain) * grain, longest), return_counts=True)
        # cost[k][j]: padded tokens when the sizes up to j are served by k lengths, the last being sizes[j].
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
            # One more length: j is the last, i the one before it (or -1: none).
            through = np.concatenate([[0], cost])
            rows_before = np.concatenate([[0], rows])
            table = through[None, :] + (rows[:, None] - rows_before[None, :]) * sizes[:, None]
            table = np.where(np.arange(len(sizes) + 1)[None, :] <= np.arange(len(sizes))[:, None], table, np.iinfo(np.int64).max)
            choice.append(table.argmin(axis=1) - 1)
            cost = table.min(axis=1)
        if best[0] < ENOUGH:
            break
    return best[1]


class Batches:
    """The training batches of one run.

    Each epoch shuffles the examples, sorts them into the padded lengths, and cuts batches; what is left over at a length moves on to the
    next longer one, so that only the epoch's last batch can be short. Then the batches are shuffled.
    """

    def __init__(self, features: Features, sizes: list[int], batch_size: int, pad: int, seed: int):
        self.features, self.sizes, self.batch_size, self.pad, self.seed = features, sizes, batch_size, pad, seed
        self.per_epoch = -(-len(features.ids) // batch_size)
        self._epoch = functools.lru_cache(maxsize=2)(self._plan)

    def _plan(self, epoch: int) -> list[tuple[int, np.ndarray]]:
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
        size, numbers = self._epoch(step // self.per_epoch)[step % self.per_epoch]
        return pack(self.features.take(numbers), size, self.batch_size, self.pad, self.seed)

    def padding(self) -> float:
        """Share of the slots of an epoch that hold no token."""
        slots = sum(size * self.batch_size for size, _ in self._epoch(0))
        return 1 - float(self.features.lengths.sum()) / slots


def pack(features: Features, size: int, rows: int, pad: int, seed: int) -> Batch:
    """At most `rows` examples as a batch of `rows` rows of `size` slots; the rows that are too many have one token and weight 0."""
    ids = np.full((rows, size), pad, np.int32)
    for row, tokens in zip(ids, features.ids, strict=False):
        row[: len(tokens)] = tokens
    fill = lambda x: np.concatenate([x, np.zeros((rows - len(x), *x.shape[1:]), x.dtype)])  # noqa: E731
    weights = fill(np.ones(len(features.ids), np.float32))
    return Batch(ids, np.maximum(fill(features.lengths), 1), fill(features.targets), fill(features.context), weights, np.full(rows, seed, np.uint32))


def in_order(features: Features, sizes: list[int], rows: int, pad: int) -> typing.Iterator[tuple[np.ndarray, Batch]]:
    """(numbers of the examples, batch) over all examples, shortest first, for evaluation."""
    order = np.argsort(features.lengths, kind="stable")
    for start in range(0, len(order), rows):
        numbers = order[start : start + rows]
        size = sizes[min(int(np.searchsorted(sizes, features.lengths[numbers].max())), len(sizes) - 1)]
        yield numbers, pack(features.take(numbers), size, rows, pad, 0)
