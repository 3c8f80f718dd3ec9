"""The loop on a fake device with a clock of its own: step times, what is due when, stops on NaN and signals."""

import io
import os
import re
import signal
import sys
import typing

import numpy as np
import pytest
import tqdm

from maelm_jax import config
from maelm_jax.training import checkpoint, loop, metrics, profiling

STEP, EVALUATION, SAVE = 1.0, 7.0, 3.0  # seconds
TOKENS, FLOPS, PEAK = 100.0, 6.0, 12.0  # a step, a step, a second


class Device:
    """Computes what it is handed in order, as an accelerator does: handing over takes no time, reading a result waits for it."""

    def __init__(self):
        self.now, self.free = 0.0, 0.0

    def submit(self, seconds: float, value: float = 1.0) -> "Result":
        self.free = max(self.now, self.free) + seconds
        return Result(self, self.free, value)


class Result:
    def __init__(self, device: Device, ready: float, value: float):
        self.device, self.ready, self.value = device, ready, value

    def block_until_ready(self) -> "Result":
        self.device.now = max(self.device.now, self.ready)
        return self

    def __array__(self, *_args, **_more):
        self.block_until_ready()
        return np.asarray(self.value)


class Lines(metrics.Writer):
    def __init__(self):
        self.lines, self.sent = [], False

    def write(self, step, values):
        self.lines.append({"step": step, **values})
        self.sent = False

    def send(self):
        self.sent = True


class Saves(checkpoint.Checkpoints):
    def __init__(self, device: Device, lines: Lines):
        self.device, self.lines, self.saved = device, lines, []

    def save(self, step, state):
        assert self.lines.sent, "a run that resumes here would lack the lines before it"
        self.device.now += SAVE
        self.saved.append(step)

    def check_in_place(self):
        """It writes no folder."""

    def newest(self):
        return max(self.saved, default=None)

    def wait(self):
        pass


class State(tuple):
    params: typing.ClassVar[dict] = {}

    def block_until_ready(self):
        for result in self:
            result.block_until_ready()


def train(
    monkeypatch,
    start=0,
    watch=lambda number: None,
    step_seconds=lambda number: STEP,
    loss=lambda step: 1.0,
    grad_norm=lambda step: 1.0,
    peak=PEAK,
    evaluated=lambda count: None,
    trace=None,
    kept_steps=(),
    **settings,
):
    """(lines of steps, saved steps) of a run on the fake device."""
    device, evaluations = Device(), []
    monkeypatch.setattr(loop.time, "perf_counter", lambda: device.now)
    run = config.Run(**{"log_every": 1, "eval_every": 4, "checkpoint_every": 1000, "train_steps": 10, "rank_every": 0} | settings)

    def train_step(state, number, rate):
        assert rate == number
        watch(number)
        device.now += 60.0 if number == start else 0.0  # the compiler works on the host
        done = device.submit(step_seconds(number), loss(number + 1))
        return State((done,)), {"loss": done, "accuracy": done, "grad_norm": device.submit(0.0, grad_norm(number + 1))}

    def evaluate(state):
        np.asarray(device.submit(EVALUATION))
        evaluations.append("done")
        evaluated(len(evaluations))
        return loop.Evaluation(state, {"eval_loss": 1.0, "eval_accuracy": 0.5})

    job = loop.Job(
        run=run,
        train_step=train_step,
        batch=int,
        learning_rates=np.arange(run.train_steps, dtype=np.float32),
        tokens=TOKENS,
        flops=FLOPS,
        peak_flops=peak,
        evaluate=evaluate,
        ranks=lambda params: {"rank": 1.0},
        kept_steps=frozenset(kept_steps),
    )
    lines = Lines()
    saves = Saves(device, lines)
    try:
        loop.run(job, State(), start, lines, saves, trace)
    finally:
        train.last = [line for line in lines.lines if "loss" in line], saves.saved
    return train.last


