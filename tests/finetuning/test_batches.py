"""Padded lengths and batches: against the obvious slow way, and on the real tasks."""

import itertools

import numpy as np
import pytest
from testing import input_format

from maelm_jax import config
from maelm_jax.finetuning import batches, features, glue, sentence_data


def waste(lengths: np.ndarray, sizes: list[int]) -> float:
    return 1 - lengths.sum() / np.asarray(sizes)[np.searchsorted(sizes, lengths)].sum()


@pytest.mark.parametrize("seed", range(5))
def test_padded_lengths_waste_least(seed, monkeypatch):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(3, 40, 60)
    monkeypatch.setattr(batches, "MOST_LENGTHS", 3)
    monkeypatch.setattr(batches, "ENOUGH", 0.0)  # never enough: the least waste of three lengths is wanted
    found = batches.padded_lengths(lengths, 64)
    best = min(waste(lengths, [*some, lengths.max()]) for some in itertools.combinations(range(3, int(lengths.max())), 2))
    assert len(found) <= 3 and waste(lengths, found) == pytest.approx(best)


def test_padded_lengths_are_few_and_round_where_that_is_enough():
    lengths = np.repeat([8, 32, 64], 50)
    assert batches.padded_lengths(lengths, 64) == [8, 32, 64]
    assert batches.padded_lengths(np.full(9, 24), 64) == [24]
    assert batches.padded_lengths(np.arange(40, 65), 64) == [48, 64]  # 10.7% of the slots are padding; with [56, 64] 11.2%, with 64 alone 18.8%


def test_no_row_is_padded_past_the_encoder_s_positions():
    assert batches.padded_lengths(np.asarray([30, 97, 100]), 100) == [32, 100]


def batches_of(lengths, batch_size=8, seed=3):
    ids = [np.full(length, number + 10, np.int32) for number, length in enumerate(lengths)]
    rows = features.Features(ids, np.arange(len(ids), dtype=np.int32), np.zeros(len(ids), np.int32))
    return batches.Batches(rows, batches.padded_lengths(rows.lengths, 512), batch_size, 1, seed)


def test_an_epoch_holds_every_example_once():
    made = batches_of(np.random.default_rng(0).integers(3, 50, 83))
    assert made.per_epoch == 11
    for epoch in range(2):
        seen = []
        for number in range(made.per_epoch):
            batch = made.batch(epoch * made.per_epoch + number)
            real = batch.weights > 0
            assert batch.ids.shape == (8, batch.ids.shape[1]) and batch.ids.shape[1] in made.sizes
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
    numbers = [n for n, batch in batches.in_order(made.features, made.sizes, 16, 1) if (batch.targets[: len(n)] == n).all()]
    assert sorted(np.concatenate(numbers).tolist()) == list(range(83))


@pytest.mark.parametrize("name", ["cola", "rte", "mrpc", "qqp"])
def test_padding_is_little_on_real_tasks(name, shared_data, corpus_vocabulary):
    train, dev = sentence_data.load(glue.TASKS[name], config.Finetune(data_dir=str(shared_data)), config.Corpus())
    ids, _, _ = features.sentences(train.sentences, input_format(corpus_vocabulary, 512))
    rows = features.Features(ids, train.labels, np.zeros(len(ids), np.int32))
    other, _, _ = features.sentences(next(iter(dev.values())).sentences, input_format(corpus_vocabulary, 512))
    sizes = batches.padded_lengths(np.concatenate([rows.lengths, [len(row) for row in other]]), 512)
    for batch_size in (16, 32):
        assert batches.Batches(rows, sizes, batch_size, 1, 0).padding() < 0.15, (sizes, batch_size)
