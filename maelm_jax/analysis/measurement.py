"""Measures one run: moments of disjoint sets of tokens, and the ranks of every layer."""

import collections.abc
import dataclasses
import itertools

import jax
import numpy as np
import tqdm

from maelm_jax import config
from maelm_jax.analysis import moments, ranks, runs
from maelm_jax.model import attention, keys, maelm
from maelm_jax.training import checkpoint, metrics, run_record


def measure(run: runs.MeasuredRun, rows: np.ndarray, tau: float, sets: int, seed: int) -> dict:
    """Measures one run on rows [R, L], cut into `sets` disjoint sets of tokens at most.

    The effective rank holds the share `tau` of the squared length. The masks are those of `seed`.

    Returns:
        Everything that the report needs, ready for JSON.
    """
    experiment, training = run.experiment, run.training
    unmasked = runs.count_unmasked(run, rows)
    possible_sets = count_sets(sets, len(rows), unmasked, experiment.model.width)
    if possible_sets < sets:
        print(f"{run.name}: {possible_sets} disjoint sets of tokens instead of {sets}")
    measure_batch = _compile(run, rows.shape[1])
    moments_by_set = _measure_sets(run, measure_batch, rows, possible_sets, seed)
    layers = tqdm.trange(experiment.model.layers + 1, unit="layer", desc="eigenvalues", leave=False)
    lines = metrics.read(run.path) if training else []
    return {
        "name": run.name,
        "workdir": run.path,
        "step": run.step,
        "started_from": started_from(experiment),
        "model": dataclasses.asdict(experiment.model),
        "masking": dataclasses.asdict(training.masking) if training else None,
        "measured_masking": dataclasses.asdict(experiment.evaluated.masking),
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


def read_loss_curve(run: runs.MeasuredRun) -> dict[str, list]:
    """Returns the evaluations of a pretraining run, after those of the runs that it goes on from.

    Returns:
        Lists `tokens` (of training), `losses` (nats) and `unigrams` (unigram cross-entropy, nats).
    """
    result: dict[str, list] = {"tokens": [], "losses": [], "unigrams": []}
    for curve in run_record.loss_curves(run.path, run.step) if run.training else ():
        evaluations = [line for line in curve.lines if "unigram" in line]
        result["tokens"] += [curve.tokens_after(line["step"]) for line in evaluations]
        result["losses"] += [line["eval_loss"] for line in evaluations]
        result["unigrams"] += [line["unigram"] for line in evaluations]
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
    run: runs.MeasuredRun, rows: np.ndarray, tau: float, sets: int, seed: int
) -> list[dict]:
    """Measures the ranks of the last layer at every checkpoint of a run, as `measure` does.

    Returns:
        For each checkpoint {"step": its step, kind of tokens: its ranks}, ready for JSON.
    """
    measure_batch = _compile(run, rows.shape[1], layers=(run.experiment.model.layers,))
    result = []
    for step in checkpoint.all_steps(run.path):
        moments_by_set = _measure_sets(runs.at_step(run, step), measure_batch, rows, sets, seed)
        described = ranks.describe(moments_by_set, 0, tau)
        for kind in (*moments.TOKEN_KINDS, "all"):
            for large in ("spectrum", "centred_spectrum"):
                described[kind].pop(large, None)
        result.append(described | {"step": step})
    return result


def _compile(
    run: runs.MeasuredRun, length: int, layers: tuple[int, ...] | None = None
) -> collections.abc.Callable:
    """Returns the compiled function that measures a batch of rows of `length` tokens."""
    special = run.vocabulary.special
    # The run's backend may be one of another machine.
    model = dataclasses.replace(run.experiment.model, attention_backend="auto")
    graph = maelm.encoder_graph(model, run.vocabulary.size, special.pad)
    masking = run.experiment.evaluated.masking
    measure = moments.measure(graph, masking, length, special, layers)

    def measure_on_one_device(*arguments):
        with attention.trace_for_one_device():
            return measure(*arguments)

    return jax.jit(measure_on_one_device)


def _measure_sets(
    run: runs.MeasuredRun,
    measure_batch: collections.abc.Callable,
    rows: np.ndarray,
    sets: int,
    seed: int,
) -> list[dict[str, moments.Moments]]:
    """Measures each set. A set is a range of neighbouring rows, so sets share few documents."""
    key, bounds = keys.make_key(seed), np.linspace(0, len(rows), sets + 1).astype(int)
    with tqdm.tqdm(total=len(rows), unit="row", desc=f"{run.name}, step {run.step}") as bar:
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
