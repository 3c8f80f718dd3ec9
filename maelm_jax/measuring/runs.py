"""Opens and measures runs on their own held-out rows, or any encoders on the same text.

A measurement takes moments of disjoint sets of tokens, and from these the ranks of every layer.
"""

import collections
import collections.abc
import dataclasses
import functools
import itertools
import os
import typing

import jax
import numpy as np

from maelm_jax import config, gin_files, progress, storage
from maelm_jax.analysis import moments, ranks
from maelm_jax.data import batches, packing, prepare, vocabularies
from maelm_jax.encoders.opened import OpenedModel, load_model
from maelm_jax.model import keys
from maelm_jax.model.kernels import backends
from maelm_jax.training import checkpoint, metrics, run_rows
from maelm_jax.training.workdir import Workdir

# Masks of text that several encoders read: each is measured with [MASK] and without.
OBJECTIVE = config.Objective(name="mlm")


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

    `files` and `bindings` change the settings of the measurement. `step` is that of the
    checkpoints. None: the newest of each run.

    Raises:
        ConfigError: A folder is no workdir, or it has no checkpoint of `step`.
    """
    opened = []
    for name in workdirs:
        storage.require_local(name)
        workdir, chosen = checkpoint.choose_step(name, step)
        workdir.require_run()
        training, record = workdir.read_settings(), str(workdir.settings_file)
        experiment = gin_files.load([record, *files], bindings)
        encoder = load_model(workdir, chosen)
        opened.append(_measured(workdir.path, encoder, experiment, training))
    return _with_unique_names(opened)


def open_encoders(paths: list[str], text: str) -> list[MeasuredRun]:
    """Loads encoders of any kind, to be measured on the files that the glob `text` names.

    Each path is a workdir, an exported or a stock folder, or a checkpoint of the published code.
    All encoders get rows of one length, the longest that all can read.

    Raises:
        ConfigError: There is no such encoder, or it cannot be computed here.
    """
    loaded = [load_model(path) for path in paths]
    length = min(packing.LONGEST_ROW, *(encoder.length for encoder in loaded))
    corpus = config.Corpus(text_files=text, sequence_length=length)
    opened = []
    for path, encoder in zip(paths, loaded, strict=True):
        experiment = config.Experiment(
            corpus=corpus,
            objective=OBJECTIVE,
            encoder=encoder.model.encoder,
            compute=encoder.model.compute,
        )
        opened.append(_measured(path, encoder, experiment, None))
    return _with_unique_names(opened)


def _measured(
    path: str,
    encoder: OpenedModel,
    experiment: config.Experiment,
    training: config.Experiment | None,
) -> MeasuredRun:
    name, step = _name(path, training), encoder.step or 0
    return MeasuredRun(name, path, experiment, training, encoder.vocabulary, step, encoder.tree())


def _name(path: str, training: config.Experiment | None) -> str:
    """Returns the folder's name, or "tiny on rte" for a run that was fine-tuned from runs/tiny."""
    if training and training.finetune and training.finetune.init_from:
        source = training.finetune.init_from.removeprefix(config.RANDOM)
        source = source.rstrip("/").rpartition("/")[2]
        fresh = "random-" if training.finetune.init_from.startswith(config.RANDOM) else ""
        return f"{fresh}{source} on {training.finetune.tasks}"
    return os.path.basename(os.path.abspath(path))


def rename(runs: list[MeasuredRun], names: list[str]) -> list[MeasuredRun]:
    """Gives runs the names of --names, in their order. Raises ConfigError if these do not fit."""
    if len(names) != len(runs) or len(set(names)) != len(names):
        raise config.ConfigError(
            f"--names={','.join(names)} must have a name of its own for each of {len(runs)} runs"
        )
    return [run._replace(name=name) for run, name in zip(runs, names, strict=True)]


def _with_unique_names(runs: list[MeasuredRun]) -> list[MeasuredRun]:
    """Names runs with equal names by their paths, and those with equal paths by their steps."""
    names = collections.Counter(run.name for run in runs)
    paths = collections.Counter(run.path for run in runs)

    def name(run: MeasuredRun) -> str:
        if names[run.name] == 1:
            return run.name
        return run.path if paths[run.path] == 1 else f"{run.path}@{run.step}"

    return [run._replace(name=name(run)) for run in runs]


