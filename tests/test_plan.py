"""Planning: slices by their names, a plan for pretended devices, the search for the largest microbatch; with libtpu at hand the real compiler."""

import dataclasses
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

from maelm_jax import config, plan

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("topology,chips,devices,cloud", [
    ("v4:2x4x4", 32, 64, "v4-64"), ("v5e:16x16", 256, 256, "v5litepod-256"), ("v5p:4x4x8", 128, 128, "v5p-256"), ("v6e:8x8", 64, 64, "v6e-64"),
])  # fmt: skip
def test_a_slice_has_its_chips_and_its_name(topology, chips, devices, cloud):
    where = plan.slice_of(topology)
    assert (where.chips, where.devices) == (chips, devices) and where.title.endswith(f" calls it {cloud}")


@pytest.mark.parametrize("topology", ["v5e:3x5", "v9:2x2", "v5p-256", "cpu:0", ""])
def test_an_unknown_topology_lists_the_known(topology):
    with pytest.raises(config.ConfigError, match=r"known are v4: 2x2x1 .*v5e: .*16x16.*; and cpu:N, N from 1 to 1024"):
        plan.slice_of(topology)


def run(*more: str) -> subprocess.CompletedProcess:
    argv = [sys.executable, "-m", "maelm_jax.plan", "--gin_file=tiny.gin", "--gin.Vocabulary.size=400", "--gin.Model.width=32", *more]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.slow
def test_a_plan_for_pretended_devices():
    done = run("--topology=cpu:4", "--gin.Run.accumulate=2")
    assert done.returncode == 0, done.stderr
    assert "mesh {'data': 4, 'fsdp': 1, 'tensor': 1}; 32 rows of 64 a step: 4 a device in each of 2 part(s)" in done.stdout
    memory = {name: float(value) for name, value in re.findall(r"^(\S.*?) +([\d.]+) GiB a device", done.stdout, re.M)}
    assert memory["all"] == pytest.approx(sum(value for name, value in memory.items() if name != "all"), abs=0.003)
    reduced = re.search(r"all-reduce +4 +([\d.]+) +1 +([\d.]+)  outside the loops: psum", done.stdout)
    assert float(reduced[2]) == pytest.approx(1.5 * float(reduced[1]), abs=0.002), "around a ring of 4 each byte goes 2 x 3/4 times"
    assert "tokens/s" not in done.stdout, "there is no estimate of time for these"
    done = run("--topology=cpu:4", "--gin.Mesh.data=3")
    assert done.returncode == 2 and "does not equal the 4 devices" in done.stderr


@pytest.mark.parametrize("rows", [1, 8, 32, 64, 512])
@pytest.mark.parametrize("fixed,each,best", [(2.0, 0.7, 16), (2.0, 0.08, 168), (2.0, 5.0, 2), (17.0, 1.0, 0)])
def test_the_largest_microbatch_is_found_in_few_compilations(monkeypatch, rows, fixed, each, best):
    tried = []

    def compile_for(experiment, where, devices):
        rows = experiment.run.batch_size // 256
        tried.append(rows)
        needed = (fixed + each * rows) * plan.GIB
        return dataclasses.replace(start, experiment=experiment, rows=rows, needed=needed, fits=needed <= 16 * plan.GIB)

    sections = [section() for section in config.SECTIONS]
    experiment = config.Experiment(*sections)
    mesh = {"data": 256, "fsdp": 1, "tensor": 1}
    start = plan.Plan(plan.with_rows(experiment, rows, 256, False), mesh, rows, {}, 0.0, None, [], None, None, 0.0)
    monkeypatch.setattr(plan, "compile_for", compile_for)
    start = compile_for(start.experiment, None, None)
    largest, _ = plan.largest_rows(start, plan.slice_of("v5e:16x16"), [])
    assert len(tried) <= 7
    assert largest <= best and fixed + each * largest <= 16 or largest == 0
    assert largest >= 0.85 * best - 1, tried


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not here: pip install '.[plan]'")
def test_the_tpu_compiler():
    done = run("--topology=v5e:2x2", "--gin.Model.dtype=bfloat16", "--no_largest")
    assert done.returncode == 0, done.stderr
    for what in ("v5e:2x2: 4 chips of TPU v5 lite", "fits in 16.00", "the compiler's estimate", "chip-hours"):
        assert what in done.stdout
    done = run("--topology=v5e:2x2", "--gin.BATCH_SIZE=262144", "--gin.Model.width=512", "--no_largest")
    assert done.returncode == 1 and "does not fit: the compiler needs" in done.stdout
