"""The phases of a pretraining run: consecutive steps with the same shapes, so one compiled step.

A phase has an `Experiment` of its own, in which the settings that change during the run have the
values of the phase. Every function of settings accepts it.
"""

import dataclasses
import itertools
import typing

from maelm_jax import config


class Phase(typing.NamedTuple):
    """Consecutive steps with the same settings."""

    start: int  # steps before it
    end: int  # steps of the run until its end
    first_row: int  # rows that the steps before it trained on
    experiment: config.Experiment

    @property
    def steps(self) -> int:
        """Number of its steps."""
        return self.end - self.start


def of_run(experiment: config.Experiment) -> list[Phase]:
    """Returns the phases of a run, in their order.

    Without plateaus and ramp there is one. A plateau that rounds to no step has no phase.
    """
    masking, run, steps = experiment.masking, experiment.run, experiment.run.train_steps
    rates = [(round(share * steps), rate) for share, rate in masking.rate_plateaus]
    rates = rates or [(0, masking.rate)]
    lengths = [count for _, count in run.batch_size_ramp]
    size_starts = itertools.accumulate(lengths, initial=0)
    sizes = list(zip(size_starts, (size for _, size in run.named_batch_sizes), strict=True))
    starts = sorted({start for start, _ in (*rates, *sizes) if start < steps})
    result, row = [], 0
    for start, end in itertools.pairwise([*starts, steps]):
        rate, size = _value_at(rates, start), _value_at(sizes, start)
        settings = dataclasses.replace(
            experiment,
            masking=dataclasses.replace(masking, rate=rate, rate_plateaus=()),
            run=dataclasses.replace(run, batch_size=size, batch_size_ramp=()),
        )
        result.append(Phase(start, end, row, settings))
        row += size * (end - start)
    return result


def _value_at(values: list[tuple[int, typing.Any]], step: int) -> typing.Any:
    """Returns the last value that begins at `step` or before. `values`: (first step, value)."""
    return [value for start, value in values if start <= step][-1]


def of_step(phases: list[Phase], steps_done: int) -> Phase:
    """Returns the phase of the next step. After the last step: the last phase."""
    return next((phase for phase in phases if steps_done < phase.end), phases[-1])


def describe(phase: Phase) -> str:
    """Returns one line: the steps of a phase, its mask rate and its batch size."""
    rate, size = phase.experiment.masking.rate, phase.experiment.run.batch_size
    return f"steps {phase.start + 1:,} to {phase.end:,}: mask rate {rate:g}, {size} rows a step"
