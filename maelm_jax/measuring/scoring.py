"""Losses of trained models on any text: what `evaluate` measures."""

import collections.abc
import dataclasses
import logging
import math
import typing

import jax
import numpy as np
from flax import traverse_util

from maelm_jax import config, progress, storage
from maelm_jax.data import batches, prepare, vocabularies
from maelm_jax.encoders.opened import OpenedModel, find_model
from maelm_jax.model import keys, maelm
from maelm_jax.model.kernels import backends
from maelm_jax.pretraining import evaluation
from maelm_jax.pretraining import objective as objectives
from maelm_jax.training import checkpoint, run_rows
from maelm_jax.training.workdir import Kind, Workdir

TOKENS = 4096  # of a batch
CONFIDENCE = 0.95
log = logging.getLogger(__name__)


class TrainedModel(typing.NamedTuple):
    """A model with a prediction head, and the settings that it is evaluated with."""

    path: str
    steps: collections.abc.Sequence[int | None]  # None: the newest, or the model is no workdir
    opened: OpenedModel  # at the last of these steps
    experiment: config.Experiment
    rows: prepare.Prepared | None  # those that a run was trained on, if they are still there

    @property
    def vocabulary(self) -> vocabularies.Vocabulary:
        """The vocabulary, the same at every step."""
        return self.opened.vocabulary

    @property
    def length(self) -> int:
        """The longest input in tokens."""
        return self.opened.length

    @property
    def objective(self) -> objectives.Objective:
        """The objective whose loss is measured."""
        sizes = (self.vocabulary.size, self.vocabulary.special)
        return objectives.create(self.experiment, *sizes, backends.one_device())

    def read(self, step: int | None) -> tuple[int | None, dict]:
        """Reads a checkpoint. Returns its step, and the parameters of the objective as a tree."""
        opened = find_model(self.path, step) if self.opened.workdir else self.opened
        params = opened.read_objective_tree()
        return opened.step, params  # the step of the weights that were read


class Score(typing.NamedTuple):
    """What a model predicts of the masked tokens of some rows."""

    path: str
    step: int | None
    trained_tokens: int | None  # until that step, in all runs of a chain; None for no workdir
    mask_rate: float | None  # None: next tokens are predicted, and none is masked
    tokens: int  # of the rows
    masked: int  # predicted tokens
    loss: float  # mean, in nats
    half: float | None  # half of its 95% interval over batches of rows; None for one batch
    accuracy: float  # share of masked tokens that have the largest logit
    # Loss of a model that knows only how often each token is in the training rows; None if
    # the rows are gone, or no tokens are predicted.
    unigram: float | None


class Measurement(typing.NamedTuple):
    """A score, and the sums that its interval comes from."""

    score: Score
    losses: np.ndarray  # of each batch, float64 [batches]
    counts: np.ndarray  # masked tokens of each batch, float64 [batches]


def name_model(path: str, step: int | None) -> str:
    """Returns how a model is called in what `evaluate` prints."""
    return path if step is None else f"{path}, step {step}"


def open_model(
    path: str,
    steps: collections.abc.Sequence[int | None],
    needs_rows: bool,
    left_to_right: bool = False,
) -> TrainedModel:
    """Opens a model at one or more checkpoints, with the settings of its own evaluations.

    Args:
        path: A workdir, an export, a stock folder with a language-model head, or a checkpoint of
            the published code with its vocabulary.
        steps: Steps of a workdir's checkpoints; None for the newest, and for what is no workdir.
        needs_rows: Whether the rows of a run are measured. If not, rows in a bucket stay there, and
            rows that cannot be opened are named in a warning.
        left_to_right: Whether next tokens are measured. A causal run is always measured so.

    Raises:
        ConfigError: There is no such model, it has no prediction head, or it has not learned next
            tokens and they are to be measured.
    """
    workdir, _ = checkpoint.split_name(path)  # its step is one of `steps`
    path, experiment = workdir.path, workdir.read_settings()
    if experiment is None:
        return _from_folder(path, left_to_right, *steps)
    if workdir.kind is Kind.FINETUNED:
        raise config.ConfigError(
            f"{path} is a fine-tuned run, which predicts no tokens: name a run of pretraining"
        )
    opened = find_model(path, steps[-1])
    rows = _recorded_rows(workdir, experiment.corpus, opened.vocabulary, needs_rows)
    evaluated = experiment.evaluated.with_model(opened.model)
    if left_to_right:
        experiment.objective.require_next_tokens(path)
        evaluated = evaluated.left_to_right
    return TrainedModel(path, steps, opened, evaluated, rows)


