"""Padded lengths and batches."""

import numpy as np
import pytest
from testing import input_format

from maelm_jax import config
from maelm_jax.finetuning import batches, grid


def test_lengths_are_added_while_they_save_more_than_they_cost():
    lengths = np.repeat([8, 32, 64], [100, 10, 10])
    assert batches.choose_lengths(lengths, 64, worth=1e9) == [64]
    assert batches.choose_lengths(lengths, 64, worth=5000) == [8, 64]  # 100 * (64 - 8) = 5600 slots saved, then 10 * 32
    assert batches.choose_lengths(lengths, 64, worth=320) == [8, 64]
    assert batches.choose_lengths(lengths, 64, worth=319) == batches.choose_lengths(lengths, 64, worth=0) == [8, 32, 64]
    assert batches.choose_lengths(np.repeat([12, 13], 50), 64, worth=200) == [16], "a length of 12 would save 200"
    assert batches.choose_lengths(np.repeat([12, 13], 50), 64, worth=0) == [12, 16]


def test_lengths_are_multiples_of_8_within_the_positions_of_the_encoder():
    lengths = np.random.default_rng(0).integers(3, 200, 500)
    found = batches.choose_lengths(lengths, 512, worth=0)
    assert len(found) == batches.MOST_LENGTHS and all(length % 8 == 0 for length in found) and found[-1] >= lengths.max()
    assert batches.choose_lengths(np.asarray([30, 97, 100]), 100, 0) == [32, 100]


def batches_of(lengths, batch_size=8, seed=3):
    ids = [np.full(length, number + 10, np.int32) for number, length in enumerate(lengths)]
    rows = batches.Features(ids, np.arange(len(ids), dtype=np.int32), np.zeros(len(ids), np.int32))
    return batches.Batches(rows, batches.choose_lengths(rows.lengths, 512, 50), batch_size, 1, seed)


def test_an_epoch_holds_every_example_once():
    made = batches_of(np.random.default_rng(0).integers(3, 50, 83))
    assert made.per_epoch == 11 and len(made.lengths) > 2
    for epoch in range(2):
        seen = []
        for number in range(made.per_epoch):
            batch = made.batch(epoch * made.per_epoch + number)
            real = batch.weights > 0
            assert batch.ids.shape == (8, batch.ids.shape[1]) and batch.ids.shape[1] in made.lengths
            for row, length, target in zip(batch.ids[real], batch.lengths[real], batch.targets[real], strict=True):
                assert (row[:length] == target + 10).all() and (row[length:] == 1).all()
            seen += batch.targets[real].tolist()
        assert sorted(seen) == list(range(83))


def test_a_batch_is_a_function_of_seed_and_step():
    lengths = np.random.default_rng(0).integers(3, 50, 83)
    one, other, another = batches_of(lengths), batches_of(lengths), batches_of(lengths, seed=4)
    for step in (0, 5, 12, 30):
        np.testing.assert_array_equal(one.batch(step).ids, other.batch(step).ids)
    assert any(not np.array_equal(one.batch(s).targets, another.batch(s).targets) for s in range(4))
    assert any(not np.array_equal(one.batch(s).targets, one.batch(s + one.per_epoch).targets) for s in range(4))  # a new order every epoch


def test_in_order_gives_each_example_once():
    made = batches_of(np.random.default_rng(0).integers(3, 50, 83))
    numbers = [n for n, batch in batches.in_order(made.features, made.lengths, 16, 1) if (batch.targets[: len(n)] == n).all()]
    assert sorted(np.concatenate(numbers).tolist()) == list(range(83))


@pytest.mark.parametrize("name", ["cola", "rte"])
def test_padding_is_little_in_long_runs_of_real_tasks(name, shared_data, corpus_vocabulary):
    data = grid.create_task(name, config.Finetune(data_dir=str(shared_data))).load(input_format(corpus_vocabulary, 512))
    lengths = batches.choose_lengths(data.train.lengths, 512, worth=0)
    slots = np.asarray(lengths)[np.searchsorted(lengths, data.train.lengths)].sum()
    assert 1 - data.train.lengths.sum() / slots < 0.16, lengths
