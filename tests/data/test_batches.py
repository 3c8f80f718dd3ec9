"""Batches: a pure function of (seed, step), the same for any number of hosts, each row once an epoch, sources by their rates."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from maelm_jax import config
from maelm_jax.data import batches, rows


class Table:
    """Rows in memory: row r of source s is [s, r]."""

    length = 2

    def __init__(self, source, count, shard_rows=10):
        self.shard_rows = shard_rows
        self.rows = np.stack([np.full(count, source), np.arange(count)], 1).astype(np.int32)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, numbers):
        return self.rows[numbers]

    def request(self, numbers):
        return lambda: self.rows[numbers]


RATES = {"a": 0.7, "b": 0.2, "c": 0.1}
STORES = {"a": Table(0, 1000), "b": Table(1, 37), "c": Table(2, 1)}


SEEDS = strategies.integers(0, 2**32 - 1)
COUNTS = strategies.integers(1, 300) | strategies.integers(1, 5000)


@hypothesis.given(COUNTS, SEEDS, SEEDS, strategies.integers(0, 10**6), strategies.integers(1, 300), strategies.integers(0, 5))
def test_each_epoch_of_any_store_is_a_permutation_by_seed_and_epoch(count, seed, other_seed, epoch, shard_rows, shuffle_shards):
    everything = np.arange(count)

    def order(seed, epoch, examples=everything):
        stream = batches.Batches({"a": Table(0, count, shard_rows)}, {"a": 1.0}, 8, seed, shuffle_shards=shuffle_shards)
        return stream.locate(epoch * count + examples).row

    rows = order(seed, epoch)
    assert sorted(rows.tolist()) == list(range(count))
    some = everything[::-3]
    np.testing.assert_array_equal(order(seed, epoch, some), rows[some], "the order depends on the epoch alone")
    if count > 100 and not shuffle_shards:
        others = [order(seed, epoch + 1), *([order(other_seed, epoch)] if other_seed != seed else [])]
        assert all((other == rows).mean() < 0.2 for other in others)


@hypothesis.given(strategies.integers(1, 2**48), SEEDS, strategies.data())
def test_permute_is_one_to_one_in_a_range_of_any_size(count, key, data):
    first = data.draw(strategies.integers(0, count - 1))
    positions = np.arange(first, min(first + 1000, count))
    found = batches.permute(positions, np.full(len(positions), key, np.uint64), count)
    assert len(set(found.tolist())) == len(positions) and found.min() >= 0 and found.max() < count


@pytest.mark.parametrize("count", [64, 1000, 12345])
def test_permute_is_a_permutation_that_differs_by_key(count):
    orders = [batches.permute(np.arange(count), np.full(count, key, np.uint64), count) for key in (1, 2)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(count))
    assert (orders[0] == orders[1]).mean() < 0.1
    assert (orders[0] == np.arange(count)).mean() < 0.1
    assert abs(np.corrcoef(orders[0], np.arange(count))[0, 1]) < 4 / np.sqrt(count), "neighbours in the store are not neighbours in the epoch"
    steps = np.diff(orders[0]) % count  # of a shift or a stride there would be one value
    assert len(np.unique(steps)) > 0.4 * min(count, 1000)


@pytest.mark.parametrize("count", [1, 9, 10, 11, 30, 64, 1000, 1007])
@pytest.mark.parametrize("shards", [1, 3, 500])
def test_permute_in_windows_is_a_permutation_whose_windows_hold_whole_shards(count, shards):
    orders = [batches.permute_in_windows(np.arange(count), np.full(count, key, np.uint64), count, 10, shards) for key in (1, 2)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(count))
        windows = [order[start : start + 10 * shards] // 10 for start in range(0, count, 10 * shards)]
        assert all(len(np.unique(window)) <= shards for window in windows)
    if count >= 64:
        assert (orders[0] == orders[1]).mean() < 0.2 and (orders[0] == np.arange(count)).mean() < 0.2
    if count == 1000 and shards == 1:
        files = [order[::10] // 10 for order in orders]
        assert (files[0] == files[1]).mean() < 0.2 and (files[0] == np.arange(100)).mean() < 0.2, "files are in another order in each epoch"
    if count == 1000 and shards == 3:
        rows = [(order[:30] % 10).tolist() for order in orders] + [(orders[0][30:60] % 10).tolist()]
        assert len({tuple(row) for row in rows}) == 3, "each window and epoch has its own order"


def test_each_epoch_has_each_row_once():
    count = 1000
    stream = batches.Batches({"a": STORES["a"]}, {"a": 1.0}, 8, 0)
    drawn = np.concatenate([stream.batch(step)[:, 1] for step in range(3 * count // 8)])
    epochs = drawn.reshape(3, count)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(count))
    assert (epochs[0] == epochs[1]).mean() < 0.02 and (epochs[1] == epochs[2]).mean() < 0.02


def test_each_source_of_a_mixture_has_its_own_epochs():
    stream = batches.Batches(STORES, RATES, 50, 3)
    drawn = np.concatenate([stream.batch(step) for step in range(100)])
    numbers = drawn[drawn[:, 0] == 1][:, 1]
    for start in range(0, len(numbers) - 37, 37):
        assert sorted(numbers[start : start + 37].tolist()) == list(range(37))


def test_rates_are_kept_over_any_stretch():
    stream = batches.Batches(STORES, RATES, 100, 0)
    for step in (0, 1, 654, 655, 656, 10**9):
        shares = np.bincount(stream.batch(step)[:, 0], minlength=3) / 100
        np.testing.assert_allclose(shares, list(RATES.values()), atol=0.021)
    source = stream.locate(np.arange(200_000)).source
    np.testing.assert_allclose(np.bincount(source) / len(source), list(RATES.values()), atol=2e-5)


@pytest.mark.parametrize("rates", [[1.0, 1e-9], [0.7, 0.3, 1e-6, 1e-6], [1.0, *[1e-5] * 20], [1e-7] * 9 + [1.0]])
def test_rare_sources_still_come(rates):
    source, rank, slots = batches.make_schedule(rates)
    assert slots.min() == 1 and slots.sum() == batches.PERIOD
    assert all((rank[source == s] == np.arange(slots[s])).all() for s in range(len(rates)))


def test_hosts_share_the_same_global_batch():
    one = batches.Batches(STORES, RATES, 16, 5)
    places = [np.arange(host, 16, 4) for host in range(4)]
    shares = [batches.Batches(STORES, RATES, 16, 5, mine) for mine in places]
    for step in (0, 1, 7, 12345, 10**8):
        for share, mine in zip(shares, places, strict=True):
            np.testing.assert_array_equal(share.batch(step), one.batch(step)[mine])


def test_a_batch_depends_on_seed_and_step_alone():
    stream = batches.Batches(STORES, RATES, 16, 5)
    late = stream.batch(1000)
    np.testing.assert_array_equal(batches.Batches(STORES, RATES, 16, 5).batch(1000), late)
    stream.batch(3)
    np.testing.assert_array_equal(stream.batch(1000), late)
    assert (batches.Batches(STORES, RATES, 16, 6).batch(1000) != late).any()
    assert (stream.batch(1001) != late).any()


def test_an_order_of_sources_in_the_stores_has_no_effect():
    backwards = dict(reversed(STORES.items()))
    np.testing.assert_array_equal(batches.Batches(backwards, RATES, 16, 5).batch(9), batches.Batches(STORES, RATES, 16, 5).batch(9))


def test_heldout_rows_are_fixed_and_spread():
    rows = batches.read_heldout(STORES, RATES, 100)
    np.testing.assert_array_equal(rows, batches.read_heldout(STORES, RATES, 100))
    counts = np.bincount(rows[:, 0])
    assert len(rows) == 100 and counts[2] == 1 and counts[1] in range(18, 26)
    assert len(np.unique(rows, axis=0)) == 100
    assert len(batches.read_heldout(STORES, RATES, 10**6)) == 1038
    np.testing.assert_array_equal(batches.read_heldout(STORES, RATES, 50), rows[:50])
    first_source = rows[rows[:, 0] == 0, 1]
    assert first_source.min() < 100 and first_source.max() >= 900 and abs(first_source.mean() - 500) < 150, "rows of all files, not of the first"
    in_training = batches.Batches(STORES, RATES, 100, 0).locate(np.arange(100)).source  # no source ends in the first turns
    np.testing.assert_array_equal(rows[:9, 0], in_training[:9])
    with pytest.raises(config.ConfigError):
        batches.read_heldout({"a": Table(0, 0)}, {"a": 1.0}, 5)


def test_a_source_that_ends_early_leaves_its_turns_to_the_others():
    stores = {"large": Table(0, 100), "small": Table(1, 5000)}
    rows = batches.read_heldout(stores, {"large": 0.99, "small": 0.01}, 4096)
    assert len(rows) == 4096 and np.bincount(rows[:, 0]).tolist() == [100, 3996]


def test_rows_of_the_coming_steps_are_requested_once():
    class Asked(Table):
        asked = 0

        def request(self, numbers):
            self.asked += len(numbers)
            return super().request(numbers)

    table = Asked(0, 1000)
    stream = batches.Batches({"a": table}, {"a": 1.0}, 8, 0)
    for step in range(5):
        stream.batch(step)
        assert table.asked == 8 * (step + 1 + batches.STEPS_AHEAD)
    stream.batch(1000)
    assert table.asked == 8 * (5 + batches.STEPS_AHEAD + 1 + batches.STEPS_AHEAD)


def test_windows_of_files_are_read_from_a_store(whole):
    stores = rows.open_stores({"a": str(whole)})["a"]
    stream = batches.Batches({"a": stores["train"]}, {"a": 1.0}, 64, 5, shuffle_shards=2)
    drawn = np.concatenate([stream.batch(step) for step in range(len(stores["train"]) // 64)])
    everything = stores["train"][np.arange(len(stores["train"]))]
    assert sorted(map(tuple, drawn.tolist())) == sorted(map(tuple, everything[stream.locate(np.arange(len(drawn))).row].tolist()))
    assert len(np.unique(stream.locate(np.arange(512)).row // 256)) == 2
