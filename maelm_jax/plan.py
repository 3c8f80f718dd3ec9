"""Estimate memory, step time and communication on TPUs or GPUs that are not at hand.

The command compiles the training step with the compiler of the device: libtpu (the extra [plan]) or
XLA for CUDA (the extra [cuda]). No TPU or GPU is needed.

    python -m maelm_jax.plan --gin_file=base.gin --topology=v5e:16x16
    python -m maelm_jax.plan --gin_file=base.gin --topology=h100:8
    python -m maelm_jax.plan --gin_file=base.gin --topology=h200:4x8
Compile each layer by itself, as a run on TPUs and GPUs does; look for the largest microbatch:
    python -m maelm_jax.plan --gin_file=base.gin --topology=v5e:16x16 --each_layer --largest
Try microbatches, rematerialisation and meshes, and recommend one:
    python -m maelm_jax.plan --gin_file=base.gin --topology=v5e:16x16 --sweep
Show memory and collectives on 8 simulated CPU devices:
    python -m maelm_jax.plan --gin_file=tiny.gin --topology=cpu:8

h200:4x8 is 4 hosts with 8 GPUs each. A slice may also have the cloud's name: v5litepod-256 or
v5e-256. Without --each_layer the layers are in a loop, which compiles faster. A run on TPUs and
GPUs compiles each layer by itself. Its steps are faster, and need less memory, than this plan says.
Memory and collectives are facts about the compiled program.
Time is an estimate: the time to compute plus the time to send the bytes. Nothing overlaps in it,
and waiting for data is left out. On a TPU, computing comes from the compiler's cycles. The compiler
has none for the Pallas kernels of this project's attention. They count with their bytes, which is a
lower bound. On a GPU, computing is the model's FLOPs at the peak of the data sheet. No step is as
fast as that. Exit status 0: the step fits, or no memory limit is known. 1: the step (with --sweep:
every step) does not fit, or another failure. 2: wrong input.
"""

import argparse
import collections
import collections.abc
import dataclasses
import math
import sys
import time
import typing

from maelm_jax import cli, config, tables
from maelm_jax.planning import targets
from maelm_jax.planning.targets import GIB

if typing.TYPE_CHECKING:  # imports JAX, which targets.start_compiler configures
    from maelm_jax.planning.estimate import Plan
    from maelm_jax.training.workdir import Workdir

MOST_COMPILATIONS = 6  # of one search for the largest microbatch
USABLE = 0.99  # share of the memory that the search aims at
SWEEP_ROWS = (32, 16, 8, 4)  # rows of a microbatch on one device
SWEEP_FSDP = (1, 8)  # sizes of Mesh.fsdp to try, besides the number of devices
SECONDS_A_DAY = 86_400
TILE = (128, 256)  # rows and columns of a product that a multiprocessor of a GPU computes at a time
FULL_ENOUGH = 0.98  # of the best use of a GPU: more rows count more than the rest
# Each is wider than its values, so that the lines of a sweep align.
SWEEP_COLUMNS = (
    "data x fsdp x tensor",
    "rows a device",
    "parts",
    "rematerialise",
    "GiB a device",
    "fits",
    "estimated step, ms",
    "sent a step, MB",
)


def main(argv: list[str]) -> int:
    """Runs the command with these arguments. Returns the exit status."""
    args, experiment = cli.parse(_flags(), argv, runs_modules=False)
    if experiment.finetune:
        raise config.ConfigError("plan compiles pretraining steps: leave the finetune files out")
    target = targets.parse(args.topology)
    devices = targets.start_compiler(target)
    print(target.title, flush=True)

    from maelm_jax.data import vocabularies
    from maelm_jax.encoders import adoption, opened
    from maelm_jax.planning import estimate

    if experiment.run.init_from:
        encoder_source = opened.find_model(experiment.run.init_from)
        experiment = adoption.adopt_settings(experiment, encoder_source).experiment
    sized = vocabularies.with_size_of_file(experiment.vocabulary)
    experiment = dataclasses.replace(experiment, vocabulary=sized)
    puts_in_loop = experiment.compute.scan_layers is None and not args.each_layer
    if puts_in_loop:
        compute = dataclasses.replace(experiment.compute, scan_layers=True)
        experiment = dataclasses.replace(experiment, compute=compute)

    def compile_step(experiment: config.Experiment) -> "Plan":
        rows = experiment.run.batch_size // experiment.run.accumulate
        looped = experiment.compute.scan_layers
        layers = "the layers in a loop" if looped else "as a run compiles it"
        # Not of simulated devices, which small models are tried on.
        minutes = f" (base.gin takes {'up to 3' if looped else 'up to 7'} CPU minutes)"
        duration = minutes if target.kind else ""
        print(f"compiling a microbatch of {rows:,} rows, {layers}{duration}", file=sys.stderr)
        began = time.monotonic()
        plan = estimate.compile_step(experiment, target=target, devices=devices)
        print(f"compiled in {time.monotonic() - began:.0f} s", file=sys.stderr)
        return plan

    if args.sweep:
        return _sweep(choices(experiment, len(devices)), compile_step)
    plan = compile_step(experiment)
    print(describe(plan, target, args.price), flush=True)
    if puts_in_loop and target.memory:
        print("the layers are in a loop. --each_layer plans the step of a run, and takes longer")
    if args.largest and target.memory:
        largest, compiled = largest_microbatch(plan, target.memory, compile_step)
        print(
            f"largest microbatch that fits: {largest or 'none'} rows a device, in eights above 16 "
            f"(compiled: {', '.join(map(str, sorted(compiled)))})"
        )
        if largest:
            print(f"proposed: --gin.Run.accumulate={propose_parts(plan, largest, target)}")
    return 0 if plan.fits is not False else 1


