"""The command: a plan for simulated devices and, where libtpu is installed, for a TPU slice."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
from testing import call

from maelm_jax import config, gin_files, plan, train
from maelm_jax.planning import estimate, search, target
from maelm_jax.training import sharding

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(*more: str) -> subprocess.CompletedProcess:
    argv = [sys.executable, "-m", "maelm_jax.plan", "--gin_file=tiny.gin", "--gin.Vocabulary.size=400", "--gin.Model.width=32", *more]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.parametrize("fits,status,recommended", [((False, False), 1, "none"), ((False, True), 0, "--gin.Mesh.data=8")])
def test_a_sweep_ends_with_1_when_nothing_fits(fits, status, recommended, monkeypatch):
    experiment = gin_files.load(["tiny.gin"])
    compute = target.Compute(1.0, "")
    plans = [estimate.Plan(experiment, sharding.MeshSizes(8, 1, 1), 4, {}, 1.0, one, model_flops=1.0, compute=compute, sending=0.0) for one in fits]
    printed = []

    def sweep(*_):
        for one in plans:
            yield one
            printed.append("8x1x1" in sys.stdout.getvalue())

    monkeypatch.setattr(search, "sweep", sweep)
    done = call("plan", "--gin_file=tiny.gin", "--topology=cpu:8", "--sweep")
    assert done.status == status and f"recommended: {recommended}" in done.stdout
    assert printed == [True] * len(plans), "a line must be there before the next program is compiled"


@pytest.mark.slow
def test_a_plan_for_simulated_devices():
    done = run("--topology=cpu:4", "--gin.Run.accumulate=2")
    assert done.returncode == 0, done.stderr
    assert "mesh {'data': 4, 'fsdp': 1, 'tensor': 1}; 32 rows of 64 a step: 4 a device in each of 2 part(s)" in done.stdout
    table = done.stdout.split("GiB a device\n")[1].split("\n\n")[0]
    memory = {name: float(value) for name, value in re.findall(r"^(\S.*?) +([\d.]+)$", table, re.M)}
    assert memory["all"] == pytest.approx(sum(value for name, value in memory.items() if name != "all"), abs=0.003)
    reduced = re.search(r"all-reduce +outside the loops: psum +4 +([\d.]+) +1 +([\d.]+)", done.stdout)
    assert float(reduced[2]) == pytest.approx(1.5 * float(reduced[1]), abs=0.002), "around a ring of 4 each byte goes 2 x 3/4 times"
    assert "tokens/s" not in done.stdout, "there is no estimate of time for these"
    done = run("--topology=cpu:4", "--gin.Mesh.data=3")
    assert done.returncode == 2 and "does not equal the 4 devices" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not here: pip install '.[plan]'")
def test_the_tpu_compiler():
    done = run("--topology=v5e:2x2", "--gin.Model.dtype=bfloat16", "--no_largest")
    assert done.returncode == 0, done.stderr
    for what in ("v5e:2x2: 4 chips of TPU v5 lite", "fits in 16.00", "the compiler's cycles", "chip-hours"):
        assert what in done.stdout
    done = run("--topology=v5e:2x2", "--gin.BATCH_SIZE=262144", "--gin.Model.width=512", "--no_largest")
    assert done.returncode == 1 and "does not fit: the compiler needs" in done.stdout


@pytest.mark.parametrize(
    "command,flags,message",
    [
        (plan, ["--topology=cpu:1", "--sweep", "--no_largest"], "--no_largest: --sweep does not look for"),
        (plan, ["--topology=cpu:1", "--gin_file=finetune/base.gin", "--gin_file=finetune/rte.gin"], "leave the finetune files out"),
        (
            train,
            ["--dry_run", "--gin_file=finetune/base.gin", "--gin_file=finetune/rte.gin"],
            "give the finetune files to python -m maelm_jax.finetune",
        ),
    ],
)
def test_what_a_command_would_not_read_is_refused(command, flags, message):
    with pytest.raises(config.ConfigError, match=message):
        command.main(["--gin_file=base.gin", *flags])
