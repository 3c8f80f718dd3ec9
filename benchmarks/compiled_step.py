"""Print what a compiled training step spends its time on, without a TPU or GPU.

    python benchmarks/compiled_step.py --topology=v5e:2x2 --gin_file=base.gin --gin.BATCH_SIZE=64
    python benchmarks/compiled_step.py --topology=h200:1 --gin_file=base.gin --gin.BATCH_SIZE=32

The step is compiled as by `plan` (the extra [plan] or [cuda]). Every operation counts as often as
it runs, one after the other. Trust ratios. What is sent to other devices is left out.
- TPU: the compiler's cycles. The compiler has none for Pallas kernels. Each is compiled alone for a
  static profile, and the larger of the profile's cycles and of its bytes at the memory's speed
  counts.
- GPU (not the A100): XLA's cost model for fusions; bytes / bandwidth for copies and others; for
  matrix products and cuDNN the larger of that and FLOPs / the speed that one H200 reached: products
  790 TFLOP/s, cuDNN's attention with a bias 138 forward and 105 backward. Without a bias it was not
  measured: it counts as products, a lower bound.
--largest=20 also prints the 20 operations that take longest, and the functions they come from.
"""

import collections
import functools
import json
import math
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
import typing

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from maelm_jax import cli, config, tables
from maelm_jax.planning import hlo, targets

PRODUCT = r"\b(convolution|dot|__cublas)"
# The first line whose patterns are found is the part of an operation. The first pattern is searched
# in the opcodes of the operation and of what is fused into it, the second in the JAX operation and
# in the Python functions that it comes from, the innermost first.
PARTS = (
    ("attention kernels", "tpu_custom_call|__cudnn", ""),
    ("vocabulary: products, softmax, loss", "", "cross_entropy|Head"),
    ("feed-forward products", PRODUCT, "FeedForward"),
    ("attention by XLA", "", "_by_xla|attention_weights"),
    ("products of q, k, v, out", PRODUCT, "Attention"),
    ("GELU and its gradient", r"\berf|tanh", "FeedForward|gelu"),
    ("attention's bias and mask", "", "RelativeBias|prepare_terms|as_bias|closed_call run "),
    ("optimiser", "", r"_updated|train_step\)/(?!shard_map|jvp|transpose)"),
    ("stacked arrays: slices and updates", "slice", r"dynamic_(update_)?index|slice run "),
    ("stacked arrays: zeros", "^broadcast$", ""),
    ("LayerNorm", "", "LayerNorm"),
    ("bias gradients: sums by themselves", "^reduce$", "Linear"),
    ("bias gradients: fused sums", r"\breduce\b", "Linear"),
    ("reduce_precision of saved values", "reduce-precision", "reduce_precision"),
    ("dropout, residual", "", r"\bdropout\b"),  # before casts, which its gradient ends in
    ("casts of weights", "convert", "^ *$|convert_element_type"),
    ("other products", PRODUCT, ""),
    ("dropout, residual", "", "Block"),
    ("embeddings, masks, slots", "", "MaeLm|draw"),
    ("all else", "", ""),
)
DTYPES = {"bf16": "bfloat16", "f32": "float32", "s32": "int32", "u32": "uint32"}
# Shares of the data sheet's FLOP/s that one H200 reached (docs/notes/gpu_step.md).
PRODUCTS_SHARE = 790 / 989
BIASED_ATTENTION_SHARES = {"forward": 138 / 989, "backward": 105 / 989}
# Operations of a GPU's program that start no kernel, and collectives.
NO_KERNEL = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|while|conditional|call|after-all|"
    "(partition|replica)-id|add-dependency|opt-barrier|copy-done|(async|all|collective)-.*|"
    "reduce-scatter.*"
)


class Operation(typing.NamedTuple):
    """An operation of the step, which a TPU or GPU starts at once."""

    instruction: hlo.Instruction
    part: str
    amount: float  # of all runs: M cycles on a TPU, ms on a GPU
    source: str  # the JAX operation and the functions that it comes from


def main(argv: list[str]):
    """Runs the command with these arguments."""
    flags = cli.parser(__doc__)
    flags.add_argument("--topology", required=True, help="as for plan, as in v5e:2x2 or h200:1")
    flags.add_argument("--largest", type=int, default=0, help="operations to print one by one")
    args, experiment = cli.parse(flags, argv)
    target = targets.parse(args.topology)
    if target.kind in (None, "A100"):
        raise config.ConfigError(f"--topology={args.topology}: no compiler estimates its time")
    if target.clock is None:  # XLA writes its estimates into a GPU's program
        flags_before = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags_before} --xla_gpu_collect_cost_model_stats=true"
    devices = targets.start_compiler(target)

    from maelm_jax.planning import estimate

    text = estimate.lower_step(experiment, devices).lowered.compile().as_text()
    operations = break_down(text, target)
    unit = "M cycles" if target.clock else "ms"
    print(tables.plain(("part", unit, "launches", "share"), sums(operations)))
    rows = [
        (f"{one.amount:.2f}", one.instruction.times, one.part, one.instruction.name, one.source)
        for one in sorted(operations, key=lambda one: -one.amount)[: args.largest]
    ]
    if rows:
        print(tables.plain((unit, "launches", "part", "operation", "from"), rows, left=5))


