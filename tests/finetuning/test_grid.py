"""The report of a grid."""

import types

from maelm_jax.finetuning import grid as grid_module


def test_seeds_that_diverged_are_named():
    problem = types.SimpleNamespace(name="rte", main="accuracy", notes=[])
    scored = [{"seed": seed, "score": value, "best": {"accuracy": value}} for seed, value in ((1, 0.7), (2, 0.5))]
    runs = [*scored, {"seed": 3, "score": None}]
    found = {"cell": [run | {"cell": {}, "init_from": "tiny", "workdir": "nowhere"} for run in runs]}
    assert grid_module.summary(problem, found)["notes"] == ["tiny: 1 of 3 seeds diverged; the figures are those of the others"]
    assert grid_module.summary(problem, {"cell": found["cell"][:2]})["notes"] == []
