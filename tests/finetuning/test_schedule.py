"""Steps, learning rates and FLOPs of a fine-tuning run."""

import dataclasses

import numpy as np
import pytest

from maelm_jax import config, gin_files
from maelm_jax.finetuning import batches, features
from maelm_jax.finetuning.schedule import Schedule
from maelm_jax.training import flops

ROWS, LENGTH = 24, 64


def schedule_of(epochs: int = 3, warmup: float = 0.25, evaluations: int = 2) -> Schedule:
    """The schedule of 24 rows of 64 tokens, 5 steps of 5 rows an epoch."""
    rows = features.Features([np.full(LENGTH, 9, np.int32)] * ROWS, np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32))
    grid = config.Grid(batch_size=5, learning_rate=2e-3, epochs=epochs, warmup=warmup)
    return Schedule(batches.Batches(rows, [LENGTH], 5, 1, 0), config.Finetune(grid=grid, evaluations=evaluations))


def test_steps_are_epochs_times_batches():
    schedule = schedule_of()
    assert (schedule.total_steps, schedule.warmup_steps, schedule.eval_every) == (15, 4, 3)
    assert schedule.tokens_per_step == ROWS * LENGTH / 5


def test_the_learning_rate_rises_to_its_peak_and_falls_towards_0():
    rates = schedule_of().learning_rates()
    assert rates.shape == (15,) and rates[0] == 0 and np.argmax(rates) == 4
    assert rates[4] == pytest.approx(2e-3) and rates[-1] == pytest.approx(2e-3 / 11)


def test_flops_are_those_of_pretraining_the_encoder_on_the_same_rows():
    experiment = gin_files.load(["tiny.gin", "mlm.gin"])
    run = dataclasses.replace(experiment.run, batch_size=ROWS)
    corpus = dataclasses.replace(experiment.corpus, sequence_length=LENGTH)
    terms = flops.flops_terms(dataclasses.replace(experiment, run=run, corpus=corpus), 4096)
    encoder = sum(value for name, value in terms.items() if name.startswith("encoder"))
    schedule = schedule_of()
    assert 5 * schedule.flops_per_step(experiment.model) == pytest.approx(encoder, rel=1e-6)
