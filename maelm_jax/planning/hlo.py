"""Reads the optimised HLO text of a compiled step: its collectives and its estimated cycles.

The cycles are the TPU compiler's own estimate. The text contains the body of a loop once, but a
step runs it many times. Everything here counts as often as it runs.
"""

import collections.abc
import math
import re
import typing

import numpy as np

# Operations that run the instructions of other computations one by one.
CONTROL_FLOW = ("while", "conditional", "call", "async-start")
TPU_KERNEL = 'custom_call_target="tpu_custom_call"'  # a kernel that is written in Pallas
# The compiler writes 2^63 - 1 cycles where it has no estimate. Values from `UNKNOWN` on mean that.
UNKNOWN = 2**62
_OPCODE = re.compile(r"(?<= )([a-z][\w\-]*)\(")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
_ARRAY = re.compile(r"\b(?:pred|(?:bf|[suf])(\d+)\w*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=(%?[\w.\-]+)"
    r"|branch_computations=\{([^}]*)\}"
)


class Instruction(typing.NamedTuple):
    """An instruction of a step."""

    line: str
    times: int  # runs in a step
    fused: bool  # inside another operation, as a fusion, which is one kernel

    @property
    def name(self) -> str:
        """The compiler's name."""
        return self.line.split(" = ")[0].strip().removeprefix("ROOT ").lstrip("%")

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
    def jax_name(self) -> str:
        """The JAX operation that it comes from. Empty: unknown."""
        match = re.search(r'op_name="([^"]*)"', self.line)
        return match[1] if match else ""

    @property
    def cycles(self) -> int | None:
        """The TPU compiler's estimate of one run. None: the text has none."""
        match = re.search(r'"estimated_cycles":"(\d+)"', self.line)
        return int(match[1]) if match and not self.fused else None


def computations(text: str) -> dict[str, list[str]]:
    """Divides an HLO text into its computations: {name: lines}. The entry is also named ENTRY."""
    result, current = {}, None
    for line in text.splitlines():
        if current is None:
            if header := _HEADER.match(line):
                current = result[header[2]] = []
                if header[1]:
                    result["ENTRY"] = current
        elif line.startswith("}"):
            current = None
        else:
            current.append(line)
    return result


def executed(text: str) -> collections.abc.Iterator[Instruction]:
    """Yields every instruction of a step, with those of the computations that it calls."""
    lines_of = computations(text)

    def walk(computation: str, times: int, fused: bool):
        for line in lines_of.get(computation, ()):
            instruction = Instruction(line, times, fused)
            yield instruction
            trips = _trips(line, lines_of) if " while(" in line else 1
            inside = fused or instruction.opcode not in CONTROL_FLOW
            for single, branches in _CALLED.findall(line):
                for called in (single or branches).split(","):
                    yield from walk(called.strip().lstrip("%"), times * trips, inside)

    yield from walk("ENTRY", 1, False)


def _trips(line: str, lines_of: dict[str, list[str]]) -> int:
    """Number of times that the body of a while loop runs.

    If the compiler does not state it, it is the constant that the loop's condition compares its
    counter with. The counter of `lax.scan` starts at 0.
    """
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    condition = lines_of.get(re.search(r"condition=%?([\w.\-]+)", line)[1], ())
    constants = (re.search(r"constant\((\d+)\)", one) for one in condition)
    return max((int(match[1]) for match in constants if match), default=1)


def array_bytes(shapes: str) -> list[int]:
    """Bytes of every array in the text of a shape, as "(f32[8,16], bf16[4])"."""
    return [
        math.prod(map(int, filter(None, sizes.split(",")))) * int(bits or 8) // 8
        for bits, sizes in _ARRAY.findall(shapes)
    ]


class Cycles(typing.NamedTuple):
    """The TPU compiler's estimate of one step on one core."""

    cycles: int
    kernel_bytes: int  # that Pallas kernels move. The compiler does not estimate their cycles
    unknown: int  # number of other operations without an estimate


def cycles(text: str) -> Cycles:
    """Sums the estimated cycles of a step, each operation as often as it runs."""
    total, kernel_bytes, unknown = 0, 0, 0
    for instruction in executed(text):
        if TPU_KERNEL in instruction.line:
            kernel_bytes += instruction.times * tpu_kernel_bytes(instruction)
        elif instruction.cycles is not None and instruction.cycles < UNKNOWN:
            total += instruction.times * instruction.cycles
        elif instruction.cycles is not None:
            unknown += 1
    return Cycles(total, kernel_bytes, unknown)


def tpu_kernel_bytes(call: Instruction) -> int:
    """Bytes of the operands and of the output of a Pallas kernel on a TPU."""
    operands = re.search(r"operand_layout_constraints=\{(.*?\})\}", call.line)
    return sum(array_bytes(call.output)) + sum(array_bytes(operands[1]))


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


def _collective(instruction: Instruction) -> Collective | None:
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
    return Collective(kind, size, members, instruction.times, instruction.jax_name)


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
