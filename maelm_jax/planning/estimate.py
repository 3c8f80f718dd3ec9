"""Compiles the training step of an experiment for a target, and reads memory and time from it."""

import dataclasses
import math
import re

import jax
import numpy as np

from maelm_jax import config
from maelm_jax.planning import hlo
from maelm_jax.planning.target import GIB, Compute, Target
from maelm_jax.pretraining import objective
from maelm_jax.training import attention_report, flops, sharding

BYTES_OF_A_VALUE = 4  # every value of the state and of a batch
UNITS = {"M": 2**20, "G": GIB, "T": 1024 * GIB}


@dataclasses.dataclass(frozen=True)
class Plan:
    """One experiment compiled for one target. Bytes are per device, seconds are per step."""

    experiment: config.Experiment
    mesh: sharding.MeshSizes
    rows: int  # of a microbatch on one device
    memory: dict[str, float]  # bytes by kind
    needed: float  # bytes in all
    fits: bool | None  # None: no limit is known
    model_flops: float  # of a step on all devices
    attention: str = ""  # the attention backend and why
    compiled: bool = False  # False: the compiler refused, because the step does not fit
    collectives: list[hlo.Collective] = dataclasses.field(default_factory=list)
    compute: Compute | None = None  # None: no estimate
    sending: float | None = None  # seconds. None: no estimate

    @property
    def seconds(self) -> float | None:
        if self.compute is None or self.sending is None:
            return None
        return self.compute.seconds + self.sending

    @property
    def tokens(self) -> int:
        """Tokens of a step on all devices."""
        return self.experiment.run.batch_size * self.experiment.corpus.sequence_length


def compile_step(experiment: config.Experiment, target: Target, devices: list) -> Plan:
    """Compiles the training step of an experiment.

    Args:
        experiment: The settings.
        target: What to compile for.
        devices: Its devices, as `target.devices()` returns them.

    Returns:
        The plan. If the step does not fit, `fits` is False and `needed` is what the compiler says
        that it needs.
    """
    sizes = sharding.mesh_sizes(experiment.mesh, len(devices))
    # The order of the devices changes neither the memory nor the bytes sent.
    mesh = jax.sharding.Mesh(np.asarray(devices).reshape(sizes), sizes._fields)
    sharding.check_mesh(experiment, mesh)
    abstract = objective.abstract_step(experiment, mesh)
    state, batch = abstract.state, abstract.batch
    memory = {
        "parameters": _bytes_of_a_device(state.params),
        "optimiser's state": _bytes_of_a_device(state.opt_state),
        "batch": _bytes_of_a_device(batch),
    }
    plan = Plan(
        experiment,
        sizes,
        rows=_microbatch_rows(experiment, sizes),
        memory=memory,
        needed=0.0,
        fits=None,
        model_flops=sum(flops.flops_terms(experiment, experiment.vocabulary.size).values()),
        attention=attention_report.describe(experiment, mesh),
    )
    try:
        program = abstract.train_step.lower(*abstract.arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        needed = needed_bytes(str(error), sum(memory.values()))
        if needed is None:
            raise
        return dataclasses.replace(plan, needed=needed, fits=False)
    gradient = sum(x.size for x in jax.tree.leaves(state.params)) * BYTES_OF_A_VALUE / sizes.tensor
    return _with_program(plan, program, gradient, target)


def _bytes_of_a_device(tree) -> float:
    """Bytes that one device holds of a tree of sharded arrays."""
    leaves = jax.tree.leaves(tree)
    return BYTES_OF_A_VALUE * sum(math.prod(x.sharding.shard_shape(x.shape)) for x in leaves)


def _microbatch_rows(experiment: config.Experiment, sizes: sharding.MeshSizes) -> int:
    run = experiment.run
    return run.batch_size // (sizes.data * sizes.fsdp * run.accumulate)


def needed_bytes(message: str, arguments: float) -> float | None:
    """Reads from a compiler's error message how many bytes a program needs on a device.

    Args:
        message: The message.
        arguments: Bytes of the program's arguments. Some messages name the temporaries only.

    Returns:
        The bytes, or None if the error is another one.
    """
    match = re.search(r"(Used |HLO temporaries \()([\d.]+)([MGT])", message)
    if "RESOURCE_EXHAUSTED" not in message or match is None:
        return None
    used = float(match[2]) * UNITS[match[3]]
    return used if match[1] == "Used " else used + arguments


def _with_program(plan: Plan, program, gradient: float, target: Target) -> Plan:
    """Adds to a plan what the compiled program says.

    Args:
        plan: The plan.
        program: The compiled step.
        gradient: Bytes of the gradient of one device's rows.
        target: What the program was compiled for.
    """
    analysis, text = program.memory_analysis(), program.as_text()
    memory = plan.memory | {
        "gradient (of one device's rows)": gradient,
        "activations and temporaries": max(analysis.temp_size_in_bytes - gradient, 0),
        "program": analysis.generated_code_size_in_bytes,
    }
    needed = sum(memory.values())
    collectives = hlo.collectives(text)
    return dataclasses.replace(
        plan,
        compiled=True,
        memory=memory,
        needed=needed,
        fits=None if target.memory is None else needed <= target.memory,
        collectives=collectives,
        compute=target.compute(text),
        sending=target.sending(collectives),
    )
