"""The loop on a fake device with a clock of its own: step times, what is due when, stops on NaN and SIGTERM."""

import functools
import io
import os
import signal
import types
import typing

import numpy as np
import pytest
import tqdm

from maelm_jax import config
from maelm_jax.training import checkpoint, loop, metrics, step_log

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

    def steps(self):
        return self.saved

    def wait(self):
        pass


class State(tuple):
    params: typing.ClassVar[dict] = {}


def rank(params: dict) -> dict[str, float]:
    return {"rank": 1.0}


def train(
    monkeypatch,
    start=0,
    watch=lambda number: None,
    step_seconds=lambda number: STEP,
    loss=lambda step: 1.0,
    grad_norm=lambda step: 1.0,
    peak=PEAK,
    ranks=rank,
    evaluated=lambda count: None,
    phase_starts=(0,),
    **settings,
):
    """(lines, saved steps, exit status) of a run on the fake device."""
    device, evaluations = Device(), []
    clock = types.SimpleNamespace(perf_counter=lambda: device.now, monotonic=lambda: device.now)
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(step_log, "time", clock)

    def train_step(phase_start, state, number):
        watch(number)
        device.now += 60.0 if number in (start, phase_start) else 0.0  # the compiler works on the host
        done = device.submit(step_seconds(number), loss(number + 1))
        return State((done,)), {"loss": done, "accuracy": done, "grad_norm": device.submit(0.0, grad_norm(number + 1))}

    def evaluate(state):
        np.asarray(device.submit(EVALUATION))
        evaluations.append("done")
        evaluated(len(evaluations))
        return loop.Evaluation(state, {"eval_loss": 1.0})

    run = config.Run(**{"log_every": 1, "eval_every": 4, "checkpoint_every": 1000, "train_steps": 10, "rank_every": 0} | settings)
    phases = tuple(
        loop.CompiledPhase(first, functools.partial(train_step, first), step_log.StepWork(TOKENS * (1 + first), FLOPS * (1 + first), peak), int)
        for first in phase_starts
    )
    job = loop.Job(run, phases, evaluate, ranks, np.ones(run.train_steps))
    lines = Lines()
    saves = Saves(device, lines)
    _, status = loop.run(job, State(), start, lines, saves)
    return lines.lines, saves.saved, status


@pytest.mark.parametrize("log_every", [1, 2, 3])
@pytest.mark.parametrize("checkpoint_every", [3, 4, 1000])
def test_evaluations_and_checkpoints_do_not_change_the_speed_of_any_line(monkeypatch, log_every, checkpoint_every):
    lines, _, _ = train(monkeypatch, log_every=log_every, checkpoint_every=checkpoint_every, rank_every=5)
    timed = [line for line in lines if line["tokens_per_second"] is not None]
    assert len(timed) >= 4
    for line in timed:
        assert line["step_seconds"] == pytest.approx(STEP), line
        assert line["tokens_per_second"] == pytest.approx(TOKENS / STEP), line
        assert line["model_flops_per_second"] == pytest.approx(FLOPS / STEP) and line["mfu"] == pytest.approx(FLOPS / STEP / PEAK), line


def test_measurements_read_the_average_of_a_state_that_has_one(monkeypatch):
    def named(params: dict) -> dict[str, float]:
        return {"rank": params["number"]}

    for average, expected in ((None, 1.0), ({"number": 2.0}, 2.0)):
        monkeypatch.setattr(State, "params", {"number": 1.0})
        monkeypatch.setattr(State, "average", average, raising=False)
        lines, _, _ = train(monkeypatch, train_steps=1, rank_every=1, ranks=named)
        assert lines[-1]["rank"] == expected


def test_the_first_step_is_not_timed(monkeypatch):
    lines, _, _ = train(monkeypatch, train_steps=2)
    assert lines[0]["tokens_per_second"] is None and "step_seconds" not in lines[0] and "mfu" not in lines[0]
    assert lines[1]["step_seconds"] == pytest.approx(STEP)


