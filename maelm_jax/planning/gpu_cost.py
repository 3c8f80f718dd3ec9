"""Estimates the time of a step on a GPU from its optimised HLO text. No GPU is needed.

Each kernel counts as often as it runs, one after the other. Its time is
- of a fusion, what XLA's cost model says (--xla_gpu_collect_cost_model_stats writes it). The model
  does not know the A100: there it is bytes / bandwidth, as below;
- of a matrix product, the larger of FLOPs / peak and bytes / bandwidth: XLA's own figure for
  products of bfloat16 is several times too large;
- of anything else (cuDNN, Pallas, copies), bytes / bandwidth.

The time to launch a kernel does not count. Ratios of such sums say more than their milliseconds.
"""

import collections
import json
import math
import re
import typing

from maelm_jax.planning import hlo
from maelm_jax.planning.target import PALLAS, Compute, KernelGroup

MATRIX_PRODUCT = "matrix products (roofline)"
FUSION = "fusions (XLA's cost model)"
FUSION_BYTES = "fusions (bytes / bandwidth)"
CUDNN = "cuDNN (bytes / bandwidth)"
OTHER = "copies and others (bytes / bandwidth)"
METHOD = "sum of estimates"
# Operations that start no kernel. Collectives are estimated from the bytes that they send.
NO_KERNEL = frozenset(
    (
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "while",
        "conditional",
        "call",
        "after-all",
        "partition-id",
        "replica-id",
        "add-dependency",
        "opt-barrier",
        "async-start",
        "async-update",
        "async-done",
        "copy-done",
        "all-reduce",
        "all-reduce-start",
        "all-reduce-done",
        "all-gather",
        "all-gather-start",
        "all-gather-done",
        "reduce-scatter",
        "reduce-scatter-start",
        "reduce-scatter-done",
        "all-to-all",
        "collective-permute",
        "collective-permute-start",
        "collective-permute-done",
    )
)
# Tensor cores multiply float32 as TF32, at half the rate.
PEAK_SHARE = {"bf16": 1.0, "f16": 1.0, "f32": 0.5}
MICROSECOND = 1e-6


class Speed(typing.NamedTuple):
    """Speed of a GPU, from its data sheet."""

    flops: float  # FLOP/s, dense, bfloat16
    bandwidth: float  # bytes/s of its memory


class Kernel(typing.NamedTuple):
    """A kernel of a step."""

    instruction: hlo.Instruction
    kind: str
    seconds: float  # of one run


def compute(text: str, speed: Speed) -> Compute:
    """Sums the estimates of all kernels of a step.

    Args:
        text: Optimised HLO text.
        speed: Speed of the GPU.
    """
    launches, seconds = collections.Counter(), collections.Counter()
    for kernel in kernels(text, speed):
        launches[kernel.kind] += kernel.instruction.times
        seconds[kernel.kind] += kernel.instruction.times * kernel.seconds
    groups = [KernelGroup(kind, count, seconds[kind]) for kind, count in launches.items()]
    groups.sort(key=lambda group: -group.seconds)
    return Compute(sum(seconds.values()), METHOD, groups=tuple(groups))


def kernels(text: str, speed: Speed) -> typing.Iterator[Kernel]:
    """Yields every kernel of a step with its estimate."""
    program = hlo.parse(text)
    shapes = hlo.output_shapes(program)
    for instruction in hlo.executed(text):
        if instruction.fused or not instruction.opcode or instruction.opcode in NO_KERNEL:
            continue
        if instruction.opcode == "fusion":
            yield _fusion(instruction, program, shapes, speed)
        elif "__cublas$" in instruction.line:
            seconds = product_seconds(instruction, shapes, speed)
            yield Kernel(instruction, MATRIX_PRODUCT, seconds)
        else:
            moved = hlo.moved_bytes(instruction, shapes)
            yield Kernel(instruction, _kind(instruction), moved / speed.bandwidth)


def _kind(instruction: hlo.Instruction) -> str:
    """The kind of a kernel that counts with its bytes."""
    if hlo.is_pallas(instruction):
        return PALLAS
    return CUDNN if "__cudnn$" in instruction.line else OTHER


def _fusion(
    instruction: hlo.Instruction, program: hlo.Program, shapes: dict[str, str], speed: Speed
) -> Kernel:
    seconds = fusion_seconds(instruction.line)
    if seconds is not None:
        return Kernel(instruction, FUSION, seconds)
    moved = fusion_bytes(instruction, program, shapes)
    return Kernel(instruction, FUSION_BYTES, moved / speed.bandwidth)


def fusion_seconds(line: str) -> float | None:
    """What XLA's cost model says of a fusion. None: nothing.

    For Triton fusions the entry "indexing-cost-model" is right. Their entry without a name is
    several hundred times too large.
    """
    match = re.search(r'"reification_cost":(\[.*?\])', line)
    costs = json.loads(match[1]) if match else []
    by_name = {cost["name"]: cost["exec_time_us"] for cost in costs}
    microseconds = by_name.get("indexing-cost-model", by_name.get(""))
    return None if microseconds is None else microseconds * MICROSECOND


def fusion_bytes(instruction: hlo.Instruction, program: hlo.Program, shapes: dict[str, str]) -> int:
    """Bytes that a fusion reads and writes.

    Of an array that the fusion only slices, the slices count. Of an array that it updates in place,
    the update counts. What the fusion computes does not count, so this is a lower bound.
    """
    [name] = re.findall(r"calls=%?([\w.\-]+)", instruction.line)
    body = [hlo.Instruction(line, 1, True) for line in program.computations[name]]
    sliced, updated, other = set(), set(), set()
    moved = 0
    for one in body:
        if one.opcode == "dynamic-slice":
            sliced.add(one.operands[0])
            moved += sum(hlo.array_bytes(one.output))
            other.update(one.operands[1:])
        elif one.opcode == "dynamic-update-slice":
            updated.add(one.operands[0])
            moved += sum(hlo.array_bytes(shapes[one.operands[1]]))
            other.update(one.operands[1:])
        else:
            other.update(one.operands)
    in_place = {shapes[name] for name in updated}
    for one in body:
        if one.opcode == "parameter" and one.name not in (sliced | updated) - other:
            moved += sum(hlo.array_bytes(one.output))
    written = re.findall(r"\b\w+\[[\d,]*\](?:\{[^}]*\})?", instruction.output)
    return moved + sum(sum(hlo.array_bytes(text)) for text in written if text not in in_place)


def product_seconds(instruction: hlo.Instruction, shapes: dict[str, str], speed: Speed) -> float:
    """Roofline of a matrix product of cuBLAS."""
    inputs = [shapes[name] for name in instruction.operands]
    left, output = _first_array(inputs[0]), _first_array(instruction.output)
    contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.line)
    depth = math.prod(left.sizes[axis] for axis in map(int, re.findall(r"\d+", contracted[1])))
    peak = speed.flops * PEAK_SHARE.get(left.dtype, 1.0)
    compute_time = 2 * depth * math.prod(output.sizes) / peak
    return max(compute_time, hlo.moved_bytes(instruction, shapes) / speed.bandwidth)


class _Array(typing.NamedTuple):
    dtype: str
    sizes: tuple[int, ...]  # of its axes


def _first_array(shape: str) -> _Array:
    """The first array in the text of a shape."""
    match = re.search(r"\b([a-z]+\d+)\[([\d,]*)\]", shape)
    return _Array(match[1], tuple(map(int, filter(None, match[2].split(",")))))
