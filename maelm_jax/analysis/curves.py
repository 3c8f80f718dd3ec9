"""What a run logged: the held-out loss by step and by hours of training, and the rank by step."""

import numpy as np

from maelm_jax import config
from maelm_jax.training import metrics, phases

NO_CURVE: dict = {"steps": [], "losses": [], "hours": [], "unigram": None}


def heldout_curve(workdir: str, experiment: config.Experiment, last_step: int) -> dict:
    """Reads the evaluations of a pretraining run.

    Args:
        workdir: Workdir of the run.
        experiment: Settings of the run.
        last_step: Evaluations after this step are left out.

    Returns:
        Lists `steps`, `losses` (nats) and `hours` (of training until the evaluation), and
        `unigram`, the unigram cross-entropy in nats. Hours are steps times the median step time of
        their phase, so start-up, evaluation and other work on the machine do not count. NO_CURVE
        if there are no evaluations.
    """
    lines = metrics.read(workdir)
    parts = phases.of_run(experiment)
    step_seconds = [_seconds_of_phase(lines, phase) for phase in parts]
    evaluations = [line for line in lines if "unigram" in line and line["step"] <= last_step]
    if not evaluations:
        return NO_CURVE
    return {
        "steps": [line["step"] for line in evaluations],
        "losses": [line["eval_loss"] for line in evaluations],
        "hours": [_seconds_until(line["step"], parts, step_seconds) / 3600 for line in evaluations],
        "unigram": evaluations[-1]["unigram"],
    }


def _seconds_of_phase(lines: list[dict], phase: phases.Phase) -> float:
    """Median time of a step of a phase in seconds, or 0 if none is timed."""
    run, corpus = phase.experiment.run, phase.experiment.corpus
    of_phase = [line for line in lines if phase.start < line["step"] <= phase.end]
    tokens_per_step = run.batch_size * corpus.sequence_length
    return median_step_seconds(of_phase, tokens_per_step, phase.start) or 0.0


def _seconds_until(step: int, parts: list[phases.Phase], step_seconds: list[float]) -> float:
    """Time of the steps until `step`, given the time of a step of each phase."""
    return sum(
        max(min(step, phase.end) - phase.start, 0) * seconds
        for phase, seconds in zip(parts, step_seconds, strict=True)
    )


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


def median_step_seconds(lines: list[dict], tokens_per_step: int, start: int = 0) -> float | None:
    """Median time of a step in seconds, or None if no step is timed.

    A line of metrics.jsonl gives the time of every step since the line before. A line of an older
    version has no `step_seconds`; its time follows from `tokens_per_second`.

    Args:
        lines: Lines of the run's metrics.jsonl.
        tokens_per_step: Tokens of a training step.
        start: Step before the first line.
    """
    seconds, steps, previous_step = [], [], start
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
