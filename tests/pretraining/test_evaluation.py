"""Held-out evaluation: which parameters it reads, and which rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maelm_jax import config, gin_files
from maelm_jax.model import loss
from maelm_jax.pretraining import evaluation
from maelm_jax.training import step


def test_the_moving_average_is_evaluated_where_there_is_one():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))

    def loss_of(params, rows, numbers, key, train):
        count = jnp.float32(rows.shape[0])
        return loss.Sums(params["encoder"]["norm"]["scale"][0] * count, count, count)

    def params(value: float) -> dict:
        return {"encoder": {"norm": {"scale": jnp.full(1, value)}}}

    heldout = evaluation.HeldoutSet(np.zeros((2, 4, 8), np.int32), unigram=1.0)
    for average, expected in ((None, 3.0), (params(5.0), 5.0)):
        state = step.State(jnp.int32(1), params(3.0), (), average)
        result = evaluation.make_evaluation(loss_of, heldout, state, 0, mesh)(state)
        assert result.values["eval_loss"] == pytest.approx(expected) and result.state is state


def test_every_held_out_row_counts_once_and_has_its_own_number():
    """Seven rows in two batches of four: the last slot is padding. The loss of a row is its first id here, its accuracy its number."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))

    def loss_of(params, rows, numbers, key, train):
        assert not train
        real, ids = (rows[:, 0] != 1).astype(jnp.float32), rows[:, 0].astype(jnp.float32)
        return loss.Sums((ids * real).sum(), (numbers.astype(jnp.float32) * real).sum(), real.sum())

    rows = np.arange(10, 17, dtype=np.int32)[:, None].repeat(8, 1)
    batches = np.concatenate([rows, np.full((1, 8), 1, np.int32)]).reshape(2, 4, 8)
    state = step.State(jnp.int32(1), {"encoder": {"norm": {"scale": jnp.ones(1)}}}, (), None)
    values = evaluation.make_evaluation(loss_of, evaluation.HeldoutSet(batches, 1.0), state, 0, mesh)(state).values
    assert values["eval_loss"] == pytest.approx(13.0) and values["eval_accuracy"] == pytest.approx(3.0)


def test_the_last_batch_of_held_out_rows_is_filled_with_padding():
    experiment = gin_files.load(["tiny.gin"], ["BATCH_SIZE=4", "SEQUENCE_LENGTH=16"])
    rows = np.random.default_rng(0).integers(5, 90, (7, 16), dtype=np.int32)
    rows[:, 0] = 0  # <s>
    heldout = evaluation.make_heldout_set(experiment, rows, np.full(100, 2.5, np.float32), config.SpecialIds.of_size(100))
    assert heldout.batches.shape == (2, 4, 16) and (heldout.batches.reshape(8, 16)[:7] == rows).all()
    assert (heldout.batches[1, 3] == 1).all() and heldout.unigram == pytest.approx(2.5)


@pytest.mark.parametrize("shards,expected", [(1, (1, 7)), (2, (1, 8)), (8, (1, 8))])
def test_few_held_out_rows_are_not_padded_to_a_microbatch(shards, expected):
    experiment = gin_files.load(["tiny.gin"], ["BATCH_SIZE=32", "SEQUENCE_LENGTH=16"])
    rows = np.random.default_rng(0).integers(5, 90, (7, 16), dtype=np.int32)
    rows[:, 0] = 0  # <s>
    nll = np.full(100, 2.5, np.float32)
    heldout = evaluation.make_heldout_set(experiment, rows, nll, config.SpecialIds.of_size(100), shards)
    assert heldout.batches.shape[:2] == expected
