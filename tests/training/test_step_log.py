"""The timer of steps. tests/training/test_loop.py has what the lines of a run hold."""

import types

import pytest

from maelm_jax.training import step_log


def test_the_timer_leaves_out_pauses(monkeypatch):
    clock = types.SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(step_log, "time", clock)
    timer = step_log.StepTimer()
    timer.step_done()
    for _ in range(3):
        clock.now += 2.0
        timer.step_done()
        with timer.paused():
            clock.now += 50.0
    speed = timer.speed()
    assert speed.median_seconds == pytest.approx(2.0) and speed.steps_per_second == pytest.approx(0.5)
    assert timer.speed() is None, "a reading starts anew"