def dry_run(experiment: config.Experiment, workdir: "Workdir", verbose: bool = False) -> int:
    """Prints size, memory, time and FLOPs of a run on the devices of this process.

    No data is read. The time is that of steps on made-up rows, or from the log of the run. The size
    of the vocabulary is that of the file in the workdir, if its settings are the same, or in the
    settings, if they name one. With `verbose`, each parameter is printed too. Returns the exit
    status, as `plan` does.
    """
    import jax

    from maelm_jax.data import vocabularies
    from maelm_jax.planning import estimate, timing
    from maelm_jax.pretraining import objective, summary
    from maelm_jax.training import sharding

    logged = timing.from_log(experiment, workdir)
    vocabulary = experiment.vocabulary
    recorded = workdir.read_settings()
    is_same = recorded is not None and recorded.vocabulary == vocabulary
    if workdir.has_vocabulary and (is_same or experiment.run.continue_from):
        vocabulary = dataclasses.replace(vocabulary, file=str(workdir.vocabulary_folder))
    sized = vocabularies.with_size_of_file(vocabulary)
    experiment = dataclasses.replace(experiment, vocabulary=sized)
    mesh = sharding.make_mesh(experiment.mesh)
    state = objective.abstract_step(experiment, mesh).arguments[0]
    summary.print_sizes(experiment, state.params)
    print("compiling a step ...", flush=True)
    count, statistics = jax.device_count(), jax.local_devices()[0].memory_stats() or {}
    memory = statistics.get("bytes_limit")
    target = targets.Target("this machine", "this machine", count, count, memory=memory)
    plan = estimate.compile_step(experiment, target, jax.devices(), keeps_program=True)
    print(describe(plan, target), flush=True)
    print(logged or timing.measure(plan, target))
    summary.print_flops(experiment)
    if verbose:
        summary.print_parameters(state.params)
    return 0 if plan.fits is not False else 1


def _flags() -> argparse.ArgumentParser:
    flags = cli.parser(__doc__)
    topology_help = "as in v5e:16x16, v5e-256, h100:8, h200:4x8 or cpu:8; a wrong one lists all"
    flags.add_argument("--topology", required=True, metavar="NAME", help=topology_help)
    sweep_help = (
        "try microbatches, rematerialisation and sizes of Mesh.data and Mesh.fsdp, whatever the "
        "settings say of them, and recommend one"
    )
    flags.add_argument("--sweep", action="store_true", help=sweep_help)
    largest_help = "look for the largest microbatch that fits (at most five more compilations)"
    flags.add_argument("--largest", action="store_true", help=largest_help)
    layer_help = (
        "compile each layer by itself, as a run does, in up to four times the time; "
        "--gin.Compute.scan_layers has priority"
    )
    flags.add_argument("--each_layer", action="store_true", help=layer_help)
    price_help = "what an hour of one chip or GPU costs, to print what the run costs"
    flags.add_argument("--price", type=float, metavar="MONEY", help=price_help)
    return flags


def describe(plan: "Plan", target: targets.Target, price: float | None = None) -> str:
    """Describes one plan: memory, collectives and, if it is estimated, time.

    `price` is that of an hour of one chip or GPU.
    """
    run, length = plan.experiment.run, plan.experiment.corpus.sequence_length
    head = (
        f"mesh {plan.mesh._asdict()}; {run.batch_size} rows of {length} a step: {plan.rows} a "
        f"device in each of {run.accumulate} part(s); "
        f"rematerialise {plan.experiment.compute.rematerialise}\n{plan.attention}"
    )
    if plan.memory is None:
        return f"{head}\n\ndoes not fit: the compiler needs {plan.needed / GIB:.2f} GiB a device"
    sizes = plan.memory | {"all": plan.needed}
    rows = [(name, f"{size / GIB:.3f}") for name, size in sizes.items()]
    memory = tables.plain(("memory", "GiB a device"), rows)
    if plan.fits is not None:
        fits = "fits" if plan.fits else "does not fit"
        memory += f"\n{fits} in {target.memory / GIB:.2f} GiB a device"
    a_device = plan.model_flops / target.count
    time = f"model FLOPs a step: {plan.model_flops:.4g}; {a_device:.4g} a device"
    if plan.time:
        time += f"\n{_describe_time(plan, target, price)}"
    return "\n\n".join(filter(None, (head, memory, _collectives(plan), time)))


