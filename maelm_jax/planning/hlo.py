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
    result, seen = [], set()
    for times, line, fused in _executed(text):
        if not (found := _COLLECTIVE.search(line)):
            continue
        shapes = [
            math.prod(map(int, filter(None, dims.split(",")))) * BYTES.get(kind, 4)
            for kind, dims in _SHAPE.findall(found[1])
        ]
        kind, group = found[2], _group(line)
        if found[3] and kind != "all-reduce":  # the shapes are (inputs, outputs)
            shapes = shapes[len(shapes) // 2 :] if kind != "collective-permute" else shapes[1:2]
        size = sum(shapes) * (group if kind == "reduce-scatter" else 1)
        piece = (
            (kind, size, times, re.search(r"channel_id=(\d+)", line)[1])
            if fused and "channel_id" in line
            else None
        )
        if group > 1 and (piece is None or piece not in seen):
            seen.add(piece)
            name = re.search(r'op_name="([^"]*)"', line)
            result.append(Collective(kind, size, group, times, name[1] if name else ""))
    return result


# The compiler writes 2^63 - 1 cycles where it has no estimate. Values from `UNKNOWN` on mean that.
UNKNOWN = 2**62


def estimated_cycles(text: str) -> tuple[int, list[str]] | None:
    """Reads the TPU compiler's estimate of the cycles of one step on one core.

    Args:
        text: Optimised HLO text.

    Returns:
        The cycles of all fusions and copies with an estimate, each counted as often as it runs, and
        the names of the operations without one, which the sum leaves out. None if the text has no
        estimates.
    """
    found = [
        (times, line, re.search(r'"estimated_cycles":"(\d+)"', line))
        for times, line, fused in _executed(text)
        if not fused
    ]
    cycles = [(times, line, int(match[1])) for times, line, match in found if match]
    name_of = lambda line: (  # noqa: E731
        line.split(" = ")[0].strip().removeprefix("ROOT ").lstrip("%")
    )
    unknown = sorted({name_of(line) for _, line, value in cycles if value >= UNKNOWN})
    return (
        (sum(times * value for times, _, value in cycles if value < UNKNOWN), unknown)
        if cycles
        else None
    )


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


def _executed(text: str) -> collections.abc.Iterator[tuple[int, str, bool]]:
    """Yields (runs in a step, line, whether inside a fusion) of every instruction of a step."""
    bodies, entry = _computations(text)

    def walk(name: str, times: int, fused: bool):
        for line in bodies.get(name, ()):
            yield times, line, fused
            if "(" not in line or not (called := _CALLED.findall(line)):
                continue
            trips = _trips(line, bodies) if " while(" in line else 1
            for one, several in called:
                for computation in several.split(",") if several else [one]:
                    yield from walk(
                        computation.strip().lstrip("%"), times * trips, fused or " fusion(" in line
                    )

    yield from walk(entry, 1, False)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Lines of every computation by name, and the name of the entry computation."""
    bodies, entry, current = {}, "", None
    for line in text.splitlines():
        if current is None:
            if header := _HEADER.match(line):
                current = bodies[header[2]] = []
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        else:
            current.append(line)
    return bodies, entry


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
    """Number of times that the body of a while loop runs.

    If the compiler does not state it, it is the constant that the loop's condition compares its
    counter with. The counter of `lax.scan` starts at 0.
    """
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    condition = bodies.get(re.search(r"condition=%?([\w.\-]+)", line)[1], [])
    constants = [
        int(found[1])
        for found in (re.search(r"constant\((\d+)\)", one) for one in condition)
        if found
    ]
    return max(constants, default=1)