@pytest.mark.parametrize("log_every", [1, 3])
@pytest.mark.parametrize("start", [0, 2, 4, 6])
def test_each_phase_logs_its_own_speed_and_work(monkeypatch, log_every, start):
    """The phase from step 5 on has steps of another length and work. Its first step is compiled."""
    lines, _, _ = train(
        monkeypatch,
        start=start,
        log_every=log_every,
        eval_every=1000,
        train_steps=12,
        phase_starts=(0, 4),
        rank_every=2,
        step_seconds=lambda number: 3.0 if number >= 4 else 1.0,
    )
    untimed = [line["step"] for line in lines if line["tokens_per_second"] is None]
    assert set(untimed) <= {start + 1, 5}
    for line in lines:
        if line["step"] not in untimed:
            seconds, share = (3.0, 5) if line["step"] > 4 else (1.0, 1)
            assert line["step_seconds"] == pytest.approx(seconds), line
            assert line["tokens_per_second"] == pytest.approx(share * TOKENS / seconds), line
            assert line["model_flops_per_second"] == pytest.approx(share * FLOPS / seconds), line
    assert {line["step"] for line in lines} >= {step for step in range(start + 1, 13) if step % log_every == 0}


def test_a_checkpoint_is_written_before_the_step_of_another_phase_is_compiled(monkeypatch):
    settings = {"eval_every": 1000, "train_steps": 8, "phase_starts": (0, 3, 6)}
    _, saved, _ = train(monkeypatch, **settings)
    assert saved == [3, 6, 8]
    _, saved, _ = train(monkeypatch, start=3, **settings)
    assert saved == [6, 8], "the first phase of a start needs none"


def test_step_seconds_is_the_median_and_tokens_per_second_the_mean(monkeypatch):
    lines, _, _ = train(monkeypatch, log_every=5, eval_every=1000, train_steps=10, step_seconds=lambda number: 11.0 if number == 7 else 1.0)
    (line,) = [line for line in lines if line["step"] == 10]
    assert line["step_seconds"] == pytest.approx(1.0) and line["tokens_per_second"] == pytest.approx(TOKENS * 5 / 15)


def test_lines_evaluations_and_measurements_come_when_they_are_due(monkeypatch):
    lines, saved, status = train(monkeypatch, log_every=3, eval_every=4, checkpoint_every=6, rank_every=5)
    assert status == 0 and saved == [6, 10]
    assert [line["step"] for line in lines] == [3, 4, 5, 6, 8, 9, 10]
    assert [line["step"] for line in lines if "eval_loss" in line] == [4, 8, 10]
    assert [line["step"] for line in lines if "rank" in line] == [5, 10]


def test_a_resumed_run_goes_on_with_its_step_numbers(monkeypatch):
    lines, saved, _ = train(monkeypatch, start=7)
    assert [line["step"] for line in lines] == [8, 9, 10] and saved == [10] and lines[0]["tokens_per_second"] is None


@pytest.mark.parametrize("step", [3, 4, 5, 6])  # 4 is evaluated, 6 saved
def test_nothing_of_a_diverged_step_is_logged_evaluated_or_saved(monkeypatch, step):
    seen = []
    monkeypatch.setattr(Lines, "write", lambda self, number, values: seen.append(number))
    good = "the last good checkpoint is step 3" if step > 3 else "there is no checkpoint yet"
    with pytest.raises(step_log.Diverged, match=f"step {step}: loss nan, gradient norm 1.0; stopped; {good}"):
        train(monkeypatch, checkpoint_every=3, loss=lambda number: float("nan") if number == step else 1.0)
    assert seen == list(range(1, step))


def test_the_mfu_of_an_unknown_device_is_left_out(monkeypatch):
    lines, _, _ = train(monkeypatch, peak=None)
    assert all("mfu" not in line for line in lines) and lines[-1]["model_flops_per_second"] == pytest.approx(FLOPS)


def test_the_progress_bar_says_compiling_until_the_first_step_is_done(monkeypatch):
    shown = []

    class Bar(tqdm.tqdm):
        def __init__(self, *args, **more):
            super().__init__(*args, **more | {"file": io.StringIO()})
            shown.append((0, self.desc))

        def update(self, n=1):
            super().update(n)
            shown.append((self.n, self.desc))

    monkeypatch.setattr(step_log.tqdm, "tqdm", Bar)
    train(monkeypatch, train_steps=3)
    assert [(done, text.rstrip(": ")) for done, text in shown] == [(0, "compiling"), (1, "training"), (2, "training"), (3, "training")]