def _from_folder(path: str, left_to_right: bool, step: int | None) -> TrainedModel:
    """Returns the model of a folder or file that is no workdir."""
    loaded = find_model(path, step).read()
    loaded.check_predicts()
    if left_to_right:
        loaded = loaded.left_to_right()
    experiment = config.Experiment(
        corpus=config.Corpus(sequence_length=loaded.length),
        objective=loaded.objective,
        encoder=loaded.model.encoder,
        decoder=loaded.model.decoder,
        compute=loaded.model.compute,
    )
    return TrainedModel(path, [step], loaded, experiment.evaluated, rows=None)


def _recorded_rows(
    workdir: Workdir, corpus: config.Corpus, vocabulary: vocabularies.Vocabulary, needed: bool
) -> prepare.Prepared | None:
    """Returns the rows of a run, or None if they are gone, or in a bucket and not `needed`."""
    if not needed and storage.in_bucket(corpus.rows_dir):
        return None
    try:
        return run_rows.open_recorded(workdir, corpus, vocabulary)
    except (config.ConfigError, config.RunError) as error:
        if needed:
            raise
        log.warning("%s: no unigram cross-entropy: its rows cannot be read (%s)", workdir, error)
        return None


def token_frequencies(path: str) -> np.ndarray | None:
    """Returns -log of the frequency of each id in the training rows of a run, float64 [ids].

    None if the model is no run of pretraining that predicts tokens, or its rows are gone or in a
    bucket.
    """
    workdir, _ = checkpoint.split_name(path)
    if workdir.kind is not Kind.RUN:
        return None
    model = open_model(workdir.path, [None], needs_rows=False)
    baseline = model.rows and model.objective.make_baseline(model.rows)
    return baseline and baseline.token_nll


def with_fresh_weights(encoder: OpenedModel) -> OpenedModel:
    """Returns the model of an encoder with new random weights, always the same."""
    init = maelm.create(encoder.model, encoder.vocabulary.size, encoder.vocabulary.special).init
    params = traverse_util.flatten_dict(jax.jit(init)(jax.random.key(0)), sep="/")
    return encoder.replace(params={path: np.asarray(value) for path, value in params.items()})


def heldout_rows(model: TrainedModel) -> np.ndarray:
    """Reads the held-out rows of a run's evaluations, int32 [Run.eval_rows or fewer, L].

    Raises ConfigError if the model is no workdir, or its rows are gone.
    """
    if model.rows is None:
        raise config.ConfigError(
            f"{model.path} has no held-out rows: give --text=FILES, a glob of text files"
        )
    if strategy := model.experiment.objective.masking.strategy:
        log.warning("%s: all tokens are masked alike, not as %s says", model.path, strategy)
    count = model.experiment.run.eval_rows
    return batches.read_heldout(model.rows.split("heldout"), model.rows.rates, count)


def with_comparable_masks(model: TrainedModel, rate: float, length: int, seed: int) -> TrainedModel:
    """Returns the model with masks that compare with those of other models.

    Single tokens are masked, special tokens never. The encoder reads [MASK] at as many of them as
    in pretraining: at none in MAE-LM, at all in MLM. `length` is the tokens of a row. Raises
    ConfigError if `rate` masks less than one token of a row, or if the model predicts no tokens.
    """
    experiment = model.experiment
    experiment.objective.require_tokens(model.path)
    masking = dataclasses.replace(
        experiment.objective.masking,
        rate=rate,
        unit="token",
        mask_special_tokens=False,
        random_fraction=0.0,
        keep_fraction=0.0,
        strategy=None,
        strategy_parameters={},
    )
    objective = experiment.objective.without_replacement(masking)
    corpus = dataclasses.replace(experiment.corpus, sequence_length=length)
    run = dataclasses.replace(experiment.run, seed=seed)
    alike = dataclasses.replace(experiment, objective=objective, corpus=corpus, run=run)
    return model._replace(experiment=alike)


