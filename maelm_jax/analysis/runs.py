"""The trained runs that `analyze` measures: their settings, parameters and held-out rows."""

import collections
import collections.abc
import hashlib
import itertools
import os
import pathlib
import typing

import jax
import numpy as np

from maelm_jax import config, gin_files, storage
from maelm_jax.analysis import ranks
from maelm_jax.data import batches, rows, sources, vocabularies
from maelm_jax.model import maelm
from maelm_jax.training import checkpoint, run_record, run_rows


class TrainedRun(typing.NamedTuple):
    """A pretrained or fine-tuned run, or any encoder in this form."""

    name: str
    workdir: str
    experiment: config.Experiment  # settings of the measurement
    training: config.Experiment | None  # settings of the run; None: not known
    vocabulary: vocabularies.Vocabulary
    step: int  # of the checkpoint
    params: dict  # of the encoder


def open_run(
    workdir: str, files: list[str], bindings: list[str], step: int | None = None
) -> TrainedRun:
    """Reads the run in a workdir. The name of the folder is the name of the run.

    Args:
        workdir: Local path of the workdir.
        files: Gin files to read after the run's config.gin, for the measurement.
        bindings: Gin bindings to apply last, for the measurement.
        step: Step of the checkpoint to read. None: the newest.

    Raises:
        ConfigError: The folder is no workdir, it has no checkpoint of `step`, or the checkpoint
            does not fit its config.gin.
    """
    storage.require_local(workdir)
    gin_file = pathlib.Path(workdir) / "config.gin"
    if not gin_file.is_file():
        raise config.ConfigError(run_record.no_run(workdir))
    training = gin_files.load([str(gin_file)])
    experiment = gin_files.load([str(gin_file), *files], bindings)
    vocabulary = run_record.load_vocabulary(workdir)
    step = checkpoint.pick_step(workdir, step)
    name = os.path.basename(os.path.abspath(workdir))
    return at_step(TrainedRun(name, workdir, experiment, training, vocabulary, step, {}), step)


def at_step(run: TrainedRun, step: int) -> TrainedRun:
    """Returns the run with the parameters of the checkpoint of `step`."""
    shapes = maelm.encoder_shapes(run.experiment.model, run.vocabulary.size, run.vocabulary.pad)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes
    )
    params = checkpoint.restore_params(run.workdir, {"encoder": abstract}, step)
    return run._replace(step=step, params=params["encoder"])


def started_from(experiment: config.Experiment) -> str | None:
    """Workdir whose parameters a run started from: that of Finetune.init_from or Run.init_from."""
    section = experiment.finetune or experiment.run
    return section.init_from


def with_unique_names(runs: list[TrainedRun]) -> list[TrainedRun]:
    """Renames runs with equal names: the paths that tell them apart, numbered where needed."""
    counts = collections.Counter(run.name for run in runs)
    paths = [os.path.abspath(run.workdir) for run in runs]
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    taken = {name for name, count in counts.items() if count == 1}
    renamed = []
    for run, path in zip(runs, paths, strict=True):
        if counts[run.name] > 1:
            label = os.path.relpath(path, root).replace("/", "-")
            labels = itertools.chain([label], (f"{label}-{n}" for n in itertools.count(2)))
            run = run._replace(name=next(label for label in labels if label not in taken))
            taken.add(run.name)
        renamed.append(run)
    return renamed


def heldout_rows(run: TrainedRun, tokens: int) -> np.ndarray:
    """Reads held-out rows of the run's corpus.

    For a fine-tuned run, they are those of the run that it started from.

    Args:
        run: The run.
        tokens: Number of tokens that the rows together hold, if there are so many.

    Returns:
        Token ids, int32 [R, L].

    Raises:
        ConfigError: The rows hold too few unmasked tokens for the width of the model.
    """
    corpus = run.experiment.corpus
    pretrained = run.workdir
    if run.experiment.finetune and run.experiment.finetune.init_from:
        pretrained = run.experiment.finetune.init_from.removeprefix(config.RANDOM)
    recorded = run_rows.open_recorded(pretrained, corpus, run.vocabulary)
    if not recorded and pretrained != run.workdir and not corpus.text_files:
        raise config.ConfigError(
            f"{run.workdir} was fine-tuned from {pretrained}, which has no rows of text to measure "
            "on: give --gin.Corpus.text_files='books/*.txt'"
        )
    stores = recorded.stores if recorded else rows.prepare(corpus, run.vocabulary)
    rates = recorded.rates if recorded else sources.rates(corpus)
    heldout = {name: store["heldout"] for name, store in stores.items()}
    count, available = 2 * tokens // corpus.sequence_length + 1, sum(map(len, heldout.values()))
    while True:  # the rows are a prefix of those that a larger count gives
        read = batches.heldout(heldout, rates, min(count, available))
        if count >= available or (read != run.vocabulary.pad).sum() >= tokens:
            break
        count *= 2
    result = first_rows(read, run.vocabulary.pad, tokens)
    check_enough(run, unmasked_tokens(run, result), "held-out tokens", "--gin.Corpus.text_files")
    return result


