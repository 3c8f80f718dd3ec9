"""Estimate memory, step time and communication of a run on a TPU slice; no TPU needed.

The command compiles the training step with the TPU compiler (libtpu, the extra [plan]).

    python -m maelm_jax.plan --gin_file=base.gin --topology=v5e:16x16
Try microbatches, rematerialisation and meshes, and recommend one:
    python -m maelm_jax.plan --gin_file=base.gin --topology=v5e:16x16 --sweep
Show memory and collectives on 8 simulated CPU devices:
    python -m maelm_jax.plan --gin_file=tiny.gin --topology=cpu:8

The compiler reports memory and collectives of the program that a slice would run. Step time is an
estimate: the compiler's cycles, with each loop counted as often as it runs, plus the time to send
the bytes over one axis of links, without overlap. The estimate leaves out waiting for data and
other work, so a real run can be slower. Exit status: 0 done, 1 the step does not fit or anything
else, 2 wrong input.
"""

import dataclasses
import os
import re
import sys

from maelm_jax import cli, config
from maelm_jax.settings import shown

GIB = 2**30
MOST_PRETENDED = 1024  # simulated CPU devices; XLA starts a thread for each


@dataclasses.dataclass(frozen=True)
class Chip:
    """Figures of a TPU generation."""

    kind: str  # key of metrics.PEAK_FLOPS
    hbm: float  # bytes a chip
    # Hz of the compiler's cycles: peak FLOP/s divided by the FLOPs that the matrix units do in a
    # cycle. docs/tpus.md says how well that fits.
    clock: float
    # Bytes/s of one link in one direction: nine tenths of the data sheet. A chip has two links on
    # each axis of the torus.
    link: float
    cores: int  # devices that the compiler lists for a chip
    slices: tuple[str, ...]  # shapes of the slices that exist
    cloud: str  # format of the cloud's name of a slice, which counts chips or cores


FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
DEEP = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")
CHIPS = {
    "v4": Chip("TPU v4", 32 * GIB, 1.05e9, 4.5e10, 2, DEEP, "v4-{cores}"),
    "v5e": Chip("TPU v5 lite", 16 * GIB, 1.5e9, 4.5e10, 1, FLAT, "v5litepod-{chips}"),
    "v5p": Chip("TPU v5", 95 * GIB, 1.75e9, 9e10, 1, DEEP, "v5p-{cores}"),
    "v6e": Chip("TPU v6 lite", 32 * GIB, 1.75e9, 9e10, 1, FLAT, "v6e-{chips}"),
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """A TPU slice, or simulated CPU devices, to plan for."""

    topology: str
    chip: Chip | None  # None: simulated CPU devices
    chips: int

    @property
    def devices(self) -> int:
        return self.chips * (self.chip.cores if self.chip else 1)

    @property
    def title(self) -> str:
        if self.chip is None:
            return f"{self.topology}: {self.chips} pretended CPU devices"
        cloud = self.chip.cloud.format(chips=self.chips, cores=2 * self.chips)
        listed = (
            f", {self.devices} devices (the compiler lists {self.chip.cores} cores a chip)"
            if self.chip.cores > 1
            else ""
        )
        return (
            f"{self.topology}: {self.chips} chips of {self.chip.kind}, "
            f"{self.chip.hbm / GIB:.1f} GiB each{listed}; the cloud calls it {cloud}"
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """One experiment compiled for one slice. Bytes are per device, seconds are per step."""

    experiment: config.Experiment
    mesh: dict[str, int]
    rows: int  # of a microbatch on one device
    memory: dict[str, float]  # bytes by kind
    needed: float  # bytes in all
    fits: bool | None  # None: no limit is known
    collectives: list
    compute: float | None  # seconds, or None without an estimate
    sending: float | None  # seconds, or None without an estimate
    model_flops: float  # of a step on all devices
    unknown: tuple[str, ...] = ()  # operations without an estimate

    @property
    def seconds(self) -> float | None:
        return None if self.compute is None else self.compute + self.sending


def main(argv: list[str]) -> int:
    flags = cli.parser(__doc__)
    flags.add_argument(
        "--topology",
        required=True,
        metavar="NAME",
        help="as in v5e:16x16, v5p:4x4x8, or cpu:8; a wrong one lists those there are",
    )
    flags.add_argument(
        "--sweep",
        action="store_true",
        help="try microbatches, rematerialisation and meshes, and recommend one",
    )
    flags.add_argument(
        "--no_largest",
        action="store_true",
        help="do not look for the largest microbatch that fits (two to four more compilations)",
    )
    args, experiment = cli.parse(flags, argv)
    where = slice_of(args.topology)
    devices = prepare(where)
    print(where.title, flush=True)
    if args.sweep:
        sweep(experiment, where, devices)
        return 0
    plan = compile_for(experiment, where, devices)
    print(report(plan, where), flush=True)
    if not args.no_largest and where.chip:
        largest, tried = largest_rows(plan, where, devices)
        print(
            f"largest microbatch that fits: {largest or 'none'} rows a device, in eights above 16 "
            f"(compiled: {', '.join(map(str, sorted(tried)))})"
        )
    return 0 if plan.fits is not False else 1


def slice_of(topology: str) -> Slice:
    """Parses a topology such as "v5e:16x16" or "cpu:8".

    Raises:
        ConfigError: The topology does not exist. The message lists those that do.
    """
    name, _, shape = topology.partition(":")
    if name == "cpu" and re.fullmatch(r"[1-9][0-9]{0,5}", shape) and int(shape) <= MOST_PRETENDED:
        return Slice(topology, None, int(shape))
    if name not in CHIPS or shape not in CHIPS[name].slices:
        known = "; ".join(f"{name}: {' '.join(chip.slices)}" for name, chip in CHIPS.items())
        raise config.ConfigError(
            f"--topology={shown(topology)[1:-1]}: known are {known}; and cpu:N, N from 1 to "
            f"{MOST_PRETENDED}"
        )
    chips = 1
    for size in shape.split("x"):
        chips *= int(size)
    return Slice(topology, CHIPS[name], chips)


def prepare(where: Slice) -> list:
    """Configures JAX and returns the devices to compile for.

    JAX must not have been used in this process before.

    Raises:
        RunError: The TPU compiler does not start.
    """
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    # No device is in use, so several plans may be made at once.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    # A cached TPU program cannot be loaded on a machine without a TPU.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    if where.chip is None:
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} "
            f"--xla_force_host_platform_device_count={where.chips}"
        )
        import jax

        return jax.devices()
    from jax.experimental import topologies

    try:
        return list(
            topologies.get_topology_desc(platform="tpu", topology_name=where.topology).devices
        )
    except Exception as error:  # jaxlib raises several types of exceptions
        raise config.RunError(
            f"the TPU compiler could not be started ({' '.join(str(error).split())[:200]}); it "
            "comes with pip install '.[plan]'"
        ) from error


