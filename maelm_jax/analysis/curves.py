"""What a run logged: the held-out loss by step and by hours of training, and the rank by step."""

import numpy as np

from maelm_jax import config
from maelm_jax.training import metrics


def heldout_curve(workdir: str, experiment: config.Experiment) -> dict:
    """Reads the evaluations of a pretraining run.

    Args:
        workdir: Workdir of the run.
        experiment: Settings of the run.

    Returns:
        Lists `steps`, `losses` (nats) and `hours` (of training until the evaluation), and
        `unigram`, the unigram cross-entropy in nats. Hours are steps times the run's median step
        time, so start-up, evaluation and other work on the machine do not count.
    """
    lines = metrics.read(workdir)
    tokens_per_step = experiment.run.batch_size * experiment.corpus.sequence_length
    seconds = median_step_seconds(lines, tokens_per_step) or 0.0
    evaluations = [line for line in lines if "unigram" in line]
    return {
        "steps": [line["step"] for line in evaluations],
        "losses": [line["eval_loss"] for line in evaluations],
        "hours": [line["step"] * seconds / 3600 for line in evaluations],
        "unigram": evaluations[-1]["unigram"] if evaluations else None,
    }


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


def median_step_seconds(lines: list[dict], tokens_per_step: int) -> float | None:
    """Median time of a step in seconds, or None if no step is timed.

    A line of metrics.jsonl gives the time of every step since the line before. A line of an older
    version has no `step_seconds`; its time follows from `tokens_per_second`.

    Args:
        lines: Lines of the run's metrics.jsonl.
        tokens_per_step: Tokens of a training step.
    """
    seconds, steps, previous_step = [], [], 0
    for line in lines:
        if line.get("tokens_per_second"):
            seconds.append(line.get("step_seconds") or tokens_per_step / line["tokens_per_second"])
            steps.append(max(line["step"] - previous_step, 1))
        previous_step = line["step"]
    if not seconds:
        return None
    order = np.argsort(seconds)
    halfway = np.searchsorted(np.cumsum(np.asarray(steps)[order]), sum(steps) / 2)
    return float(np.asarray(seconds)[order][halfway])