def read_heldout_rows(run: MeasuredRun, tokens: int) -> np.ndarray:
    """Reads held-out rows of the run's corpus, or of that of the run it was fine-tuned from.

    Returns:
        Token ids, int32 [R, L]. The rows together hold `tokens` tokens, if there are so many.

    Raises:
        ConfigError: There is no text to read.
    """
    corpus, pretrained = run.experiment.corpus, Workdir(run.path)
    if run.experiment.finetune and run.experiment.finetune.init_from:
        pretrained, _ = checkpoint.split_name(
            run.experiment.finetune.init_from.removeprefix(config.RANDOM)
        )
    recorded = run_rows.open_recorded(pretrained, corpus, run.vocabulary)
    if not recorded and pretrained.path != run.path and not corpus.text_files:
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
    return first_rows(read, run.vocabulary.pad, tokens)


def first_rows(rows: np.ndarray, pad: int, tokens: int) -> np.ndarray:
    """Returns the first rows of `rows` [R, L] that together hold `tokens` tokens, or all rows."""
    cumulative = (rows != pad).sum(1).cumsum()
    return rows[: int(np.searchsorted(cumulative, min(tokens, int(cumulative[-1])))) + 1]


def count_unmasked(run: MeasuredRun, rows: np.ndarray) -> int:
    """Returns the expected number of tokens of `rows` [R, L] that are not masked."""
    tokens = int((rows != run.vocabulary.pad).sum())
    return int(tokens * (1 - run.experiment.evaluated.objective.masking.rate))


def require_tokens(run: MeasuredRun, rows: np.ndarray):
    """Raises ConfigError if the unmasked tokens of `rows` are too few for a rank."""
    unmasked, width = count_unmasked(run, rows), run.experiment.encoder.width
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
        if run.training and run.training.evaluated.objective != run.experiment.evaluated.objective
    ]


def measure(run: MeasuredRun, rows: np.ndarray, tau: float, sets: int, seed: int) -> dict:
    """Measures one run on rows [R, L], cut into `sets` disjoint sets of tokens at most.

    The effective rank holds the share `tau` of the squared length. The masks are those of `seed`.

    Returns:
        Everything that the report needs, ready for JSON.
    """
    experiment, training = run.experiment, run.training
    unmasked = count_unmasked(run, rows)
    possible_sets = count_sets(sets, len(rows), unmasked, experiment.encoder.width)
    if possible_sets < sets:
        print(f"{run.name}: {possible_sets} disjoint sets of tokens instead of {sets}")
    measure_batch = _compile(run)
    moments_by_set = _measure_sets(run, measure_batch, rows, possible_sets, seed)
    layers = progress.Bar(
        range(experiment.encoder.layers + 1), unit="layer", desc="eigenvalues", leave=False
    )
    lines = metrics.read(Workdir(run.path)) if training else []
    return {
        "name": run.name,
        "workdir": run.path,
        "step": run.step,
        "started_from": started_from(experiment),
        "started_step": Workdir(run.path).read_inputs().get("start_step"),
        "encoder": dataclasses.asdict(experiment.encoder),
        "decoder": dataclasses.asdict(experiment.decoder) if experiment.decoder else None,
        "objective": training.objective.title if training else None,
        "delta": training.objective.encoder_mask_fraction if training else None,
        "masking": dataclasses.asdict(training.objective.masking) if training else None,
        "measured_masking": dataclasses.asdict(experiment.evaluated.objective.masking),
        "vocabulary": run.vocabulary.fingerprint[:12],
        "rows": len(rows),
        "length": int(rows.shape[1]),
        "sets": possible_sets,
        "tokens": {
            kind: int(sum(one[kind].count for one in moments_by_set))
            for kind in moments.TOKEN_KINDS
        },
        "layers": [ranks.describe(moments_by_set, layer, tau) for layer in layers],
        "curve": read_loss_curve(run),
        "fine_tuned": experiment.finetune is not None,
        "rank_curve": read_rank_curve(lines),
    }


def started_from(experiment: config.Experiment) -> str | None:
    """Returns the run or encoder that a run began with."""
    if experiment.finetune:
        return experiment.finetune.init_from
    return experiment.run.continue_from or experiment.run.init_from


