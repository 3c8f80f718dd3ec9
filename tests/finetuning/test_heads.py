"""Heads and their losses: what counts, and where an answer can be."""

import jax
import jax.numpy as jnp
import numpy as np
from testing import fresh_model, model_of

from maelm_jax import config, gin_files
from maelm_jax.finetuning import batches, grid, heads

PAIR = grid.create_task("rte", config.Finetune())
SPAN = grid.create_task("squad1", config.Finetune())


def a_batch(size: int, targets) -> batches.Batch:
    ids = [np.arange(4, 4 + length, dtype=np.int32) for length in (9, 12, 7)]
    rows = batches.Features(ids, np.asarray(targets), np.asarray([4, 5, 4], np.int32))
    return jax.tree.map(jnp.asarray, batches.pack(rows, size, 4, 1, seed=0))


def test_neither_padding_nor_rows_without_weight_count(pretrained):
    graph, params = fresh_model(pretrained, PAIR)
    params = jax.tree.map(lambda x: 4 * x, params)  # so that what is attended to is seen in the scores
    loss_fn = heads.loss_function(graph, PAIR)

    @jax.jit
    def sums(batch):
        return loss_fn(params, batch, jnp.arange(4, dtype=jnp.uint32), jax.random.key(0), False)

    short, long = a_batch(12, np.asarray([0, 1, 1], np.int32)), a_batch(24, np.asarray([0, 1, 1], np.int32))
    np.testing.assert_allclose(sums(short)[:3], sums(long)[:3], rtol=1e-5)
    assert float(sums(short).count) == 3
    other = short._replace(ids=short.ids.at[3].set(7), targets=short.targets.at[3].set(1))
    np.testing.assert_array_equal(sums(short)[:3], sums(other)[:3])


def test_the_seed_in_the_batch_draws_the_dropout(pretrained):
    _, params = fresh_model(pretrained, PAIR)
    graph, _ = heads.define(model_of(gin_files.load([str(pretrained / "config.gin")]).model, dropout=0.5), 500, 1, PAIR)
    loss_fn, numbers = heads.loss_function(graph, PAIR), jnp.arange(4, dtype=jnp.uint32)
    batch = a_batch(12, np.asarray([0, 1, 1], np.int32))

    @jax.jit
    def training_loss(batch):
        return loss_fn(params, batch, numbers, jax.random.key(0), True).loss_nats

    assert training_loss(batch) == training_loss(batch) != training_loss(batch._replace(seed=batch.seed + 1))


def test_an_answer_is_in_the_context_or_nowhere(pretrained):
    graph, params = fresh_model(pretrained, SPAN)
    spans = jax.jit(heads.predict_function(graph, SPAN))(params, a_batch(24, np.zeros((3, 2), np.int32)))
    for row, (first, length) in enumerate([(4, 9), (5, 12), (4, 7)]):
        allowed = {0, *range(first, length - 1)}
        for scores, slots in ((spans.start, spans.start_slot), (spans.end, spans.end_slot)):
            assert set(np.asarray(slots[row])[np.asarray(scores[row]) > -1e8].tolist()) == allowed


def test_several_labels_are_decisions_of_their_own(pretrained):
    """The loss is that of torch.nn.BCEWithLogitsLoss: the mean of -log p over all labels of a row."""
    custom = config.CustomTask(columns=("text",), labels=("a", "b", "c"), label_separator=",")
    several = grid.create_task("own", config.Finetune(tasks="own", train_file="x", custom=custom))
    graph, params = fresh_model(pretrained, several)
    params = jax.tree.map(lambda x: 4 * x, params)  # so that scores have both signs
    targets = np.asarray([[1, 0, 1], [0, 0, 0], [1, 1, 1]], np.float32)
    batch = a_batch(12, targets)
    scores = np.asarray(jax.jit(heads.predict_function(graph, several))(params, batch), np.float64)[:3]
    assert (scores > 0).any() and (scores < 0).any()
    right = 1 / (1 + np.exp(-scores * (2 * targets - 1)))
    loss_fn = heads.loss_function(graph, several)
    loss_of_batch = jax.jit(lambda batch: loss_fn(params, batch, jnp.arange(4, dtype=jnp.uint32), jax.random.key(0), False))
    sums = loss_of_batch(batch)
    np.testing.assert_allclose(sums.loss_nats, -np.log(right).mean(axis=1).sum(), rtol=1e-5)
    assert float(sums.correct) == (right > 0.5).all(axis=1).sum() and float(sums.count) == 3
    as_predicted = batch._replace(targets=batch.targets.at[:3].set(jnp.asarray(scores > 0, jnp.float32)))
    assert float(loss_of_batch(as_predicted).correct) == 3
