"""Runs the parts of an array job (rows.write_part) as one pipeline of Apache Beam.

The workers write their blocks to `Corpus.rows_dir`, which all of them share. Beam starts a part
again if its worker is killed. The part goes on after its finished blocks.
"""

import dataclasses
import logging
import re
import typing

from maelm_jax import config
from maelm_jax.data import rows, sources
from maelm_jax.data import vocabulary as vocabularies

QUIET = ("--default_sdk_harness_log_level=WARNING",)  # a worker else logs each of its connections
# The last line of a traceback, in which Beam reports an error of a worker.
ERROR = re.compile(r"^maelm_jax\.\S+\.(ConfigError|RunError|BadFile|Unavailable): (.*)$", re.M)


def import_beam():
    """Returns the apache_beam module. Raises ConfigError if it is not installed."""
    try:
        import apache_beam
        from apache_beam.options import pipeline_options  # noqa: F401
    except ImportError as error:
        raise config.ConfigError(
            f"--runner=beam needs Apache Beam ({error}); pip install -r requirements-beam.txt "
            "in an environment of its own") from error
    return apache_beam


def prepare(
    corpus: config.Corpus, vocabulary: vocabularies.Vocabulary, options: list[str],
    parts: int | None = None
):
    """Makes the stores of all sources: tokenises with Beam, then joins the parts here.

    Args:
        corpus: The sources, and the folder of the rows, which all workers share.
        vocabulary: Turns text into ids.
        options: Beam's pipeline options, `--NAME=VALUE`.
        parts: Number of parts. None: as many as the largest source has files.

    Raises:
        ConfigError: The text cannot be read, or an option is wrong.
        RunError: The pipeline fails for another reason.
    """
    beam = import_beam()
    rows.check_parts(corpus)
    if parts is None:
        parts = max(len(sources.shards(source, corpus)) for source in sources.rates(corpus))
    one_process = dataclasses.replace(corpus, processes=1)
    logging.getLogger("apache_beam").setLevel(logging.WARNING)
    try:
        pipeline_options = beam.options.pipeline_options.PipelineOptions([*QUIET, *options])
        with beam.Pipeline(options=pipeline_options) as run:
            numbers = run | "Parts" >> beam.Create(range(parts)) | beam.Reshuffle()
            numbers | "Rows" >> beam.Map(_write_part, one_process, vocabulary, parts)
    except Exception as error:  # Beam reports an error of a worker as text
        raise _error(error) from error
    rows.join(corpus, vocabulary)


def _write_part(
    part: int, corpus: config.Corpus, vocabulary: vocabularies.Vocabulary, parts: int
):
    rows.write_part(corpus, vocabulary, part, parts)


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
