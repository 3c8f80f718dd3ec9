"""benchmarks/compiled_step.py divides a step compiled for a TPU into parts, and estimates calls of cuDNN."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from testing import ROOT

from maelm_jax.planning import hlo, targets

spec = importlib.util.spec_from_file_location("compiled_step", ROOT / "benchmarks" / "compiled_step.py")
compiled_step = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compiled_step)


@pytest.mark.parametrize(
    "call,tflops,products",
    [("ScaleBiasSoftmax", 138, 2), ("ScaleBiasSoftmaxBackward", 105, 5), ("Softmax", 790, 2), ("SoftmaxBackward", 790, 5)],
)
def test_attention_of_cudnn_takes_as_long_as_on_the_gpu_that_was_measured(call, tflops, products):
    rows, heads, slots, size = 32, 12, 4400, 64
    line = (
        f"  %call.1 = (bf16[{rows},{heads},{slots},{size}], f32[{rows},{heads},{slots}], u8[0]) custom-call(%q, %k, %v), "
        f'custom_call_target="__cudnn$fmha{call}", backend_config={{"cudnn_fmha_backend_config":{{"fmha_scale":0.125,'
        f'"intermediate_tensor_shape":{{"element_type":"BF16","dimensions":["{rows}","{heads}","{slots}","{slots}"]}}}}}}'
    )
    shape = f"bf16[{rows},{slots},{heads},{size}]"
    found = compiled_step.gpu_milliseconds(hlo.Instruction(line, 1, False), targets.parse("h200:1"), dict.fromkeys("qkv", shape))
    assert found == pytest.approx(1e3 * 2 * products * rows * heads * slots**2 * size / (tflops * 1e12), rel=0.01)


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
