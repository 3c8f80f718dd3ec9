"""The timer of steps, on the real clock. tests/training/test_loop.py has what the lines of a run hold."""

import time

from maelm_jax.training import step_log


def test_the_timer_leaves_out_pauses():
    timer = step_log.StepTimer()
    timer.step_done()
    for _ in range(3):
        time.sleep(0.01)
        timer.step_done()
        with timer.paused():
            time.sleep(0.2)
    speed = timer.speed()
    assert 0.01 <= speed.median_seconds < 0.1 and 0.01 <= 1 / speed.steps_per_second < 0.1
    assert timer.speed() is None, "a reading starts anew"