def first_rows(rows: np.ndarray, pad: int, tokens: int) -> np.ndarray:
    """First rows of `rows` [R, L] that together hold `tokens` tokens, or all rows."""
    cumulative = (rows != pad).sum(1).cumsum()
    return rows[: int(np.searchsorted(cumulative, min(tokens, int(cumulative[-1])))) + 1]


def unmasked_tokens(run: TrainedRun, rows: np.ndarray) -> int:
    """Expected number of tokens of `rows` [R, L] that are not masked."""
    tokens = int((rows != run.vocabulary.pad).sum())
    return int(tokens * (1 - run.experiment.evaluated.masking.rate))


def check_enough(run: TrainedRun, unmasked: int, tokens: str, text_flag: str):
    """Checks that a rank can be measured on `unmasked` tokens.

    Args:
        run: The run.
        unmasked: Number of tokens that are not masked.
        tokens: What the tokens are, for the message.
        text_flag: The flag that names the text, for the message.

    Raises:
        ConfigError: They are too few.
    """
    width = run.experiment.model.width
    least = ranks.LEAST_PER_DIMENSION * width
    if unmasked < least:
        raise config.ConfigError(
            f"{unmasked:,} unmasked {tokens} of {run.workdir} are too few for a rank, which "
            f"needs {least:,} ({ranks.LEAST_PER_DIMENSION} for each of {width} dimensions). "
            f"Raise --tokens, or give more text with {text_flag}"
        )


def other_masks(run: TrainedRun) -> list[str]:
    """Describes how the masks of the measurement differ from those of the run's settings."""
    if run.training is None:
        return []
    changes = config.differences(run.training.evaluated, run.experiment.evaluated)
    of_masks = [change for change in changes if change.startswith("Masking.")]
    if not of_masks:
        return []
    listed = "; ".join(change.removeprefix("Masking.") for change in of_masks)
    return [f"the ranks of {run.name} are measured with other masks than the run has ({listed})"]


def differences(
    runs: list[TrainedRun], rows: collections.abc.Sequence[np.ndarray], text: str | None
) -> list[str]:
    """Describes the differences that prevent a comparison of the runs token by token.

    Args:
        runs: The runs.
        rows: The rows that each is measured on.
        text: Glob of the text that all runs are measured on. None: each has its own.
    """
    consequence = "each is analysed on its own text"
    if text:
        consequence = "the same text is cut into different tokens"
    properties: dict[str, collections.abc.Callable[[TrainedRun], typing.Any]] = {
        "vocabularies": lambda run: run.vocabulary.fingerprint[:12],
        "lengths": lambda run: run.experiment.corpus.sequence_length,
        "corpora": lambda run: run.experiment.corpus.rates,
    }
    notes = []
    for name, value_of in properties.items():
        if len({str(value_of(run)) for run in runs}) > 1:
            notes.append(_difference(name, runs, list(map(value_of, runs)), consequence))
    if not notes and not text and any(not np.array_equal(rows[0], other) for other in rows):
        counts = [f"{len(of_run)} rows, sha256 {_digest(of_run)}" for of_run in rows]
        notes.append(_difference("held-out rows", runs, counts, consequence))
    return notes + _different_masks(runs)


def _different_masks(runs: list[TrainedRun]) -> list[str]:
    """Describes masks that prevent a comparison of losses, or of ranks of masked input."""
    of_ranks = [_masks(run.experiment) for run in runs]
    of_losses = [_masks(run.training or run.experiment) for run in runs]
    consequences: dict[tuple[str, ...], list[str]] = {}
    consequences.setdefault(tuple(of_losses), []).append("losses")
    consequences.setdefault(tuple(of_ranks), []).append("ranks of masked input")
    return [
        _difference("masks", runs, masks, f"{' and '.join(what)} do not compare")
        for masks, what in consequences.items()
        if len(set(masks)) > 1
    ]


def _difference(
    name: str, runs: list[TrainedRun], values: collections.abc.Sequence, consequence: str
) -> str:
    listed = ", ".join(f"{run.name}: {value}" for run, value in zip(runs, values, strict=True))
    return f"the runs have different {name} ({listed}); {consequence}"


def _digest(rows: np.ndarray) -> str:
    return hashlib.sha256(rows.astype(np.int32).tobytes()).hexdigest()[:12]


def _masks(experiment: config.Experiment) -> str:
    """Describes the masks of evaluations and measurements."""
    masking = experiment.evaluated.masking
    special = ", special tokens too" if masking.mask_special_tokens else ""
    return f"{masking.rate:g} of the tokens by {masking.unit}{special}"
