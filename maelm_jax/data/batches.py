"""Training batches as a pure function of (seed, step).

There is no iterator state, so nothing is saved or restored. Example i of step s has the number
g = first_example + s * batch_size + i. `first_example` is the number of rows that the run of
Run.continue_from has read, else 0. A fixed schedule of PERIOD slots gives the source of example g
and the number of earlier examples of that source. That number divided by the source's row count is
the epoch; the remainder is the position in the epoch. A permutation that is new in each epoch turns
the position into a row number.

Each host reads only the rows that its own devices hold. The global batch is the same for any
number of hosts.
"""

import typing

import numpy as np

from maelm_jax import config
from maelm_jax.data.rows import Rows

PERIOD = 65536  # slots of the schedule, so rates are exact to 1 in 65,536
ROUNDS = 6  # rounds of the Feistel network
STEPS_AHEAD = 16  # rows of so many coming steps are requested while a step runs


def mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, uint64 -> uint64. Each output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permute(positions: np.ndarray, keys: np.ndarray, count: int) -> np.ndarray:
    """Applies to each position the permutation of range(count) that its key selects.

    The permutation is a Feistel network on a range of 4**k >= count values. A result outside
    range(count) is permuted again until it is inside. So no table of `count` entries is needed.

    Args:
        positions: Positions in range(count), int [n].
        keys: The key of each position, uint64 [n].
        count: Size of the permuted range.

    Returns:
        The permuted positions, int64 [n].
    """
    half = np.uint64(max(1, (max(count - 1, 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    values = positions.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        left, right, key = values[outside] >> half, values[outside] & mask, keys[outside]
        for round_number in range(1, ROUNDS + 1):
            left, right = right, left ^ (mix(right ^ mix(key + np.uint64(round_number))) & mask)
        values[outside] = (left << half) | right
        outside = values >= np.uint64(count)
    return values.astype(np.int64)


def permute_in_windows(
    positions: np.ndarray, keys: np.ndarray, count: int, shard_rows: int, window_shards: int
) -> np.ndarray:
    """Like `permute`, but neighbouring positions give rows of few shards.

    The key orders the shards. Then each window of `window_shards` shards has its rows permuted. The
    last shard is the last in each order if it has fewer rows than the others.
    """
    window_rows = window_shards * shard_rows
    window = positions // window_rows
    window_keys = mix(keys + mix(window.astype(np.uint64) + np.uint64(1)))
    sizes = np.minimum(count - window * window_rows, window_rows)
    ordered = window * window_rows
    for size in np.unique(sizes).tolist():
        chosen = sizes == size
        ordered[chosen] += permute(positions[chosen] % window_rows, window_keys[chosen], size)
    shard, row = np.divmod(ordered, shard_rows)
    full_shards = count // shard_rows
    full = shard < full_shards
    shard[full] = permute(shard[full], keys[full], full_shards)
    return shard * shard_rows + row


class Schedule(typing.NamedTuple):
    """The source of each slot."""

    source: np.ndarray  # int [PERIOD]
    rank: np.ndarray  # number of earlier slots of the same source, int [PERIOD]
    slots: np.ndarray  # slots of each source, int [sources]


def make_schedule(rates: typing.Sequence[float]) -> Schedule:
    """Gives each slot of the schedule to a source.

    Each source gets its share of the slots, at least one. Its slots are spread evenly, so any
    stretch of examples holds every source in nearly its share. Only the ratios of `rates` count.
    """
    shares = np.asarray(rates, np.float64) / np.sum(rates) * PERIOD
    slots = np.maximum(np.floor(shares).astype(np.int64), 1)
    while (left := PERIOD - slots.sum()) != 0:  # the largest remainders are rounded up first
        missing = (shares - slots) * np.sign(left)
        missing[(slots == 1) & (left < 0)] = -np.inf  # a source keeps its last slot
        slots[np.argmax(missing)] += np.sign(left)
    source = np.repeat(np.arange(len(slots)), slots)
    rank = np.concatenate([np.arange(n) for n in slots])
    order = np.lexsort((source, (rank + 0.5) / slots[source]))
    return Schedule(source[order], rank[order], slots)


class Location(typing.NamedTuple):
    """Where examples are read from."""

    source: np.ndarray  # int64 [n]
    row: np.ndarray  # row number in the source's store, int64 [n]


class RequestedRows(typing.NamedTuple):
    """The rows of one source in a batch, which are being read."""

    in_batch: np.ndarray  # whether a row of the batch is of this source, bool [n]
    wait: typing.Callable[[], np.ndarray]  # returns the rows, int32 [m, length]


class Batches:
    """Training batches of prepared rows.

    Args:
        stores: {source: Rows}.
        rates: {source: rate}. Its order numbers the sources.
        batch_size: Rows of a batch, over all hosts.
        seed: Seed of the data order.
        row_indices: Indices in the global batch of the rows that this host reads, int [n]. None
            reads all rows.
        shuffle_shards: Corpus.shuffle_shards.
        first_example: Number of the first example of step 0.
    """

    def __init__(
        self,
        stores: dict[str, Rows],
        rates: dict[str, float],
        batch_size: int,
        seed: int,
        row_indices: np.ndarray | None = None,
        shuffle_shards: int = 0,
        first_example: int = 0,
    ):
        self.stores = [stores[source] for source in rates]
        self.schedule = make_schedule(list(rates.values()))
        self.batch_size, self.seed = batch_size, seed
        if row_indices is None:
            row_indices = np.arange(batch_size)
        self.row_indices = np.asarray(row_indices, np.int64)
        self.shuffle_shards, self.first_example = shuffle_shards, first_example
        self.length = self.stores[0].length
        self._requested: dict[int, list[RequestedRows]] = {}  # by step

    def locate(self, examples: np.ndarray) -> Location:
        """Finds the rows of examples, given their global numbers, int [n]."""
        slot = examples % PERIOD
        source = self.schedule.source[slot]
        earlier = examples // PERIOD * self.schedule.slots[source] + self.schedule.rank[slot]
        row = np.zeros_like(earlier)
        for index, store in enumerate(self.stores):
            of_source = source == index
            epochs, positions = np.divmod(earlier[of_source], len(store))
            keys = self._permutation_keys(index, epochs)
            if self.shuffle_shards:
                row[of_source] = permute_in_windows(
                    positions, keys, len(store), store.shard_rows, self.shuffle_shards
                )
            else:
                row[of_source] = permute(positions, keys, len(store))
        return Location(source, row)

    def _permutation_keys(self, source: int, epochs: np.ndarray) -> np.ndarray:
        """Returns the key of a source's permutation in each of some epochs, uint64 [n]."""
        seeds = np.full(len(epochs), self.seed, np.int64).astype(np.uint64)
        return mix(mix(mix(seeds) + np.uint64(source)) + epochs.astype(np.uint64))

    def batch(self, step: int) -> np.ndarray:
        """Reads this host's rows of one step, int32 [len(row_indices), length].

        The rows of the coming steps are requested too, so that their reading takes no time later.
        """
        steps = range(step, step + 1 + STEPS_AHEAD)
        self._requested = {each: self._requested.get(each) or self._request(each) for each in steps}
        result = np.empty((len(self.row_indices), self.length), np.int32)
        for part in self._requested.pop(step):
            result[part.in_batch] = part.wait()
        return result

    def _request(self, step: int) -> list[RequestedRows]:
        """Begins to read this host's rows of one step."""
        source, row = self.locate(self.first_example + step * self.batch_size + self.row_indices)
        masks = [source == index for index in range(len(self.stores))]
        return [
            RequestedRows(mask, store.request(row[mask]))
            for store, mask in zip(self.stores, masks, strict=True)
        ]


def read_heldout(stores: dict[str, Rows], rates: dict[str, float], count: int) -> np.ndarray:
    """Reads the rows of every evaluation, the same each time, int32 [at most count, length].

    The sources take turns in the order of the training schedule. Each gives its rows in one fixed
    order, drawn at random over all of its files, until it has no more. Rows of a smaller count are
    the first ones of a larger count. Raises ConfigError if no source has a row.
    """
    names = list(rates)
    turns = make_schedule(list(rates.values()))
    sizes = [min(len(stores[name]), count) for name in names]
    source = np.repeat(np.arange(len(names)), sizes)
    position = np.concatenate([np.arange(size) for size in sizes])
    in_turn = np.lexsort((source, (position + 0.5) / turns.slots[source]))[:count]
    source, position = source[in_turn], position[in_turn]
    if len(source) == 0:
        raise config.ConfigError(
            "no held-out rows: raise Corpus.heldout_fraction, or give a corpus of more documents"
        )
    result = np.empty((len(source), stores[names[0]].length), np.int32)
    for index, name in enumerate(names):
        own = position[source == index]
        store = stores[name]
        result[source == index] = store[permute(own, np.zeros(len(own), np.uint64), len(store))]
    return result
