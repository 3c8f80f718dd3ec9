"""Searches for the largest microbatch that fits and for the fastest mesh and microbatch."""

import dataclasses
import typing

import tqdm

from maelm_jax import config
from maelm_jax.planning import estimate
from maelm_jax.planning.target import Target

MOST_COMPILATIONS = 6  # of one search for the largest microbatch
USABLE = 0.99  # share of the memory that the search aims at
SWEEP_ROWS = (32, 16, 8, 4)  # rows of a microbatch on one device
SWEEP_FSDP = (1, 8)  # sizes of Mesh.fsdp to try, besides the number of devices


class LargestMicrobatch(typing.NamedTuple):
    """The result of a search."""

    rows: int  # on one device; 0: none fits
    compiled: list[int]  # rows of all microbatches that were compiled


def with_microbatch(
    experiment: config.Experiment, rows: int, row_devices: int
) -> config.Experiment | None:
    """Divides the batch into microbatches of `rows` rows on each device.

    Args:
        experiment: The settings.
        rows: Rows of a microbatch on one device.
        row_devices: Number of devices that the rows are distributed over.

    Returns:
        The settings, or None if the batch is not a multiple of such microbatches.
    """
    parts, rest = divmod(experiment.run.batch_size, rows * row_devices)
    if rest or not parts:
        return None
    return dataclasses.replace(
        experiment, run=dataclasses.replace(experiment.run, accumulate=parts)
    )


def with_rows(experiment: config.Experiment, rows: int, row_devices: int) -> config.Experiment:
    """Gives each device `rows` rows at a time. The number of microbatches stays."""
    batch_size = rows * row_devices * experiment.run.accumulate
    run = dataclasses.replace(experiment.run, batch_size=batch_size)
    return dataclasses.replace(experiment, run=run)


def largest_microbatch(plan: estimate.Plan, target: Target, devices: list) -> LargestMicrobatch:
    """Finds the largest microbatch that fits.

    Memory grows almost linearly with the rows. Interpolation between the compiled microbatches
    therefore needs few compilations.
    """
    row_devices = plan.mesh.data * plan.mesh.fsdp
    needed = {plan.rows: plan.needed}
    fitting = {plan.rows} if plan.fits else set()
    rows = 2 * plan.rows if plan.fits else max(plan.rows // 2, 1)
    while rows and rows not in needed and len(needed) < MOST_COMPILATIONS:
        attempt = estimate.compile_step(
            with_rows(plan.experiment, rows, row_devices), target, devices
        )
        needed[rows] = attempt.needed
        if attempt.fits:
            fitting.add(rows)
        rows = _next_rows(needed, fitting, USABLE * target.memory)
        if fitting and rows <= max(fitting):
            break
    return LargestMicrobatch(max(fitting, default=0), list(needed))


def _next_rows(needed: dict[int, float], fitting: set[int], limit: float) -> int:
    """Rows at which a line through the smallest and the largest microbatch meets the limit.

    Args:
        needed: {rows: bytes} of the microbatches compiled so far.
        fitting: Rows of those that fit.
        limit: Bytes to meet.

    Returns:
        The rows, fewer than those of any microbatch that did not fit. Above 16, a multiple of 8.
    """
    (few, bytes_of_few), (many, bytes_of_many) = min(needed.items()), max(needed.items())
    bytes_a_row = max(bytes_of_many - bytes_of_few, 1.0) / max(many - few, 1)
    rows = int(few + (limit - bytes_of_few) / bytes_a_row)
    refused = set(needed) - fitting
    if refused:
        rows = min(rows, min(refused) - 1)
    if rows > 16:
        rows -= rows % 8
    return max(rows, 0)


def choices(experiment: config.Experiment, devices: int) -> list[config.Experiment]:
    """Meshes, rematerialisation and microbatches to try, all with the same batch size.

    `Mesh.tensor` stays as it is set.
    """
    result: list[config.Experiment] = []
    tensor = experiment.mesh.tensor
    row_devices = devices // tensor
    widths = (experiment.model.width, experiment.model.decoder.width)
    for fsdp in dict.fromkeys((*SWEEP_FSDP, row_devices)):
        if row_devices % fsdp or any(width % fsdp for width in widths):
            continue
        mesh = config.Mesh(row_devices // fsdp, fsdp, tensor)
        for rematerialise in (False, True):
            model = dataclasses.replace(experiment.model, rematerialise=rematerialise)
            choice = dataclasses.replace(experiment, mesh=mesh, model=model)
            divided = (with_microbatch(choice, rows, row_devices) for rows in SWEEP_ROWS)
            result += filter(None, divided)
    return result


def sweep(
    experiment: config.Experiment, target: Target, devices: list
) -> typing.Iterator[estimate.Plan]:
    """Compiles all of `choices`, one for each plan that is asked for. Shows a progress bar.

    Raises:
        ConfigError: There are none: `Mesh.tensor` does not divide the devices, or the batch is no
            multiple of any of the microbatches.
    """
    tensor = experiment.mesh.tensor
    if tensor < 1 or len(devices) % tensor:
        raise config.ConfigError(
            f"Mesh.tensor={tensor}: --sweep keeps it and tries others of Mesh.data and Mesh.fsdp. "
            f"Give a divisor of {len(devices)} devices"
        )
    candidates = choices(experiment, len(devices))
    if not candidates:
        sizes = ", ".join(map(str, SWEEP_ROWS))
        raise config.ConfigError(
            f"Run.batch_size={experiment.run.batch_size} is no multiple of {len(devices)} devices "
            f"/ Mesh.tensor={tensor} x {sizes} rows, the microbatches of --sweep. "
            "Give another --gin.BATCH_SIZE"
        )
    bar = tqdm.tqdm(candidates, desc="compiling", unit="program", disable=None)
    return (estimate.compile_step(candidate, target, devices) for candidate in bar)


def fastest(plans: list[estimate.Plan]) -> estimate.Plan | None:
    """The plan with the least estimated time of those that fit. None: none has an estimate."""
    timed = [plan for plan in plans if plan.fits and plan.seconds]
    return min(timed, key=lambda plan: plan.seconds, default=None)