def compile_for(experiment: config.Experiment, where: Slice, devices: list) -> Plan:
    """Compiles the training step of an experiment.

    Args:
        experiment: The settings.
        where: The slice.
        devices: Its devices, as `prepare` returns them.

    Returns:
        The plan. If the step does not fit, `fits` is False and `needed` is what the compiler says
        that it needs.
    """
    import jax
    import numpy as np

    from maelm_jax.planning import hlo
    from maelm_jax.training import metrics, sharding, step

    axes = ("data", "fsdp", "tensor")
    sizes = sharding.mesh_sizes(experiment.mesh, len(devices))
    # The order of the devices changes neither the memory nor the bytes sent.
    mesh = jax.sharding.Mesh(np.asarray(devices).reshape(sizes), axes)
    sharding.check_mesh(experiment, mesh)
    train_step, state, batch = step.abstract(experiment, mesh)
    # Every value of the state and the batch has 4 bytes.
    held = lambda tree: sum(  # noqa: E731
        4 * np.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree)
    )
    whole_gradient = sum(x.size for x in jax.tree.leaves(state.params)) * 4 / sizes[2]
    memory = {
        "parameters": held(state.params),
        "optimiser (Adam's moments)": held(state.opt_state),
        "batch": held(batch),
    }
    flops = sum(metrics.flops_terms(experiment, experiment.vocabulary.size).values())
    rows = experiment.run.batch_size // (sizes[0] * sizes[1] * experiment.run.accumulate)
    plan = Plan(
        experiment,
        dict(zip(axes, sizes, strict=True)),
        rows,
        memory,
        0.0,
        None,
        [],
        None,
        None,
        flops,
    )
    try:
        program = train_step.lower(state, batch).compile()
    except jax.errors.JaxRuntimeError as error:
        used = re.search(r"(Used |HLO temporaries \()([\d.]+)([MGT])", str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or not used:
            raise
        needed = float(used[2]) * {"M": 2**20, "G": GIB, "T": 1024 * GIB}[used[3]]
        return dataclasses.replace(
            plan, needed=needed + (0 if used[1] == "Used " else sum(memory.values())), fits=False
        )
    analysis, text = program.memory_analysis(), program.as_text()
    memory |= {
        "gradient (of one device's rows, whole)": whole_gradient,
        "activations and temporaries": max(analysis.temp_size_in_bytes - whole_gradient, 0),
        "program": analysis.generated_code_size_in_bytes,
    }
    found, estimate = hlo.collectives(text), hlo.estimated_cycles(text)
    limit = where.chip.hbm / where.chip.cores if where.chip else None
    return dataclasses.replace(
        plan,
        memory=memory,
        needed=sum(memory.values()),
        fits=None if limit is None else True,  # the compiler fails if it does not fit
        collectives=found,
        compute=None if estimate is None or where.chip is None else estimate[0] / where.chip.clock,
        unknown=() if estimate is None else tuple(estimate[1]),
        sending=None
        if where.chip is None
        else sum(one.sent_bytes for one in found) / (2 * where.chip.link),
    )


def report(plan: Plan, where: Slice) -> str:
    """Formats one plan as text."""
    from maelm_jax.training import metrics

    run, length = plan.experiment.run, plan.experiment.corpus.sequence_length
    lines = [
        f"mesh {plan.mesh}; {run.batch_size} rows of {length} a step: {plan.rows} a device in each "
        f"of {run.accumulate} part(s); "
        f"rematerialise {plan.experiment.model.rematerialise}",
        "",
    ]
    limit = where.chip.hbm / where.chip.cores if where.chip else None
    if plan.fits is False:
        return "\n".join(
            [
                *lines,
                f"does not fit: the compiler needs {plan.needed / GIB:.2f} GiB a device of "
                f"{limit / GIB:.2f}",
            ]
        )
    lines += [f"{name:<42}{value / GIB:>9.3f} GiB a device" for name, value in plan.memory.items()]
    lines += [
        f"{'all':<42}{plan.needed / GIB:>9.3f} GiB a device"
        + (f": fits in {limit / GIB:.2f}" if limit else ""),
        "",
    ]
    lines += [
        f"{'collective':<20}{'devices':>8}{'whole array, MB':>17}{'times a step':>14}"
        f"{'sent a step, MB':>17}  from"
    ]
    merged: dict[tuple, list] = {}
    for one in plan.collectives:
        merged.setdefault((one.kind, one.group, one.times, place(one.name)), []).append(one)
    for (kind, group, times, origin), ones in sorted(
        merged.items(), key=lambda item: -sum(one.sent_bytes for one in item[1])
    ):
        size, sent = (
            sum(one.array_bytes for one in ones) / 1e6,
            sum(one.sent_bytes for one in ones) / 1e6,
        )
        lines.append(f"{kind:<20}{group:>8}{size:>17.3f}{times:>14}{sent:>17.3f}  {origin}")
    lines += [
        "",
        f"model FLOPs a step: {plan.model_flops:.4g}; {plan.model_flops / where.devices:.4g} a "
        "device",
    ]
    if plan.seconds is not None:
        peak = metrics.PEAK_FLOPS[where.chip.kind] * where.chips
        tokens, days = run.batch_size * length, plan.seconds * run.train_steps / 86400
        lines += [
            f"step: {1e3 * plan.compute:.1f} ms computing (the compiler's estimate) + "
            f"{1e3 * plan.sending:.1f} ms sending (bytes / link speed)",
            f"that is {tokens / plan.seconds:,.0f} tokens/s, MFU "
            f"{plan.model_flops / plan.seconds / peak:.1%} of {peak / 1e15:.2f} PFLOP/s",
            f"{run.train_steps:,} steps: {days:.2f} days, {24 * days * where.chips:,.0f} "
            "chip-hours",
        ]
        if plan.unknown:
            lines.append(
                f"left out, for the compiler has no estimate: {len(plan.unknown)} operation(s), "
                f"{', '.join(plan.unknown[:4])}"
            )
    return "\n".join(lines)


def place(name: str) -> str:
    """Describes where in the step a JAX operation is: in how many loops, and in which pass."""
    loops = name.count("while/body")
    backward = "backward " if "transpose" in name else ""
    return (
        f"{backward}{('outside the loops', 'one loop', 'loop in a loop')[min(loops, 2)]}: "
        f"{name.rsplit('/', 1)[-1]}"
    )


def with_rows(
    experiment: config.Experiment, rows: int, row_devices: int, steps_alike: bool
) -> config.Experiment | None:
    """Changes an experiment to microbatches of `rows` rows on each device.

    Args:
        experiment: The settings.
        rows: Rows of a microbatch on one device.
        row_devices: Number of devices that the rows are distributed over.
        steps_alike: Whether to keep the batch size and change the number of microbatches. If False,
            the batch becomes one microbatch.

    Returns:
        The settings, or None if the batch is not a multiple of such microbatches.
    """
    if not steps_alike:
        return dataclasses.replace(
            experiment,
            run=dataclasses.replace(experiment.run, batch_size=rows * row_devices, accumulate=1),
        )
    parts, rest = divmod(experiment.run.batch_size, rows * row_devices)
    return (
        None
        if rest or not parts
        else dataclasses.replace(
            experiment, run=dataclasses.replace(experiment.run, accumulate=parts)
        )
    )


def largest_rows(plan: Plan, where: Slice, devices: list) -> tuple[int, list[int]]:
    """Finds the largest microbatch that fits.

    Memory grows almost linearly with the rows. Interpolation between the compiled microbatches
    therefore needs few compilations.

    Returns:
        Rows of the largest microbatch on one device (0: none fits), and all rows that were tried.
    """
    limit, row_devices = where.chip.hbm / where.chip.cores, plan.mesh["data"] * plan.mesh["fsdp"]
    needs, fitting = {plan.rows: plan.needed}, {plan.rows} if plan.fits else set()
    guess = 2 * plan.rows if plan.fits else max(plan.rows // 2, 1)
    while guess and guess not in needs and len(needs) < 6:
        tried = compile_for(
            with_rows(plan.experiment, guess, row_devices, steps_alike=False), where, devices
        )
        needs[guess] = tried.needed
        if tried.fits:
            fitting.add(guess)
        (low, less), (high, more) = min(needs.items()), max(needs.items())
        guess = int(low + (0.99 * limit - less) * (high - low) / max(more - less, 1.0))
        if refused := set(needs) - fitting:
            guess = min(guess, min(refused) - 1)
        guess = max(guess - guess % (8 if guess > 16 else 1), 0)
        if fitting and guess <= max(fitting):
            break
    return max(fitting, default=0), list(needs)


def sweep(experiment: config.Experiment, where: Slice, devices: list):
    """Prints a table of microbatches, rematerialisation and meshes, and the fastest that fits.

    All choices have the same batch size.
    """
    import tqdm

    count = len(devices)
    meshes = [config.Mesh(count, 1, 1)] + [
        config.Mesh(count // size, size, 1)
        for size in (8, count)
        if count % size == 0 and size <= count
    ]
    choices = []
    for mesh in dict.fromkeys(meshes):
        if experiment.model.width % mesh.fsdp:
            continue
        for remat in (False, True):
            for rows in (32, 16, 8, 4):
                model = dataclasses.replace(experiment.model, rematerialise=remat)
                choice = with_rows(
                    dataclasses.replace(experiment, mesh=mesh, model=model),
                    rows,
                    count,
                    steps_alike=True,
                )
                choices += [choice] if choice else []
    plans = []
    for choice in tqdm.tqdm(
        choices, desc="compiling", unit="program", disable=None, file=sys.stderr
    ):
        plans.append(compile_for(choice, where, devices))
    print(
        f"{'mesh':<16}{'rows a device':>14}{'parts':>7}{'remat':>7}{'GiB a device':>14}{'fits':>6}"
        f"{'step, ms':>10}{'tokens/s':>14}"
    )
    for plan in plans:
        run, tokens = (
            plan.experiment.run,
            plan.experiment.run.batch_size * plan.experiment.corpus.sequence_length,
        )
        speed = (
            f"{1e3 * plan.seconds:>10.1f}{tokens / plan.seconds:>14,.0f}"
            if plan.seconds and plan.fits
            else f"{'-':>10}{'-':>14}"
        )
        mesh, fits = (
            "x".join(map(str, plan.mesh.values())),
            {True: "yes", False: "no", None: "?"}[plan.fits],
        )
        print(
            f"{mesh:<16}{plan.rows:>14}{run.accumulate:>7}"
            f"{plan.experiment.model.rematerialise!s:>7}{plan.needed / GIB:>14.2f}{fits:>6}{speed}"
        )
    good = [plan for plan in plans if plan.fits and plan.seconds]
    if good:
        best = min(good, key=lambda plan: plan.seconds)
        flags = {f"Mesh.{name}": size for name, size in best.mesh.items()}
        flags |= {
            "Run.accumulate": best.experiment.run.accumulate,
            "Model.rematerialise": best.experiment.model.rematerialise,
        }
        print("recommended: " + " ".join(f"--gin.{name}={value}" for name, value in flags.items()))


if __name__ == "__main__":
    cli.run(main)
