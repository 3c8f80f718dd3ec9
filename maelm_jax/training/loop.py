"""The training loop: logging, evaluation, checkpoints, and the stop on SIGTERM and on NaN.

Pretraining and fine-tuning share it. `Job` holds all that depends on the task.
"""

import collections.abc
import contextlib
import dataclasses
import math
import signal
import sys
import time
import typing

import jax
import numpy as np
import tqdm
from jax.experimental import multihost_utils

from maelm_jax import config, stopping
from maelm_jax.training import checkpoint, coordination, metrics, process_exit

STOPPED = stopping.STOPPED


class Diverged(config.RunError):
    """The loss or the gradient is not finite. Launchers do not restart on exit status 3."""

    status = 3


@dataclasses.dataclass
class Job:
    """What the loop runs."""

    run: config.Run
    # (state, batch) -> (state, metrics)
    train_step: collections.abc.Callable[[tuple, typing.Any], tuple[tuple, dict]]
    batch: collections.abc.Callable[[int], typing.Any]  # step, from 0 -> its batch on the devices
    # state -> (state to continue with, values to log)
    evaluate: collections.abc.Callable[[tuple], tuple[tuple, dict[str, float]]]
    # Of every step. Computing one while logging would wait for the running step.
    learning_rates: np.ndarray
    tokens_per_step: float  # the mean if steps differ
    flops_per_step: float
    peak_flops: float | None  # FLOP/s of all devices. None: unknown, and MFU is not logged
    # (interval in steps, params -> values to log). Each also runs after the last step. 0: never.
    measures: tuple[tuple[int, collections.abc.Callable[[dict], dict[str, float]]], ...] = ()


class Interrupted:
    """Context manager that records SIGTERM. All processes of a run stop after the same step."""

    def __enter__(self):
        self._listens, self._asked, self._heard, self._before = False, False, False, None
        return self

    def listen(self):
        """Starts recording SIGTERM. The loop calls it when the first step is compiled.

        Before that, SIGTERM ends the run at once (stopping.py): there is nothing to save.
        """
        if self._listens:
            return
        self._listens = True
        if coordination.is_multi_process():
            process_exit.record_sigterm()
        else:
            # stopping.py reads this descriptor. It must not see a signal that is handled here.
            self._wakeup = signal.set_wakeup_fd(-1)
            self._before = signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_):
        self._asked = True

    def after(self, step: int) -> bool:
        """Returns whether the run stops after this step. Call it once for every step."""
        if coordination.is_multi_process():
            return multihost_utils.reached_preemption_sync_point(step)
        self._heard = self._asked
        return self._heard

    def __exit__(self, failed, *_):
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        # The signal came while the last step was saved: deliver it again.
        if self._asked and not self._heard and not failed:
            signal.raise_signal(signal.SIGTERM)


def run(
    job: Job, state: tuple, start: int, writer: metrics.Writer, checkpoints: checkpoint.Checkpoints
) -> tuple[tuple, int]:
    """Trains until `job.run.train_steps`.

    The loop reads the metrics of step n while step n + 1 runs, so the device never waits for the
    host. Before an evaluation, a measurement or a checkpoint, the loop waits for the running step.
    Otherwise the step's time would be lost in the pause.

    Args:
        job: What to run.
        state: The state after `start` steps. The device may still be computing it.
        start: Steps already done.

    Returns:
        The last state, and the exit status: 0, or 143 after SIGTERM.

    Raises:
        Diverged: The loss or the gradient is not finite. The state is not saved.
        RunError: A checkpoint cannot be written.
    """
    settings = job.run
    with Interrupted() as interrupted, progress_bar(settings.train_steps, start) as bar:
        recorder, saves = Recorder(job, writer, checkpoints, bar), SaveCadence(settings)
        running = None  # (number, metrics) of the step that the device computes
        for step in range(start + 1, settings.train_steps + 1):
            state, values = job.train_step(state, job.batch(step - 1))
            interrupted.listen()
            if running is not None:
                recorder.write(running[0], recorder.finish(*running), {})
            running, numbers, extra = (step, values), None, {}
            last = step == settings.train_steps
            evaluates = last or step % settings.eval_every == 0
            measures = [
                measure for every, measure in job.measures if every and (last or step % every == 0)
            ]
            if evaluates or measures:
                numbers = recorder.finish(*running)
                with recorder.clock.paused():
                    if evaluates:
                        state, extra = job.evaluate(state)
                    for measure in measures:
                        extra = extra | measure(state.params)
                    # An evaluation may return a new state that the device still computes.
                    jax.block_until_ready(state)
            stop = interrupted.after(step)
            saves_now = saves.due(step) or last or stop
            if numbers is not None or saves_now:
                numbers = recorder.finish(*running) if numbers is None else numbers
                running = None
                with recorder.clock.paused():
                    recorder.write(step, numbers, extra)
                    if saves_now:
                        save(checkpoints, step, state, wait=last or stop)
                        saves.saved()
                        writer.send()
            if stop:
                return state, STOPPED
    return state, 0


