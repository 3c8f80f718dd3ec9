"""Print the TPU compiler's cycles of the attention kernels, without a TPU.

    python benchmarks/kernel_cycles.py --slots=440 --heads=12 --rows=16

The compiler (libtpu, the extra [plan]) writes a static profile of each kernel, compiled alone for
v5e. A profile simulates every grid step, and the first steps fill the pipeline. So a step's cycles
are the difference of two profiles, of four heads and of two steps more. The table has the cycles of
a layer by profile, the bytes that a layer's kernel moves at the speed of the memory, in cycles, and
the larger of the two, which is the estimate.
"""

import argparse
import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from maelm_jax import cli, tables

TOPOLOGY = "v5e:2x2"
BYTES_A_CYCLE = 546  # 819 GB/s at 1.5 GHz
HEAD_SIZE = 64
KINDS = ("bias", "segments", "bias, dropout")


def main(argv: list[str]) -> int:
    """Runs the command with these arguments."""
    layout = argparse.RawDescriptionHelpFormatter
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=layout, allow_abbrev=False)
    flags.add_argument("--slots", type=int, default=440, help="queries, and keys, of a row")
    flags.add_argument("--heads", type=int, default=12, help="heads of size 64")
    flags.add_argument("--rows", type=int, default=16, help="rows of a device")
    flags.add_argument("--compile", nargs=3, help=argparse.SUPPRESS)  # kernel, kind, heads
    args = flags.parse_args(argv)
    if args.compile:
        compile_kernel(args.compile[0], args.compile[1], int(args.compile[2]), args.slots)
        return 0
    rows = []
    for kind in KINDS:
        for kernel in ("forward", "backward"):
            four, eight = (profiled(kernel, kind, heads, args.slots) for heads in (4, 8))
            cycles = (eight - four) / 4 * args.heads * args.rows
            memory = moved_bytes(kernel, kind, args) / BYTES_A_CYCLE
            estimate = max(cycles, memory)
            rows.append((kernel, kind, *(f"{x / 1e6:.3f}" for x in (cycles, memory, estimate))))
    header = ("kernel", "with", "profile, M cycles", "memory, M cycles", "estimate, M cycles")
    print(tables.markdown(header, rows, left=2))
    return 0


def moved_bytes(kernel: str, kind: str, args: argparse.Namespace) -> int:
    """Bytes that a layer's kernel reads and writes, in bfloat16."""
    states = 2 * args.rows * args.slots * args.heads * HEAD_SIZE
    bias = 2 * args.rows * args.heads * args.slots**2 if "bias" in kind else 0
    # Backward reads the bias, and reads and writes the sum of its gradients.
    return 4 * states + bias if kernel == "forward" else 8 * states + 3 * bias


def profiled(kernel: str, kind: str, heads: int, slots: int) -> int:
    """Cycles of a kernel for one row, from its static profile.

    The compiler may abort after it has written the profile of the kernel, so its exit status says
    nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "p").mkdir()
        profile = f"--xla_jf_dump_to={folder} --xla_jf_dump_static_llo_profile_to={folder}/p"
        command = [sys.executable, __file__, f"--slots={slots}", "--compile", kernel, kind]
        done = subprocess.run(
            [*command, str(heads)],
            env=os.environ | {"LIBTPU_INIT_ARGS": profile},
            capture_output=True,
            text=True,
        )
        profiles = [path.read_text() for path in pathlib.Path(folder, "p").glob("*attention*")]
    if not profiles:
        raise SystemExit(f"no profile was written: {done.stderr[-500:]}")
    return int(re.search(r"estimated_cycles: (\d+)", profiles[0])[1])


def compile_kernel(kernel: str, kind: str, heads: int, slots: int):
    """Compiles one kernel for one row."""
    from maelm_jax.planning import topologies

    device = topologies.parse(TOPOLOGY).devices()[0]
    import jax
    import jax.numpy as jnp

    from maelm_jax.model import attention_tpu

    def shaped(dtype, *shape):
        sharding = jax.sharding.SingleDeviceSharding(device)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    states = shaped(jnp.bfloat16, 1, slots, heads * HEAD_SIZE)
    bias = shaped(jnp.bfloat16, 1, heads, slots, slots) if "bias" in kind else None
    operands = attention_tpu.Operands()
    if kind == "segments":
        segments = shaped(jnp.float32, 1, 1, slots)
        operands = attention_tpu.Operands(segments, segments)
    if "dropout" in kind:
        words = shaped(jnp.uint32, 1, heads), shaped(jnp.uint32, 1)
        operands = attention_tpu.Operands(None, None, *words)
    settings = attention_tpu.Settings(heads, 0.1 if "dropout" in kind else 0.0)

    if kernel == "forward":
        call = functools.partial(attention_tpu.run_forward_kernel, settings)
        arrays = (states, states, states, bias, operands)
    else:
        group = attention_tpu.heads_per_step(HEAD_SIZE)
        statistics = shaped(jnp.float32, 1, heads // group, 2 * group, slots)
        call = functools.partial(attention_tpu.run_backward_kernel, settings)
        arrays = (states, states, states, bias, bias, operands, states, statistics, states)
    donated = [4] if kernel == "backward" and bias is not None else []  # the sum of gradients
    jax.jit(call, donate_argnums=donated).lower(*arrays).compile()


if __name__ == "__main__":
    cli.run(main)
