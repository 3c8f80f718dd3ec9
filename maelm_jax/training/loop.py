"""The one loop: cadence of logging, evaluation and checkpoints; SIGTERM; the stop on NaN. It knows nothing of what is trained."""

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
from maelm_jax.training import checkpoint, distributed, metrics

STOPPED = stopping.STOPPED


class Diverged(config.RunError):
    """The loss or the gradient is not finite. Exit status 3: launchers do not start the command again."""

    status = 3


@dataclasses.dataclass
class Job:
    """What the loop runs."""

    run: config.Run
    train_step: collections.abc.Callable[[tuple, typing.Any], tuple[tuple, dict]]  # (state, batch) -> (state, metrics)
    batch: collections.abc.Callable[[int], typing.Any]  # step (from 0) -> its batch on the devices
    evaluate: collections.abc.Callable[[tuple], tuple[tuple, dict[str, float]]]  # state -> (state to go on with, what is logged as eval_*)
    learning_rates: np.ndarray  # of every step; one computed when it is logged would wait behind the step that the device has begun
    tokens_per_step: float  # the mean, where steps differ
    flops_per_step: float
    peak_flops: float | None  # None: unknown, and MFU is left out
    # More to measure now and then: (every so many steps and after the last, 0: never; params -> what is logged).
    measures: tuple[tuple[int, collections.abc.Callable[[dict], dict[str, float]]], ...] = ()


class Interrupted:
    """Notes SIGTERM instead of dying of it, from `listen` to the end of the context. All processes stop after the same step."""

    def __enter__(self):
        self._listens, self._asked, self._heard, self._before = False, False, False, None
        return self

    def listen(self):
        """To be called once the first step is compiled: until then there is nothing to save, and no reason to wait."""
        if self._listens:
            return
        self._listens = True
        if distributed.several():
            distributed.listen()
        else:
            self._wakeup = signal.set_wakeup_fd(-1)  # stopping.py's: it must not learn of a signal that is handled here
            self._before = signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_):
        self._asked = True

    def after(self, step: int) -> bool:
        """Whether the run is to stop after this step; asked once for every step."""
        if distributed.several():
            return multihost_utils.reached_preemption_sync_point(step)
        self._heard = self._asked
        return self._heard

    def __exit__(self, failed, *_):
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        if self._asked and not self._heard and not failed:  # while the last step was saved: as if it came now
            signal.raise_signal(signal.SIGTERM)


def run(job: Job, state: tuple, start: int, writer: metrics.Writer, checkpoints: checkpoint.Checkpoints) -> tuple[tuple, int]:
    """Trains until `job.run.train_steps`; returns the last state and the exit status (0, or 143 after SIGTERM).

    `start` is the number of steps that `state` has behind it; the state itself may still be in the making, while the first
    step is compiled. Step n's metrics are read while step n + 1 runs, so the device never waits for the host. Before an
    evaluation, a measurement or a checkpoint the loop waits for the running step: its time is a step's, not a pause's.

    Raises:
        Diverged: The loss or gradient is not finite. The state is then not saved.
        RunError: A checkpoint cannot be written.
    """
    settings = job.run
    with Interrupted() as interrupted, progress_bar(settings.train_steps, start) as bar:
        recorder, saves = Recorder(job, writer, checkpoints, bar), SaveCadence(settings)
        running = None  # the step that the device computes, and its metrics
        for step in range(start + 1, settings.train_steps + 1):
            state, values = job.train_step(state, job.batch(step - 1))
            interrupted.listen()
            if running is not None:
                recorder.write(running[0], recorder.finish(*running), {})
            running, numbers, extra = (step, values), None, {}
            last = step == settings.train_steps
            evaluates = last or step % settings.eval_every == 0
            measures = [measure for every, measure in job.measures if every and (last or step % every == 0)]
            if evaluates or measures:
                numbers = recorder.finish(*running)
                with recorder.clock.paused():
                    if evaluates:
                        state, extra = job.evaluate(state)
                    for measure in measures:
                        extra = extra | measure(state.params)
                    jax.block_until_ready(state)  # an evaluation may return a new state, still in the making
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
    """The bar of process 0. It says "compiling" until the first step is done."""
    interval = 0.5 if sys.stderr.isatty() else 30.0
    return tqdm.tqdm(
        total=total, initial=start, unit="step", desc="compiling", disable=jax.process_index() > 0, mininterval=interval
    )