def read_loss_curve(run: MeasuredRun) -> dict[str, list]:
    """Returns the evaluations of a pretraining run, after those of the runs that it goes on from.

    Runs with another held-out loss, as those of a causal phase, are left out, and so are losses of
    which no unigram cross-entropy is known: they do not compare.

    Returns:
        Lists `tokens` (of training), `losses` (nats) and `unigrams` (unigram cross-entropy, nats).
        Also `words` of training, if they were counted, and `hours` of training; both are empty if
        the run goes on from another one.
    """
    names = ("tokens", "losses", "unigrams", "words", "hours")
    result: dict[str, list] = {name: [] for name in names}
    curves = metrics.read_curves(Workdir(run.path), run.step) if run.training else []
    for curve in curves:
        if curve.evaluated != curves[-1].evaluated:
            continue
        evaluations = [line for line in curve.lines if "unigram" in line]
        result["tokens"] += [curve.tokens_after(line["step"]) for line in evaluations]
        result["losses"] += [line["eval_loss"] for line in evaluations]
        result["unigrams"] += [line["unigram"] for line in evaluations]
        if len(curves) == 1 and not curve.first_token:
            hours, words = curve.hours_after(), curve.words_per_step
            result["hours"] += [hours[line["step"]] for line in evaluations]
            result["words"] += [line["step"] * words for line in evaluations if words]
    return result


def read_rank_curve(lines: list[dict]) -> dict[str, list]:
    """Returns the ranks that a run logged: lists `steps` and `ranks` (last layer, no [MASK])."""
    lines = [line for line in lines if "rank_plain_last" in line]
    return {
        "steps": [line["step"] for line in lines],
        "ranks": [line["rank_plain_last"] for line in lines],
    }


def count_sets(requested: int, rows: int, unmasked: int, width: int) -> int:
    """Returns the number of disjoint sets: `requested`, or fewer so that each can have a rank.

    A set consists of whole rows. A margin of a tenth allows for rows of different lengths.
    """
    with_enough_tokens = unmasked * 9 // 10 // (ranks.LEAST_PER_DIMENSION * width)
    return max(1, min(requested, rows, with_enough_tokens))


def measure_steps(
    run: MeasuredRun, rows: np.ndarray, tau: float, sets: int, seed: int
) -> list[dict]:
    """Measures the ranks of the last layer at every checkpoint of a run, as `measure` does.

    Returns:
        For each checkpoint {"step": its step, kind of tokens: its ranks}, ready for JSON.
    """
    measure_batch = _compile(run, layers=(run.experiment.encoder.layers,))
    result = []
    steps = checkpoint.all_steps(Workdir(run.path))
    for encoder in checkpoint.read_each(steps, functools.partial(load_model, run.path)):
        at_step = run._replace(step=encoder.step, params=encoder.tree())
        moments_by_set = _measure_sets(at_step, measure_batch, rows, sets, seed)
        described = ranks.describe(moments_by_set, 0, tau)
        for kind in (*moments.TOKEN_KINDS, "all"):
            for large in ("spectrum", "centred_spectrum"):
                described[kind].pop(large, None)
        result.append(described | {"step": encoder.step, "layer": run.experiment.encoder.layers})
    return result


def _compile(run: MeasuredRun, layers: tuple[int, ...] | None = None) -> collections.abc.Callable:
    """Returns the compiled function that measures a batch of rows."""
    vocabulary = run.vocabulary
    sizes = (vocabulary.size, vocabulary.special)
    target = backends.one_device()
    return jax.jit(moments.measure(run.experiment, *sizes, layers, target))


def _measure_sets(
    run: MeasuredRun,
    measure_batch: collections.abc.Callable,
    rows: np.ndarray,
    sets: int,
    seed: int,
) -> list[dict[str, moments.Moments]]:
    """Measures each set. A set is a range of neighbouring rows, so sets share few documents."""
    key = keys.make_stream_key(seed, keys.RANK_STREAM)
    bounds = np.linspace(0, len(rows), sets + 1).astype(int)
    with progress.Bar(total=len(rows), unit="row", desc=f"{run.name}, step {run.step}") as bar:
        return [
            moments.accumulate(
                measure_batch,
                run.params,
                rows[start:end],
                int(start),
                key,
                run.vocabulary.pad,
                progress=bar.update,
            )
            for start, end in itertools.pairwise(bounds)
        ]
