"""The log of a run: reads the metrics of finished steps, times the steps, and writes lines."""

import collections.abc
import contextlib
import math
import sys
import time
import typing

import jax
import numpy as np
import tqdm

from maelm_jax import config
from maelm_jax.training import checkpoint, metrics

# Seconds between two drawings of the progress bar, on a terminal and in a file.
TERMINAL_INTERVAL, FILE_INTERVAL = 0.5, 30.0


class Diverged(config.RunError):
    """The loss or the gradient is not finite. Launchers do not restart on exit status 3."""

    status = 3


class Speed(typing.NamedTuple):
    """The speed of the steps since the last reading."""

    steps_per_second: float
    median_seconds: float  # of one step


class StepTimer:
    """Measures the time between ends of steps, without pauses and the first step (compilation)."""

    def __init__(self):
        self._last_end: float | None = None
        self._seconds: list[float] = []  # one for each step since the last reading

    def restart(self):
        """Forgets the steps since the last reading. The next step is compiled, so not timed."""
        self._last_end, self._seconds = None, []

    def step_done(self):
        """Records that a step ended now."""
        now = time.perf_counter()
        if self._last_end is not None:
            self._seconds.append(now - self._last_end)
        self._last_end = now

    @contextlib.contextmanager
    def paused(self) -> collections.abc.Iterator[None]:
        """Excludes the block. No step may run on the device: its time would be excluded too."""
        began = time.perf_counter()
        yield
        if self._last_end is not None:
            self._last_end += time.perf_counter() - began

    def speed(self) -> Speed | None:
        """Returns the speed since the last reading, or None when no step was timed since then."""
        if not self._seconds:
            return None
        speed = Speed(len(self._seconds) / sum(self._seconds), float(np.median(self._seconds)))
        self._seconds = []
        return speed


class StepWork(typing.NamedTuple):
    """The work of a step, and the rate that the devices could do it at."""

    tokens: float  # of a step; the mean if steps differ
    flops: float  # model FLOPs of a step
    peak_flops: float | None  # FLOP/s of all devices. None: unknown, and MFU is not logged


class StepLog:
    """Context manager that writes a run's log lines and shows its progress bar.

    Call `begin_phase` before the first step.

    Args:
        run: Number of steps, and how often a line is written.
        learning_rates: Of every step. Computing one while logging would wait for the running step.
        start: Steps already done.
        writer: Writes metrics.jsonl.
        checkpoints: Checkpoints that the message of a diverged run names.
    """

    def __init__(
        self,
        run: config.Run,
        learning_rates: np.ndarray,
        start: int,
        writer: metrics.Writer,
        checkpoints: checkpoint.Checkpoints,
    ):
        self.timer = StepTimer()
        self._run, self._learning_rates = run, learning_rates
        self._work: StepWork | None = None
        self._writer, self._checkpoints = writer, checkpoints
        self._bar = _progress_bar(run.train_steps, start)
        self._compiling = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._bar.close()

    def begin_phase(self, work: StepWork):
        """Begins steps of this work. No step may run. The speed of earlier ones is dropped."""
        self._work = work
        self.timer.restart()

    def finish(self, step: int, values: dict) -> dict[str, float]:
        """Waits for a step and returns its metrics. Raises Diverged if they are not finite."""
        numbers = {name: float(value) for name, value in jax.device_get(values).items()}
        self.timer.step_done()
        if self._compiling:
            self._compiling = False
            self._bar.set_description("training", refresh=False)
        self._bar.update(1)
        if not (math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"])):
            with contextlib.suppress(Exception):  # a write that fails is not among the steps then
                self._checkpoints.wait()
            newest = max(self._checkpoints.steps(), default=None)
            good = (
                "there is no checkpoint yet"
                if newest is None
                else f"the last good checkpoint is step {newest}"
            )
            raise Diverged(
                f"step {step}: loss {numbers['loss']}, gradient norm {numbers['grad_norm']}; "
                f"stopped; {good}. A lower learning rate may help"
            )
        return numbers

    def finish_and_write(self, step: int, values: dict):
        """Finishes a step after which nothing was measured, and writes its line if one is due."""
        self.write(step, self.finish(step, values), {})

    def write(self, step: int, numbers: dict[str, float], evaluation: dict[str, float | int]):
        """Writes a line if one is due.

        A line is due every `log_every` steps, after the last step, and if `evaluation` has values.

        Args:
            step: Number of the step.
            numbers: Its metrics, from `finish`.
            evaluation: Values of evaluations and measurements after the step.
        """
        last = step == self._run.train_steps
        if step % self._run.log_every and not evaluation and not last:
            return
        line = {
            "loss": numbers["loss"],
            "accuracy": numbers["accuracy"],
            "learning_rate": float(self._learning_rates[step - 1]),
            "grad_norm": numbers["grad_norm"],
        }
        self._writer.write(step, line | self._speed_values() | evaluation)
        shown = {"loss": f"{numbers['loss']:.3f}"}
        shown |= {name: f"{value:.4g}" for name, value in evaluation.items()}
        self._bar.set_postfix(shown, refresh=False)

    def _speed_values(self) -> dict[str, float | None]:
        speed = self.timer.speed()
        if speed is None:  # only the first step of a phase is done: it is compiled, so not timed
            return {"tokens_per_second": None}
        values: dict[str, float | None] = {
            "tokens_per_second": speed.steps_per_second * self._work.tokens,
            "step_seconds": speed.median_seconds,
            "model_flops_per_second": speed.steps_per_second * self._work.flops,
        }
        if self._work.peak_flops is not None:
            values["mfu"] = values["model_flops_per_second"] / self._work.peak_flops
        return values


def _progress_bar(total: int, start: int) -> tqdm.tqdm:
    """Returns the progress bar of process 0. It says "compiling" until the first step is done."""
    interval = TERMINAL_INTERVAL if sys.stderr.isatty() else FILE_INTERVAL
    return tqdm.tqdm(
        total=total,
        initial=start,
        unit="step",
        desc="compiling",
        disable=jax.process_index() > 0,
        mininterval=interval,
    )
