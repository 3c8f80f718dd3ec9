"""The runner of Apache Beam: its flags and its errors. tests/beam.sh runs pipelines, in an environment of their own."""

import importlib.util
import os
import threading
import time

import pytest

from maelm_jax import config, prepare
from maelm_jax.data import beam_runner, readers

WORKER = """Traceback (most recent call last):
  File "x.py", line 3, in f
maelm_jax.data.readers.BadFile: a.txt: not UTF-8 at byte 3; convert it [while running 'Rows']

During handling of the above exception, another one ended the bundle"""


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RuntimeError(WORKER), config.ConfigError, "a.txt: not UTF-8 at byte 3; convert it"),
        (
            RuntimeError(WORKER.replace("data.readers.BadFile", "config.RunError")),
            config.RunError,
            "a.txt: not UTF-8 at byte 3; convert it",
        ),
        (readers.BadFile("a.txt", ": empty [while running 'Rows']"), config.ConfigError, "a.txt: empty"),
        (ValueError("no such\nrunner"), config.RunError, "no such runner"),
    ],
)
def test_errors_of_a_pipeline_keep_their_kind(error, kind, message):
    told = beam_runner._meaning(error)
    assert type(told) is kind and message in str(told)
    assert "while running" not in str(told)


@pytest.mark.parametrize("ends_by_itself", [False, True])
def test_a_killed_worker_ends_the_command_unless_the_pipeline_ends(monkeypatch, capsys, ends_by_itself):
    """Beam would wait for ever for a worker whose thread ended with an error."""
    exits = []
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(beam_runner, "PATIENCE", 0.3)
    hook = threading.excepthook

    def ended():
        raise RuntimeError("Worker subprocess exited with return code 137")

    with beam_runner._ending_if_a_worker_is_killed():
        thread = threading.Thread(target=ended, name=beam_runner.WORKER_THREAD)
        thread.start()
        if not ends_by_itself:
            thread.join()
    thread.join()
    time.sleep(0.1)
    assert exits == ([] if ends_by_itself else [1]) and threading.excepthook is hook
    assert ("worker process of Beam was killed" in capsys.readouterr().err) is not ends_by_itself


@pytest.mark.parametrize(
    "flags",
    [["--beam_runner=X"], ["--runner=beam", "--join"], ["--runner=spark"]],
)
def test_flags_that_do_not_fit_together_are_refused(flags):
    with pytest.raises(config.ConfigError, match="--runner"):
        prepare.main(["--gin_file=tiny.gin", *flags])


@pytest.mark.skipif(importlib.util.find_spec("apache_beam") is not None, reason="Beam is here")
def test_without_beam_its_requirements_are_named():
    with pytest.raises(config.ConfigError, match="requirements-beam.txt"):
        beam_runner.import_beam()
