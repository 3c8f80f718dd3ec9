"""The command: its searches, what it prints, and a plan for simulated devices and (with libtpu) for a TPU slice."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys

import pytest
from testing import ROOT, call, model_of

from maelm_jax import config, gin_files, plan, train
from maelm_jax.planning import estimate, hlo, targets
from maelm_jax.training import sharding

EXPERIMENT = config.Experiment()
GIB = 2**30
PLAN = estimate.Plan(
    EXPERIMENT,
    sharding.MeshSizes(4, 1, 1),
    8,
    attention="attention: xla",
    model_flops=8e12,
    needed=1.5 * GIB,
    fits=True,
    memory={"parameters": GIB, "program": GIB / 2},
    collectives=[hlo.Collective("all-reduce", 4_000_000, (0, 1, 2, 3), times, "") for times in (1, 2)],
    time=estimate.StepTime(0.2, 0.05, "the compiler's cycles", 8e14),
)


def with_time(seconds: float, **fields) -> estimate.Plan:
    return dataclasses.replace(PLAN, time=PLAN.time._replace(computing=seconds), **fields)


def test_a_plan_shows_memory_collectives_and_time():
    text = plan.describe(PLAN, targets.parse("v5e:2x2"))
    lines = [line.split() for line in text.splitlines()]
    assert ["parameters", "1.000"] in lines and ["all", "1.500"] in lines
    assert ["all-reduce", "4", "3", "12.000", "18.000"] in lines, "around a ring of 4 each byte goes 2 x 3/4 times"
    assert "fits in 16.00 GiB" in text and "200.0 ms computing" in text and "50.0 ms sending" in text and "MFU 4.0%" in text


def test_a_refused_step_shows_what_it_needs_and_an_unestimated_one_no_rate():
    slice_ = targets.parse("v5e:2x2")
    assert "needs 20.00 GiB" in plan.describe(dataclasses.replace(PLAN, memory=None, fits=False, needed=20 * GIB), slice_)
    assert "tokens/s" not in plan.describe(dataclasses.replace(PLAN, time=None), slice_)


@pytest.mark.parametrize("rows", [1, 8, 32, 64, 512])
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("fixed,each,best", [(2.0, 0.7, 16), (2.0, 0.08, 168), (2.0, 5.0, 2), (17.0, 1.0, 0)])
def test_the_largest_microbatch_is_found_in_few_compilations(rows, parts, fixed, each, best):
    limit, devices = 16 * GIB, 256

    def compile_step(experiment):
        assert experiment.run.accumulate == parts, "accumulation needs memory for a second gradient"
        rows = experiment.run.batch_size // devices // parts
        needed = (fixed + each * rows) * GIB
        return dataclasses.replace(PLAN, experiment=experiment, rows=rows, needed=needed, fits=needed <= limit)

    run = dataclasses.replace(EXPERIMENT.run, batch_size=rows * devices * parts, accumulate=parts)
    first = compile_step(dataclasses.replace(EXPERIMENT, run=run))
    largest, compiled = plan.largest_microbatch(first, limit, compile_step)
    assert len(compiled) <= 6
    assert (largest <= best and fixed + each * largest <= 16) or largest == 0
    assert largest >= 0.85 * best - 1, compiled


@pytest.mark.parametrize(
    "topology,largest,rows",
    # 440 slots and width 768: of 132 multiprocessors, 32 rows leave 17% idle in three waves, 64 rows none in five.
    [("h200:1", 20, 16), ("h200:1", 40, 32), ("h200:1", 100, 64), ("h200:1", 600, 512), ("v5e:2x2", 40, 32), ("cpu:1", 3, 2)],
)
def test_the_proposed_microbatch_fits_divides_the_batch_and_fills_a_gpu(topology, largest, rows):
    run = dataclasses.replace(EXPERIMENT.run, batch_size=2048, accumulate=64)
    base = dataclasses.replace(gin_files.load(["base.gin"]), run=run)
    one = dataclasses.replace(PLAN, experiment=base, rows=32)
    assert plan.propose_parts(one, largest, targets.parse(topology)) == 2048 // rows


def test_every_choice_of_a_sweep_has_the_same_batch_size():
    found = plan.choices(EXPERIMENT, 8)
    assert {choice.run.batch_size for choice in found} == {EXPERIMENT.run.batch_size}
    assert {(choice.mesh.data, choice.mesh.fsdp) for choice in found} == {(8, 1), (1, 8)}
    assert {choice.model.compute.rematerialise for choice in found} == {False, True}
    for choice in found:
        rows, rest = divmod(choice.run.batch_size, 8 * choice.run.accumulate)
        assert rows in plan.SWEEP_ROWS and not rest


def test_a_sweep_keeps_tensor_and_skips_meshes_that_the_decoder_does_not_fit():
    wide = dataclasses.replace(EXPERIMENT, mesh=config.Mesh(tensor=2), run=dataclasses.replace(EXPERIMENT.run, batch_size=128))
    assert {choice.mesh for choice in plan.choices(wide, 16)} == {config.Mesh(data=8, fsdp=1, tensor=2), config.Mesh(data=1, fsdp=8, tensor=2)}
    model = model_of(EXPERIMENT.model, decoder_width=512)
    narrow = dataclasses.replace(EXPERIMENT.with_model(model), run=dataclasses.replace(EXPERIMENT.run, batch_size=24 * 32))
    assert {choice.mesh.fsdp for choice in plan.choices(narrow, 24)} == {1, 8}, "768 is divisible by 24, and 512 is not"


@pytest.mark.parametrize("batch_size,tensor", [(24, 1), (256, -1), (256, 3), (256, 16)])
def test_a_sweep_without_choices_names_the_batch_and_tensor(batch_size, tensor):
    run = dataclasses.replace(EXPERIMENT.run, batch_size=batch_size)
    experiment = dataclasses.replace(EXPERIMENT, run=run, mesh=config.Mesh(data=1, tensor=tensor))
    with pytest.raises(config.ConfigError, match=rf"Mesh.tensor={tensor}\b.*Run.batch_size={batch_size}\b"):
        plan.choices(experiment, 8)


def test_the_recommended_plan_fits_and_is_the_first_of_the_fastest():
    run = dataclasses.replace(EXPERIMENT.run, accumulate=8)
    fast = with_time(0.1, experiment=dataclasses.replace(EXPERIMENT, run=run))
    flags = plan.recommend([with_time(0.3), fast, with_time(0.1), with_time(0.05, fits=False), dataclasses.replace(PLAN, time=None)])
    assert "--gin.Mesh.data=4 --gin.Mesh.fsdp=1 --gin.Mesh.tensor=1 --gin.Run.accumulate=8 --gin.Compute.rematerialise=False" in flags
    assert "--gin" not in plan.recommend([with_time(0.05, fits=False), dataclasses.replace(PLAN, time=None)])


@pytest.mark.parametrize("fits,status", [((False, False), 1), ((False, True), 0), ((None, None), 0)])
def test_a_sweep_ends_with_1_when_nothing_fits(fits, status, monkeypatch):
    plans = [dataclasses.replace(PLAN, fits=one, rows=1234) for one in fits]
    printed = []

    def compile_step(*_, **__):
        printed.append(sys.stdout.getvalue().count("1234"))
        return plans[len(printed) - 1]

    monkeypatch.setattr(estimate, "compile_step", compile_step)
    monkeypatch.setattr(plan, "choices", lambda *_: plans)
    done = call("plan", "--gin_file=tiny.gin", "--topology=cpu:8", "--sweep")
    assert done.status == status and ("recommended: --gin" in done.stdout) == (True in fits)
    assert printed == [0, 1], "a line must be there before the next program is compiled"


def run(*more: str) -> subprocess.CompletedProcess:
    argv = [sys.executable, "-m", "maelm_jax.plan", "--gin_file=tiny.gin", "--gin.Vocabulary.size=400", "--gin.Encoder.width=32", *more]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.slow
def test_a_plan_for_simulated_devices():
    done = run("--topology=cpu:4", "--gin.Run.accumulate=2")
    assert done.returncode == 0, done.stderr
    assert "mesh {'data': 4, 'fsdp': 1, 'tensor': 1}; 32 rows of 64 a step: 4 a device in each of 2 part(s)" in done.stdout
    table = done.stdout.split("GiB a device\n")[1].split("\n\n")[0]
    memory = {name: float(value) for name, value in re.findall(r"^(\S.*?) +([\d.]+)$", table, re.M)}
    assert memory["all"] == pytest.approx(sum(value for name, value in memory.items() if name != "all"), abs=0.003)
    reduced = re.search(r"^all-reduce +4 +1 +([\d.]+) +([\d.]+)$", done.stdout, re.M)
    assert float(reduced[2]) == pytest.approx(1.5 * float(reduced[1]), abs=0.002), "the gradient, once a step"
    assert "tokens/s" not in done.stdout, "there is no estimate of time for these"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not here: pip install '.[plan]'")
def test_the_tpu_compiler():
    done = run("--topology=v5e:2x2", "--gin.Compute.dtype=bfloat16", "--no_largest")
    assert done.returncode == 0, done.stderr
    for what in ("v5e:2x2: 4 chips of TPU v5 lite", "fits in 16.00", "the compiler's cycles", "chip-hours"):
        assert what in done.stdout
    done = run("--topology=v5e:2x2", "--gin.BATCH_SIZE=262144", "--gin.Encoder.width=512", "--no_largest")
    assert done.returncode == 1 and "does not fit: the compiler needs" in done.stdout


@pytest.mark.parametrize("command,flags", [(plan, ["--topology=cpu:1"]), (train, ["--dry_run"])])
def test_a_command_of_pretraining_refuses_files_of_finetuning(command, flags):
    with pytest.raises(config.ConfigError):
        command.main(["--gin_file=base.gin", *flags, "--gin_file=finetune/base.gin", "--gin_file=finetune/rte.gin"])
