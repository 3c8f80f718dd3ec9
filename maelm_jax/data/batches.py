"""Training batches as a pure function of (seed, step).

There is no iterator state, so nothing is saved or restored. Example i of step s has the number
g = s * batch_size + i in the whole run. A fixed schedule of PERIOD slots gives the task of example
g (a task is one source) and the number of earlier examples of that task. That number divided by
the task's row count is the epoch; the remainder is the position in the epoch. A permutation that
is new in each epoch turns the position into a row number.

Each host reads only the rows that its own devices hold. The global batch is the same for any
number of hosts.
"""

import typing

import numpy as np

from maelm_jax import config
from maelm_jax.data import rows as row_stores

PERIOD = 65536  # slots of the schedule, so rates are exact to 1 in 65,536
ROUNDS = 6  # rounds of the Feistel network


def mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, uint64 -> uint64. Each output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permute(places: np.ndarray, keys: np.ndarray, count: int) -> np.ndarray:
    """Applies to each position the permutation of range(count) that its key selects.

    The permutation is a Feistel network on a range of 4**k >= count values. A result outside
    range(count) is permuted again until it is inside. So no table of `count` entries is needed.

    Args:
        places: Positions in range(count), int [n].
        keys: The key of each position, uint64 [n].
        count: Size of the permuted range.

    Returns:
        The permuted positions, int64 [n].
    """
    half = np.uint64(max(1, (max(count - 1, 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    values = places.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        left, right, key = values[outside] >> half, values[outside] & mask, keys[outside]
        for number in range(ROUNDS):
            left, right = right, left ^ (mix(right ^ mix(key + np.uint64(number + 1))) & mask)
        values[outside] = (left << half) | right
        outside = values >= np.uint64(count)
    return values.astype(np.int64)


def schedule(rates: typing.Sequence[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The task of each slot of the schedule.

    Each task gets its share of the slots, at least one. Its slots are spread evenly, so any stretch
    of examples holds every task in nearly its share.

    Args:
        rates: Rate of each task. Only their ratios count.

    Returns:
        (task of each slot [PERIOD], number of earlier slots of the same task [PERIOD], slots of
        each task [tasks])
    """
    shares = np.asarray(rates, np.float64) / np.sum(rates) * PERIOD
    slots = np.maximum(np.floor(shares).astype(np.int64), 1)
    while (left := PERIOD - slots.sum()) != 0:  # the largest remainders are rounded up first
        slots[np.argmax((shares - slots) * np.sign(left))] += np.sign(left)
    task = np.repeat(np.arange(len(slots)), slots)
    rank = np.concatenate([np.arange(n) for n in slots])
    order = np.lexsort((task, (rank + 0.5) / slots[task]))
    return task[order], rank[order], slots


class Batches:
    """Training batches of prepared rows.

    Args:
        stores: {source: Rows}.
        rates: {source: rate}. Its order numbers the tasks.
        batch_size: Rows of a batch, over all hosts.
        seed: Seed of the data order.
        places: Indices in the global batch of the rows that this host reads, int [n]. None
            reads all rows.
    """

    def __init__(
        self, stores: dict[str, "row_stores.Rows"], rates: dict[str, float], batch_size: int,
        seed: int, places: np.ndarray | None = None
    ):
        self.stores = [stores[source] for source in rates]
        self.tasks, self.ranks, self.slots = schedule(list(rates.values()))
        self.batch_size, self.seed = batch_size, seed
        self.places = np.arange(batch_size) if places is None else np.asarray(places, np.int64)
        self.length = self.stores[0].length

    def locate(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Finds the rows of examples.

        Args:
            examples: Global example numbers, int [n].

        Returns:
            (task, epoch of the task, row number in the task's store), each int64 [n]
        """
        slot = examples % PERIOD
        task = self.tasks[slot]
        before = examples // PERIOD * self.slots[task] + self.ranks[slot]
        epoch, number = np.zeros_like(before), np.zeros_like(before)
        for index, store in enumerate(self.stores):
            here = task == index
            epoch[here], places = np.divmod(before[here], len(store))
            keys = mix(
                mix(
                    mix(np.full(len(places), self.seed, np.int64).astype(np.uint64))
                    + np.uint64(index)
                )
                + epoch[here].astype(np.uint64)
            )
            number[here] = permute(places, keys, len(store))
        return task, epoch, number

    def batch(self, step: int) -> np.ndarray:
        """This host's rows of one step, int32 [len(places), length]."""
        task, _, number = self.locate(step * self.batch_size + self.places)
        result = np.empty((len(self.places), self.length), np.int32)
        for index, store in enumerate(self.stores):
            here = task == index
            result[here] = store[number[here]]
        return result


def heldout(
    stores: dict[str, "row_stores.Rows"], rates: dict[str, float], count: int
) -> np.ndarray:
    """The rows of every evaluation, the same each time.

    The tasks take turns in the order of the training schedule. Each gives its rows from the first
    on, until it has no more.

    Args:
        stores: {source: Rows} of the held-out split.
        rates: {source: rate}.
        count: Rows that are wanted.

    Returns:
        Rows, int32 [at most count, length].

    Raises:
        ConfigError: No task has a row.
    """
    names = list(rates)
    tasks, ranks, slots = schedule(list(rates.values()))
    # Many more examples than `count`, so that a rare task has turns for all its rows.
    examples = np.arange(min(max(count, PERIOD), 16 * PERIOD))
    task, number = (
        tasks[examples % PERIOD],
        examples // PERIOD * slots[tasks[examples % PERIOD]] + ranks[examples % PERIOD],
    )
    sizes = np.array([len(stores[name]) for name in names])
    there = number < sizes[task]
    task, number = task[there][:count], number[there][:count]
    if len(task) == 0:
        raise config.ConfigError(
            "no held-out rows: raise Corpus.heldout_fraction, or give a corpus of more documents"
        )
    result = np.empty((len(task), stores[names[0]].length), np.int32)
    for index, name in enumerate(names):
        result[task == index] = stores[name][number[task == index]]
    return result
