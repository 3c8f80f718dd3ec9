"""Reads the optimised HLO text of a compiled step: its collectives and its estimated cycles.

The cycles are the TPU compiler's own estimate. The text contains the body of a loop once, but a
step runs it many times. Everything here counts as often as it runs.
"""

import collections.abc
import math
import re
import typing

import numpy as np

BYTES = {  # of one value
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}
# Targets of the calls of kernels that are written in Pallas: of a TPU, of a GPU (Triton).
_PALLAS = re.compile(r'custom_call_target="(tpu_custom_call|__gpu\$xla\.gpu\.triton)"')
# Operations that run the instructions of other computations one by one.
CONTROL_FLOW = ("while", "conditional", "call", "async-start")
_OPCODE = re.compile(r"(?<= )([a-z][\w\-]*)\(")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_SHAPE = re.compile(r"\b(pred|bf16|[suf]\d+)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=(%?[\w.\-]+)"
    r"|branch_computations=\{([^}]*)\}"
)


class Collective(typing.NamedTuple):
    """One collective instruction."""

    kind: str  # all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute
    array_bytes: int  # of the whole array on one device: the summed array, or the gathered one
    members: tuple[int, ...]  # devices of one group, which exchange data with each other
    times: int  # runs in a step
    name: str  # JAX operation that it comes from

    @property
    def group(self) -> int:
        """Number of devices that exchange data with each other."""
        return len(self.members)

    @property
    def total_bytes(self) -> int:
        return self.array_bytes * self.times

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in a step if the devices form a ring."""
        if self.kind == "collective-permute":  # the whole array, to one other device
            return self.total_bytes
        share = (self.group - 1) / self.group
        return self.total_bytes * share * (2 if self.kind == "all-reduce" else 1)


def collectives(text: str) -> list[Collective]:
    """Finds the collectives of more than one device in an HLO text.

    The compiler may split an instruction into overlapping pieces with the same channel. Such pieces
    count once.
    """
    result, pieces = [], set()
    for instruction in executed(text):
        collective = _collective(instruction)
        if collective is None or collective.group == 1:
            continue
        channel = re.search(r"channel_id=(\d+)", instruction.line)
        if instruction.fused and channel:
            piece = (collective.kind, collective.array_bytes, collective.times, channel[1])
            if piece in pieces:
                continue
            pieces.add(piece)
        result.append(collective)
    return result


def _collective(instruction: "Instruction") -> Collective | None:
    """The collective that an instruction is, or None if it is another operation."""
    match = _COLLECTIVE.search(instruction.line)
    if match is None:
        return None
    sizes, kind, members = array_bytes(match[1]), match[2], _members(instruction.line)
    asynchronous = match[3] is not None
    if asynchronous and kind == "collective-permute":  # (input, output, ...)
        sizes = sizes[1:2]
    elif asynchronous and kind != "all-reduce":  # (inputs, outputs)
        sizes = sizes[len(sizes) // 2 :]
    size = sum(sizes) * (len(members) if kind == "reduce-scatter" else 1)
    return Collective(kind, size, members, instruction.times, operation_name(instruction.line))


def array_bytes(shapes: str) -> list[int]:
    """Bytes of every array in the text of a shape, as "(f32[8,16], bf16[4])"."""
    return [
        math.prod(map(int, filter(None, dims.split(",")))) * BYTES.get(kind, 4)
        for kind, dims in _SHAPE.findall(shapes)
    ]


def operation_name(line: str) -> str:
    """The JAX operation that an instruction comes from. Empty: unknown."""
    match = re.search(r'op_name="([^"]*)"', line)
    return match[1] if match else ""


# The compiler writes 2^63 - 1 cycles where it has no estimate. Values from `UNKNOWN` on mean that.
UNKNOWN = 2**62


class CycleEstimate(typing.NamedTuple):
    """The TPU compiler's estimate of one step on one core."""

    cycles: int
    operations: int  # with an estimate, each counted as often as it runs
    unknown: list[str]  # names of the operations without an estimate, which `cycles` leaves out


def estimated_cycles(text: str) -> CycleEstimate | None:
    """Reads the estimated cycles of one step.

    Args:
        text: Optimised HLO text.

    Returns:
        The cycles of all fusions and copies with an estimate, each counted as often as it runs.
        None if the text has no estimates.
    """
    total, operations, unknown = 0, 0, set()
    for instruction in executed(text):
        match = re.search(r'"estimated_cycles":"(\d+)"', instruction.line)
        if match is None or instruction.fused:
            continue
        if int(match[1]) >= UNKNOWN:
            unknown.add(instruction.name)
        else:
            operations += instruction.times
            total += instruction.times * int(match[1])
    return CycleEstimate(total, operations, sorted(unknown)) if operations or unknown else None