def sums(operations: list[Operation]) -> list[tuple]:
    """Rows of the table: the parts, the largest first, and all of them together."""
    amounts, launches = collections.Counter(), collections.Counter()
    for one in operations:
        amounts[one.part] += one.amount
        launches[one.part] += one.instruction.times
    rows = [*amounts.most_common(), ("all", amounts.total())]
    launches["all"] = launches.total()
    return [
        (part, f"{amount:.2f}", f"{launches[part]:,}", f"{amount / amounts.total():.1%}")
        for part, amount in rows
    ]


def break_down(text: str, target: targets.Target) -> list[Operation]:
    """Lists the operations of a compiled step.

    Args:
        text: Optimised HLO text.
        target: What it was compiled for.
    """
    lines_of = hlo.computations(text)
    functions = python_functions(text)
    shapes = {}
    for line in (line for lines in lines_of.values() for line in lines):
        one = hlo.Instruction(line, 1, False)
        shapes[one.name] = one.output
    amount = tpu_megacycles if target.clock else gpu_milliseconds
    operations = []
    for instruction in hlo.executed(text):
        each = None if instruction.fused else amount(instruction, target, shapes)
        if each is None:
            continue
        frame = re.search(r"stack_frame_id=(\d+)", instruction.line)
        source = f"{instruction.jax_name} {functions[frame[1]] if frame else ''} "
        names = " ".join(sorted(opcodes(instruction, lines_of)))
        part = next(
            part for part, of, by in PARTS if re.search(of, names) and re.search(by, source)
        )
        operations.append(Operation(instruction, part, each * instruction.times, source))
    return operations


def opcodes(instruction: hlo.Instruction, lines_of: dict[str, list[str]]) -> set[str]:
    """The opcodes of an operation and of what is fused into it; of calls, what they call."""
    result = {instruction.opcode, *re.findall(r'custom_call_target="([^"]*)"', instruction.line)}
    for called in re.findall(r"calls=%?([\w.\-]+)", instruction.line):
        for line in lines_of[called]:
            result |= opcodes(hlo.Instruction(line, 1, True), lines_of)
    return result


def python_functions(text: str) -> dict[str, str]:
    """Reads the tables of stack frames: {number of a frame: its functions, the innermost first}."""

    def table(name: str, pattern: str) -> dict[str, tuple[str, ...]]:
        lines = re.search(rf"^{name}\n(.*?)\n\n", text, re.M | re.S)[1].splitlines()
        return {match[1]: match.groups()[1:] for match in (re.match(pattern, x) for x in lines)}

    names = table("FunctionNames", r'(\d+) "(.*)"')
    locations = table("FileLocations", r"(\d+) \{.*?function_name_id=(\d+)")
    frames = table("StackFrames", r"(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")

    def stack(frame: str) -> str:
        if frame not in frames:
            return ""
        location, parent = frames[frame]
        [function] = names[locations[location][0]]
        return f"{function} {stack(str(int(parent) - 1)) if parent else ''}"

    return {frame: stack(frame) for frame in frames}


def tpu_megacycles(
    instruction: hlo.Instruction, target: targets.Target, shapes: dict[str, str]
) -> float | None:
    """M cycles of one run of an operation on a TPU. None: it has no estimate."""
    if hlo.TPU_KERNEL in instruction.line:
        operands = re.search(r"operand_layout_constraints=\{(.*?\})\}", instruction.line)[1]
        backend, _ = json.JSONDecoder().raw_decode(instruction.line.split("backend_config=")[1])
        settings = json.dumps({"custom_call_config": backend["custom_call_config"]})
        cycles = profiled_cycles(operands, instruction.output, settings, target)
        moving = hlo.tpu_kernel_bytes(instruction) / target.bandwidth * target.clock
        return max(cycles, moving) / 1e6
    cycles = instruction.cycles
    return None if cycles is None or cycles >= hlo.UNKNOWN else cycles / 1e6


