"""What a run says at its start."""

import jax
import pytest

from maelm_jax import config
from maelm_jax.pretraining import summary


@pytest.mark.parametrize(("schedule", "warmup", "is_told"), [("linear", 100, True), ("wsd", 300, True), ("linear", 99, False), ("decay", 300, False)])
def test_a_warm_up_that_the_run_cuts_is_told(capsys, schedule, warmup, is_told):
    experiment = config.Experiment(
        optimizer=config.Optimizer(schedule=schedule, warmup_steps=warmup),
        run=config.Run(train_steps=100, continue_from="other" if schedule == "decay" else None),
    )
    summary.print_start(experiment, {}, jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]), config.SpecialIds.of_size(400), [])
    assert ("Optimizer.warmup_steps" in capsys.readouterr().out) == is_told
