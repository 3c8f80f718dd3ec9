"""Estimate memory, step time and communication on TPUs or GPUs that are not at hand.

The command compiles the training step with the compiler of the device: libtpu (the extra [plan]) or
XLA for CUDA (the extra [cuda]). It needs neither a TPU nor a GPU.

    python -m maelm_jax.plan --gin_file=base.gin --topology=v5e:16x16
    python -m maelm_jax.plan --gin_file=base.gin --topology=h100:8
    python -m maelm_jax.plan --gin_file=base.gin --topology=h200:4x8
Try microbatches, rematerialisation and meshes, and recommend one:
    python -m maelm_jax.plan --gin_file=base.gin --topology=v5e:16x16 --sweep
Show memory and collectives on 8 simulated CPU devices:
    python -m maelm_jax.plan --gin_file=tiny.gin --topology=cpu:8

h200:4x8 is 4 hosts with 8 GPUs each. Memory, collectives and kernels are read from the compiled
program. Step time is an estimate: the time of all kernels, each counted as often as it runs, plus
the time to send the bytes. Nothing overlaps in it. On a TPU, the kernels' time comes from the
compiler's cycles. On a GPU, it comes from rooflines and the compiler's cost model
(planning/gpu_cost.py). No compiler estimates the Pallas kernels of this project's attention. They
count as bytes / bandwidth, which is a lower bound. Waiting for data is left out, so a real run can
be slower. Exit status 0: the step fits, or no memory limit is known. 1: the step (with --sweep:
every step) does not fit, or another failure. 2: wrong input.
"""

import argparse
import dataclasses
import sys

import tqdm

from maelm_jax import cli, config
from maelm_jax.planning import topologies


def main(argv: list[str]) -> int:
    """Runs the command with these arguments. Returns the exit status."""
    args, experiment = cli.parse(_flags(), argv)
    if args.sweep and args.no_largest:
        raise config.ConfigError("--no_largest: --sweep does not look for the largest microbatch")
    if experiment.finetune:
        raise config.ConfigError("plan compiles pretraining steps: leave the finetune files out")
    target = topologies.parse(args.topology)
    devices = target.devices()
    print(target.title, flush=True)

    # These import JAX, which `target.devices` configures.
    from maelm_jax.data import vocabularies
    from maelm_jax.encoders import adoption, source
    from maelm_jax.planning import estimate, report, search
    from maelm_jax.training import flops, phases

    if experiment.run.init_from:
        encoder_source = source.find_encoder(experiment.run.init_from)
        experiment = adoption.adopt_settings(experiment, encoder_source).experiment
    sized = vocabularies.with_size_of_file(experiment.vocabulary)
    experiment = dataclasses.replace(experiment, vocabulary=sized)
    run_phases = phases.of_run(experiment)
    size = experiment.vocabulary.size
    flops_by_phase = [sum(flops.flops_terms(one.experiment, size).values()) for one in run_phases]
    most = run_phases[flops_by_phase.index(max(flops_by_phase))]
    experiment = most.experiment
    if len(run_phases) > 1:
        print(
            f"the plan is for the steps with the most FLOPs, {phases.describe(most)}. So the time "
            "of the run is an upper bound. Steps at a higher mask rate can need more memory",
            flush=True,
        )
    if args.sweep:
        plans = []
        programs = search.sweep(experiment, target, devices)
        print(report.sweep_header(), flush=True)
        for plan in programs:
            tqdm.tqdm.write(report.sweep_line(plan))  # above the progress bar
            sys.stdout.flush()
            plans.append(plan)
        print(report.recommendation(search.fastest(plans)))
        return 1 if all(plan.fits is False for plan in plans) else 0
    plan = estimate.compile_step(experiment, target, devices)
    print(report.of_plan(plan, target), flush=True)
    if not args.no_largest and target.memory:
        largest = search.largest_microbatch(plan, target, devices)
        print(
            f"largest microbatch that fits: {largest.rows or 'none'} rows a device, in eights "
            f"above 16 (compiled: {', '.join(map(str, sorted(largest.compiled)))})"
        )
    return 0 if plan.fits is not False else 1


def _flags() -> argparse.ArgumentParser:
    flags = cli.parser(__doc__)
    topology_help = "as in v5e:16x16, h100:8, h200:4x8 or cpu:8; a wrong one lists those there are"
    flags.add_argument("--topology", required=True, metavar="NAME", help=topology_help)
    sweep_help = (
        "try microbatches, rematerialisation and sizes of Mesh.data and Mesh.fsdp, whatever the "
        "settings say of them, and recommend one"
    )
    flags.add_argument("--sweep", action="store_true", help=sweep_help)
    largest_help = (
        "do not look for the largest microbatch that fits (at most five more compilations)"
    )
    flags.add_argument("--no_largest", action="store_true", help=largest_help)
    return flags


def command():
    """Runs `maelm-plan`, or `python -m maelm_jax.plan`."""
    cli.run(main)


if __name__ == "__main__":
    command()
