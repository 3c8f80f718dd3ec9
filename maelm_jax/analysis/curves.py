"""What a run logged: the held-out loss by tokens, and the rank by step."""

import numpy as np

from maelm_jax.training import metrics, run_record

NO_CURVE: dict = {"steps": [], "losses": [], "tokens": [], "unigram": None}


def heldout_curve(workdir: str, last_step: int) -> dict:
    """Reads the evaluations of a pretraining run, after those of the runs that it goes on from.

    Args:
        workdir: Workdir of the run.
        last_step: Evaluations of the run after this step are left out.

    Returns:
        Lists `losses` (nats), `tokens` (trained on until the evaluation, in all runs) and `steps`
        (of the run of the evaluation), and `unigram`, the unigram cross-entropy in nats. NO_CURVE
        if there are no evaluations.
    """
    result: dict = {name: [] for name in ("steps", "losses", "tokens")}
    chain = run_record.loss_curves(workdir, last_step)
    for curve in chain:
        lines = [line for line in curve.lines if "eval_loss" in line]
        result["steps"] += [line["step"] for line in lines]
        result["losses"] += [line["eval_loss"] for line in lines]
        result["tokens"] += [curve.tokens_after(line["step"]) for line in lines]
    unigrams = [line["unigram"] for curve in chain for line in curve.lines if "unigram" in line]
    return result | {"unigram": unigrams[-1]} if unigrams else NO_CURVE


def rank_curve(workdir: str) -> dict:
    """Reads the ranks that a run logged: without [MASK], of the last layer.

    Returns:
        Lists `steps` and `ranks`.
    """
    lines = [line for line in metrics.read(workdir) if "rank_plain_last" in line]
    return {
        "steps": [line["step"] for line in lines],
        "ranks": [line["rank_plain_last"] for line in lines],
    }


def median_step_seconds(lines: list[dict]) -> float | None:
    """Median time of a step in seconds, or None if no step is timed.

    A line of metrics.jsonl gives the time of every step since the line before.
    """
    seconds, steps, previous_step = [], [], 0
    for line in lines:
        if "step_seconds" in line:
            seconds.append(line["step_seconds"])
            steps.append(max(line["step"] - previous_step, 1))
        previous_step = line["step"]
    if not seconds:
        return None
    order = np.argsort(seconds)
    halfway = np.searchsorted(np.cumsum(np.asarray(steps)[order]), sum(steps) / 2)
    return float(np.asarray(seconds)[order][halfway])
