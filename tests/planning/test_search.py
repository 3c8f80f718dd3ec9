"""The search for the largest microbatch, and the choices of a sweep."""

import dataclasses

import pytest

from maelm_jax import config
from maelm_jax.planning import estimate, search, target, topologies
from maelm_jax.training import sharding

EXPERIMENT = config.Experiment(*(section() for section in config.SECTIONS))
SLICE = topologies.parse("v5e:16x16")


def plan_of(rows: int, needed: float, **settings) -> estimate.Plan:
    """A plan of one microbatch of `rows` rows a device that needs so many GiB."""
    experiment = search.with_rows(EXPERIMENT, rows, SLICE.count)
    mesh, limit = sharding.MeshSizes(SLICE.count, 1, 1), SLICE.memory / target.GIB
    plan = estimate.Plan(experiment, mesh, rows, {}, needed * target.GIB, needed <= limit, model_flops=0.0)
    return dataclasses.replace(plan, **settings)


def test_a_batch_of_other_rows_keeps_its_microbatches():
    """Accumulation needs memory for a second gradient."""
    run = dataclasses.replace(EXPERIMENT.run, batch_size=2048, accumulate=4)
    other = search.with_rows(dataclasses.replace(EXPERIMENT, run=run), 3, 256).run
    assert (other.batch_size, other.accumulate) == (3 * 256 * 4, 4)


@pytest.mark.parametrize("rows", [1, 8, 32, 64, 512])
@pytest.mark.parametrize("fixed,each,best", [(2.0, 0.7, 16), (2.0, 0.08, 168), (2.0, 5.0, 2), (17.0, 1.0, 0)])
def test_the_largest_microbatch_is_found_in_few_compilations(monkeypatch, rows, fixed, each, best):
    tried = []

    def compile_step(experiment, target, devices):
        rows = experiment.run.batch_size // SLICE.count
        tried.append(rows)
        return plan_of(rows, fixed + each * rows)

    monkeypatch.setattr(estimate, "compile_step", compile_step)
    start = compile_step(search.with_rows(EXPERIMENT, rows, SLICE.count), SLICE, [])
    largest = search.largest_microbatch(start, SLICE, []).rows
    assert len(tried) <= 7
    assert (largest <= best and fixed + each * largest <= 16) or largest == 0
    assert largest >= 0.85 * best - 1, tried


def test_every_choice_of_a_sweep_has_the_same_batch_size():
    found = search.choices(EXPERIMENT, 8)
    assert {choice.run.batch_size for choice in found} == {EXPERIMENT.run.batch_size}
    assert {(choice.mesh.data, choice.mesh.fsdp) for choice in found} == {(8, 1), (1, 8)}
    for choice in found:
        rows, rest = divmod(choice.run.batch_size, 8 * choice.run.accumulate)
        assert rows in search.SWEEP_ROWS and not rest


def test_a_sweep_keeps_tensor_and_skips_meshes_that_the_decoder_does_not_fit():
    wide = dataclasses.replace(EXPERIMENT, mesh=config.Mesh(tensor=2), run=dataclasses.replace(EXPERIMENT.run, batch_size=128))
    assert {choice.mesh for choice in search.choices(wide, 16)} == {config.Mesh(8, 1, 2), config.Mesh(1, 8, 2)}
    model = dataclasses.replace(EXPERIMENT.model, decoder_width=512)
    narrow = dataclasses.replace(EXPERIMENT, model=model, run=dataclasses.replace(EXPERIMENT.run, batch_size=24 * 32))
    assert {choice.mesh.fsdp for choice in search.choices(narrow, 24)} == {1, 8}, "768 is divisible by 24, and 512 is not"


def test_the_fastest_plan_fits_and_has_an_estimate():
    def timed(seconds, **settings):
        return plan_of(8, 1.0, compute=target.Compute(seconds, ""), sending=0.0, **settings)

    slow, fast = timed(2.0), timed(1.0)
    assert search.fastest([slow, fast, timed(0.5, fits=False), plan_of(8, 1.0)]) is fast
    assert search.fastest([plan_of(8, 1.0)]) is None


def test_a_batch_that_no_microbatch_of_a_sweep_divides_is_refused():
    small = dataclasses.replace(EXPERIMENT, run=dataclasses.replace(EXPERIMENT.run, batch_size=24))
    with pytest.raises(config.ConfigError, match="Run.batch_size=24 is no multiple of 8 devices / Mesh.tensor=1 x 32, 16, 8, 4 rows"):
        search.sweep(small, SLICE, [None] * 8)


@pytest.mark.parametrize("tensor", [-1, 3, 16])
def test_a_tensor_that_a_sweep_cannot_keep_is_refused(tensor):
    wide = dataclasses.replace(EXPERIMENT, mesh=config.Mesh(data=1, tensor=tensor))
    with pytest.raises(config.ConfigError, match=rf"Mesh.tensor={tensor}: --sweep keeps it .* Give a divisor of 8 devices"):
        search.sweep(wide, SLICE, [None] * 8)
