"""Plans as text."""

import collections

from maelm_jax import tables
from maelm_jax.planning import hlo
from maelm_jax.planning.estimate import Plan
from maelm_jax.planning.target import GIB, Compute, Target

SECONDS_A_DAY = 86_400
MOST_NAMED = 4  # operations without an estimate that are named
# Each is wider than its values, so that the lines of a sweep align.
SWEEP_COLUMNS = (
    "data x fsdp x tensor",
    "rows a device",
    "parts",
    "rematerialise",
    "GiB a device",
    "fits",
    "estimated step, ms",
    "estimated tokens/s",
)
DEPTHS = ("outside the loops", "one loop", "loop in a loop")


def of_plan(plan: Plan, target: Target) -> str:
    """Describes one plan: memory, collectives and, if it is estimated, time."""
    run, length = plan.experiment.run, plan.experiment.corpus.sequence_length
    head = (
        f"mesh {plan.mesh._asdict()}; {run.batch_size} rows of {length} a step: {plan.rows} a "
        f"device in each of {run.accumulate} part(s); "
        f"rematerialise {plan.experiment.model.rematerialise}\n{plan.attention}"
    )
    if not plan.compiled:
        return f"{head}\n\n{_refusal(plan, target)}"
    parts = [head, _memory(plan, target)]
    if plan.collectives:
        parts.append(_collectives(plan.collectives))
    a_device = plan.model_flops / target.count
    flops = f"model FLOPs a step: {plan.model_flops:.4g}; {a_device:.4g} a device"
    parts.append("\n".join([flops, *_time(plan, target)]))
    return "\n\n".join(parts)


def _refusal(plan: Plan, target: Target) -> str:
    limit = f" of {target.memory / GIB:.2f}" if target.memory else ""
    return f"does not fit: the compiler needs {plan.needed / GIB:.2f} GiB a device{limit}"


def _memory(plan: Plan, target: Target) -> str:
    rows = [(name, f"{value / GIB:.3f}") for name, value in plan.memory.items()]
    rows.append(("all", f"{plan.needed / GIB:.3f}"))
    lines = tables.plain(("memory", "GiB a device"), rows)
    if target.memory is None:
        return lines
    if not plan.fits:
        return f"{lines}\n{_refusal(plan, target)}"
    return f"{lines}\nfits in {target.memory / GIB:.2f} GiB a device"


def _collectives(collectives: list[hlo.Collective]) -> str:
    """Table of the collectives. Those of one kind and origin are one line."""
    groups = collections.defaultdict(list)
    for one in collectives:
        groups[one.kind, one.group, one.times, origin_of(one.name)].append(one)
    sent = {key: sum(one.sent_bytes for one in ones) / 1e6 for key, ones in groups.items()}
    rows = []
    for key in sorted(groups, key=sent.get, reverse=True):
        kind, devices, times, origin = key
        megabytes = sum(one.array_bytes for one in groups[key]) / 1e6
        rows.append((kind, origin, devices, f"{megabytes:.3f}", times, f"{sent[key]:.3f}"))
    header = (
        "collective",
        "from",
        "devices",
        "array, MB",
        "times a step",
        "sent a step, MB",
    )
    return tables.plain(header, rows, left=2)


def origin_of(name: str) -> str:
    """Describes where in the step a JAX operation is: in how many loops, and in which pass."""
    backward = "backward " if "transpose" in name else ""
    depth = DEPTHS[min(name.count("while/body"), len(DEPTHS) - 1)]
    # The compiler joins the names of merged operations with colons.
    operation = name.rsplit("/", 1)[-1].split(":")[0].rstrip(")")
    return f"{backward}{depth}: {operation or 'unnamed'}"


def _time(plan: Plan, target: Target) -> list[str]:
    """Lines about the estimated time; none without an estimate."""
    if plan.seconds is None:
        return []
    peak, steps = target.peak_flops, plan.experiment.run.train_steps
    days = plan.seconds * steps / SECONDS_A_DAY
    lines = [
        (
            f"estimated step: {1e3 * plan.compute.seconds:.1f} ms computing "
            f"({plan.compute.method}) + {1e3 * plan.sending:.1f} ms sending (bytes / link speed)"
        ),
        (
            f"that is {plan.tokens / plan.seconds:,.0f} tokens/s, MFU "
            f"{plan.model_flops / plan.seconds / peak:.1%} of {peak / 1e15:.2f} PFLOP/s"
        ),
        f"{steps:,} steps: {days:.2f} days, {24 * days * target.chips:,.0f} chip-hours",
    ]
    if plan.compute.groups:
        lines += ["", _kernels(plan.compute)]
    unknown = plan.compute.unknown
    if unknown:
        names = ", ".join(unknown[:MOST_NAMED])
        lines.append(
            f"not in the time, because the compiler has no estimate: {len(unknown)} "
            f"operation(s), {names}"
        )
    return lines


def _kernels(compute: Compute) -> str:
    """Table of the kernels by kind."""
    rows = [
        (group.kind, f"{group.launches:,}", f"{1e3 * group.seconds:.2f}")
        for group in compute.groups
    ]
    launches = sum(group.launches for group in compute.groups)
    rows.append(("all", f"{launches:,}", f"{1e3 * compute.seconds:.2f}"))
    return tables.plain(("kernels", "launches a step", "estimated ms a step"), rows)


def sweep_header() -> str:
    """Line above the lines of a sweep's plans."""
    return tables.plain(SWEEP_COLUMNS, [])


def sweep_line(plan: Plan) -> str:
    """Line of one plan of a sweep. It can be printed before the other plans are known."""
    time, rate = "-", "-"
    if plan.seconds and plan.fits:
        time, rate = f"{1e3 * plan.seconds:.1f}", f"{plan.tokens / plan.seconds:,.0f}"
    cells = (
        "x".join(map(str, plan.mesh)),
        plan.rows,
        plan.experiment.run.accumulate,
        plan.experiment.model.rematerialise,
        f"{plan.needed / GIB:.2f}",
        {True: "yes", False: "no", None: "?"}[plan.fits],
        time,
        rate,
    )
    return tables.plain(SWEEP_COLUMNS, [cells]).splitlines()[-1]


def recommendation(plan: Plan | None) -> str:
    """The flags that choose the mesh, the microbatch and the rematerialisation of a plan.

    `plan` is None if no plan of a sweep fits and has an estimated time.
    """
    if plan is None:
        return "recommended: none. No plan fits and has an estimated time"
    flags = {f"Mesh.{name}": size for name, size in plan.mesh._asdict().items()}
    flags["Run.accumulate"] = plan.experiment.run.accumulate
    flags["Model.rematerialise"] = plan.experiment.model.rematerialise
    return "recommended: " + " ".join(f"--gin.{name}={value}" for name, value in flags.items())