def progress_bar(total: int, start: int) -> tqdm.tqdm:
    """Returns the progress bar of process 0. It says "compiling" until the first step is done."""
    interval = 0.5 if sys.stderr.isatty() else 30.0
    return tqdm.tqdm(
        total=total,
        initial=start,
        unit="step",
        desc="compiling",
        disable=jax.process_index() > 0,
        mininterval=interval,
    )


class Recorder:
    """Reads the metrics of finished steps, times the steps, and writes the log lines."""

    def __init__(
        self, job: Job, writer: metrics.Writer, checkpoints: checkpoint.Checkpoints, bar: tqdm.tqdm
    ):
        self.clock = Clock()
        self._job, self._writer, self._checkpoints, self._bar = job, writer, checkpoints, bar
        self._any_finished = False

    def finish(self, step: int, values: dict) -> dict[str, float]:
        """Waits for a step and returns its metrics. Raises Diverged if they are not finite."""
        numbers = {name: float(value) for name, value in jax.device_get(values).items()}
        self.clock.step_done()
        if not self._any_finished:
            self._any_finished = True
            self._bar.set_description("training", refresh=False)
        self._bar.update(1)
        if not (math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"])):
            good = max(self._checkpoints.steps(), default=None)
            kept = (
                f"the last good checkpoint is step {good}"
                if good is not None
                else "there is no checkpoint yet"
            )
            raise Diverged(
                f"step {step}: loss {numbers['loss']}, gradient norm {numbers['grad_norm']}; "
                f"stopped; {kept}. A lower learning rate may help"
            )
        return numbers

    def write(self, step: int, numbers: dict[str, float], extra: dict):
        """Writes a line every `log_every` steps, after the last one, and if `extra` has values."""
        job = self._job
        if step % job.run.log_every and not extra and step != job.run.train_steps:
            return
        line: dict[str, float | None] = {name: numbers[name] for name in ("loss", "accuracy")}
        line |= {
            "learning_rate": float(job.learning_rates[step - 1]),
            "grad_norm": numbers["grad_norm"],
        }
        speed = self.clock.speed()
        if speed is None:  # only the first step of this process is done, and it is not timed
            line["tokens_per_second"] = None
        else:
            line["tokens_per_second"] = speed.steps_per_second * job.tokens_per_step
            line["step_seconds"] = speed.median_seconds
            line["model_flops_per_second"] = speed.steps_per_second * job.flops_per_step
            if job.peak_flops is not None:
                line["mfu"] = line["model_flops_per_second"] / job.peak_flops
        self._writer.write(step, line | extra)
        shown = {"loss": f"{numbers['loss']:.3f}"} | {
            name: f"{value:.4g}" for name, value in extra.items()
        }
        self._bar.set_postfix(shown, refresh=False)


class SaveCadence:
    """Decides when to save: every `checkpoint_every` steps and `checkpoint_minutes` after the last.

    The clock of process 0 decides for all processes. In a multi-process run it decides at log lines
    only, because each decision costs a message.
    """

    def __init__(self, settings: config.Run):
        self._settings = settings
        self._saved_at: float | None = None  # set after the first step: compilation does not count

    def saved(self):
        self._saved_at = time.monotonic()

    def due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after this step. Call it once for every step."""
        minutes = self._settings.checkpoint_minutes
        if self._saved_at is None:
            self.saved()
        if step % self._settings.checkpoint_every == 0:
            return True
        if minutes is None or coordination.is_multi_process() and step % self._settings.log_every:
            return False
        late = time.monotonic() - self._saved_at >= 60 * minutes
        return coordination.broadcast_flag(f"checkpoint of step {step}", late)


def save(checkpoints: checkpoint.Checkpoints, step: int, state: tuple, wait: bool):
    """Saves a checkpoint; `wait` waits until it is on disk. Raises RunError if storage fails."""
    try:
        checkpoints.save(step, state)
        if wait:
            checkpoints.wait()
    except Exception as error:  # Orbax passes on any exception of its storage layers
        whole = [kept for kept in checkpoints.steps() if kept != step]
        reason = " ".join(str(error).split())[:300]
        raise config.RunError(
            f"a checkpoint could not be written by step {step}: {reason}. "
            f"Whole checkpoints: {whole or 'none'}"
        ) from error


class Speed(typing.NamedTuple):
    """The speed of the steps since the last reading."""

    steps_per_second: float
    median_seconds: float  # of one step


class Clock:
    """Measures the time between ends of steps, without pauses and the first step (compilation)."""

    def __init__(self):
        self._last = None
        self._seconds: list[float] = []  # one for each step since the last reading

    def step_done(self):
        """Records that a step ended now."""
        now = time.perf_counter()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now

    @contextlib.contextmanager
    def paused(self) -> collections.abc.Iterator[None]:
        """Excludes the block. No step may run on the device: its time would be excluded too."""
        began = time.perf_counter()
        yield
        if self._last is not None:
            self._last += time.perf_counter() - began

    def speed(self) -> Speed | None:
        """Returns the speed since the last reading, or None when no step was timed since then."""
        if not self._seconds:
            return None
        speed = Speed(len(self._seconds) / sum(self._seconds), float(np.median(self._seconds)))
        self._seconds = []
        return speed
