"""Reads the optimised HLO text of a compiled step: its collectives and its estimated cycles.

The cycles are the TPU compiler's own estimate. The text contains the body of a loop once, but a
step runs it many times. Everything here counts as often as it runs.
"""

import collections.abc
import math
import re
import typing

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
    group: int  # devices that exchange data with each other
    times: int  # runs in a step
    name: str  # JAX operation that it comes from

    @property
    def total_bytes(self) -> int:
        return self.array_bytes * self.times

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in a step if the devices form a ring."""
        return (
            self.total_bytes
            * (self.group - 1)
            / self.group
            * (2 if self.kind == "all-reduce" else 1)
        )


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
    sizes, kind, group = array_bytes(match[1]), match[2], _group(instruction.line)
    asynchronous = match[3] is not None
    if asynchronous and kind == "collective-permute":  # (input, output, ...)
        sizes = sizes[1:2]
    elif asynchronous and kind != "all-reduce":  # (inputs, outputs)
        sizes = sizes[len(sizes) // 2 :]
    size = sum(sizes) * (group if kind == "reduce-scatter" else 1)
    return Collective(kind, size, group, instruction.times, operation_name(instruction.line))


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
    unknown: list[str]  # names of the operations without an estimate, which `cycles` leaves out


def estimated_cycles(text: str) -> CycleEstimate | None:
    """Reads the estimated cycles of one step.

    Args:
        text: Optimised HLO text.

    Returns:
        The cycles of all fusions and copies with an estimate, each counted as often as it runs.
        None if the text has no estimates.
    """
    total, unknown, estimated = 0, set(), False
    for instruction in executed(text):
        match = re.search(r'"estimated_cycles":"(\d+)"', instruction.line)
        if match is None or instruction.fused:
            continue
        estimated = True
        if int(match[1]) >= UNKNOWN:
            unknown.add(instruction.name)
        else:
            total += instruction.times * int(match[1])
    return CycleEstimate(total, sorted(unknown)) if estimated else None


def _group(line: str) -> int:
    """Number of devices that take part in a collective."""
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(iota[2])
    if first := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(first[1].split(","))
    if axes := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", axes[2]))
    return 2 if "source_target_pairs={{" in line else 1


class Instruction(typing.NamedTuple):
    """An instruction of a step."""

    line: str
    times: int  # runs in a step
    fused: bool  # inside a fusion, which is one kernel

    @property
    def name(self) -> str:
        return self.line.split(" = ")[0].strip().removeprefix("ROOT ").lstrip("%")


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
            for called in _called(line):
                yield from walk(called, times * trips, fused or " fusion(" in line)

    yield from walk(program.entry, 1, False)


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