@pytest.mark.parametrize("start,steps,traced", [(0, 2, [2, 3]), (3, 4, [5, 6, 7, 8]), (0, 50, [2, 3, 4, 5, 6, 7, 8, 9]), (8, 3, []), (0, 0, [])])
def test_a_trace_holds_the_steps_asked_for_after_compilation(monkeypatch, tmp_path, start, steps, traced):
    """Steps are counted from 0. The run ends after step 9."""
    is_tracing, seen = [], []
    monkeypatch.setattr(profiling.jax.profiler, "start_trace", is_tracing.append)
    monkeypatch.setattr(profiling.jax.profiler, "stop_trace", is_tracing.clear)
    trace = profiling.StepTrace(tmp_path, start, steps)
    lines, _ = train(
        monkeypatch, start, watch=lambda number: seen.append(number) if is_tracing else None, trace=trace, log_every=100 if traced else 1
    )
    assert seen == traced and not is_tracing
    if not traced:  # nothing waits for the device
        assert {line.get("step_seconds") for line in lines} <= {STEP, None}


@pytest.mark.parametrize("log_every", [1, 2, 3])
@pytest.mark.parametrize("checkpoint_every", [3, 4, 1000])
def test_evaluations_and_checkpoints_do_not_change_the_speed_of_any_line(monkeypatch, log_every, checkpoint_every):
    lines, _ = train(monkeypatch, log_every=log_every, checkpoint_every=checkpoint_every, rank_every=5)
    timed = [line for line in lines if line["tokens_per_second"] is not None]
    assert len(timed) >= 4
    for line in timed:
        assert line["step_seconds"] == pytest.approx(STEP), line
        assert line["tokens_per_second"] == pytest.approx(TOKENS / STEP), line
        assert line["model_flops_per_second"] == pytest.approx(FLOPS / STEP) and line["mfu"] == pytest.approx(FLOPS / STEP / PEAK), line


def test_step_seconds_is_the_median_and_tokens_per_second_the_mean(monkeypatch):
    lines, _ = train(monkeypatch, log_every=5, eval_every=1000, train_steps=10, step_seconds=lambda number: 11.0 if number == 7 else 1.0)
    (line,) = [line for line in lines if line["step"] == 10]
    assert line["step_seconds"] == pytest.approx(1.0) and line["tokens_per_second"] == pytest.approx(TOKENS * 5 / 15)


def test_lines_evaluations_measurements_and_checkpoints_come_when_they_are_due(monkeypatch):
    lines, saved = train(monkeypatch, log_every=3, eval_every=4, checkpoint_every=6, rank_every=7)
    assert saved == [6, 10]
    assert [line["step"] for line in lines] == [3, 4, 6, 7, 8, 9, 10]
    assert [line["step"] for line in lines if "eval_loss" in line] == [4, 8, 10], "every four steps, and after the last"
    assert [line["step"] for line in lines if "rank" in line] == [7, 10]
    assert [line["checkpoint"] for line in lines] == [None] * 3 + [6] * 4, "the newest one that is complete"
    assert [line["learning_rate"] for line in lines] == [line["step"] - 1 for line in lines]


def test_checkpoints_come_after_the_steps_that_are_kept(monkeypatch):
    _, saved = train(monkeypatch, checkpoint_every=6, kept_steps=[1, 4, 6])
    assert saved == [1, 4, 6, 10]


def test_checkpoints_come_by_minutes_too(monkeypatch):
    """Of steps of a second, after a minute of compilation. A save takes three seconds, which do not count."""
    _, saved = train(monkeypatch, train_steps=200, eval_every=1000, log_every=1000, checkpoint_every=70, checkpoint_minutes=0.5)
    gaps = np.diff(saved)
    assert saved[0] == 1 and 70 in saved and 140 in saved and saved[-1] == 200
    assert max(gaps) <= 32 and len(saved) <= 10, "half a minute after each, also after one of checkpoint_every"


def test_several_processes_save_when_the_clock_of_process_0_says_so(monkeypatch):
    asked, now = [], [0.0]

    def from_process_zero(number):
        asked.append(number)
        return 1  # its minute is over; the clock here has not moved

    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(loop.jax, "process_count", lambda: 2)
    monkeypatch.setattr(loop.distributed, "from_process_zero", from_process_zero)
    clock = loop.SaveClock(config.Run(log_every=5, checkpoint_minutes=1.0))
    assert [step for step in range(1, 12) if clock.is_due(step)] == [5, 10] and asked == [False, False]
    assert not loop.SaveClock(config.Run(log_every=5)).is_due(5) and len(asked) == 2, "without the setting nobody waits"