class Recorder:
    """Reads the metrics of finished steps, times the steps, and writes the log lines."""

    def __init__(self, job: Job, writer: metrics.Writer, checkpoints: checkpoint.Checkpoints, bar: tqdm.tqdm):
        self.clock = Clock()
        self._job, self._writer, self._checkpoints, self._bar = job, writer, checkpoints, bar
        self._any_finished = False

    def finish(self, step: int, values: dict) -> dict[str, float]:
        """Waits until the device is done with a step; returns its metrics. Raises Diverged when they are not finite."""
        numbers = {name: float(value) for name, value in jax.device_get(values).items()}
        self.clock.step_done()
        if not self._any_finished:
            self._any_finished = True
            self._bar.set_description("training", refresh=False)
        self._bar.update(1)
        if not (math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"])):
            good = max(self._checkpoints.steps(), default=None)
            kept = f"the last good checkpoint is step {good}" if good is not None else "there is no checkpoint yet"
            raise Diverged(
                f"step {step}: loss {numbers['loss']}, gradient norm {numbers['grad_norm']}; stopped; {kept}. "
                "A lower learning rate may help"
            )
        return numbers

    def write(self, step: int, numbers: dict[str, float], extra: dict):
        """Writes a step's line when one is due, or when an evaluation or measurement gave something (`extra`)."""
        job = self._job
        if step % job.run.log_every and not extra and step != job.run.train_steps:
            return
        line: dict[str, float | None] = {name: numbers[name] for name in ("loss", "accuracy")}
        line |= {"learning_rate": float(job.learning_rates[step - 1]), "grad_norm": numbers["grad_norm"]}
        speed = self.clock.speed()
        if speed is None:  # the first step of this process, which is not timed
            line["tokens_per_second"] = None
        else:
            line["tokens_per_second"] = speed.steps_per_second * job.tokens_per_step
            line["step_seconds"] = speed.median_seconds
            line["model_flops_per_second"] = speed.steps_per_second * job.flops_per_step
            if job.peak_flops is not None:
                line["mfu"] = line["model_flops_per_second"] / job.peak_flops
        self._writer.write(step, line | extra)
        shown = {"loss": f"{numbers['loss']:.3f}"} | {name: f"{value:.4g}" for name, value in extra.items()}
        self._bar.set_postfix(shown, refresh=False)


class SaveCadence:
    """When a checkpoint is due: every `Run.checkpoint_every` steps, and `Run.checkpoint_minutes` after the last one.

    Process 0's watch decides for all processes. Several processes compare at log lines only: one message each is cheap there.
    """

    def __init__(self, settings: config.Run):
        self._settings = settings
        self._saved_at: float | None = None  # the first step's compilation does not count

    def saved(self):
        self._saved_at = time.monotonic()

    def due(self, step: int) -> bool:
        """Asked once for every step."""
        minutes = self._settings.checkpoint_minutes
        if self._saved_at is None:
            self.saved()
        if step % self._settings.checkpoint_every == 0:
            return True
        if minutes is None or distributed.several() and step % self._settings.log_every:
            return False
        late = time.monotonic() - self._saved_at >= 60 * minutes
        return distributed.decided_by_first(f"checkpoint of step {step}", late)


def save(checkpoints: checkpoint.Checkpoints, step: int, state: tuple, wait: bool):
    """Saves, and turns a storage error into RunError. What was whole before stays whole."""
    try:
        checkpoints.save(step, state)
        if wait:
            checkpoints.wait()
    except Exception as error:  # Orbax hands on whatever its storage layers raise
        whole = [kept for kept in checkpoints.steps() if kept != step]
        reason = " ".join(str(error).split())[:300]
        raise config.RunError(f"a checkpoint could not be written by step {step}: {reason}. Whole checkpoints: {whole or 'none'}") from error


class Speed(typing.NamedTuple):
    """Of the steps since the last reading."""

    steps_per_second: float
    median_seconds: float  # of one step


class Clock:
    """Times steps by the moments at which each is seen to be done. Pauses and the first step (compilation) are left out."""

    def __init__(self):
        self._last = None
        self._seconds: list[float] = []  # of each step since the last reading

    def step_done(self):
        now = time.perf_counter()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now

    @contextlib.contextmanager
    def paused(self) -> collections.abc.Iterator[None]:
        """Leaves out the time of the block. No step may be running on the device: its time would be lost."""
        began = time.perf_counter()
        yield
        if self._last is not None:
            self._last += time.perf_counter() - began

    def speed(self) -> Speed | None:
        """None when no step was timed since the last reading."""
        if not self._seconds:
            return None
        speed = Speed(len(self._seconds) / sum(self._seconds), float(np.median(self._seconds)))
        self._seconds = []
        return speed
