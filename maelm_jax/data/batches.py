"""batch(step): which rows a step sees, as a pure function of (seed, step). There is no iterator state, so nothing to save or restore.

Example i of step s is number g = s * batch_size + i of the whole run. A fixed schedule of PERIOD slots says which task example g is drawn from and
how many of that task's examples came before; that count says the epoch and the place in it, and a keyed permutation of the row numbers, new each
epoch, says the row. Each host reads only the places of the batch that its own devices hold, so any number of hosts sees the same global batch.
"""

import typing

import numpy as np

from maelm_jax import config
from maelm_jax.data import rows as row_stores

PERIOD = 65536  # slots of the schedule: rates are kept to 1 in 65,536
ROUNDS = 6  # of the Feistel network


def mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: uint64 -> uint64, each bit of the output depending on every bit of the input."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permute(places: np.ndarray, keys: np.ndarray, count: int) -> np.ndarray:
    """The permutation of range(count) that belongs to each key, at each place: int64 [n], uint64 [n] -> int64 [n].

    A Feistel network over the smallest square of a power of two that holds `count`; values past the end walk on along their cycle until they are
    inside. So no table of `count` entries is ever made.
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
    """(task of each slot [PERIOD], examples of that task in earlier slots [PERIOD], slots of each task [tasks]).

    Each task's slots are spread evenly, so that any stretch of examples holds every task in nearly its share.
    """
    shares = np.asarray(rates, np.float64) / np.sum(rates) * PERIOD
    slots = np.maximum(np.floor(shares).astype(np.int64), 1)
    while (left := PERIOD - slots.sum()) != 0:  # largest remainders first
        slots[np.argmax((shares - slots) * np.sign(left))] += np.sign(left)
    task = np.repeat(np.arange(len(slots)), slots)
    rank = np.concatenate([np.arange(n) for n in slots])
    order = np.lexsort((task, (rank + 0.5) / slots[task]))
    return task[order], rank[order], slots


class Batches:
    """Training batches of prepared rows. `stores` is {source: Rows}, `rates` {source: rate}; `batch_size` counts the rows of all hosts.

    `places` (int [n], of range(batch_size)) are the places of a batch that this host reads; None: all.
    """

    def __init__(self, stores: dict[str, "row_stores.Rows"], rates: dict[str, float], batch_size: int, seed: int, places: np.ndarray | None = None):
        self.stores = [stores[source] for source in rates]
        self.tasks, self.ranks, self.slots = schedule(list(rates.values()))
        self.batch_size, self.seed = batch_size, seed
        self.places = np.arange(batch_size) if places is None else np.asarray(places, np.int64)
        self.length = self.stores[0].length

    def locate(self, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(task, epoch of the task, row number) of global example numbers, each int64 [n]."""
        slot = examples % PERIOD
        task = self.tasks[slot]
        before = examples // PERIOD * self.slots[task] + self.ranks[slot]
        epoch, number = np.zeros_like(before), np.zeros_like(before)
        for index, store in enumerate(self.stores):
            here = task == index
            epoch[here], places = np.divmod(before[here], len(store))
            keys = mix(mix(mix(np.full(len(places), self.seed, np.int64).astype(np.uint64)) + np.uint64(index)) + epoch[here].astype(np.uint64))
            number[here] = permute(places, keys, len(store))
        return task, epoch, number

    def batch(self, step: int) -> np.ndarray:
        """This host's rows of a step, int32 [len(places), length]."""
        task, _, number = self.locate(step * self.batch_size + self.places)
        result = np.empty((len(self.places), self.length), np.int32)
        for index, store in enumerate(self.stores):
            here = task == index
            result[here] = store[number[here]]
        return result


def heldout(stores: dict[str, "row_stores.Rows"], rates: dict[str, float], count: int) -> np.ndarray:
    """The rows of every evaluation: the tasks in turn by the same schedule, each from its first row on, int32 [at most count, length].

    A task that has no more rows is left out from there on. Raises ConfigError when no task has any.
    """
    names = list(rates)
    tasks, ranks, slots = schedule(list(rates.values()))
    examples = np.arange(min(max(count, PERIOD), 16 * PERIOD))  # enough turns for a rare task to give its rows
    task, number = tasks[examples % PERIOD], examples // PERIOD * slots[tasks[examples % PERIOD]] + ranks[examples % PERIOD]
    sizes = np.array([len(stores[name]) for name in names])
    there = number < sizes[task]
    task, number = task[there][:count], number[there][:count]
    if len(task) == 0:
        raise config.ConfigError("no held-out rows: raise Corpus.heldout_fraction, or give a corpus of more documents")
    result = np.empty((len(task), stores[names[0]].length), np.int32)
    for index, name in enumerate(names):
        result[task == index] = stores[name][number[task == index]]
    return result