def _collectives(plan: "Plan") -> str:
    """Table of the collectives by kind and number of devices. Empty: there are none."""
    groups = collections.defaultdict(list)
    for one in plan.collectives:
        groups[one.kind, one.group].append(one)
    rows = [
        (
            *kind_and_devices,
            sum(one.times for one in ones),
            f"{sum(one.total_bytes for one in ones) / 1e6:.3f}",
            f"{sum(one.sent_bytes for one in ones) / 1e6:.3f}",
        )
        for kind_and_devices, ones in sorted(groups.items())
    ]
    header = ("collective", "devices", "times a step", "arrays a step, MB", "sent a step, MB")
    return tables.plain(header, rows) if rows else ""


def _describe_time(plan: "Plan", target: targets.Target, price: float | None) -> str:
    time, steps = plan.time, plan.experiment.run.train_steps
    # A GPU's time is a roofline, so a real step takes longer.
    name, most, least = (
        ("estimated step", "", "") if target.clock else ("roofline", "at most ", "at least ")
    )
    mfu = plan.model_flops / time.seconds / time.peak_flops
    days = time.seconds * steps / SECONDS_A_DAY
    hours = 24 * days * target.chips
    cost = "" if price is None else f", {least}{hours * price:,.0f} at {price:g} an hour"
    return (
        f"{name}: {1e3 * time.computing:.1f} ms computing ({time.method}) + "
        f"{1e3 * time.sending:.1f} ms sending (bytes / link speed)\n"
        f"that is {most}{plan.tokens / time.seconds:,.0f} tokens/s, MFU {mfu:.1%} of "
        f"{time.peak_flops / 1e15:.2f} PFLOP/s\n"
        f"{steps:,} steps: {least}{days:.2f} days, {hours:,.0f} chip-hours{cost}"
    )


