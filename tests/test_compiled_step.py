"""benchmarks/compiled_step.py: each operation by its own rule and part, as often as it runs."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from testing import ROOT

from maelm_jax.planning import targets

PRODUCT = '"gemm_backend_config":{"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}'
LOOP = '"reification_cost":[{"exec_time_us":2.5,"name":""},{"exec_time_us":2.0,"name":"sol"}]'
TRITON = '"reification_cost":[{"exec_time_us":6813,"name":""},{"exec_time_us":1.45e+01,"name":"indexing-cost-model"}]'
GPU_STEP = f"""HloModule step

FileNames
1 "layers.py"

FunctionNames
1 "FeedForward.__call__"
2 "Linear.__call__"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=1}}
2 {{file_name_id=1 function_name_id=2 line=2}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}

%fused (p: bf16[4096,1024]) -> bf16[4096,1024] {{
  %p = bf16[4096,1024]{{1,0}} parameter(0)
  ROOT %n = bf16[4096,1024]{{1,0}} erf(%p)
}}
%body (t: (s32[], bf16[4096,1024])) -> (s32[], bf16[4096,1024]) {{
  %t = (s32[], bf16[4096,1024]{{1,0}}) parameter(0)
  %a = bf16[4096,1024]{{1,0}} get-tuple-element(%t), index=1
  %w = bf16[1024,2048]{{1,0}} constant({{...}})
  %g = (bf16[4096,2048]{{1,0}}, s8[4194304]{{0}}) custom-call(%a, %w), custom_call_target="__cublas$lt$matmul", \
metadata={{op_name="jit(train_step)/jvp()/dot_general" stack_frame_id=2}}, backend_config={{{PRODUCT}}}
  %l = bf16[4096,1024]{{1,0}} fusion(%a), kind=kLoop, calls=%fused, \
metadata={{op_name="jit(train_step)/jvp()/erf" stack_frame_id=1}}, backend_config={{{LOOP}}}
  %f = bf16[4096,1024]{{1,0}} fusion(%a), kind=kCustom, calls=%fused, \
metadata={{op_name="jit(train_step)/jvp()/mul" stack_frame_id=1}}, backend_config={{{TRITON}}}
}}
ENTRY %main (p: bf16[4096,1024]) -> bf16[4096,1024] {{
  %p.1 = bf16[4096,1024]{{1,0}} parameter(0)
  %while = (s32[], bf16[4096,1024]{{1,0}}) while(%p.1), condition=%c, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
  %r = bf16[4096,1024]{{1,0}} all-reduce(%p.1), channel_id=1, replica_groups={{{{0,1}}}}, to_apply=%add
  %copy = bf16[1024,4096]{{1,0}} copy(%p.1), metadata={{op_name="jit(train_step)/add"}}
  ROOT %attention = (bf16[4096,1024]{{1,0}}, u8[100]{{0}}) custom-call(%p.1, %r), custom_call_target="__cudnn$fmhaSoftmax"
}}
"""


@pytest.fixture
def compiled_step():
    spec = importlib.util.spec_from_file_location("compiled_step", ROOT / "benchmarks" / "compiled_step.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_kernel_of_a_gpu_has_its_own_rule_and_counts_as_often_as_it_runs(compiled_step):
    operations = compiled_step.break_down(GPU_STEP, targets.parse("h100:1"))
    ms = {one.instruction.name: (one.part, one.instruction.times, pytest.approx(one.amount, rel=0.01)) for one in operations}
    array = 4096 * 1024 * 2 / 3.352e12 * 1e3
    assert ms == {
        "g": ("feed-forward products", 3, 3 * 2 * 4096 * 1024 * 2048 / 989e12 * 1e3),
        "l": ("GELU and its gradient", 3, 3 * 2.5e-3),
        "f": ("GELU and its gradient", 3, 3 * 14.5e-3),
        "copy": ("optimiser", 1, 2 * array),
        "attention": ("attention kernels", 1, 3 * array),
    }


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not here: pip install '.[plan]'")
def test_the_parts_of_a_step_compiled_for_a_tpu():
    command = [sys.executable, "benchmarks/compiled_step.py", "--topology=v5e:2x2", "--gin_file=tiny.gin", "--gin.Model.dtype=bfloat16"]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    parts = {name: float(cycles) for name, cycles in re.findall(r"^(\S.*?) {2,}([\d.]+) +[\d,]+ +[\d.]+%$", done.stdout, re.M)}
    total = parts.pop("all")
    assert sum(parts.values()) == pytest.approx(total, abs=0.01 * len(parts)), done.stderr
    assert parts["attention kernels"] > 0 and parts["feed-forward products"] > 0
    assert parts["all else"] < 0.1 * total, "new functions: add them to PARTS"
