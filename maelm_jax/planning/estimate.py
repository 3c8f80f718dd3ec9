"""Compiles the training step of an experiment for a target, and reads memory and time from it."""

import dataclasses
import math
import re
import typing

import jax
import numpy as np

from maelm_jax import config
from maelm_jax.planning import hlo
from maelm_jax.planning.targets import GIB, Target
from maelm_jax.pretraining import objective
from maelm_jax.training import attention_report, flops, sharding

UNITS = {"M": 2**20, "G": GIB, "T": 1024 * GIB}


class StepTime(typing.NamedTuple):
    """Seconds of a step. Nothing overlaps in it."""

    computing: float
    sending: float
    method: str  # where `computing` comes from
    peak_flops: float  # FLOP/s of all devices, from the data sheet

    @property
    def seconds(self) -> float:
        return self.computing + self.sending


@dataclasses.dataclass(frozen=True)
class Plan:
    """One experiment compiled for one target. Bytes are per device."""

    experiment: config.Experiment
    mesh: sharding.MeshSizes
    rows: int  # of a microbatch on one device
    attention: str  # the attention backend and why
    model_flops: float  # of a step on all devices
    needed: float  # bytes in all
    fits: bool | None  # None: no limit is known
    memory: dict[str, float] | None = None  # bytes by kind. None: the compiler refused the step
    collectives: list[hlo.Collective] = dataclasses.field(default_factory=list)
    time: StepTime | None = None  # None: no estimate
    program: jax.stages.Compiled | None = None  # None: refused by the compiler, or not kept

    @property
    def tokens(self) -> int:
        """Tokens of a step on all devices."""
        return self.experiment.run.batch_size * self.experiment.corpus.sequence_length


class LoweredStep(typing.NamedTuple):
    """A training step that is ready to be compiled."""

    mesh: jax.sharding.Mesh
    lowered: jax.stages.Lowered
    argument_bytes: float  # of one device: its part of the state and of the batch


def lower_step(experiment: config.Experiment, devices: list) -> LoweredStep:
    """Lowers the training step of an experiment for devices that need not exist here."""
    sizes = sharding.mesh_sizes(experiment.mesh, len(devices))
    # The order of the devices changes neither the memory nor the bytes sent.
    mesh = jax.sharding.Mesh(np.asarray(devices).reshape(sizes), sizes._fields)
    sharding.check_mesh(experiment, mesh)
    abstract = objective.abstract_step(experiment, mesh)
    arguments = sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(abstract.arguments)
    )
    return LoweredStep(mesh, abstract.train_step.lower(*abstract.arguments), arguments)


def compile_step(
    experiment: config.Experiment, target: Target, devices: list, keeps_program: bool = False
) -> Plan:
    """Compiles the training step of an experiment for the devices of `targets.start_compiler`.

    If the compiler refuses the step because it does not fit, `fits` is False and `needed` is what
    the compiler says that it needs.
    """
    lowered = lower_step(experiment, devices)
    sizes, run = sharding.MeshSizes(**lowered.mesh.shape), experiment.run
    plan = Plan(
        experiment,
        sizes,
        rows=run.batch_size // (sizes.data * sizes.fsdp * run.accumulate),
        attention=attention_report.describe(experiment, lowered.mesh),
        model_flops=sum(flops.flops_terms(experiment, experiment.vocabulary.size).values()),
        needed=0.0,
        fits=None,
    )
    try:
        program = lowered.lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = needed_bytes(str(error), lowered.argument_bytes)
        if needed is None:
            raise
        return dataclasses.replace(plan, needed=needed, fits=False)
    analysis, text = program.memory_analysis(), program.as_text()
    memory = {
        "parameters, optimiser's state, batch": analysis.argument_size_in_bytes,
        "activations, gradients, temporaries": analysis.temp_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes,
        "program": analysis.generated_code_size_in_bytes,
    }
    needed, collectives = sum(memory.values()), hlo.collectives(text)
    return dataclasses.replace(
        plan,
        needed=needed,
        fits=None if target.memory is None else needed <= target.memory,
        memory=memory,
        collectives=collectives,
        time=step_time(text, collectives, plan.model_flops, target),
        program=program if keeps_program else None,
    )


def needed_bytes(message: str, arguments: float) -> float | None:
    """Reads from a compiler's error message how many bytes a program needs on a device.

    Returns None for another error. If the message names the temporaries only, `arguments`, in
    bytes, is added.
    """
    match = re.search(r"(Used |HLO temporaries \()([\d.]+)([MGT])", message)
    if "RESOURCE_EXHAUSTED" not in message or match is None:
        return None
    used = float(match[2]) * UNITS[match[3]]
    return used if match[1] == "Used " else used + arguments


def step_time(
    text: str, collectives: list[hlo.Collective], model_flops: float, target: Target
) -> StepTime | None:
    """Estimates the time of a step from its optimised HLO text. None for simulated devices.

    `model_flops` are those of all devices.
    """
    if target.kind is None:
        return None
    sending = sum(one.sent_bytes / _link(one, target) for one in collectives)
    peak = flops.PEAK_FLOPS[target.kind] * target.chips
    if target.clock is None:
        return StepTime(model_flops / peak, sending, "model FLOPs at the peak", peak)
    estimate = hlo.cycles(text)
    kernels = estimate.kernel_bytes / target.bandwidth
    method = "the compiler's cycles"
    if kernels:
        method += f", and {1e3 * kernels:.1f} ms of Pallas kernels by their bytes"
    if estimate.unknown:
        method += f", without {estimate.unknown} operation(s) that it does not estimate"
    return StepTime(estimate.cycles / target.clock + kernels, sending, method, peak)


def _link(collective: hlo.Collective, target: Target) -> float:
    """Bytes/s that a device sends in a collective. A ring is as fast as its slowest link."""
    hosts = {device // target.devices_a_host for device in collective.members}
    return target.network if len(hosts) > 1 else target.link
