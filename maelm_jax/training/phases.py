"""The phases of a pretraining run: consecutive steps with the same shapes, so one compiled step.

A phase is an `Experiment` in which the settings that change during the run have the values of the
phase. All that computes something from settings takes a phase's like those of any run.
"""

import dataclasses
import typing

from maelm_jax import config


class Phase(typing.NamedTuple):
    """Consecutive steps with the same settings."""

    start: int  # steps before it
    end: int  # steps of the run until its end
    experiment: config.Experiment

    @property
    def steps(self) -> int:
        """Number of its steps."""
        return self.end - self.start


def of_run(experiment: config.Experiment) -> list[Phase]:
    """Returns the phases of a run, in their order. Without plateaus there is one.

    A plateau that rounds to no step has no phase.
    """
    masking, steps = experiment.masking, experiment.run.train_steps
    plateaus = masking.rate_plateaus or ((0.0, masking.rate),)
    starts = [round(start * steps) for start, _ in plateaus]
    phases = []
    for (_, rate), start, end in zip(plateaus, starts, [*starts[1:], steps], strict=True):
        if start < end:
            settings = dataclasses.replace(masking, rate=rate, rate_plateaus=())
            phases.append(Phase(start, end, dataclasses.replace(experiment, masking=settings)))
    return phases


def of_step(phases: list[Phase], step: int) -> Phase:
    """Returns the phase of the step after `step` steps. After the last step: the last phase."""
    return next((phase for phase in phases if step < phase.end), phases[-1])


def describe(phase: Phase) -> str:
    """Returns one line: the steps of a phase and its mask rate."""
    rate = phase.experiment.masking.rate
    return f"steps {phase.start + 1:,} to {phase.end:,}: mask rate {rate:g}"
