"""The training loop: steps, evaluations, log lines, checkpoints, and the stop on signals and NaN.

Pretraining and fine-tuning share it. `Job` holds all that depends on the task.
"""

import collections
import collections.abc
import contextlib
import dataclasses
import math
import os
import signal
import sys
import time
import typing

import jax
import numpy as np
from jax.experimental import multihost_utils

from maelm_jax import config, progress
from maelm_jax.training import checkpoint, distributed, metrics, optimizers, profiling

RECENT_STEPS = 50  # whose mean time the progress bar takes for that of the steps to come
TIMED_STEPS = 5  # below RECENT_STEPS; after them the time of the run is estimated
SHORT_RUN = 300.0  # seconds; the time of a shorter run is not printed


class Diverged(config.RunError):
    """The loss or the gradient is not finite. Launchers do not restart on exit status 3."""

    status = 3


class Evaluation(typing.NamedTuple):
    """Result of an evaluation."""

    state: tuple  # the state to continue with
    values: dict[str, float | int]  # to log
    ends: bool = False  # whether the run ends after it, before its last step


@dataclasses.dataclass
class Job:
    """What the loop runs."""

    run: config.Run
    # (state, batch, learning rate) -> (state, metrics)
    train_step: collections.abc.Callable[..., tuple[tuple, dict]]
    batch: collections.abc.Callable[[int], typing.Any]  # step, from 0 -> its batch on the devices
    learning_rates: optimizers.LearningRates | np.ndarray  # of every step, float32
    tokens: float  # of text in a step, without padding; the mean if steps differ
    flops: float  # model FLOPs of a step
    peak_flops: float | None  # FLOP/s of all devices. None: unknown, and MFU is not logged
    evaluate: collections.abc.Callable[[tuple], Evaluation]
    ranks: collections.abc.Callable[[dict], dict[str, float | int]]  # params -> values to log
    kept_steps: frozenset[int] = frozenset()  # checkpoints are written after them too

    def ranks_after(self, step: int) -> bool:
        """Returns whether the ranks are to be measured after a step."""
        every, last = self.run.rank_every, step == self.run.train_steps
        return bool(every) and (last or step % every == 0)

    def evaluates_after(self, step: int) -> bool:
        """Returns whether an evaluation is due after a step."""
        return step == self.run.train_steps or step % self.run.eval_every == 0


class RunningStep(typing.NamedTuple):
    """A step that the device computes."""

    number: int
    metrics: dict


def run(
    job: Job,
    state: tuple,
    start: int,
    writer: metrics.Writer,
    checkpoints: checkpoint.Checkpoints,
    trace: profiling.StepTrace | None = None,
) -> tuple:
    """Trains until `job.run.train_steps`, or an evaluation that ends, and returns the last state.

    The loop reads the metrics of step n while step n + 1 runs, so the device never waits for the
    host. Before an evaluation, a measurement or a checkpoint, the loop waits for the running step.
    Otherwise the step's time would be lost in the pause. `state` is that after `start` steps. The
    device may still be computing it. `trace` profiles some steps.

    Raises:
        Diverged: The loss or the gradient is not finite. The state is not saved.
        SystemExit: A signal stopped the run, and its state is saved. The code is 128 + the signal:
            143 for SIGTERM, on which launchers start the run again. With one process also 130 for
            Ctrl-C.
        RunError: The workdir was removed or renamed.
        OSError: A checkpoint or the metrics cannot be written.
    """
    last = job.run.train_steps
    running: RunningStep | None = None
    clock = SaveClock(job.run)
    with (
        StopSignals() as signals,
        StepLog(job, start, writer, checkpoints) as log,
        trace or contextlib.nullcontext(),
    ):
        for step in range(start + 1, last + 1):
            rate = job.learning_rates[step - 1]
            if trace:
                trace.step_begins(step, state)
            state, values = job.train_step(state, job.batch(step - 1), rate)
            if trace:
                trace.step_ends(step, state)
            if running is not None:
                log.write(running.number, log.finish(*running), {})
            running, evaluation = RunningStep(step, values), {}
            measures = job.evaluates_after(step) or job.ranks_after(step)
            if measures:
                numbers = log.finish(*running)
                with log.timer.paused():
                    state, evaluation, ends = _evaluate(job, step, state)
                last = step if ends else last
            stopped = signals.stopped_after(step)
            is_due = step % job.run.checkpoint_every == 0 or step in job.kept_steps
            saves = clock.is_due(step) or is_due or step == last or stopped
            if saves and not measures:
                numbers = log.finish(*running)
            if measures or saves:
                running = None
                with log.timer.paused():
                    log.write(step, numbers, evaluation)
                    if saves:
                        # A run that resumes at this step needs the lines before it.
                        writer.send()
                        checkpoints.save(step, state)
                        clock.restart()
                        if step == last or stopped:
                            checkpoints.wait()
                            writer.write(step, {"checkpoint": step})
            if stopped and step < last:
                name = signal.Signals(stopped).name
                log.print(f"stopped by {name} at step {step}; the same command goes on from there")
                raise SystemExit(128 + stopped)
            if step == last:
                break
    return state


