"""Measures one run: moments of disjoint sets of tokens, and the ranks of every layer."""

import collections.abc
import dataclasses
import itertools

import jax
import numpy as np
import tqdm

from maelm_jax.analysis import curves, moments, ranks, runs
from maelm_jax.model import attention_choice, keys, maelm
from maelm_jax.training import checkpoint

MOST_SETS = 100  # more sets take more batches and narrow the intervals little


def measure(run: runs.TrainedRun, rows: np.ndarray, tau: float, sets: int, seed: int) -> dict:
    """Measures one run.

    Args:
        run: The run.
        rows: Rows to measure on, int32 [R, L].
        tau: Share of the squared length that the effective rank holds.
        sets: Disjoint sets of tokens for the confidence intervals, at most.
        seed: Seed of the masks.

    Returns:
        Everything that the report needs, ready for JSON.
    """
    experiment, training, curve = run.experiment, run.training, curves.NO_CURVE
    if training:
        curve = curves.heldout_curve(run.workdir, run.step)
    unmasked = runs.unmasked_tokens(run, rows)
    possible_sets = number_of_sets(sets, len(rows), unmasked, experiment.model.width)
    if possible_sets < sets:
        print(f"{run.name}: {possible_sets} disjoint sets of tokens instead of {sets}")
    measure_batch = _compiled(run, rows.shape[1])
    moments_by_set = _moments_of_sets(run, measure_batch, rows, possible_sets, seed)
    layers = tqdm.trange(experiment.model.layers + 1, unit="layer", desc="eigenvalues", leave=False)
    return {
        "name": run.name,
        "workdir": run.workdir,
        "step": run.step,
        "started_from": runs.started_from(experiment),
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
        "curve": curve,
        "fine_tuned": experiment.finetune is not None,
        "rank_curve": curves.rank_curve(run.workdir),
    }


def number_of_sets(requested: int, rows: int, unmasked: int, width: int) -> int:
    """Number of disjoint sets: `requested`, or fewer so that each can have a rank.

    A set consists of whole rows. A margin of a tenth allows for rows of different lengths.
    """
    with_enough_tokens = unmasked * 9 // 10 // (ranks.LEAST_PER_DIMENSION * width)
    return max(1, min(requested, MOST_SETS, rows, with_enough_tokens))


def ranks_by_step(
    run: runs.TrainedRun, rows: np.ndarray, tau: float, sets: int, seed: int
) -> list[dict]:
    """Measures the ranks of the last layer at every checkpoint of a run.

    Args:
        run: The run.
        rows: Rows to measure on, int32 [R, L].
        tau: Share of the squared length that the effective rank holds.
        sets: Disjoint sets of tokens for the confidence intervals.
        seed: Seed of the masks.

    Returns:
        For each checkpoint {"step": its step, name of a set of tokens: its ranks}, ready for JSON.
    """
    measure_batch = _compiled(run, rows.shape[1], layers=(run.experiment.model.layers,))
    result = []
    for step in checkpoint.all_steps(run.workdir):
        moments_by_set = _moments_of_sets(runs.at_step(run, step), measure_batch, rows, sets, seed)
        result.append({"step": step} | ranks.without_spectra(moments_by_set, 0, tau))
    return result


def _compiled(
    run: runs.TrainedRun, length: int, layers: tuple[int, ...] | None = None
) -> collections.abc.Callable:
    """Returns the compiled function that measures a batch of rows of `length` tokens."""
    special = run.vocabulary.special
    # The run's backend may be one of another machine.
    model = dataclasses.replace(run.experiment.model, attention_backend="auto")
    graph = maelm.encoder_graph(model, run.vocabulary.size, special.pad)
    masking = run.experiment.evaluated.masking
    measure = moments.measure(graph, masking, length, special, layers)

    def measure_on_one_device(*arguments):
        with attention_choice.traced_for(attention_choice.one_device()):
            return measure(*arguments)

    return jax.jit(measure_on_one_device)


def _moments_of_sets(
    run: runs.TrainedRun,
    measure_batch: collections.abc.Callable,
    rows: np.ndarray,
    sets: int,
    seed: int,
) -> list[dict[str, moments.Moments]]:
    """Moments of each set. A set is a range of neighbouring rows, so sets share few documents."""
    key, bounds = keys.of_seed(seed), np.linspace(0, len(rows), sets + 1).astype(int)
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
