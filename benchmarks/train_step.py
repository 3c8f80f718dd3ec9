r"""Measure the training step of a config on any backend.

Prints tokens/s, model FLOP/s, its share of the machine's matmul rate, and peak memory.

    python benchmarks/train_step.py --gin_file=tiny.gin
    python benchmarks/train_step.py --gin_file=base.gin --gin.BATCH_SIZE=2 \
        --gin.Compute.dtype=float32

Rows are random ids of full length; the cost of a step does not depend on the ids. Tokens are
counted before masking. The matmul rate is that of a 2048^3 product in the config's dtype. It is
measured in the same process before and after the steps; the larger value counts.
"""

import pathlib
import resource
import statistics
import sys
import time
import typing

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from maelm_jax import cli, config

MATMUL_SIZE = 2048  # rows and columns of the matrices whose product is the machine's matmul rate


class Timing(typing.NamedTuple):
    """What was measured."""

    first: float  # seconds of the first step, with its compilation
    steps: list[float]  # seconds of each later step
    matmul_rate: float  # FLOP/s


def main(argv: list[str]):
    """Runs the command with these arguments."""
    flags = cli.parser(__doc__)
    steps = "steps timed, after two that are not"
    flags.add_argument("--steps", type=cli.whole_number(1), default=10, help=steps)
    args, experiment = cli.parse(flags, argv)
    for name, value in figures(experiment, measure(experiment, args.steps)).items():
        print(f"{name:<28}{value}")


def measure(experiment: config.Experiment, steps: int) -> Timing:
    """Times `steps` training steps, after two that are not counted."""
    import training_setup

    setup = training_setup.set_up(experiment)
    before = measure_matmul_rate(experiment.compute.dtype)
    seconds = training_setup.time_steps(setup, steps + 2)
    after = measure_matmul_rate(experiment.compute.dtype)
    return Timing(seconds[0], seconds[2:], max(before, after))


def measure_matmul_rate(dtype: str, seconds: float = 0.5) -> float:
    """Measures the best FLOP/s of a MATMUL_SIZE^3 matrix product on the first device."""
    import jax
    import jax.numpy as jnp

    matrix = jnp.ones((MATMUL_SIZE, MATMUL_SIZE), dtype)
    product = jax.jit(lambda matrix: matrix @ matrix)
    product(matrix).block_until_ready()
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        product(matrix).block_until_ready()
        best = max(best, 2 * MATMUL_SIZE**3 / (time.perf_counter() - start))
    return best


def figures(experiment: config.Experiment, timing: Timing) -> dict[str, str]:
    """The figures to print: {name: text}."""
    import jax
    import training_setup

    from maelm_jax.training import flops

    dropout, run = experiment.dropout, experiment.run
    seconds = statistics.median(timing.steps)
    tokens = run.batch_size * experiment.corpus.sequence_length
    step_flops = sum(flops.flops_terms(experiment, experiment.vocabulary.size).values())
    peak = flops.peak_flops()
    # On CPU, one product takes all cores, which simulated devices share.
    devices = 1 if jax.default_backend() == "cpu" else jax.device_count()
    matmul_rate = timing.matmul_rate * devices
    return {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}, "
        f"{experiment.compute.dtype}",
        "shape": training_setup.shape_of(experiment),
        "dropout, attention dropout": f"{dropout.hidden}, {dropout.attention}",
        "step": f"{1e3 * seconds:.1f} ms (median of {len(timing.steps)}; "
        f"{1e3 * min(timing.steps):.1f} to {1e3 * max(timing.steps):.1f}); "
        f"first {timing.first:.1f} s",
        "tokens/s": f"{tokens / seconds:,.0f}",
        "model FLOP/s": f"{step_flops / seconds / 1e9:,.1f} G",
        "matmul FLOP/s": f"{matmul_rate / 1e9:,.1f} G ({MATMUL_SIZE}^3)",
        "share": f"{step_flops / seconds / matmul_rate:.1%}",
        "MFU": f"{step_flops / seconds / peak:.1%}" if peak else "-, the data sheet is unknown",
        "peak memory": f"{peak_memory() / 2**30:.2f} GiB",
    }


def peak_memory() -> int:
    """Peak bytes in use on the first device, or of this process where a device keeps no count."""
    import jax

    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", process)


if __name__ == "__main__":
    cli.run(main, trains=True)