@functools.cache
def profiled_cycles(operands: str, output: str, settings: str, target: targets.Target) -> int:
    """Cycles of a Pallas kernel, from the static profile that the compiler writes of it.

    The compiler may abort after it has written the profile, so its exit status says nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (operands, output, settings, target, folder)
        process = multiprocessing.get_context("spawn").Process(target=_profile, args=arguments)
        process.start()
        process.join()
        [profile] = pathlib.Path(folder, "p").glob("*_static_llo_profile.textproto")
        return int(re.search(r"estimated_cycles: (\d+)", profile.read_text())[1])


def _profile(operands: str, output: str, settings: str, target: targets.Target, folder: str):
    """Compiles a kernel. The compiler writes its profile to folder/p."""
    os.chdir(folder)  # for the core of an abort
    os.mkdir("p")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_static_llo_profile_to={folder}/p"
    os.environ["LIBTPU_INIT_ARGS"] = dump
    device = targets.start_compiler(target)[0]
    import jax

    def arrays(shapes: str, sharding=None) -> list[jax.ShapeDtypeStruct]:
        found = re.findall(r"\b([a-z]+\d+)\[([\d,]+)\]", shapes)
        return [
            jax.ShapeDtypeStruct(tuple(map(int, sizes.split(","))), DTYPES[kind], sharding=sharding)
            for kind, sizes in found
        ]

    options = {"custom_call_api_version": 1, "legacy_backend_config": settings}
    kernel = jax.ffi.ffi_call("tpu_custom_call", arrays(output), **options)
    inputs = arrays(operands, jax.sharding.SingleDeviceSharding(device))
    jax.jit(kernel).lower(*inputs).compile()


def gpu_milliseconds(
    instruction: hlo.Instruction, target: targets.Target, shapes: dict[str, str]
) -> float | None:
    """Milliseconds of one run of a kernel on a GPU. None: the instruction starts no kernel.

    Args:
        instruction: The instruction.
        target: The GPU.
        shapes: Text of the output's shape of every instruction.
    """
    from maelm_jax.training import flops

    line, opcode = instruction.line, instruction.opcode
    if not opcode or NO_KERNEL.fullmatch(opcode):
        return None
    estimates = re.findall(r'"exec_time_us":([\d.e+-]+)[^}]*"name":"([^"]*)"', line)
    costs = {name: float(microseconds) for microseconds, name in estimates}
    if opcode == "fusion" and costs:
        # Of Triton's fusions the entry without a name is several hundred times too large.
        return costs.get("indexing-cost-model", costs.get("", 0.0)) / 1e3
    operands = re.findall(r"%([\w.\-]+)", line.split(f" {opcode}(")[1].split(")")[0])
    inputs = [shapes[name] for name in operands]
    output = re.sub(r"\b[su]8\[\d+\]", "", instruction.output)  # without a library's workspace
    moving = sum(map(sum, map(hlo.array_bytes, (*inputs, output)))) / target.bandwidth
    peak = PRODUCTS_SHARE * flops.PEAK_FLOPS[target.kind]
    if "__cudnn$fmha" in line:
        return 1e3 * max(_attention_seconds(line, inputs[0], target), moving)
    if "__cublas$" not in line:
        return 1e3 * moving
    kind, sizes = re.search(r"([a-z]+\d+)\[([\d,]*)\]", inputs[0]).groups()
    contracted = re.search(r'lhs_contracting_dimensions":\[([^\]]*)\]', line)[1]
    depth = math.prod(int(sizes.split(",")[int(axis)]) for axis in re.findall(r"\d+", contracted))
    products = depth * math.prod(map(int, re.search(r"\[([\d,]*)\]", output)[1].split(",")))
    # Tensor cores multiply float32 as TF32, at half the rate.
    if kind == "f32":
        peak /= 2
    return 1e3 * max(2 * products / peak, moving)


def _attention_seconds(line: str, queries: str, target: targets.Target) -> float:
    """Seconds of a call of cuDNN's attention by its FLOPs: two products forward, five backward.

    `queries` is the text of the queries' shape.
    """
    from maelm_jax.training import flops

    direction = "backward" if "Backward" in line else "forward"
    share = BIASED_ATTENTION_SHARES[direction] if "ScaleBias" in line else PRODUCTS_SHARE
    scores = re.search(r'intermediate_tensor_shape":.*?"dimensions":\[([^\]]*)\]', line)[1]
    head_size = int(re.search(r"\[[\d,]*?(\d+)\]", queries)[1])
    products = 5 if direction == "backward" else 2
    operations = 2 * products * head_size * math.prod(map(int, re.findall(r"\d+", scores)))
    return operations / (share * flops.PEAK_FLOPS[target.kind])


if __name__ == "__main__":
    cli.run(main)
