"""The command: its searches, what it prints, and a plan for simulated devices and (with libtpu) for a TPU slice."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
from testing import ROOT, call, model_of, training

from maelm_jax import config, gin_files, plan, train
from maelm_jax.planning import estimate, hlo, targets, timing
from maelm_jax.training import sharding
from maelm_jax.training.workdir import Workdir

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


def test_a_price_makes_the_cost_of_all_steps():
    hours = PLAN.time.seconds * EXPERIMENT.run.train_steps / 3600 * 4  # of 4 chips
    assert f"{hours * 1.5:,.0f} at 1.5 an hour" in plan.describe(PLAN, targets.parse("v5e:2x2"), price=1.5)


@pytest.mark.parametrize(
    "flags,programs",
    [
        ([], [(8, True)]),
        (["--each_layer"], [(8, None)]),
        (["--gin.Compute.scan_layers=False"], [(8, False)]),
        (["--largest"], [(8, True), (16, True)]),
    ],
)
def test_a_plan_compiles_one_program_with_its_layers_in_a_loop_unless_more_is_asked_for(flags, programs, monkeypatch):
    compiled = []

    def compile_step(experiment, target, devices):
        rows = experiment.run.batch_size // 4
        compiled.append((rows, experiment.compute.scan_layers))
        assert sys.stderr.getvalue().count("compiling") == len(compiled), "the line comes before the minutes"
        return dataclasses.replace(PLAN, experiment=experiment, rows=rows, needed=rows * GIB, fits=rows < 10)

    monkeypatch.setattr(estimate, "compile_step", compile_step)
    monkeypatch.setattr(targets, "start_compiler", lambda target: [])
    done = call("plan", "--gin_file=tiny.gin", "--gin.BATCH_SIZE=32", "--topology=v5e-4", *flags)
    assert done.status == 0 and compiled[: len(programs)] == programs and bool(compiled[1:]) == ("--largest" in flags)
    assert ("--each_layer" in done.stdout) == (compiled[0][1] is True)


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
    monkeypatch.setattr(plan, "choices", lambda *_: [one.experiment for one in plans])
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
    done = run("--topology=v5e:2x2", "--gin.Compute.dtype=bfloat16")
    assert done.returncode == 0, done.stderr
    for what in ("v5e:2x2: 4 chips of TPU v5 lite", "fits in 16.00", "the compiler's cycles", "chip-hours"):
        assert what in done.stdout
    done = run("--topology=v5e:2x2", "--gin.BATCH_SIZE=262144", "--gin.Encoder.width=512")
    assert done.returncode == 1 and "does not fit: the compiler needs" in done.stdout


@pytest.mark.parametrize("command,flags", [(plan, ["--topology=cpu:1"]), (train, ["--dry_run"])])
def test_a_command_of_pretraining_refuses_files_of_finetuning(command, flags):
    with pytest.raises(config.ConfigError):
        command.main(["--gin_file=base.gin", *flags, "--gin_file=finetune/base.gin", "--gin_file=finetune/rte.gin"])


# The dry run of train.

TINY = ["--gin_file=tiny.gin", "--gin.Vocabulary.size=400", "--gin.Encoder.width=32", "--gin.BATCH_SIZE=8", "--gin.TRAIN_STEPS=50"]


def test_a_dry_run_says_size_memory_and_time_before_its_details(tmp_path):
    done = call("train", *TINY, "--dry_run", f"--workdir={tmp_path / 'none'}")
    assert done.status == 0, done.stderr
    order = [done.stdout.index(what) for what in ("parameters (", "compiling", "GiB a device", "time here: about", "encoder matrices")]
    assert order == sorted(order) and "encoder/token_embedding" not in done.stdout
    assert "for 50 steps" in done.stdout and not (tmp_path / "none").exists()
    done = call("train", *TINY, "--dry_run", "--verbose", f"--workdir={tmp_path / 'none'}")
    assert "encoder/token_embedding" in done.stdout


def test_a_dry_run_has_the_vocabulary_that_is_asked_for_not_that_of_another_run_in_the_workdir(text, uninterrupted):
    counts = []
    for size in (400, 2000):
        done = call("train", *training(text, uninterrupted), f"--gin.Vocabulary.size={size}", "--dry_run")
        counts.append(int(done.stdout.split(" parameters")[0].replace(",", "")))
    assert counts[1] > counts[0] + 1000 * 32


def test_the_time_of_a_run_that_has_begun_is_that_of_its_log(tmp_path):
    experiment = gin_files.load(["tiny.gin"], ["TRAIN_STEPS=100"])
    (tmp_path / "config.gin").write_text(gin_files.render(experiment))
    lines = [{"step": 10, "step_seconds": None}, {"step": 20, "step_seconds": 3.0}, {"step": 40, "step_seconds": 60.0}]
    lines.append({"step": 40, "checkpoint": 40})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = timing.from_log(experiment, Workdir(tmp_path))
    assert (found.step_seconds, found.steps) == (60.0, 60) and "about 60 minutes for 60 steps" in str(found)
    other = gin_files.load(["tiny.gin"], ["TRAIN_STEPS=100", "BATCH_SIZE=64"])
    assert timing.from_log(other, Workdir(tmp_path)) is None and timing.from_log(other, Workdir(tmp_path / "none")) is None
    for free in ("Run.accumulate=2", "Compute.rematerialise=True", "Mesh.tensor=2"):
        assert timing.from_log(gin_files.load(["tiny.gin"], ["TRAIN_STEPS=100", free]), Workdir(tmp_path)) is None


@pytest.mark.parametrize("flops,rows,is_bound", [(1.0, 8, False), (4.0, 2, False), (100.0, None, True)])
def test_a_large_step_is_timed_with_fewer_rows_or_bounded(monkeypatch, flops, rows, is_bound):
    """`flops` is a multiple of the limit: a step of four times the limit is timed with two of its eight rows."""
    timed = []

    def compile_step(experiment, *_, **__):
        return dataclasses.replace(PLAN, experiment=experiment, needed=0.0, program=object())

    monkeypatch.setattr(timing.estimate, "compile_step", compile_step)
    monkeypatch.setattr(timing, "_time_steps", lambda plan: timed.append(plan.experiment.run.batch_size) or 0.5)
    monkeypatch.setattr(timing, "_time_update", lambda plan: 0.125)
    run = dataclasses.replace(EXPERIMENT.run, batch_size=8, accumulate=4, train_steps=10)
    one = compile_step(dataclasses.replace(EXPERIMENT, run=run))
    one = dataclasses.replace(one, model_flops=flops * timing.MOST_FLOPS, mesh=sharding.MeshSizes(1, 1, 1))
    found = timing.measure(one, targets.parse("cpu:1"))
    assert timed == ([rows] if rows else []) and found.is_bound == is_bound and found.steps == 10
    if rows == 8:
        assert found.step_seconds == 0.5
    elif rows:
        assert found.step_seconds == 0.375 * 8 / rows + 0.125, "the optimiser's update takes as long with fewer rows"


@pytest.mark.parametrize("most", [1, 16, 47, 127, 129])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("share", [0.0, 1 / 16])
@pytest.mark.parametrize("devices", [1, 2])
def test_fewer_rows_make_microbatches_that_are_no_larger_and_that_the_devices_can_divide(most, accumulate, share, devices):
    run = dataclasses.replace(EXPERIMENT.run, batch_size=128, accumulate=accumulate)
    objective = dataclasses.replace(EXPERIMENT.objective, causal_share=share)
    experiment = dataclasses.replace(EXPERIMENT, run=run, objective=objective)
    one = dataclasses.replace(PLAN, experiment=experiment, mesh=sharding.MeshSizes(devices, 1, 1))
    rows, parts = timing._fewer_rows(one, most)
    microbatch, group = 128 // accumulate, devices * (16 if share else 1)
    assert rows // parts <= microbatch and rows % (parts * group) == 0
    assert rows <= most < rows + (microbatch if most >= microbatch else group), "as many as there can be"


def test_a_large_step_with_causal_rows_is_timed_with_whole_groups_of_them(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "MOST_FLOPS", 1.0)
    monkeypatch.setattr(timing, "_fewer_rows", lambda plan, most, choose=timing._fewer_rows: choose(plan, 20))
    files = ["--gin_file=recipes/efficient.gin", "--gin_file=recipes/hybrid.gin", "--gin.BATCH_SIZE=32"]
    done = call("train", *TINY, *files, "--dry_run", f"--workdir={tmp_path / 'none'}")
    assert done.status == 0 and "16 of 32 rows a step" in done.stdout, done


def test_a_step_that_does_not_fit_is_not_timed(monkeypatch):
    monkeypatch.setattr(timing, "_free_memory", lambda: 1.0 * GIB)
    one = dataclasses.replace(PLAN, needed=2.0 * GIB, model_flops=1.0, program=object())
    assert "2.00 GiB" in timing.measure(one, targets.parse("cpu:1"))
    assert "not measured" in timing.measure(dataclasses.replace(PLAN, fits=False), targets.parse("cpu:1"))
