"""Progress bars: a terminal shows them, and a file gets few lines."""

import io
import sys

import pytest
import tqdm

from maelm_jax import progress


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_short_bar_leaves_nothing_in_a_file(monkeypatch, is_terminal):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    assert sum(progress.Bar(range(1000), desc="counting")) == 499_500
    assert ("counting" in stream.getvalue()) == is_terminal


def test_an_hour_is_few_lines_in_a_file(monkeypatch):
    now, stream = [0.0], io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    with progress.Bar(total=3600) as bar:
        bar._time, bar.start_t, bar.last_print_t = (lambda: now[0]), 0.0, 0.0
        for _ in range(3600):
            now[0] += 1.0
            bar.update()
    drawn = stream.getvalue().count("\r")
    assert 5 <= drawn <= 20, drawn
