"""Prepares rows with a pipeline of Apache Beam whose elements are the files of the sources.

The workers write blocks (blocks.py) to `Corpus.rows_dir`, which all of them share. A file that is
given to a second worker, or to the next pipeline, goes on after the finished blocks. If a worker of
Beam's DirectRunner is killed, the command ends with an error.
"""

import contextlib
import logging
import os
import queue
import re
import sys
import threading
import time
import typing

from maelm_jax import config
from maelm_jax.data import blocks, prepared_folders, rows, rows_dir, sources, vocabularies

QUIET = ("--default_sdk_harness_log_level=WARNING",)  # a worker else logs each of its connections
# The last line of a traceback, in which Beam reports an error of a worker.
ERROR = re.compile(r"^maelm_jax\.\S+\.(ConfigError|RunError|BadFile|Unavailable): (.*)$", re.M)

WORKER_THREAD = "run_worker"  # name of the DirectRunner's threads, each of which waits for a worker
PATIENCE = 10.0  # seconds in which a pipeline can end by itself after one of its workers has ended
KILLED = (
    "a worker process of Beam was killed, often because memory was full; use fewer workers and "
    "give the same command again: it goes on where it stopped"
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


def prepare(corpus: config.Corpus, vocabulary: vocabularies.Vocabulary, options: list[str]):
    """Makes the stores of all sources: tokenises with Beam, then joins the blocks here.

    Args:
        corpus: The sources, and the folder of the rows, which all workers share.
        vocabulary: Turns text into ids.
        options: Beam's pipeline options, `--NAME=VALUE`.

    Raises:
        ConfigError: The text cannot be read, or it changed meanwhile, or `rows_dir` cannot be used.
        RunError: The pipeline fails for another reason.
    """
    beam = import_beam()
    rows.check_parts(corpus)
    logging.getLogger("apache_beam").setLevel(logging.WARNING)
    text_before = prepared_folders.present_text(sources.rates(corpus), corpus)
    jobs = list(_jobs(corpus, vocabulary))

    def run():
        pipeline_options = beam.options.pipeline_options.PipelineOptions([*QUIET, *options])
        with beam.Pipeline(options=pipeline_options) as pipeline:
            files = pipeline | "Files" >> beam.Create(jobs) | beam.Reshuffle()
            files | "Rows" >> beam.Map(_write, vocabulary)

    try:
        _call_watching_workers(run)
    except Exception as error:  # Beam reports an error of a worker as text
        raise _error(error) from error
    for source, folder in {job.shard.source: job.folder for job in jobs}.items():
        rows.check_unchanged({source: text_before[source]}, folder, corpus)
    rows.join(corpus, vocabulary)


def _call_watching_workers(function: typing.Callable[[], None]):
    """Calls a function that runs a pipeline. Raises RunError if a local worker process is killed.

    Beam would wait for that worker forever: its thread ends with an error, and nobody reads it.
    """
    outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    worker_ended = config.RunError(KILLED)

    def call():
        try:
            function()
            outcomes.put(None)
        except BaseException as error:
            outcomes.put(error)

    def on_error_of_thread(arguments: threading.ExceptHookArgs):
        if arguments.thread is not None and arguments.thread.name == WORKER_THREAD:
            outcomes.put(worker_ended)
        else:
            previous(arguments)

    previous, threading.excepthook = threading.excepthook, on_error_of_thread
    try:
        threading.Thread(target=call, daemon=True).start()
        outcome = outcomes.get()
        end = time.monotonic() + PATIENCE
        # A pipeline that fails, or is done, ends its workers itself.
        while outcome is worker_ended and (seconds := end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                outcome = outcomes.get(timeout=seconds)
    finally:
        threading.excepthook = previous
    if outcome is worker_ended:
        _exit_without_workers()
    if outcome is not None:
        raise outcome


def _exit_without_workers():
    """Lets this process exit although threads of Beam wait for workers."""

    def exit_after_main():
        threading.main_thread().join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.RunError.status)

    threading.Thread(target=exit_after_main, daemon=True).start()


def _jobs(
    corpus: config.Corpus, vocabulary: vocabularies.Vocabulary
) -> typing.Iterator[blocks.Job]:
    """Yields a job for each file of the sources that have no complete store."""
    for source, folder in rows.folders(corpus, vocabulary).items():
        if rows.is_complete(folder):
            continue
        prepared_folders.require_local(corpus, f"whole store of the rows of {source}")
        for number, shard in enumerate(sources.shards(source, corpus)):
            yield blocks.Job(rows.blocks_folder(folder), shard, number, corpus.sequence_length)


def _write(job: blocks.Job, vocabulary: vocabularies.Vocabulary):
    with rows_dir.writing(job.shard.corpus):
        blocks.write_shard(job, vocabulary)


def _error(error: Exception) -> Exception:
    """Returns the error of a worker that a pipeline reports, as an error of this program."""
    if isinstance(error, (config.ConfigError, config.RunError)):
        # Beam adds the step to the message.
        return type(error)(str(error).partition(" [while running")[0])
    if match := ERROR.search(str(error)):
        wrong_input = match[1] != config.RunError.__name__
        message = match[2].partition(" [while running")[0]
        return (config.ConfigError if wrong_input else config.RunError)(message)
    reason = " ".join(str(error).split())[-300:]
    return config.RunError(f"the Beam pipeline failed ({type(error).__name__}: {reason})")


def options(argv: typing.Sequence[str]) -> list[str]:
    """Returns Beam's options `--NAME=VALUE` of flags `--beam_NAME=VALUE`.

    Raises:
        ConfigError: A flag has no value.
    """
    for flag in argv:
        if "=" not in flag:
            raise config.ConfigError(f"{flag}: give a value, as in {flag}=VALUE")
    return [flag.replace("--beam_", "--", 1) for flag in argv]
