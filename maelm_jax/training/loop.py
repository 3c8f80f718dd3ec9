"""The one loop: cadence of logging, evaluation and checkpoints; SIGTERM; the stop on NaN. It knows nothing of what is trained."""

import collections.abc
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

from maelm_jax import config
from maelm_jax.training import checkpoint, distributed, metrics

STOPPED = 143  # exit status after a checkpoint on SIGTERM: launchers start the command again


class Diverged(config.RunError):
    """The loss or the gradient is not finite."""


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
    peak_flops: float
    # More to measure now and then: (every so many steps, and after the last; params -> what is logged).
    measures: tuple[tuple[int, collections.abc.Callable[[dict], dict[str, float]]], ...] = ()


class Interrupted:
    """Notes SIGTERM instead of dying of it, for as long as the context lasts; of several processes all stop after the same step."""

    def __enter__(self):
        self._asked, self._heard, self._before = False, False, None
        if distributed.several():
            distributed.listen()
        else:
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

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
        if self._asked and not self._heard and not failed:  # while the last step was saved: as if it came now
            signal.raise_signal(signal.SIGTERM)


def run(job: Job, state: tuple, start: int, writer: metrics.Writer, checkpoints: checkpoint.Checkpoints) -> tuple[tuple, int]:
    """Trains until `job.run.train_steps`; returns the last state and the exit status (0, or 143 after SIGTERM).

    `start` is the number of steps that `state` has behind it; the state itself may still be in the making, while the first step is compiled.
    Step n's numbers are read while step n + 1 runs, so the device never waits for the host.
    Raises Diverged when the loss or gradient is not finite (the state is then not saved), RunError when a checkpoint cannot be written.
    """
    settings = job.run
    clock = Clock()
    pending = None
    quiet = {"disable": jax.process_index() > 0, "mininterval": 0.5 if sys.stderr.isatty() else 30.0}
    with Interrupted() as interrupted, tqdm.tqdm(total=settings.train_steps, initial=start, unit="step", desc="training", **quiet) as bar:

        def record(step: int, values: dict, extra: dict):
            values = {name: float(value) for name, value in jax.device_get(values).items()}
            clock.step_done()
            bar.update(1)
            if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
                good = max(checkpoints.steps(), default=None)
                kept = f"the last good checkpoint is step {good}" if good is not None else "there is no checkpoint yet"
                raise Diverged(
                    f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}; stopped; {kept}. A lower learning rate may help"
                )
            if step % settings.log_every == 0 or extra or step == settings.train_steps:
                rate = clock.steps_per_second()
                line = {name: values[name] for name in ("loss", "accuracy")}
                line |= {"learning_rate": float(job.learning_rates[step - 1]), "grad_norm": values["grad_norm"]}
                if rate is not None:
                    line |= {"tokens_per_second": rate * job.tokens_per_step, "model_flops_per_second": rate * job.flops_per_step}
                    line |= {"mfu": rate * job.flops_per_step / job.peak_flops}
                else:  # one step since the start: nothing to divide yet
                    line |= {"tokens_per_second": None}
                writer.write(step, line | extra)
                bar.set_postfix({"loss": f"{values['loss']:.3f}"} | {name: f"{value:.4g}" for name, value in extra.items()}, refresh=False)

        for step in range(start + 1, settings.train_steps + 1):
            state, values = job.train_step(state, job.batch(step - 1))
            if pending is not None:
                record(*pending)
            pending = (step, values, {})
            last = step == settings.train_steps
            if last or step % settings.eval_every == 0:
                with clock.paused():
                    state, evaluated = job.evaluate(state)
                pending = (step, values, evaluated)
            for every, measure in job.measures:
                if last or step % every == 0:
                    with clock.paused():
                        pending = (step, values, pending[2] | measure(state.params))
            stop = interrupted.after(step)
            if last or stop or step % settings.checkpoint_every == 0:
                record(*pending)
                pending = None
                with clock.paused():
                    save(checkpoints, step, state, wait=last or stop)
                    writer.send()
            if stop:
                return state, STOPPED
    return state, 0


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


class Clock:
    """Steps a second since the last reading, pauses (evaluation, checkpoints) and the first step (compilation) left out."""

    def __init__(self):
        self._last = None
        self._steps, self._seconds = 0, 0.0

    def step_done(self):
        now = time.perf_counter()
        if self._last is not None:
            self._steps, self._seconds = self._steps + 1, self._seconds + now - self._last
        self._last = now

    def paused(self):
        return self

    def __enter__(self):
        self._paused_at = time.perf_counter()

    def __exit__(self, *_):
        if self._last is not None:
            self._last += time.perf_counter() - self._paused_at

    def steps_per_second(self) -> float | None:
        if not self._steps:
            return None
        rate = self._steps / self._seconds
        self._steps, self._seconds = 0, 0.0
        return rate
