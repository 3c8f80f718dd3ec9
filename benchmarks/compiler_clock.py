"""Compare the TPU compiler's cycles with the data sheet, on two functions whose time is known.

    python benchmarks/compiler_clock.py --topology=v5e:2x2

The compiler (libtpu, the extra [plan]) estimates the cycles of a matrix product, whose time is that
of its FLOPs, and of x + 1, whose time is that of its bytes. `plan` turns cycles into seconds with
the clock of planning/tpus.py. No TPU is needed.
"""

import argparse
import collections.abc
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from maelm_jax import cli
from maelm_jax.planning import hlo, topologies, tpus

PRODUCT = 8192  # rows and columns of the matrices
ADDITION = 16384  # rows and columns of x, 0.5 GiB
BYTES_OF_BFLOAT16 = 2


def main(argv: list[str]):
    """Runs the command with these arguments."""
    layout = argparse.RawDescriptionHelpFormatter
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=layout, allow_abbrev=False)
    flags.add_argument("--topology", default="v5e:2x2", help="a TPU slice; default v5e:2x2")
    target = topologies.parse(flags.parse_args(argv).topology)
    if not isinstance(target, tpus.TpuSlice):
        flags.error("--topology: name a TPU slice, as v5e:2x2")
    device = target.devices()[0]

    import jax
    import jax.numpy as jnp

    def seconds(function: collections.abc.Callable, size: int, inputs: int) -> float:
        sharding = jax.sharding.SingleDeviceSharding(device)
        array = jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=sharding)
        program = jax.jit(function).lower(*[array] * inputs).compile()
        return hlo.estimated_cycles(program.as_text()).cycles / target.chip.clock

    peak = target.peak_flops / target.count
    share = 2 * PRODUCT**3 / seconds(jnp.matmul, PRODUCT, 2) / peak
    moved = 2 * BYTES_OF_BFLOAT16 * ADDITION**2  # read and written
    by_bytes = moved * target.chip.cores / target.chip.bandwidth
    ratio = seconds(lambda x: x + 1, ADDITION, 1) / by_bytes
    print(f"{target.name}: clock {target.chip.clock / 1e9:.2f} GHz")
    print(f"product of {PRODUCT} x {PRODUCT}, bfloat16: {share:.0%} of the peak")
    print(f"x + 1 over 0.5 GiB: {ratio:.1f} times bytes / bandwidth")


if __name__ == "__main__":
    cli.run(main)
