"""What `analyze` measures: runs on their own held-out rows, or any encoders on the same text."""

import collections
import collections.abc
import os
import pathlib
import typing

import numpy as np

from maelm_jax import config, gin_files, storage
from maelm_jax.analysis import ranks
from maelm_jax.data import batches, packing, prepare, sources, vocabularies
from maelm_jax.encoders.encoder import Encoder
from maelm_jax.training import run_record, run_rows

LONGEST_ROW = 512  # tokens, of text that several encoders read
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
    """Loads encoders of any kind. All get rows of one length, the longest that all can read.

    Args:
        paths: Workdirs, exported or stock folders, checkpoints of the published code.
        text: Glob of the files to measure on.

    Raises:
        ConfigError: There is no such encoder, or it cannot be computed here.
    """
    loaded = [Encoder.load(path) for path in paths]
    length = min(LONGEST_ROW, *(encoder.length for encoder in loaded))
    corpus = config.Corpus(text_files=text, sequence_length=length)
    opened = [
        MeasuredRun(
            _name(path, None),
            path,
            config.Experiment(
                vocabulary=config.Vocabulary(),
                corpus=corpus,
                masking=MASKING,
                model=encoder.model,
                optimizer=config.Optimizer(),
                mesh=config.Mesh(),
                run=config.Run(),
            ),
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

    Args:
        run: The run.
        tokens: Number of tokens that the rows together hold, if there are so many.

    Returns:
        Token ids, int32 [R, L].

    Raises:
        ConfigError: The rows hold too few unmasked tokens for the width of the model.
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
    if not recorded and corpus.task_modules:
        # The record of a run may be a stranger's, so the code that it names is not run here.
        raise config.ConfigError(
            f"to prepare text here would run Corpus.task_modules of {pretrained}: prepare its rows "
            "with python -m maelm_jax.prepare, or leave them out by --gin.Corpus.task_modules='()'"
        )
    prepared = recorded or prepare.prepare(corpus, run.vocabulary)
    heldout = prepared.split("heldout")
    count, available = 2 * tokens // corpus.sequence_length + 1, sum(map(len, heldout.values()))
    while True:  # the rows are a prefix of those that a larger count gives
        read = batches.read_heldout(heldout, prepared.rates, min(count, available))
        if count >= available or (read != run.vocabulary.pad).sum() >= tokens:
            break
        count *= 2
    result = first_rows(read, run.vocabulary.pad, tokens)
    _require_tokens(run, result, "--gin.Corpus.text_files")
    return result


def read_text(runs: list[MeasuredRun], tokens: int) -> list[np.ndarray]:
    """Reads the same text for every encoder, each with its own tokenizer.

    Args:
        runs: Encoders of `open_encoders`.
        tokens: Sets the amount of text: see `sources.first_texts`.

    Returns:
        For each encoder the token ids, int32 [R, L].

    Raises:
        ConfigError: The text is missing or too short for a rank.
    """
    corpus = runs[0].experiment.corpus
    texts = sources.first_texts(corpus, tokens)
    result = []
    for run in runs:
        packed = packing.pack(texts, run.vocabulary, corpus.sequence_length).rows
        result.append(packed.astype(np.int32))
        _require_tokens(run, result[-1], "--text")
    return result


def first_rows(rows: np.ndarray, pad: int, tokens: int) -> np.ndarray:
    """Returns the first rows of `rows` [R, L] that together hold `tokens` tokens, or all rows."""
    cumulative = (rows != pad).sum(1).cumsum()
    return rows[: int(np.searchsorted(cumulative, min(tokens, int(cumulative[-1])))) + 1]


def count_unmasked(run: MeasuredRun, rows: np.ndarray) -> int:
    """Returns the expected number of tokens of `rows` [R, L] that are not masked."""
    tokens = int((rows != run.vocabulary.pad).sum())
    return int(tokens * (1 - run.experiment.evaluated.masking.rate))


def _require_tokens(run: MeasuredRun, rows: np.ndarray, text_flag: str):
    """Raises ConfigError if the unmasked tokens of `rows` are too few for a rank."""
    unmasked, width = count_unmasked(run, rows), run.experiment.model.width
    least = ranks.LEAST_PER_DIMENSION * width
    if unmasked < least:
        raise config.ConfigError(
            f"{unmasked:,} unmasked tokens for {run.path} are too few for a rank, which needs "
            f"{least:,} ({ranks.LEAST_PER_DIMENSION} for each of {width} dimensions). "
            f"Raise --tokens, or give more text with {text_flag}"
        )


def describe_differences(
    runs: list[MeasuredRun], rows: collections.abc.Sequence[np.ndarray], text: str | None
) -> list[str]:
    """Returns what prevents a comparison of the runs token by token, one line each.

    Args:
        runs: The runs.
        rows: The rows that each is measured on.
        text: Glob of the text that all runs are measured on. None: each has its own.
    """
    other_text = "each is analysed on its own text"
    if text:
        other_text = "the same text is cut into different tokens"
    notes = [
        f"the ranks of {run.name} are measured with other masks than the run has"
        for run in runs
        if run.training and run.training.evaluated.masking != run.experiment.evaluated.masking
    ]
    compared = (
        ("vocabularies", other_text, [run.vocabulary.fingerprint[:12] for run in runs]),
        ("lengths", other_text, [run.experiment.corpus.sequence_length for run in runs]),
        ("corpora", other_text, [run.experiment.corpus.rates for run in runs]),
        ("masks", "losses and ranks of masked input do not compare", list(map(_masks, runs))),
    )
    for name, consequence, values in compared:
        if any(value != values[0] for value in values):
            listed = ", ".join(f"{run.name}: {v}" for run, v in zip(runs, values, strict=True))
            notes.append(f"the runs have different {name} ({listed}); {consequence}")
    same_kind = all(value == values[0] for _, _, values in compared[:3] for value in values)
    if same_kind and any(not np.array_equal(rows[0], other) for other in rows):
        counts = ", ".join(f"{run.name}: {len(r)}" for run, r in zip(runs, rows, strict=True))
        notes.append(f"the runs have different held-out rows ({counts}); {other_text}")
    return notes


def _masks(run: MeasuredRun) -> str:
    """Describes the masks of the measurement."""
    masking = run.experiment.evaluated.masking
    special = ", special tokens too" if masking.mask_special_tokens else ""
    return f"{masking.rate:g} of the tokens by {masking.unit}{special}"
