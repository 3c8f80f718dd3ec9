"""The phases of a run: which settings each of its steps has."""

import dataclasses

import jax
import numpy as np
import pytest

from maelm_jax import config, gin_files
from maelm_jax.training import phases, sharding

PLATEAUS = "Masking.rate_plateaus=((0, 0.3), (0.5, 0.2), (0.9, 0.15))"


def parts_of(*bindings: str) -> list[phases.Phase]:
    return phases.of_run(gin_files.load(["tiny.gin"], ["TRAIN_STEPS=100", *bindings]))


def test_each_step_of_a_plateau_is_one_of_a_run_at_its_rate():
    parts = parts_of(PLATEAUS)
    assert [(part.start, part.end, part.steps) for part in parts] == [(0, 50, 50), (50, 90, 40), (90, 100, 10)]
    for part, rate in zip(parts, (0.3, 0.2, 0.15), strict=True):
        assert part.experiment == gin_files.load(["tiny.gin"], ["TRAIN_STEPS=100", f"Masking.rate={rate}"])


def test_a_run_without_plateaus_is_one_phase_with_the_settings_of_the_run():
    (part,) = parts_of()
    assert (part.start, part.end) == (0, 100) and part.experiment == gin_files.load(["tiny.gin"], ["TRAIN_STEPS=100"])


@pytest.mark.parametrize("trained_at", ["Masking.rate=0.4", "Masking.rate_plateaus=((0, 0.4), (0.5, 0.3))"])
@pytest.mark.parametrize("heldout,rate", [("Masking.heldout_rate=0.2", 0.2), ("Masking.heldout_rate=None", None)])
def test_evaluations_have_the_heldout_rate_or_that_of_the_run(trained_at, heldout, rate):
    found = gin_files.load(["base.gin"], [trained_at, heldout]).evaluated
    assert found == gin_files.load(["base.gin"], [f"Masking.rate={rate or trained_at.partition('rate=')[2] or 0.15}"])
    assert found.evaluated == found


def test_a_batch_size_ramp_counts_the_rows_before_each_phase():
    ramp = "Run.batch_size_ramp=((4, 30), (8, 30))"
    parts = parts_of("BATCH_SIZE=16", ramp, "Masking.rate_plateaus=((0, 0.3), (0.5, 0.15))")
    found = [(part.start, part.end, part.first_row, part.experiment.run.batch_size, part.experiment.masking.rate) for part in parts]
    assert found == [(0, 30, 0, 4, 0.3), (30, 50, 120, 8, 0.3), (50, 60, 280, 8, 0.15), (60, 100, 360, 16, 0.15)]
    assert parts[0].experiment == gin_files.load(["tiny.gin"], ["TRAIN_STEPS=100", "BATCH_SIZE=4", "Masking.rate=0.3"])
    longer = parts_of("BATCH_SIZE=16", ramp, "TRAIN_STEPS=200")
    assert [(part.start, part.first_row) for part in longer] == [(0, 0), (30, 120), (60, 360)], "the length of the run moves no row"
    assert [(part.end, part.first_row) for part in parts_of("BATCH_SIZE=16", ramp, "TRAIN_STEPS=40")] == [(30, 0), (40, 120)]


@pytest.mark.parametrize(
    "bindings,message",
    [
        (["Run.batch_size_ramp=((8, 10), (4, 10))"], "Run.batch_size_ramp must ascend to batch_size 32, got ((8, 10), (4, 10))"),
        (["Run.batch_size_ramp=((32, 10),)"], "Run.batch_size_ramp must ascend to batch_size 32, got ((32, 10),)"),
        (["Run.batch_size_ramp=((8, 0),)"], "Run.batch_size_ramp must be a list"),
        (["Run.batch_size_ramp=((6, 10),)", "Run.accumulate=4"], "Run.batch_size_ramp 6 is not divisible by Run.accumulate 4"),
    ],
)
def test_a_ramp_that_makes_no_sense_is_refused(bindings, message):
    with pytest.raises(config.ConfigError) as caught:
        gin_files.load(["tiny.gin"], bindings)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_mesh_divides_every_batch_of_a_ramp():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(4, 1, 1), ("data", "fsdp", "tensor"))
    sharding.check_mesh(gin_files.load(["tiny.gin"], ["Run.batch_size_ramp=((4, 9), (16, 9))"]), mesh)
    with pytest.raises(config.ConfigError, match="Run.batch_size_ramp=6 in Run.accumulate=1 parts is not divisible by 4 devices"):
        sharding.check_mesh(gin_files.load(["tiny.gin"], ["Run.batch_size_ramp=((4, 9), (6, 9))"]), mesh)


def test_every_step_has_one_phase():
    parts = parts_of(PLATEAUS)
    rates = [phases.of_step(parts, step).experiment.masking.rate for step in (0, 49, 50, 89, 90, 99, 100)]
    assert rates == [0.3, 0.3, 0.2, 0.2, 0.15, 0.15, 0.15]


def test_a_plateau_of_a_short_run_can_have_no_step():
    parts = parts_of(PLATEAUS, "TRAIN_STEPS=1")
    assert [(part.start, part.end) for part in parts] == [(0, 1)]


@pytest.mark.parametrize(
    "plateaus,message",
    [
        ([[0, 0.3], [0.5, 0.15]], None),
        (((0.1, 0.3),), "rate_plateaus must begin at 0 and ascend, got ((0.1, 0.3),)"),
        (((0, 0.3), (0.5, 0.2), (0.5, 0.1)), "must begin at 0 and ascend"),
        (((0, 0.3), (0.6, 0.2), (0.5, 0.1)), "must begin at 0 and ascend"),
        (((0, 1.0),), "rate_plateaus must be a list, each item (a number, at least 0 and below 1; a number, above 0 and below 1), got ((0, 1.0),)"),
        (0.3, "rate_plateaus must be a list"),
    ],
)
def test_plateaus_that_make_no_sense_are_refused(plateaus, message):
    if message is None:
        assert config.Masking(rate_plateaus=plateaus).rate_plateaus == ((0, 0.3), (0.5, 0.15))
        return
    with pytest.raises(config.ConfigError) as caught:
        config.Masking(rate_plateaus=plateaus)
    assert message in str(caught.value)


def test_a_plateau_masks_a_token_of_each_row_at_least():
    experiment = gin_files.load(["tiny.gin"], ["SEQUENCE_LENGTH=50"])
    dataclasses.replace(experiment, masking=config.Masking(rate_plateaus=((0, 0.3), (0.5, 0.02))))
    with pytest.raises(config.ConfigError, match="Masking.rate=0.01 masks less than one of the 50 tokens"):  # that of evaluations
        dataclasses.replace(experiment, masking=config.Masking(rate=0.01, rate_plateaus=((0, 0.3), (0.5, 0.2))))
    with pytest.raises(config.ConfigError, match="rate 0.019 from 0.5 on masks less than one of the 50 tokens of a row. Use 0.02 or more"):
        dataclasses.replace(experiment, masking=config.Masking(rate_plateaus=((0, 0.3), (0.5, 0.019))))
