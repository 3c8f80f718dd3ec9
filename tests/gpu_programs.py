"""Compiles training steps for GPUs that are not here, and checks the programs.

    PYTHONPATH=. python tests/gpu_programs.py

Needs the extra [cuda] and no GPU. Each program takes the compiler a minute or more, so the test
suite leaves this out. The last line says how many programs were checked. docs/notes/gpu_programs.txt
has the last output.
"""

import re
import subprocess
import sys
import typing

NO_DROPOUT = "--gin.Model.attention_dropout=0.0"
BASE = ("--gin_file=base.gin", "--no_largest")
TINY = ("--gin_file=tiny.gin", "--gin.Model.dtype=bfloat16", "--no_largest")
GRADIENT_MB = 560.0  # of base in float32


class Program(typing.NamedTuple):
    """A step to compile, and what its plan must show."""

    flags: tuple[str, ...]
    # Of fused attention in a step: one a layer and pass.
    attention_launches: dict[str, int]
    most_launches: int  # a step
    gradient_mb: float | None = None  # all-reduced once a step. None: not checked


# With attention dropout, only the decoder's four layers.
CUDNN_TINY, CUDNN_BASE, WITH_DROPOUT = {"cuDNN": 6}, {"cuDNN": 32}, {"cuDNN": 8}
PROGRAMS = (
    Program((*TINY, "--topology=a100:1"), CUDNN_TINY, 800),
    Program((*TINY, "--topology=h100:8"), CUDNN_TINY, 800),
    Program((*TINY, "--topology=h200:2x4", "--gin.Mesh.fsdp=2", "--gin.Mesh.tensor=2"), CUDNN_TINY, 1300),
    Program((*BASE, "--topology=h200:1", "--gin.BATCH_SIZE=32"), WITH_DROPOUT, 1600),
    Program((*BASE, NO_DROPOUT, "--topology=h100:8", "--gin.BATCH_SIZE=256"), CUDNN_BASE, 1600, GRADIENT_MB),
    Program((*BASE, NO_DROPOUT, "--topology=h200:4x8", "--gin.BATCH_SIZE=1024"), CUDNN_BASE, 1600, GRADIENT_MB),
)


def main() -> int:
    """Compiles every program. Returns the number of those that are not as they should be."""
    wrong = 0
    for program in PROGRAMS:
        command = [sys.executable, "-m", "maelm_jax.plan", *program.flags]
        print("+", " ".join(command[1:]), flush=True)
        done = subprocess.run(command, capture_output=True, text=True)
        print(done.stdout)
        problems = check(program, done.stdout) if done.returncode == 0 else [done.stderr[-500:]]
        wrong += bool(problems)
        print("\n".join(f"WRONG: {problem}" for problem in problems), flush=True)
    print(f"{len(PROGRAMS)} programs, {wrong} wrong")
    return wrong


def check(program: Program, text: str) -> list[str]:
    """What is wrong with a plan."""
    problems = []
    launches = {kind: int(count.replace(",", "")) for kind, count in re.findall(r"^(cuDNN|Pallas|all)\b.*?([\d,]+) +[\d.]+$", text, re.MULTILINE)}
    attention = {kind: count for kind, count in launches.items() if kind != "all"}
    if attention != program.attention_launches:
        problems.append(f"attention takes the launches {attention} instead of {program.attention_launches}")
    if launches.get("all", sys.maxsize) > program.most_launches:
        problems.append(f"{launches.get('all')} launches, more than {program.most_launches}")
    reduced = re.findall(r"^all-reduce .*? (\d+) +([\d.]+) +(\d+) +[\d.]+$", text, re.MULTILINE)
    sent = sum(float(megabytes) * int(times) for _, megabytes, times in reduced)
    if program.gradient_mb and abs(sent - program.gradient_mb) > 1:
        problems.append(f"{sent:.0f} MB are reduced a step instead of {program.gradient_mb:.0f}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