@pytest.mark.parametrize("steps,seconds,told", [(10, 100.0, "08:20"), (7, 100.0, None), (1005, 3.6, "1:00:00")])
def test_a_long_run_says_how_long_it_takes(monkeypatch, capsys, steps, seconds, told):
    """After five timed steps: the first is compiled."""
    train(monkeypatch, train_steps=steps + 1, eval_every=4000, log_every=1000, step_seconds=lambda number: seconds)
    out = capsys.readouterr().out
    assert (told is None and not out) or f"take about {told} " in out


def test_a_log_file_has_the_duration_while_the_run_goes_on(monkeypatch):
    """Under a launcher, stdout is a file, which Python writes in blocks."""
    log, seen = io.BytesIO(), []
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BufferedWriter(log, 10_000), write_through=False))
    train(monkeypatch, train_steps=11, eval_every=4000, step_seconds=lambda number: 100.0, watch=lambda number: seen.append(log.getvalue()))
    assert b"take about" in seen[-1] and b"take about" not in seen[0]


def test_a_resumed_run_goes_on_with_its_step_numbers(monkeypatch):
    lines, saved = train(monkeypatch, start=7)
    assert [line["step"] for line in lines] == [8, 9, 10] and saved == [10]
    assert lines[0]["tokens_per_second"] is None and "step_seconds" not in lines[0], "it is compiled, so not timed"


def test_a_finished_run_takes_no_step(monkeypatch):
    assert train(monkeypatch, start=10) == ([], [])


@pytest.mark.parametrize("step", [3, 4, 5, 6])  # 4 is evaluated, 6 saved
def test_nothing_of_a_diverged_step_is_logged_evaluated_or_saved(monkeypatch, step):
    good = 3 if step > 3 else None
    with pytest.raises(loop.Diverged, match=rf"step {step}\b.*nan.*step {good}\b") as error:
        train(monkeypatch, checkpoint_every=3, loss=lambda number: float("nan") if number == step else 1.0)
    assert error.value.status == 3 and [line["step"] for line in train.last[0]] == list(range(1, step))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_stops_the_run_where_the_loss_is_finite(monkeypatch, value):
    with pytest.raises(loop.Diverged, match=f"step 3.*{value}"):
        train(monkeypatch, grad_norm=lambda number: value if number == 3 else 1.0)


def test_a_checkpoint_whose_write_fails_is_not_called_good(monkeypatch):
    def wait(self):
        self.saved.remove(3)
        raise OSError("no space")

    monkeypatch.setattr(Saves, "wait", wait)
    with pytest.raises(loop.Diverged, match="None"):
        train(monkeypatch, checkpoint_every=3, loss=lambda number: float("nan") if number == 5 else 1.0)


def test_the_mfu_of_an_unknown_device_is_left_out(monkeypatch):
    lines, _ = train(monkeypatch, peak=None)
    assert all("mfu" not in line for line in lines) and lines[-1]["model_flops_per_second"] == pytest.approx(FLOPS)


@pytest.fixture
def drawn(monkeypatch) -> list[str]:
    """Every state of the progress bar on a terminal that draws each of them."""
    states = []

    class Bar(loop.StepBar):
        def __init__(self, **settings):
            super().__init__(**settings | {"file": io.StringIO(), "mininterval": 0.0, "miniters": 1})

        def display(self, msg=None, pos=None):
            states.append(str(self) if msg is None else msg)

    monkeypatch.setattr(loop, "StepBar", Bar)
    return states


def test_the_progress_bar_shows_compilation_then_the_first_loss_and_the_held_out_loss(monkeypatch, drawn):
    train(monkeypatch, train_steps=3, eval_every=2, rank_every=2, log_every=1000, loss=lambda step: 10.0 + step)
    assert "compiling" in drawn[0] and "loss" not in drawn[0]
    first = next(state for state in drawn if "1/3" in state and "training" in state)
    assert "loss=11.000" in first, "at the first step, whatever log_every is"
    assert "loss=13.000, held-out loss=1.000" in drawn[-1] and "3/3" in drawn[-1]


