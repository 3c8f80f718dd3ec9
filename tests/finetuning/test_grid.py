"""The report of a grid, and its runs that earlier versions began."""

import dataclasses
import types

import pytest

from maelm_jax import config, gin_files
from maelm_jax.finetuning import grid as grid_module


def test_a_run_that_recorded_settings_of_pretraining_goes_on(tmp_path):
    experiment = gin_files.load(["tiny.gin", "finetune/base.gin", "finetune/rte.gin"])
    masking = dataclasses.replace(experiment.masking, rate_plateaus=((0.0, 0.3),))
    run = dataclasses.replace(experiment.run, batch_size=32, batch_size_ramp=((16, 5),))
    (tmp_path / "config.gin").write_text(gin_files.render(dataclasses.replace(experiment, masking=masking, run=run)))
    now = dataclasses.replace(experiment, run=dataclasses.replace(run, batch_size_ramp=()))
    assert grid_module.finished(tmp_path, now, {}) is None
    with pytest.raises(config.ConfigError, match=r"other settings \(Run.seed: 0 -> 1\)"):
        grid_module.finished(tmp_path, dataclasses.replace(now, run=dataclasses.replace(now.run, seed=1)), {})


def test_seeds_that_diverged_are_named():
    problem = types.SimpleNamespace(name="rte", main="accuracy", notes=[])
    scored = [{"seed": seed, "score": value, "best": {"accuracy": value}} for seed, value in ((1, 0.7), (2, 0.5))]
    runs = [*scored, {"seed": 3, "score": None}]
    found = {"cell": [run | {"cell": {}, "init_from": "tiny", "workdir": "nowhere"} for run in runs]}
    assert grid_module.summary(problem, found)["notes"] == ["tiny: 1 of 3 seeds diverged; the figures are those of the others"]
    assert grid_module.summary(problem, {"cell": found["cell"][:2]})["notes"] == []


def test_more_epochs_are_tried_for_a_small_task():
    settings = config.Grid(epochs=(2, 3), small_task_epochs=(3, 10))
    assert [cell.epochs for cell in grid_module.cells(settings, grid_module.SMALL_TASK - 1)] == [2, 3, 10]
    assert [cell.epochs for cell in grid_module.cells(settings, grid_module.SMALL_TASK)] == [2, 3]
