"""How long a run takes on the devices of this process: from its own log, or from a few steps."""

import dataclasses
import functools
import operator
import re
import time
import typing

import jax
import jax.numpy as jnp
import numpy as np

from maelm_jax import config
from maelm_jax.model.kernels import linear
from maelm_jax.planning import estimate
from maelm_jax.planning.targets import GIB, Target
from maelm_jax.pretraining import objective
from maelm_jax.training import metrics, optimizers, sharding
from maelm_jax.training.workdir import Workdir

TIMED_STEPS = 3
MOST_SECONDS = 20.0  # after so many, no further step is timed
# Model FLOPs of a step that is timed, seconds. One of more than twice as many is timed with fewer
# of its rows.
MOST_FLOPS, MOST_FLOPS_OF_ACCELERATOR = 2e11, 1e15
# A run may change these when it goes on, and they change its speed.
SPEED_SETTINGS = operator.attrgetter("compute", "mesh", "run.accumulate")
PRODUCT_SIZE = 2048  # rows and columns of the matrices whose product bounds the speed of a CPU


class Duration(typing.NamedTuple):
    """How long the steps of a run take."""

    step_seconds: float
    steps: int  # that are left
    method: str  # where `step_seconds` comes from
    is_bound: bool = False  # whether no step is faster

    def __str__(self):
        seconds = self.step_seconds * self.steps
        units = (("days", 86_400), ("hours", 3600), ("minutes", 60), ("seconds", 1))
        unit, size = next((one for one in units if seconds >= 2 * one[1]), units[-1])
        about = "at least" if self.is_bound else "about"
        return (
            f"time here: {about} {seconds / size:.3g} {unit} for {self.steps:,} steps of "
            f"{self.step_seconds:.3g} s, without evaluations ({self.method})"
        )


def from_log(experiment: config.Experiment, workdir: Workdir) -> Duration | None:
    """Returns the duration of the steps that a run has left, by its newest log line with a speed.

    None if no step was timed, or only steps with other settings were.
    """
    recorded = workdir.read_settings()
    if recorded is None or config.differences(recorded, experiment):
        return None
    if SPEED_SETTINGS(recorded) != SPEED_SETTINGS(experiment):
        return None
    lines = metrics.read(workdir)
    timed = [line["step_seconds"] for line in lines if line.get("step_seconds")]
    if not timed:
        return None
    left = max(experiment.run.train_steps - lines[-1]["step"], 0)
    return Duration(timed[-1], left, f"the speed in its log, {workdir.metrics_file}")


def measure(plan: estimate.Plan, target: Target) -> Duration | str:
    """Times steps of a plan that was compiled for the devices of this process, on made-up rows.

    Returns why not if that is impossible.
    """
    run, steps = plan.experiment.run, plan.experiment.run.train_steps
    if jax.process_count() > 1 or plan.program is None or plan.fits is False:
        return "time here: not measured, because the step does not fit or has several processes"
    is_cpu = jax.default_backend() == "cpu"
    most = MOST_FLOPS if is_cpu else MOST_FLOPS_OF_ACCELERATOR
    rows = run.batch_size
    if plan.model_flops > 2 * most:
        rows, parts = _fewer_rows(plan, int(most / plan.model_flops * rows))
        if not rows:
            return _bound_by_products(plan) if is_cpu else "time here: a row is too large to time"
        smaller = dataclasses.replace(run, batch_size=rows, accumulate=parts)
        experiment = dataclasses.replace(plan.experiment, run=smaller)
        plan = estimate.compile_step(experiment, target, jax.devices(), keeps_program=True)
    free = _free_memory() if is_cpu else None
    if plan.program is None or plan.fits is False or (free is not None and plan.needed > free):
        return f"time here: not measured, because a step needs {plan.needed / GIB:.2f} GiB"
    seconds, method = _time_steps(plan), "steps on made-up rows"
    if rows < run.batch_size:
        update = _time_update(plan)  # takes as long for any number of rows
        seconds = max(seconds - update, 0.0) * run.batch_size / rows + update
        method += f", {rows} of {run.batch_size} rows a step"
    return Duration(seconds, steps, method)


def _fewer_rows(plan: estimate.Plan, most: int) -> tuple[int, int]:
    """Returns how many rows to time, at most `most`, and the number of parts to compute them in.

    They are whole microbatches of the run. If one microbatch has more rows than `most`, they are
    as many of its rows as the devices can share evenly, 0 if that is impossible.
    """
    run, causal_rows = plan.experiment.run, plan.experiment.objective.causal_rows
    microbatch = run.batch_size // run.accumulate
    if parts := most // microbatch:
        return parts * microbatch, parts
    group = plan.mesh.data * plan.mesh.fsdp * causal_rows.denominator
    return most // group * group, 1


def _time_steps(plan: estimate.Plan) -> float:
    """Returns the median seconds of TIMED_STEPS steps, or of fewer that take MOST_SECONDS."""
    experiment, size = plan.experiment, plan.experiment.vocabulary.size
    mesh = sharding.make_mesh(experiment.mesh)
    state, batch, _ = objective.abstract_step(experiment, mesh).arguments
    state = _zeros(state)
    special = config.SpecialIds.of_size(size)
    rows = np.random.default_rng(0).integers(special.unk + 1, special.mask, batch.shape, np.int32)
    rows[:, 0] = special.bos
    rows = jax.device_put(rows, batch.sharding)
    seconds = []
    while len(seconds) < TIMED_STEPS and sum(seconds) < MOST_SECONDS:
        began = time.perf_counter()
        state, _ = plan.program(state, rows, np.float32(1e-4))
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))


def _time_update(plan: estimate.Plan) -> float:
    """Returns the seconds of one update by the optimiser."""
    experiment = plan.experiment
    mesh = sharding.make_mesh(experiment.mesh)
    state = _zeros(objective.abstract_step(experiment, mesh).arguments[0])
    optimizer = optimizers.create(experiment.optimizer, experiment.compute.dtype)
    update = jax.jit(optimizer.update)
    return _fastest(lambda: update(state.params, state.opt_state, state.params))


def _zeros(state):
    """Returns a state of zeros with these shapes, types and shardings."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), state)


def _bound_by_products(plan: estimate.Plan) -> Duration:
    """Returns the duration at the speed of a product of large matrices."""
    matrix = jnp.ones((PRODUCT_SIZE, PRODUCT_SIZE), plan.experiment.compute.dtype)
    multiply = jax.jit(functools.partial(linear.product, "ij,jk->ik"))
    speed = 2 * PRODUCT_SIZE**3 / _fastest(lambda: multiply(matrix, matrix))
    method = f"its FLOPs at {speed / 1e9:.0f} GFLOP/s, as in a product of matrices"
    return Duration(plan.model_flops / speed, plan.experiment.run.train_steps, method, True)


def _fastest(compute: typing.Callable[[], typing.Any]) -> float:
    """Returns the seconds of the fastest of TIMED_STEPS calls, after one that compiles."""
    jax.block_until_ready(compute())
    seconds = []
    for _ in range(TIMED_STEPS):
        began = time.perf_counter()
        jax.block_until_ready(compute())
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _free_memory() -> float | None:
    """Returns the bytes of this machine's memory that are free. None: not known."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return float(re.search(r"^MemAvailable: +(\d+) kB", file.read(), re.M)[1]) * 1024
    except (OSError, TypeError):
        return None