def _evaluate(job: Job, step: int, state: tuple) -> Evaluation:
    """Runs the evaluation and the measurement of ranks that are due after a step."""
    values: dict[str, float | int] = {}
    ends = False
    if job.evaluates_after(step):
        state, values, ends = job.evaluate(state)
    if job.ranks_after(step):
        values = values | job.ranks(state.params)
    # An evaluation may return a new state that the device still computes.
    jax.block_until_ready(state)
    return Evaluation(state, values, ends)


@contextlib.contextmanager
def closing(writer: metrics.Writer, checkpoints: checkpoint.Checkpoints):
    """Context manager that closes both. An error of the run has priority over one of closing."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            writer.close()
        if jax.process_count() == 1:  # Orbax would wait for processes that may be dead
            with contextlib.suppress(Exception):
                checkpoints.close()
        raise
    try:
        writer.close()
    finally:
        checkpoints.close()


class StopSignals:
    """Context manager that records the first SIGTERM or Ctrl-C (SIGINT). A second one kills.

    It begins when the first step is done. Before that there is nothing to save, so both end the
    process at once.

    In a run of several processes, JAX records SIGTERM from the start (its preemption service), and
    Ctrl-C ends the process without saving.
    """

    def __enter__(self):
        self._handlers: dict[int, typing.Any] = {}  # those before, by signal
        self._received = 0
        return self

    def _record(self, number, _frame):
        self._received = number
        for either in self._handlers:
            signal.signal(either, signal.SIG_DFL)
        # A print could be interrupted by this handler, and then fail.
        os.write(2, b"\nsaving a checkpoint; a second signal ends the process at once\n")

    def stopped_after(self, step: int) -> int:
        """Returns the signal that stops the run after this step, or 0. Call it for every step."""
        if jax.process_count() > 1:  # a signal to one process counts for all
            return signal.SIGTERM * multihost_utils.reached_preemption_sync_point(step)
        if not self._handlers:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._handlers[number] = signal.signal(number, self._record)
        return self._received

    def __exit__(self, error, *_):
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._received and not error:  # it came at the last step: deliver it to what follows
            signal.raise_signal(self._received)


class SaveClock:
    """Tells when a checkpoint is due by time (`Run.checkpoint_minutes`), alike in all processes."""

    def __init__(self, run: config.Run):
        self._run = run
        self.restart()

    def restart(self):
        """Counts the time from now on."""
        self._began = time.perf_counter()

    def is_due(self, step: int) -> bool:
        """Returns whether so many minutes have passed. All processes call it for every step.

        A process alone looks at its clock after each step. Of several, all wait for the answer of
        process 0, so they ask it every `log_every` steps only.
        """
        minutes = self._run.checkpoint_minutes
        if minutes is None or (jax.process_count() > 1 and step % self._run.log_every):
            return False
        has_passed = time.perf_counter() - self._began >= 60 * minutes
        return bool(distributed.from_process_zero(has_passed))


class Speed(typing.NamedTuple):
    """The speed of the steps since the last reading."""

    steps_per_second: float
    median_seconds: float  # of one step


class StepTimer:
    """Measures the time between ends of steps, without pauses and the first step (compilation)."""

    def __init__(self):
        self._last_end: float | None = None
        self._seconds: list[float] = []  # one for each step since the last reading

    def step_done(self) -> float | None:
        """Records that a step ended now. Returns its seconds, None for the first step."""
        now, before = time.perf_counter(), self._last_end
        self._last_end = now
        if before is None:
            return None
        self._seconds.append(now - before)
        return now - before

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


class StepBar(progress.Bar):
    """Progress of a run. The time left is that of the steps, without evaluations and checkpoints.

    Attributes:
        step_seconds: Recent time of a step. None: no step was timed.
        tokens_per_second: Of the newest log line.
    """

    step_seconds: float | None = None
    tokens_per_second: float | None = None

    def __init__(self, **settings: typing.Any):
        layout = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{pace}{postfix}]"
        super().__init__(bar_format=layout, delay=0.0, **settings)

    @property
    def format_dict(self):
        """The fields of the layout (an interface of tqdm)."""
        pace = ""
        if self.step_seconds is not None:
            left = self.format_interval(self.step_seconds * (self.total - self.n))
            pace = f", {left} left, {self.step_seconds:.3g} s/step"
        if self.tokens_per_second is not None:
            pace += f", {self.tokens_per_second:,.0f} tokens/s"
        return super().format_dict | {"pace": pace}


class StepLog:
    """Context manager that writes a run's log lines and shows its progress bar.

    `start` steps are done before. Each line names the newest of `checkpoints`.
    """

    def __init__(
        self, job: Job, start: int, writer: metrics.Writer, checkpoints: checkpoint.Checkpoints
    ):
        self.timer = StepTimer()
        self._job, self._writer, self._checkpoints = job, writer, checkpoints
        self._recent_seconds: collections.deque[float] = collections.deque(maxlen=RECENT_STEPS)
        self._shown: dict[str, str] = {}  # behind the progress bar
        self._bar = StepBar(
            total=job.run.train_steps,
            initial=start,
            unit="step",
            desc="compiling",
            disable=jax.process_index() > 0,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._bar.close()

    def print(self, line: str):
        """Prints a line above the progress bar, which would draw over one of `print`.

        The line is flushed, because stdout is a file under most launchers.
        """
        self._bar.write(line)
        sys.stdout.flush()

    def finish(self, step: int, values: dict) -> dict[str, float]:
        """Waits for a step and returns its metrics. Raises Diverged if they are not finite."""
        numbers = {name: float(value) for name, value in jax.device_get(values).items()}
        seconds = self.timer.step_done()
        self._shown["loss"] = f"{numbers['loss']:.3f}"
        self._bar.set_postfix(self._shown, refresh=False)
        if seconds is None:  # the first step, with compilation
            self._bar.set_description("training", refresh=False)
            self._bar.update(1)
            self._bar.refresh()  # shows the first loss
        else:
            self._recent_seconds.append(seconds)
            self._bar.step_seconds = float(np.mean(self._recent_seconds))
            self._bar.update(1)
        if not (math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"])):
            with contextlib.suppress(Exception):  # a checkpoint that cannot be written is not good
                self._checkpoints.wait()
            newest = self._checkpoints.newest()
            raise Diverged(
                f"step {step}: loss {numbers['loss']}, gradient norm {numbers['grad_norm']}; "
                f"stopped; the last good checkpoint is step {newest}. "
                "A lower learning rate may help"
            )
        if len(self._recent_seconds) == TIMED_STEPS:
            self._print_duration(step)
        return numbers

    def _print_duration(self, step: int):
        """Prints how long the steps after `step` will take, on process 0."""
        seconds, left = float(np.median(self._recent_seconds)), self._job.run.train_steps - step
        if seconds * left >= SHORT_RUN and not jax.process_index():
            duration = self._bar.format_interval(round(seconds * left))
            self.print(
                f"{seconds:.3g} s a step: the {left:,} steps that are left take about {duration} "
                "(hours:minutes:seconds), without evaluations"
            )

    def write(self, step: int, numbers: dict[str, float], evaluation: dict[str, float | int]):
        """Writes a line if one is due.

        A line is due every `log_every` steps, after the last step, and if `evaluation` has values.
        `numbers` are the metrics of the step, from `finish`.
        """
        run = self._job.run
        if step % run.log_every and not evaluation and step != run.train_steps:
            return
        line: dict[str, float | int | None] = {
            "loss": numbers["loss"],
            "accuracy": numbers["accuracy"],
            "learning_rate": float(self._job.learning_rates[step - 1]),
            "grad_norm": numbers["grad_norm"],
            "checkpoint": self._checkpoints.newest(),
        }
        if "causal_loss" in numbers:
            line["causal_loss"] = numbers["causal_loss"]
        self._checkpoints.check_in_place()
        speed = self._speed_values()
        self._writer.write(step, line | speed | evaluation)
        self._bar.tokens_per_second = speed["tokens_per_second"]
        if "eval_loss" in evaluation:
            self._shown["held-out loss"] = f"{evaluation['eval_loss']:.3f}"
            self._bar.set_postfix(self._shown, refresh=False)

    def _speed_values(self) -> dict[str, float | int | None]:
        speed, job = self.timer.speed(), self._job
        if speed is None:  # only the first step of a start is done: it is compiled, so not timed
            return {"tokens_per_second": None}
        values: dict[str, float | int | None] = {
            "tokens_per_second": speed.steps_per_second * job.tokens,
            "step_seconds": speed.median_seconds,
            "model_flops_per_second": speed.steps_per_second * job.flops,
        }
        if job.peak_flops is not None:
            values["mfu"] = values["model_flops_per_second"] / job.peak_flops
        return values