def test_the_time_left_is_that_of_the_steps(monkeypatch, drawn):
    """Evaluations of 7 s and checkpoints of 3 s lie between steps of 60 s."""
    train(monkeypatch, train_steps=61, eval_every=4, checkpoint_every=3, step_seconds=lambda number: 60.0)
    assert " left" not in next(state for state in drawn if " 1/61" in state), "no step was timed yet"
    for step in range(2, 61):
        (left,) = {re.search(r"([\d:]+) left", state)[1] for state in drawn if f" {step}/61" in state}
        assert left == tqdm.tqdm.format_interval((61 - step) * 60.0), step


def test_the_line_of_a_stopped_run_is_not_drawn_over(monkeypatch):
    terminal = io.StringIO()  # shows both streams
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(SystemExit):
        train(monkeypatch, start=5, watch=lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 7 else None)
    before, _, after = terminal.getvalue().partition("stopped by SIGINT")
    assert before.endswith("\r"), "the line of the bar is cleared"
    assert "\n" in after.partition("\r")[0]


@pytest.mark.parametrize("number,status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends_the_run_with_its_status(monkeypatch, capsys, number, status):
    before = signal.getsignal(number)
    handlers = {}

    def watch(step):
        handlers[step] = signal.getsignal(number)
        if step == 7:
            os.kill(os.getpid(), number)

    with pytest.raises(SystemExit) as end:
        train(monkeypatch, start=5, watch=watch)
    lines, saved = train.last
    assert end.value.code == status and saved == [8] == [lines[-1]["step"]]
    assert f"stopped by {number.name} at step 8" in capsys.readouterr().out
    assert handlers[5] is before, "there is nothing to save before the first step is done"
    assert handlers[6] not in (before, signal.SIG_DFL) and signal.getsignal(number) is before


def test_of_several_processes_sigterm_saves_and_ctrl_c_does_not(monkeypatch):
    """JAX's preemption service says after which step all processes stop."""
    monkeypatch.setattr(loop.jax, "process_count", lambda: 2)
    monkeypatch.setattr(loop.multihost_utils, "reached_preemption_sync_point", lambda step: step == 8)
    with pytest.raises(SystemExit) as end:
        train(monkeypatch, start=5)
    assert end.value.code == 143 and train.last[1] == [8]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(monkeypatch, start=5, watch=lambda step: signal.raise_signal(signal.SIGINT) if step == 7 else None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert train.last[1] == []


def test_a_second_signal_ends_the_process_at_once():
    with loop.StopSignals() as signals:
        assert signals.stopped_after(1) == 0
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.stopped_after(2) == signal.SIGINT and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
            raise SystemExit
        signals._received = 0


@pytest.mark.parametrize("when", ["evaluating", "saving"])
def test_a_signal_at_the_last_step_is_delivered_to_what_follows_the_loop(when, monkeypatch):
    """As to the next run of a grid."""

    def kill_when(phase: str):
        if when == phase:
            os.kill(os.getpid(), signal.SIGTERM)

    received = []
    monkeypatch.setattr(Saves, "wait", lambda self: kill_when("saving"))
    before = signal.signal(signal.SIGTERM, lambda *_: received.append("after the loop"))
    try:
        _, saved = train(monkeypatch, train_steps=2, eval_every=1, evaluated=lambda number: kill_when("evaluating") if number == 2 else None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert saved == [2] and received == ["after the loop"]


def test_the_error_of_a_run_has_priority_over_those_of_closing():
    """A diverged run has its own exit status, by which launchers do not start it again."""
    closed = []

    class FullDisk(Lines):
        def close(self):
            closed.append("writer")
            raise OSError("no space")

    class FailedWrite(Saves):
        def close(self):
            closed.append("checkpoints")
            raise OSError("of an earlier checkpoint")

    writer, checkpoints = FullDisk(), FailedWrite(Device(), Lines())
    with pytest.raises(loop.Diverged), loop.closing(writer, checkpoints):
        raise loop.Diverged("step 3")
    with pytest.raises(OSError, match="of an earlier checkpoint"), loop.closing(writer, checkpoints):
        pass
    assert closed == ["writer", "checkpoints"] * 2