def test_a_checkpoint_is_written_when_the_minutes_have_passed_since_the_last_one(monkeypatch):
    _, saved, _ = train(monkeypatch, eval_every=1000, checkpoint_every=7, checkpoint_minutes=4 / 60)
    assert saved == [5, 7, 10], "4 s after the compilation; then a multiple of 7, from which the minutes count anew; the last"


def test_several_processes_follow_the_first_ones_watch_and_compare_at_log_lines_only(monkeypatch):
    asked = []

    def decided(what, flag):
        asked.append(what)
        return what.endswith(" 8")

    monkeypatch.setattr(loop.coordination, "broadcast_flag", decided)
    monkeypatch.setattr(loop.coordination, "is_multi_process", lambda: True)
    settings = config.Run(log_every=4, checkpoint_every=12, checkpoint_minutes=1e-9)
    saves = loop.SaveCadence(settings)
    assert [step for step in range(1, 13) if saves.due(step)] == [8, 12]
    assert asked == ["checkpoint of step 4", "checkpoint of step 8"]


def test_sigterm_is_noted_once_the_first_step_is_compiled_and_not_before(monkeypatch):
    handlers = {}
    before = signal.getsignal(signal.SIGTERM)
    train(monkeypatch, start=6, watch=lambda number: handlers.update({number: signal.getsignal(signal.SIGTERM)}))
    assert handlers[6] is before and all(handlers[number] not in (before, signal.SIG_DFL) for number in (7, 8, 9))
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_stops_the_run_where_the_loss_is_finite(monkeypatch, value):
    with pytest.raises(step_log.Diverged, match=f"step 3: loss 1.0, gradient norm {value}"):
        train(monkeypatch, grad_norm=lambda number: value if number == 3 else 1.0)


def test_the_last_line_is_written_and_evaluated_even_where_no_interval_ends_there(monkeypatch):
    lines, saved, _ = train(monkeypatch, train_steps=7, log_every=100, eval_every=100, rank_every=100)
    assert [line["step"] for line in lines] == [7] and saved == [7]
    assert {"eval_loss", "rank"} <= set(lines[0])


def test_a_finished_run_takes_no_step(monkeypatch):
    assert train(monkeypatch, start=10) == ([], [], 0)


@pytest.mark.parametrize("when", ["never", "evaluating", "saving"])
def test_a_signal_at_the_last_step_is_not_lost(when, monkeypatch):
    def kill_when(phase: str):
        if when == phase:
            os.kill(os.getpid(), signal.SIGTERM)

    received = []
    monkeypatch.setattr(Saves, "wait", lambda self: kill_when("saving"))
    descriptor = signal.set_wakeup_fd(-1)  # else a thread of stopping.py may read the signal later, and end this process
    before = signal.signal(signal.SIGTERM, lambda *_: received.append("after the loop"))
    try:
        evaluated = lambda number: kill_when("evaluating") if number == 2 else None  # noqa: E731
        _, saved, status = train(monkeypatch, train_steps=2, eval_every=1, evaluated=evaluated)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    expected = {"never": (0, []), "evaluating": (loop.STOPPED, []), "saving": (0, ["after the loop"])}
    assert saved == [2] and (status, received) == expected[when]


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
    with pytest.raises(step_log.Diverged), loop.closing(writer, checkpoints):
        raise step_log.Diverged("step 3")
    with pytest.raises(OSError, match="of an earlier checkpoint"), loop.closing(writer, checkpoints):
        pass
    assert closed == ["writer", "checkpoints"] * 2


def test_a_checkpoint_whose_write_fails_is_not_called_good(monkeypatch):
    def wait(self):
        self.saved.remove(3)
        raise OSError("no space")

    monkeypatch.setattr(Saves, "wait", wait)
    with pytest.raises(step_log.Diverged, match="there is no checkpoint yet"):
        train(monkeypatch, checkpoint_every=3, loss=lambda number: float("nan") if number == 5 else 1.0)