def is_pallas(instruction: "Instruction") -> bool:
    """Whether an instruction calls a kernel that is written in Pallas."""
    return _PALLAS.search(instruction.line) is not None


def _members(line: str) -> tuple[int, ...]:
    """Numbers of the devices of a collective's first group, or of a permutation's first pair."""
    if explicit := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return tuple(map(int, explicit[1].split(",")))
    if iota := re.search(r"replica_groups=(\[\d+,\d+\])<=(\[[\d,]+\])(T\([\d,]+\))?", line):
        groups = _iota(iota[2], iota[3]).reshape(_integers(iota[1]))
        return tuple(groups[0].tolist())
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](.*?)\{([^}]*)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        ids = np.arange(math.prod(sizes.values()))
        if order := re.search(r"device_ids=\((\[[\d,]+\])(T\([\d,]+\))?\)", mesh[2]):
            ids = _iota(order[1], order[2])
        axes = re.findall(r"'(\w+)'", mesh[3])
        first_group = tuple(slice(None) if axis in axes else 0 for axis in sizes)
        return tuple(ids.reshape(tuple(sizes.values()))[first_group].flatten().tolist())
    pair = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", line)
    return (int(pair[1]), int(pair[2])) if pair else (0,)


def _iota(shape: str, permutation: str | None) -> np.ndarray:
    """Device numbers of the form "[2,4]T(1,0)": counted in a shape, then transposed."""
    numbers = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return numbers.transpose(_integers(permutation)) if permutation else numbers


def _integers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


class Instruction(typing.NamedTuple):
    """An instruction of a step."""

    line: str
    times: int  # runs in a step
    fused: bool  # inside another operation, as a fusion, which is one kernel

    @property
    def name(self) -> str:
        return name_of(self.line)

    @property
    def opcode(self) -> str:
        """The operation, as "fusion" or "all-reduce-start"."""
        match = _OPCODE.search(self.line)
        return match[1] if match else ""

    @property
    def output(self) -> str:
        """Text of the output's shape."""
        match = _OPCODE.search(self.line)
        return self.line[self.line.index(" = ") + 3 : match.start() - 1] if match else ""

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        match = _OPCODE.search(self.line)
        return re.findall(
            r"%([\w.\-]+)", self.line[match.end() : self.line.index(")", match.end())]
        )


class Program(typing.NamedTuple):
    """An HLO module."""

    computations: dict[str, list[str]]  # lines by name
    entry: str  # name of the computation that starts


def executed(text: str) -> collections.abc.Iterator[Instruction]:
    """Yields every instruction of a step, with those of the computations that it calls."""
    program = parse(text)

    def walk(computation: str, times: int, fused: bool):
        for line in program.computations.get(computation, ()):
            yield Instruction(line, times, fused)
            if "(" not in line:
                continue
            trips = _trips(line, program) if " while(" in line else 1
            inside = Instruction(line, times, fused).opcode not in CONTROL_FLOW
            for called in _called(line):
                yield from walk(called, times * trips, fused or inside)

    yield from walk(program.entry, 1, False)


def name_of(line: str) -> str:
    """Name of an instruction."""
    return line.split(" = ")[0].strip().removeprefix("ROOT ").lstrip("%")


def _called(line: str) -> list[str]:
    """Names of the computations that an instruction calls."""
    names = []
    for single, branches in _CALLED.findall(line):
        names += branches.split(",") if branches else [single]
    return [name.strip().lstrip("%") for name in names]


def parse(text: str) -> Program:
    """Divides an HLO text into its computations."""
    computations, entry, current = {}, "", None
    for line in text.splitlines():
        if current is None:
            if header := _HEADER.match(line):
                current = computations[header[2]] = []
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        else:
            current.append(line)
    return Program(computations, entry)


def _trips(line: str, program: Program) -> int:
    """Number of times that the body of a while loop runs.

    If the compiler does not state it, it is the constant that the loop's condition compares its
    counter with. The counter of `lax.scan` starts at 0.
    """
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    name = re.search(r"condition=%?([\w.\-]+)", line)[1]
    matches = (re.search(r"constant\((\d+)\)", one) for one in program.computations.get(name, ()))
    return max((int(match[1]) for match in matches if match), default=1)


def output_shapes(program: Program) -> dict[str, str]:
    """Text of the output's shape of every instruction, by name."""
    lines = (line for computation in program.computations.values() for line in computation)
    instructions = (Instruction(line, times=1, fused=False) for line in lines)
    return {one.name: one.output for one in instructions}


def moved_bytes(instruction: Instruction, shapes: dict[str, str]) -> int:
    """Bytes of the operands and of the output, without the workspace of a library's kernel."""
    inputs = (shapes.get(name, "") for name in instruction.operands)
    texts = [*inputs, re.sub(r"\b[su]8\[\d+\]", "", instruction.output)]
    return sum(sum(array_bytes(text)) for text in texts)
