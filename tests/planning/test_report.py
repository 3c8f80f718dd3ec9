"""Plans as text."""

import dataclasses

import pytest

from maelm_jax import config
from maelm_jax.planning import estimate, hlo, report, target, topologies
from maelm_jax.training import sharding

SLICE = topologies.parse("v5e:2x2")
PLAN = estimate.Plan(
    config.Experiment(*(section() for section in config.SECTIONS)),
    sharding.MeshSizes(4, 1, 1),
    8,
    memory={"parameters": target.GIB, "batch": target.GIB / 2},
    needed=1.5 * target.GIB,
    fits=True,
    model_flops=8e12,
    compiled=True,
    collectives=[hlo.Collective("all-reduce", 4_000_000, (0, 1, 2, 3), 1, "jit(step)/transpose/while/body/psum")] * 2,
    compute=target.Compute(0.2, "the compiler's cycles"),
    sending=0.05,
)


def test_a_plan_shows_memory_collectives_and_time():
    text = report.of_plan(PLAN, SLICE)
    lines = [line.split() for line in text.splitlines()]
    assert ["parameters", "1.000"] in lines and ["all", "1.500"] in lines
    assert "fits in 16.00 GiB a device" in text
    [row] = [line for line in text.splitlines() if line.startswith("all-reduce")]
    assert row.split()[-4:] == ["4", "8.000", "1", "12.000"] and "backward one loop: psum" in row
    assert "estimated step: 200.0 ms computing" in text and "+ 50.0 ms sending" in text


def test_a_refused_step_shows_what_it_needs():
    refused = dataclasses.replace(PLAN, compiled=False, fits=False, needed=20 * target.GIB)
    assert report.of_plan(refused, SLICE).endswith("does not fit: the compiler needs 20.00 GiB a device of 16.00")


def test_a_plan_without_an_estimate_shows_no_rate():
    assert "tokens/s" not in report.of_plan(dataclasses.replace(PLAN, compute=None), SLICE)


def test_a_sweep_has_a_line_for_each_plan_and_no_time_for_one_that_does_not_fit():
    refused = dataclasses.replace(PLAN, fits=False)
    large = dataclasses.replace(PLAN, mesh=sharding.MeshSizes(512, 16, 4), rows=4096, needed=1e14, model_flops=1e15)
    lines = [report.sweep_line(plan) for plan in (PLAN, refused, large)]
    cells = [line.split() for line in lines]
    assert cells[0][-2] == "250.0" and cells[1][-2:] == ["-", "-"] and cells[1][-3] == "no"
    assert {len(line) for line in lines} == {len(report.sweep_header())}, "the columns do not align"


def test_a_recommendation_has_the_flags_of_its_plan():
    flags = "--gin.Mesh.data=4 --gin.Mesh.fsdp=1 --gin.Mesh.tensor=1 --gin.Run.accumulate=1 --gin.Model.rematerialise=False"
    assert report.recommendation(PLAN) == f"recommended: {flags}"
    assert report.recommendation(None).startswith("recommended: none")


@pytest.mark.parametrize(
    "name,origin",
    [
        ("jit(step)/psum", "outside the loops: psum"),
        ("jit(step)/reduce_scatter:reduce_scatter)", "outside the loops: reduce_scatter"),
        ("a/while/body/b/while/body/transpose/dot", "backward loop in a loop: dot"),
    ],
)
def test_the_origin_of_an_operation(name, origin):
    assert report.origin_of(name) == origin
