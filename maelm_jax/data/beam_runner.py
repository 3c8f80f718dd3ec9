"""Makes the parts of a corpus (prepare.py) with a pipeline of Apache Beam.

The workers write to `Corpus.rows_dir`, which all of them share.
"""

import contextlib
import functools
import logging
import os
import pathlib
import re
import sys
import threading
import typing

from maelm_jax import config
from maelm_jax.data import prepare

QUIET = ("--default_sdk_harness_log_level=WARNING",)  # a worker else logs each of its connections
# An error of this program, as the last line of a traceback, which Beam reports of a worker.
ERROR = re.compile(r"^maelm_jax\.\S+\.(ConfigError|RunError|BadFile|Unavailable): (.*)$", re.M)
WORKER_THREAD = "run_worker"  # name of the DirectRunner's threads, each of which waits for a worker
PATIENCE = 10.0  # seconds in which a pipeline can end by itself after one of its workers has ended
KILLED = (
    "error: a worker process of Beam was killed, often because memory was full; use fewer workers "
    "and give the same command again: it goes on where it stopped"
)


def import_beam():
    """Returns the apache_beam module. Raises ConfigError if it is not installed."""
    try:
        import apache_beam
        from apache_beam.options import pipeline_options  # noqa: F401
    except ImportError as error:
        raise config.ConfigError(
            f"--runner=beam needs Apache Beam ({error}); pip install -r requirements-beam.txt "
            "in an environment of its own"
        ) from error
    return apache_beam


def make_with_beam(folder: pathlib.Path, options: typing.Sequence[str]):
    """Makes the missing parts of a folder. `options` are those of Beam's pipelines."""
    beam = import_beam()
    logging.getLogger("apache_beam").setLevel(logging.WARNING)
    pipeline_options = beam.options.pipeline_options.PipelineOptions([*QUIET, *options])
    numbers = prepare.missing_parts(folder)
    try:
        with _ending_if_a_worker_is_killed(), beam.Pipeline(options=pipeline_options) as pipeline:
            parts = pipeline | "Parts" >> beam.Create(numbers) | beam.Reshuffle()
            parts | "Rows" >> beam.Map(functools.partial(prepare.make_part, folder))
    except Exception as error:
        raise _meaning(error) from error


@contextlib.contextmanager
def _ending_if_a_worker_is_killed() -> typing.Iterator[None]:
    """Context manager that ends this process, with a line, if a local worker is killed.

    Beam would wait for that worker forever: its thread ends with an error, and nobody reads it.
    """
    done = threading.Event()

    def on_error_of_thread(arguments: threading.ExceptHookArgs):
        if arguments.thread is None or arguments.thread.name != WORKER_THREAD:
            previous(arguments)
        elif not done.wait(PATIENCE):  # a pipeline that fails, or is done, ends its workers itself
            print(KILLED, file=sys.stderr, flush=True)
            os._exit(config.RunError.status)

    previous, threading.excepthook = threading.excepthook, on_error_of_thread
    try:
        yield
    finally:
        done.set()
        threading.excepthook = previous


def _meaning(error: Exception) -> Exception:
    """Returns the error of a worker that a pipeline reports, as an error of this program."""
    text = f"{type(error).__module__}.{type(error).__name__}: {error}"
    if match := ERROR.search(text):
        kind = config.RunError if match[1] == "RunError" else config.ConfigError
        return kind(match[2].partition(" [while running")[0])  # Beam adds the step
    reason = " ".join(str(error).split())[-300:]
    return config.RunError(f"the Beam pipeline failed ({type(error).__name__}: {reason})")