def largest_microbatch(
    plan: "Plan", limit: float, compile_step: collections.abc.Callable[..., "Plan"]
) -> tuple[int, list[int]]:
    """Finds the largest microbatch that fits into `limit` bytes. The number of microbatches stays.

    Memory grows almost linearly with the rows. Interpolation between the compiled microbatches
    therefore needs few compilations.

    Returns:
        Rows on one device (0: none fits), and the rows of all microbatches that were compiled.
    """
    needed = {plan.rows: plan.needed}  # {rows: bytes}
    largest = plan.rows if plan.fits else 0
    refused = [] if plan.fits else [plan.rows]
    group = plan.experiment.objective.causal_rows.denominator
    rows = 2 * plan.rows if plan.fits else plan.rows // 2 // group * group
    while rows > largest and rows not in needed and len(needed) < MOST_COMPILATIONS:
        run = plan.experiment.run
        run = dataclasses.replace(run, batch_size=run.batch_size // plan.rows * rows)
        attempt = compile_step(dataclasses.replace(plan.experiment, run=run))
        needed[rows] = attempt.needed
        if attempt.fits:
            largest = max(largest, rows)
        else:
            refused.append(rows)
        (few, bytes_of_few), (many, bytes_of_many) = min(needed.items()), max(needed.items())
        bytes_a_row = max(bytes_of_many - bytes_of_few, 1.0) / (many - few)
        rows = int(few + (USABLE * limit - bytes_of_few) / bytes_a_row)
        if refused:
            rows = min(rows, min(refused) - 1)
        if rows > 16:
            rows -= rows % 8
        rows -= rows % group
    return largest, list(needed)


def propose_parts(plan: "Plan", largest: int, target: targets.Target) -> int:
    """Returns the `Run.accumulate` of the fewest microbatches whose products fill a GPU.

    A product of the encoder's width computes tiles, one on each multiprocessor at a time. Of the
    microbatches with at most `largest` rows that divide the batch, the largest counts whose last
    wave of tiles leaves least idle, within FULL_ENOUGH. On other devices it is the largest.
    """
    from maelm_jax.model import masking

    experiment = plan.experiment
    slots = masking.budget(experiment.objective, experiment.corpus.sequence_length).visible
    rows_a_device = plan.rows * experiment.run.accumulate

    def share_used(rows: int) -> float:
        if target.multiprocessors is None:
            return 1.0
        tiles = math.ceil(rows * slots / TILE[0]) * math.ceil(experiment.encoder.width / TILE[1])
        waves = math.ceil(tiles / target.multiprocessors)
        return tiles / (waves * target.multiprocessors)

    group = experiment.objective.causal_rows.denominator
    possible = [
        rows for rows in range(1, largest + 1) if rows_a_device % rows == 0 and rows % group == 0
    ]
    enough = FULL_ENOUGH * max(map(share_used, possible))
    rows = max(rows for rows in possible if share_used(rows) >= enough)
    return rows_a_device // rows


def choices(experiment: config.Experiment, devices: int) -> list[config.Experiment]:
    """Meshes, rematerialisation and microbatches to try, all with the same batch size.

    `Mesh.tensor` stays as it is set. On each mesh, the choices without rematerialisation and with
    many rows come first. Raises ConfigError if there are none: `Mesh.tensor` does not divide the
    devices, or the batch is no multiple of any of the microbatches.
    """
    result: list[config.Experiment] = []
    tensor, batch_size = experiment.mesh.tensor, experiment.run.batch_size
    row_devices = devices // tensor if tensor > 0 and devices % tensor == 0 else 0
    group = experiment.objective.causal_rows.denominator
    widths = [experiment.encoder.width]
    if experiment.decoder:
        widths.append(experiment.decoder.stack(experiment.encoder).width)
    for fsdp in dict.fromkeys((*SWEEP_FSDP, row_devices)) if row_devices else ():
        if row_devices % fsdp or any(width % fsdp for width in widths):
            continue
        mesh = config.Mesh(data=row_devices // fsdp, fsdp=fsdp, tensor=tensor)
        for rematerialise in (False, True):
            compute = dataclasses.replace(experiment.compute, rematerialise=rematerialise)
            for rows in SWEEP_ROWS:
                parts, rest = divmod(batch_size, rows * row_devices)
                if parts and not rest and rows % group == 0:
                    run = dataclasses.replace(experiment.run, accumulate=parts)
                    result.append(
                        dataclasses.replace(experiment, mesh=mesh, compute=compute, run=run)
                    )
    if not result:
        raise config.ConfigError(
            f"--sweep has nothing to try. Mesh.tensor={tensor} must divide the {devices} devices. "
            f"Run.batch_size={batch_size} must be a multiple of {devices} / Mesh.tensor x "
            f"{', '.join(map(str, SWEEP_ROWS))} rows: give another --gin.BATCH_SIZE"
        )
    return result


def _sweep(
    experiments: list[config.Experiment], compile_step: collections.abc.Callable[..., "Plan"]
) -> int:
    """Compiles every choice, prints a line for each and a recommendation."""
    print(f"{len(experiments)} programs\n{tables.plain(SWEEP_COLUMNS, [])}", flush=True)
    plans = []
    for experiment in experiments:
        plans.append(compile_step(experiment))
        table = tables.plain(SWEEP_COLUMNS, [_sweep_cells(plans[-1])])
        print(table.splitlines()[-1], flush=True)
    print(recommend(plans))
    return 1 if all(plan.fits is False for plan in plans) else 0


def _sweep_cells(plan: "Plan") -> tuple:
    """Cells of the line of one plan of a sweep."""
    sent = sum(one.sent_bytes for one in plan.collectives) / 1e6
    return (
        "x".join(map(str, plan.mesh)),
        plan.rows,
        plan.experiment.run.accumulate,
        plan.experiment.compute.rematerialise,
        f"{plan.needed / GIB:.2f}",
        {True: "yes", False: "no", None: "?"}[plan.fits],
        f"{1e3 * plan.time.seconds:.1f}" if plan.time and plan.fits else "-",
        f"{sent:,.0f}" if plan.memory else "-",
    )


def recommend(plans: list["Plan"]) -> str:
    """Returns the flags of the fastest plan that fits, by the estimates; of equals, the first.

    On GPUs, whose estimate knows neither microbatches nor rematerialisation, that is the plan that
    sends least, with the most rows and without rematerialisation if it fits.
    """
    timed = [plan for plan in plans if plan.fits and plan.time]
    if not timed:
        return "recommended: none. No plan fits and has an estimated time"
    plan = min(timed, key=lambda plan: plan.time.seconds)
    flags = {f"Mesh.{name}": size for name, size in plan.mesh._asdict().items()}
    flags["Run.accumulate"] = plan.experiment.run.accumulate
    flags["Compute.rematerialise"] = plan.experiment.compute.rematerialise
    return "recommended: " + " ".join(f"--gin.{name}={value}" for name, value in flags.items())


def command():
    """Runs `maelm-plan`, or `python -m maelm_jax.plan`."""
    cli.run(main)


if __name__ == "__main__":
    command()
