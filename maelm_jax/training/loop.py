"""The training loop: steps, evaluations, checkpoints, and the stop on SIGTERM and on NaN.

Pretraining and fine-tuning share it. `Job` holds all that depends on the task.
"""

import collections.abc
import contextlib
import dataclasses
import time
import typing

import jax
import numpy as np

from maelm_jax import config, stopping
from maelm_jax.training import checkpoint, coordination, metrics, sigterm, step_log
from maelm_jax.training.step import evaluated_params

STOPPED = stopping.STOPPED


class Evaluation(typing.NamedTuple):
    """Result of an evaluation."""

    state: tuple  # the state to continue with
    values: dict[str, float | int]  # to log


class CompiledPhase(typing.NamedTuple):
    """Consecutive steps that one compiled function computes."""

    start: int  # steps of the run before it
    # (state, batch) -> (state, metrics)
    train_step: collections.abc.Callable[[tuple, typing.Any], tuple[tuple, dict]]
    work: step_log.StepWork  # of one step
    batch: collections.abc.Callable[[int], typing.Any]  # step, from 0 -> its batch on the devices


@dataclasses.dataclass
class Job:
    """What the loop runs."""

    run: config.Run
    phases: tuple[CompiledPhase, ...]  # the first starts at 0
    evaluate: collections.abc.Callable[[tuple], Evaluation]
    ranks: collections.abc.Callable[[dict], dict[str, float | int]]  # params -> values to log
    learning_rates: np.ndarray  # of every step

    def phase_of(self, steps_done: int) -> CompiledPhase:
        """Returns the phase of the next step."""
        return [phase for phase in self.phases if phase.start <= steps_done][-1]

    def ranks_after(self, step: int) -> bool:
        """Returns whether the ranks are to be measured after a step."""
        every, last = self.run.rank_every, step == self.run.train_steps
        return bool(every) and (last or step % every == 0)

    def evaluates_after(self, step: int) -> bool:
        """Returns whether an evaluation is due after a step."""
        return step == self.run.train_steps or step % self.run.eval_every == 0


class LoopResult(typing.NamedTuple):
    """How the loop ended."""

    state: tuple
    status: int  # exit status: 0, or 143 after SIGTERM


@contextlib.contextmanager
def closing(writer, checkpoints):
    """Context manager that closes both. An error of the run has priority over one of closing."""
    try:
        yield
    except BaseException:
        for resource in (writer, checkpoints):
            with contextlib.suppress(Exception):
                resource.close()
        raise
    try:
        writer.close()
    finally:
        checkpoints.close()


class RunningStep(typing.NamedTuple):
    """A step that the device computes."""

    number: int
    metrics: dict


def run(
    job: Job, state: tuple, start: int, writer: metrics.Writer, checkpoints: checkpoint.Checkpoints
) -> LoopResult:
    """Trains until `job.run.train_steps`.

    The loop reads the metrics of step n while step n + 1 runs, so the device never waits for the
    host. Before an evaluation, a measurement, a checkpoint or another phase, the loop waits for the
    running step. Otherwise the step's time would be lost in the pause.

    Args:
        job: What to run.
        state: The state after `start` steps. The device may still be computing it.
        start: Steps already done.
        writer: Writes the metrics.
        checkpoints: Where states are saved.

    Raises:
        Diverged: The loss or the gradient is not finite. The state is not saved.
        RunError: A checkpoint cannot be written.
    """
    log = step_log.StepLog(job.run, job.learning_rates, start, writer, checkpoints)
    cadence = SaveCadence(job.run)
    running: RunningStep | None = None
    phase: CompiledPhase | None = None
    with sigterm.SigtermWatcher() as watcher, log:
        for step in range(start + 1, job.run.train_steps + 1):
            due = job.phase_of(step - 1)
            if phase is not due:
                if running is not None:
                    log.finish_and_write(*running)
                    running = None
                if phase is not None:
                    # A run that is killed while the new step is compiled goes on from here.
                    _save_with_lines(writer, checkpoints, step - 1, state, wait=True)
                    cadence.record_save()
                phase = due
                log.begin_phase(phase.work)
            state, values = phase.train_step(state, phase.batch(step - 1))
            watcher.start()
            if running is not None:
                log.finish_and_write(*running)
            running, numbers, evaluation = RunningStep(step, values), None, {}
            if job.evaluates_after(step) or job.ranks_after(step):
                numbers = log.finish(*running)
                with log.timer.paused():
                    state, evaluation = _evaluate(job, step, state)
            last, stop = step == job.run.train_steps, watcher.stops_after(step)
            saves = cadence.due(step) or last or stop
            if numbers is not None or saves:
                numbers = log.finish(*running) if numbers is None else numbers
                running = None
                with log.timer.paused():
                    log.write(step, numbers, evaluation)
                    if saves:
                        _save_with_lines(writer, checkpoints, step, state, last or stop)
                        cadence.record_save()
            if stop:
                return LoopResult(state, STOPPED)
    return LoopResult(state, 0)


def _evaluate(job: Job, step: int, state: tuple) -> Evaluation:
    """Runs the evaluation and the measurement of ranks that are due after a step."""
    values: dict[str, float | int] = {}
    if job.evaluates_after(step):
        state, values = job.evaluate(state)
    if job.ranks_after(step):
        values = values | job.ranks(evaluated_params(state))
    # An evaluation may return a new state that the device still computes.
    jax.block_until_ready(state)
    return Evaluation(state, values)


class SaveCadence:
    """Decides when to save: every `checkpoint_every` steps and `checkpoint_minutes` after the last.

    The clock of process 0 decides for all processes. In a multi-process run it decides at log lines
    only, because each decision costs a message.
    """

    def __init__(self, settings: config.Run):
        self._settings = settings
        self._saved_at: float | None = None  # set after the first step: compilation does not count

    def record_save(self):
        """Records that a checkpoint was saved now."""
        self._saved_at = time.monotonic()

    def due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after this step. Call it once for every step."""
        minutes = self._settings.checkpoint_minutes
        if self._saved_at is None:
            self.record_save()
        if step % self._settings.checkpoint_every == 0:
            return True
        if minutes is None:
            return False
        if coordination.is_multi_process() and step % self._settings.log_every:
            return False
        late = time.monotonic() - self._saved_at >= 60 * minutes
        return coordination.broadcast_flag(f"checkpoint of step {step}", late)


def _save_with_lines(
    writer: metrics.Writer, checkpoints: checkpoint.Checkpoints, step: int, state: tuple, wait: bool
):
    """Saves a checkpoint, after the lines that a run which resumes there needs."""
    writer.send()
    save(checkpoints, step, state, wait)


def save(checkpoints: checkpoint.Checkpoints, step: int, state: tuple, wait: bool):
    """Saves a checkpoint; `wait` waits until it is on disk. Raises RunError if storage fails."""
    try:
        checkpoints.save(step, state)
        if wait:
            checkpoints.wait()
    except Exception as error:  # Orbax passes on any exception of its storage layers
        reason = " ".join(str(error).split())[:300]
        raise config.RunError(
            f"step {step}: a checkpoint could not be written: {reason}. Complete checkpoints: "
            f"{checkpoints.steps() or 'none'}. Free some space or check the storage, then give the "
            "same command again"
        ) from error
