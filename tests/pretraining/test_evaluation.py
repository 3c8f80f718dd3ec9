"""Held-out evaluation: every row counts once, whatever the batches."""

import jax.numpy as jnp
import numpy as np
import pytest
from testing import mesh_of

from maelm_jax import config, gin_files
from maelm_jax.model import loss
from maelm_jax.pretraining import evaluation, objective, unigram
from maelm_jax.training import step


class FirstId(objective.MaskedTokens):
    """The loss of a row is its first id, its accuracy its number."""

    def loss(self, params, rows, row_numbers, key, train):
        assert not train
        real, ids = (rows[:, 0] != self.special.pad).astype(jnp.float32), rows[:, 0].astype(jnp.float32)
        return loss.Sums((ids * real).sum(), (row_numbers.astype(jnp.float32) * real).sum(), real.sum())


@pytest.mark.parametrize("batch_size", [4, 32])
def test_every_held_out_row_counts_once_and_has_its_own_number(batch_size):
    """Seven rows in one batch, or in two of four: the last slot is padding."""
    mesh = mesh_of(1, 1, 1)
    rows = np.arange(10, 17, dtype=np.int32)[:, None].repeat(8, 1)
    params = {"encoder": {"norm": {"scale": jnp.ones(1)}}}
    experiment = gin_files.load(["tiny.gin"], [f"BATCH_SIZE={batch_size}"])
    first_id = FirstId(experiment, 99, config.SpecialIds.of_size(99), None)
    baseline = unigram.Unigram(np.full(99, 2.5), ())
    evaluate = evaluation.make_evaluation(first_id, rows, baseline, params, experiment, mesh, pad=1)
    state = step.State(jnp.int32(1), params, ())
    values = evaluate(state).values
    assert values == {"eval_loss": pytest.approx(13.0), "eval_accuracy": pytest.approx(3.0), "unigram": 2.5}


@pytest.mark.parametrize("shards,expected", [(1, (1, 7)), (2, (1, 8)), (8, (1, 8))])
def test_few_held_out_rows_are_not_padded_to_a_microbatch(shards, expected):
    rows = np.random.default_rng(0).integers(5, 90, (7, 16), dtype=np.int32)
    batches = evaluation.in_batches(rows, 32, shards, pad=1)
    assert batches.shape[:2] == expected and (batches.reshape(-1, 16)[:7] == rows).all() and (batches.reshape(-1, 16)[7:] == 1).all()
