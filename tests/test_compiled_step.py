"""benchmarks/compiled_step.py divides a step compiled for a TPU into parts."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from testing import ROOT


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not here: pip install '.[plan]'")
def test_the_parts_of_a_step_compiled_for_a_tpu():
    command = [sys.executable, "benchmarks/compiled_step.py", "--topology=v5e:2x2", "--gin_file=tiny.gin", "--gin.Compute.dtype=bfloat16"]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    parts = {name: float(cycles) for name, cycles in re.findall(r"^(\S.*?) {2,}([\d.]+) +[\d,]+ +[\d.]+%$", done.stdout, re.M)}
    total = parts.pop("all")
    assert sum(parts.values()) == pytest.approx(total, abs=0.01 * len(parts)), done.stderr
    assert parts["attention kernels"] > 0 and parts["feed-forward products"] > 0
    assert parts["all else"] < 0.1 * total, "new functions: add them to PARTS"
