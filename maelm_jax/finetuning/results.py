"""results.json of a finished run: what it holds, how it is written and read."""

import json
import pathlib
import typing

import numpy as np

from maelm_jax import config, json_files, storage
from maelm_jax.finetuning.task_data import TaskData
from maelm_jax.training import metrics

NAME = "results.json"  # written last: a folder that holds it is finished
# Types of the fields of every run, and of the others of a run that did not diverge.
NUMBER = int | float
FIELDS = {"task": str, "cell": dict, "seed": int}
SCORED_FIELDS = {
    "score": NUMBER,
    "best": dict,
    "last": dict,
    "evaluations": list,
    "predictions": list,
}
HYPERPARAMETERS = ("batch_size", "learning_rate", "epochs", "warmup")  # of a cell of the grid


def cell_of(grid: config.Grid) -> dict:
    """The hyper-parameters that tell one cell of the grid from another."""
    return {name: getattr(grid, name) for name in HYPERPARAMETERS}


def write_json(path: pathlib.Path, content):
    """Writes a JSON file. Under its name it is always complete."""
    storage.write(path, json.dumps(content, indent=1) + "\n")


def read(folder: pathlib.Path) -> dict:
    """Reads results.json of a finished run. Raises ConfigError when it is damaged."""
    return json_files.read(folder / NAME, _is_result, f"remove {folder} and run again")


def _is_result(content) -> bool:
    """Whether a value from a JSON file is what a finished run or one that diverged writes."""
    if not json_files.has_fields(content, FIELDS):
        return False
    if "diverged" in content:
        return isinstance(content["diverged"], str)
    if not json_files.has_fields(content, SCORED_FIELDS):
        return False
    numbers = dict.fromkeys(content["best"], NUMBER)
    return (
        json_files.is_texts(content.get("labels", []))
        and json_files.has_fields(content["best"], numbers)
        and json_files.has_fields(content["last"], numbers)
    )


class Evaluations(typing.NamedTuple):
    """All evaluations of a run: step, epoch and metrics of each."""

    lines: list[dict]
    best: dict  # the first one with the highest selection score


def evaluations(workdir: str, task: TaskData, steps_per_epoch: int) -> Evaluations:
    """Reads the evaluations of a run from its metrics.jsonl."""
    lines = [
        {"step": line["step"], "epoch": round(line["step"] / steps_per_epoch, 4)} | line
        for line in evaluations_in(metrics.read(workdir), task.main)
    ]
    return Evaluations(lines, max(lines, key=task.selection_score))


def evaluations_in(lines: list[dict], main_metric: str) -> list[dict]:
    """Step and metrics of each evaluation in lines of metrics.jsonl."""
    return [
        {"step": line["step"]}
        | {
            name.removeprefix("eval_"): value
            for name, value in line.items()
            if name.startswith("eval_")
        }
        for line in lines
        if f"eval_{main_metric}" in line
    ]


def speed(workdir: str, tokens_per_step: float, batch_size: int) -> float | None:
    """Median training examples per second, without evaluation; None in a very short run."""
    lines = metrics.read(workdir)
    rates = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    return float(np.median(rates)) / tokens_per_step * batch_size if rates else None


def metric_line(name: str, *values: float) -> str:
    """A line of a table of metrics, as text."""
    return f"  {name:<24}" + "".join(f"{value:>10.4f}" for value in values)


def summary(folder: pathlib.Path) -> str:
    """Metrics of the best and the last evaluation of a finished run, as text."""
    results = read(folder)
    best, last = results["best"], results["last"]
    title = (
        f"{results['task']}, best of {len(results['evaluations'])} evaluations "
        f"(epoch {best['epoch']:g}) and last:"
    )
    lines = [
        metric_line(name, best[name], last[name]) for name in best if name not in ("step", "epoch")
    ]
    predictions = ", ".join(str(folder / name) for name in results["predictions"])
    return "\n".join([title, *lines, f"predictions: {predictions}"])