def measure(model: TrainedModel, rows: np.ndarray) -> list[Measurement]:
    """Measures the loss of a model on rows of ids, int32 [R, L], at each of its checkpoints.

    A checkpoint that the run prunes meanwhile is left out, unless it was the only one. Masks are
    those of `Run.seed`. On the held-out rows of a run they are those of its evaluations.
    Raises ConfigError if no token is masked.
    """
    experiment, vocabulary, objective = model.experiment, model.vocabulary, model.objective
    size = max(TOKENS // rows.shape[1], 1)
    parts = evaluation.in_batches(rows, size, 1, vocabulary.pad)
    key = keys.make_stream_key(experiment.run.seed, keys.EVALUATION_STREAM)

    @jax.jit
    def loss(params: dict, part: np.ndarray, numbers: np.ndarray):
        return objective.loss(params, part, numbers, key, False)

    baseline = model.rows and objective.make_baseline(model.rows)
    unigram = baseline and baseline.loss(rows)
    measured = []
    for number, params in checkpoint.read_each(model.steps, model.read):
        name = name_model(model.path, number)
        losses, correct, counts = _sums(loss, params, parts, name)
        masked = counts.sum()
        if not masked:
            raise config.ConfigError(
                f"{name}: no token of the {len(rows)} rows is predicted: give more text"
            )
        mean = losses.sum() / masked
        score = Score(
            path=model.path,
            step=number,
            trained_tokens=None if number is None else Workdir(model.path).trained_tokens(number),
            mask_rate=None if experiment.model.causal else experiment.objective.masking.rate,
            tokens=int((rows != vocabulary.pad).sum()),
            masked=int(masked),
            loss=float(mean),
            half=half_interval(losses, counts, mean),
            accuracy=float(correct.sum() / masked),
            unigram=unigram,
        )
        measured.append(Measurement(score, losses, counts))
    return measured


def _sums(loss: typing.Callable, params: dict, parts: np.ndarray, name: str) -> np.ndarray:
    """Returns loss, correct predictions and masked tokens of each batch, [3, batches]."""
    params, size, sums = jax.device_put(params), parts.shape[1], []
    for number, part in enumerate(progress.Bar(parts, desc=name, unit="batch")):
        numbers = np.arange(number * size, (number + 1) * size, dtype=np.uint32)
        sums.append(jax.device_get(loss(params, part, numbers)[:3]))
    return np.asarray(sums, np.float64).T


def half_interval(losses: np.ndarray, counts: np.ndarray, mean: float) -> float | None:
    """Returns half of the interval of a ratio of sums over batches (Student's t)."""
    import scipy.stats  # slow to import

    number = len(losses)
    if number == 1:
        return None
    residuals = losses - mean * counts
    error = math.sqrt(number / (number - 1) * (residuals**2).sum()) / counts.sum()
    return float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, number - 1) * error)


class Difference(typing.NamedTuple):
    """The loss of one model minus that of another one, on the same masked tokens.

    The interval is narrower than those of the two losses say, because a hard batch is hard for
    both.
    """

    one: str
    other: str
    mean: float  # nats
    half: float | None  # half of the 95% interval; None with one batch

    def __str__(self):
        interval = ""
        if self.half is not None:
            low, high = self.mean - self.half, self.mean + self.half
            interval = f" (95% interval {low:+.3f} to {high:+.3f})"
        return f"{self.one} - {self.other}: {self.mean:+.3f} nats{interval}"


def paired_difference(one: Measurement, other: Measurement) -> Difference:
    """Returns the difference of two models that were measured on the same masked tokens."""
    losses = one.losses - other.losses
    mean = float(losses.sum() / one.counts.sum())
    names = [name_model(model.score.path, model.score.step) for model in (one, other)]
    return Difference(*names, mean, half_interval(losses, one.counts, mean))
