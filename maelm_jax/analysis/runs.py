"""What `analyze` measures: runs on their own held-out rows, or any encoders on the same text."""

import collections
import os
import pathlib
import typing

import numpy as np

from maelm_jax import config, gin_files, storage
from maelm_jax.analysis import ranks
from maelm_jax.data import batches, packing, prepare, vocabularies
from maelm_jax.encoders.encoder import Encoder
from maelm_jax.training import run_record, run_rows

# Masks of text that several encoders read: each is measured with [MASK] and without.
MASKING = config.Masking(encoder_mask_fraction=1.0)


class MeasuredRun(typing.NamedTuple):
    """A pretrained or fine-tuned run, or any encoder in this form."""

    name: str
    path: str
    experiment: config.Experiment  # settings of the measurement
    training: config.Experiment | None  # settings of the run; None: not known
    vocabulary: vocabularies.Vocabulary
    step: int  # of the checkpoint, or 0
    params: dict  # of the encoder


def open_runs(
    workdirs: list[str], files: list[str], bindings: list[str], step: int | None = None
) -> list[MeasuredRun]:
    """Opens workdirs, to be measured on held-out rows of their own.

    Args:
        workdirs: Local paths.
        files: Gin files to read after each run's config.gin, for the measurement.
        bindings: Gin bindings to apply last, for the measurement.
        step: Step of the checkpoints. None: the newest of each run.

    Raises:
        ConfigError: A folder is no workdir, or it has no checkpoint of `step`.
    """
    opened = []
    for path in workdirs:
        storage.require_local(path)
        record = str(pathlib.Path(path) / gin_files.RECORD)
        if not os.path.isfile(record):
            raise config.ConfigError(run_record.no_run(path))
        training = gin_files.load([record])
        experiment = gin_files.load([record, *files], bindings)
        encoder = Encoder.load(path, step)
        opened.append(
            MeasuredRun(
                _name(path, training),
                path,
                experiment,
                training,
                encoder.vocabulary,
                encoder.step or 0,
                encoder.tree(),
            )
        )
    return _with_unique_names(opened)


def open_encoders(paths: list[str], text: str) -> list[MeasuredRun]:
    """Loads encoders of any kind, to be measured on the files that the glob `text` names.

    Each path is a workdir, an exported or a stock folder, or a checkpoint of the published code.
    All encoders get rows of one length, the longest that all can read.

    Raises:
        ConfigError: There is no such encoder, or it cannot be computed here.
    """
    loaded = [Encoder.load(path) for path in paths]
    length = min(packing.LONGEST_ROW, *(encoder.length for encoder in loaded))
    corpus = config.Corpus(text_files=text, sequence_length=length)
    opened = [
        MeasuredRun(
            _name(path, None),
            path,
            config.Experiment(corpus=corpus, masking=MASKING, model=encoder.model),
            None,
            encoder.vocabulary,
            encoder.step or 0,
            encoder.tree(),
        )
        for path, encoder in zip(paths, loaded, strict=True)
    ]
    return _with_unique_names(opened)


def at_step(run: MeasuredRun, step: int) -> MeasuredRun:
    """Returns the run with the parameters of the checkpoint of `step`."""
    return run._replace(step=step, params=Encoder.load(run.path, step).tree())


def _name(path: str, training: config.Experiment | None) -> str:
    """Returns the folder's name, or "tiny on rte" for a run that was fine-tuned from runs/tiny."""
    if training and training.finetune and training.finetune.init_from:
        source = training.finetune.init_from.rstrip("/").rpartition("/")[2]
        fresh = "random-" if training.finetune.init_from.startswith(config.RANDOM) else ""
        return f"{fresh}{source} on {training.finetune.tasks}"
    return os.path.basename(os.path.abspath(path))


def _with_unique_names(runs: list[MeasuredRun]) -> list[MeasuredRun]:
    """Names runs with equal names by their paths."""
    counts = collections.Counter(run.name for run in runs)
    return [run if counts[run.name] == 1 else run._replace(name=run.path) for run in runs]


def read_heldout_rows(run: MeasuredRun, tokens: int) -> np.ndarray:
    """Reads held-out rows of the run's corpus, or of that of the run it was fine-tuned from.

    Returns:
        Token ids, int32 [R, L]. The rows together hold `tokens` tokens, if there are so many.

    Raises:
        ConfigError: There is no text to read.
    """
    corpus, pretrained = run.experiment.corpus, run.path
    if run.experiment.finetune and run.experiment.finetune.init_from:
        pretrained = run.experiment.finetune.init_from.removeprefix(config.RANDOM)
    recorded = run_rows.open_recorded(pretrained, corpus, run.vocabulary)
    if not recorded and pretrained != run.path and not corpus.text_files:
        raise config.ConfigError(
            f"{run.path} was fine-tuned from {pretrained}, which has no rows of text to measure "
            "on: give --gin.Corpus.text_files='books/*.txt'"
        )
    if not recorded and (corpus.document_filter or corpus.task_modules):
        # The record of a run may be a stranger's, so the code that it names is not run here.
        raise config.ConfigError(
            "to prepare text here would run Corpus.document_filter or Corpus.task_modules of "
            f"{pretrained}: prepare its rows with python -m maelm_jax.prepare, or leave them "
            "out by --gin.Corpus.document_filter=None --gin.Corpus.task_modules='()'"
        )
    prepared = recorded or prepare.prepare(corpus, run.vocabulary)
    heldout = prepared.split("heldout")
    count, available = 2 * tokens // corpus.sequence_length + 1, sum(map(len, heldout.values()))
    while True:  # the rows are a prefix of those that a larger count gives
        read = batches.read_heldout(heldout, prepared.rates, min(count, available))
        if count >= available or (read != run.vocabulary.pad).sum() >= tokens:
            break
        count *= 2
    return first_rows(read, run.vocabulary.pad, tokens)


def first_rows(rows: np.ndarray, pad: int, tokens: int) -> np.ndarray:
    """Returns the first rows of `rows` [R, L] that together hold `tokens` tokens, or all rows."""
    cumulative = (rows != pad).sum(1).cumsum()
    return rows[: int(np.searchsorted(cumulative, min(tokens, int(cumulative[-1])))) + 1]


def count_unmasked(run: MeasuredRun, rows: np.ndarray) -> int:
    """Returns the expected number of tokens of `rows` [R, L] that are not masked."""
    tokens = int((rows != run.vocabulary.pad).sum())
    return int(tokens * (1 - run.experiment.evaluated.masking.rate))


def require_tokens(run: MeasuredRun, rows: np.ndarray):
    """Raises ConfigError if the unmasked tokens of `rows` are too few for a rank."""
    unmasked, width = count_unmasked(run, rows), run.experiment.model.width
    least = ranks.LEAST_PER_DIMENSION * width
    if unmasked < least:
        text_flag = "--gin.Corpus.text_files" if run.training else "--text"
        raise config.ConfigError(
            f"{unmasked:,} unmasked tokens for {run.path} are too few for a rank, which needs "
            f"{least:,} ({ranks.LEAST_PER_DIMENSION} for each of {width} dimensions). "
            f"Raise --tokens, or give more text with {text_flag}"
        )


def describe_other_masks(runs: list[MeasuredRun]) -> list[str]:
    """Returns a line for each run that is measured with other masks than its own."""
    return [
        f"the ranks of {run.name} are measured with other masks than the run has"
        for run in runs
        if run.training and run.training.evaluated.masking != run.experiment.evaluated.masking
    ]
