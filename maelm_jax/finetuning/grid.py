"""The grid: runs every cell with every seed and chooses a cell by the median of its seeds.

A cell is one combination of batch size, learning rate, epochs and warm-up. Each run has a folder of
its own. Finished runs are skipped.
"""

import contextlib
import dataclasses
import itertools
import pathlib
import shutil

import numpy as np

from maelm_jax import config, setting_changes
from maelm_jax.finetuning import files, session
from maelm_jax.finetuning.encoder_source import EncoderSource
from maelm_jax.finetuning.task_data import TaskData
from maelm_jax.training import run_record, sharding, step_log, workdir_lock

INPUTS = "inputs.json"  # fingerprint of a run's data, and checkpoint step of its encoder
SMALL_TASK = 10_000  # with fewer training examples, `small_task_epochs` are tried too


def cells(settings: config.Finetune, examples: int) -> list[config.Finetune]:
    """The cells of the grid, each as settings with one value of each hyperparameter.

    `examples` is the number of training examples.
    """
    epochs = settings.listed("epochs")
    if examples < SMALL_TASK:
        epochs += tuple(
            value for value in settings.listed("small_task_epochs") if value not in epochs
        )
    lists = (
        settings.listed("batch_size"),
        settings.listed("learning_rate"),
        epochs,
        settings.listed("warmup"),
    )
    names = ("batch_size", "learning_rate", "epochs", "warmup")
    return [
        dataclasses.replace(settings, small_task_epochs=(), **dict(zip(names, values, strict=True)))
        for values in itertools.product(*lists)
    ]


def name_of(cell: config.Finetune) -> str:
    """The name of a cell's folder, for example b32-lr3e-05-e3-w0.06."""
    return f"b{cell.batch_size}-lr{cell.learning_rate:g}-e{cell.epochs}-w{cell.warmup:g}"


def is_single(settings: config.Finetune, examples: int) -> bool:
    """Whether the grid has one cell and one seed."""
    return len(cells(settings, examples)) * len(settings.listed("seeds")) == 1


def experiment_of(
    experiment: config.Experiment, cell: config.Finetune, seed: int
) -> config.Experiment:
    """The settings of one run of the grid. Its config.gin holds them."""
    settings = dataclasses.replace(experiment.run, seed=seed, batch_size=cell.batch_size)
    return dataclasses.replace(
        experiment, finetune=dataclasses.replace(cell, seeds=seed), run=settings
    )


def run_all(
    tuner: session.FinetuneSession, start: EncoderSource, experiment: config.Experiment,
    folder: pathlib.Path, describe, alone: bool,
) -> dict | None:  # fmt: skip
    """Does all runs of the grid that are not finished. Only the chosen cell keeps its models.

    Args:
        tuner: Data and compiled steps of the task.
        start: The encoder to start from.
        experiment: Settings of the grid.
        folder: Folder of the grid. A run has the folder FOLDER/CELL/seedN, so that cells and seeds
            can be added later.
        describe: Called with the folder and the settings of a run. It writes config.gin,
            environment.txt and vocabulary/.
        alone: The grid is a single run, and its folder is `folder` itself.

    Returns:
        The summary (see `summary`); None when SIGTERM stopped a run.

    Raises:
        ConfigError: A batch does not fit the mesh, or a folder holds a run that differs.
        Diverged: The single run diverged.
    """
    chosen = cells(experiment.finetune, len(tuner.problem.train.ids))
    seeds = experiment.finetune.listed("seeds")
    for cell in chosen:
        sharding.check_mesh(experiment_of(experiment, cell, 0), tuner.mesh)
    inputs = {"start_step": start.step, **tuner.problem.fingerprint}
    found: dict[str, list[dict]] = {}
    best = None
    for number, (cell, seed) in enumerate(itertools.product(chosen, seeds), start=1):
        name = name_of(cell)
        place = folder if alone else folder / name / f"seed{seed}"
        result = finished(place, experiment_of(experiment, cell, seed), inputs)
        if result is None:
            print(
                f"{tuner.problem.name} {start.label} {name} seed {seed} "
                f"({number} of {len(chosen) * len(seeds)})",
                flush=True,
            )
            result = _run(
                tuner, start, experiment_of(experiment, cell, seed), place, inputs, describe, alone
            )
            if result is None:
                return None
        found.setdefault(name, []).append(result | {"workdir": str(place)})
        if len(found[name]) == len(seeds):
            best = _keep_better(folder, best, name, found)
    return summary(tuner.problem, found)


def finished(place: pathlib.Path, experiment: config.Experiment, inputs: dict) -> dict | None:
    """The results of a finished run.

    Args:
        place: Folder of the run.
        experiment: Settings that the run must have.
        inputs: Content that its INPUTS file must have.

    Returns:
        The content of results.json; None when the run is not finished.

    Raises:
        ConfigError: The folder holds a run with other settings, on other data, or from another
            checkpoint of its encoder.
    """
    setting_changes.check_workdir(place, experiment)
    if (place / INPUTS).exists():
        before = files.read_record(place / INPUTS, f"Remove {place} and run again.")
        changed = [
            f"{name}: {before.get(name)} -> {value}"
            for name, value in inputs.items()
            if before.get(name) != value
        ]
        if changed:
            raise config.ConfigError(
                f"{place} holds a run on other data, or from another step of its start "
                f"({'; '.join(changed)}): give another --workdir"
            )
    if not (place / session.RESULTS).exists():
        return None
    # The folder remains when a kill came after the results were written and before its removal.
    shutil.rmtree(place / session.UNFINISHED, ignore_errors=True)
    return session.read_results(place)


def _run(
    tuner: session.FinetuneSession, start: EncoderSource, experiment: config.Experiment,
    place: pathlib.Path, inputs: dict, describe, alone: bool,
) -> dict | None:  # fmt: skip
    """One run. A run that diverges gets results without a score, unless it is `alone`."""

    def record():
        describe(place, experiment)
        session.write_json(place / INPUTS, inputs)

    try:
        # The caller holds the lock of FOLDER, which is the folder of a run that is alone.
        with contextlib.nullcontext() if alone else workdir_lock.held(str(place)):
            run_record.check(str(place))
            return tuner.run(experiment, start, str(place), record)
    except step_log.Diverged as error:
        if alone:
            raise
        # A grid also tries learning rates that are too high. It goes on, and this run ranks last.
        # metrics.jsonl keeps the loss up to this point.
        result = {
            "task": tuner.problem.name, "init_from": start.name, "seed": experiment.run.seed,
            "score": None, "diverged": str(error),
        }  # fmt: skip
        result |= {
            "cell": session.cell_of(experiment.finetune), "main_metric": tuner.problem.main,
            "notes": tuner.problem.notes,
        }  # fmt: skip
        session.write_json(place / session.RESULTS, result)
        shutil.rmtree(place / session.UNFINISHED, ignore_errors=True)
        return result


def median(results: list[dict]) -> float:
    """The median score of the seeds of a cell. A run that diverged counts as -inf.

    The median is -inf when half of the runs or more diverged, so that such a cell ranks last.
    """
    scores = sorted(-np.inf if result["score"] is None else result["score"] for result in results)
    half = len(scores) // 2
    return scores[half] if len(scores) % 2 else (scores[half - 1] + scores[half]) / 2


def _keep_better(
    folder: pathlib.Path, best: str | None, name: str, found: dict[str, list[dict]]
) -> str:
    """The better one of the cells `best` and `name`. Removes the models of the other one."""
    if best is None:
        return name
    keep, drop = (name, best) if median(found[name]) > median(found[best]) else (best, name)
    for place in (folder / drop).glob("seed*/checkpoints"):
        shutil.rmtree(place)
    return keep


def summary(problem: TaskData, found: dict[str, list[dict]]) -> dict:
    """The report of a task with one encoder.

    Args:
        problem: The task.
        found: {cell: results of its runs, one a seed}.

    Returns:
        "cells": median, least and highest score of every cell over its seeds. "chosen": the cell
        with the highest median. "metrics": median, least and highest value of every metric in the
        chosen cell. "model": the workdir with its middle score among those with a checkpoint, or
        None. Besides these: task, main_metric, seeds, notes.
    """
    rows = []
    for name, results in found.items():
        scores = [result["score"] for result in results]
        known = [score for score in scores if score is not None]
        row = {
            "name": name, **results[0]["cell"], "median": median(results),
            "least": min(known, default=None), "highest": max(known, default=None),
        }  # fmt: skip
        row |= {
            "median": row["median"] if np.isfinite(row["median"]) else None, "scores": scores,
            "seeds": [result["seed"] for result in results],
        }  # fmt: skip
        rows.append(row)
    chosen = max(found, key=lambda name: median(found[name]))
    good = [result for result in found[chosen] if result["score"] is not None]
    values = lambda metric: [result["best"][metric] for result in good]  # noqa: E731
    names = [name for name in good[0]["best"] if name not in ("step", "epoch")] if good else []
    spread = {
        name: {
            "median": float(np.median(values(name))),
            "least": min(values(name)),
            "highest": max(values(name)),
        }
        for name in names
    }
    kept = [
        result
        for result in sorted(good, key=lambda result: result["score"])
        if (pathlib.Path(result["workdir"]) / "checkpoints").is_dir()
    ]
    lost = len(found[chosen]) - len(good)
    unsaid = [
        (f"{found[chosen][0]['init_from']}: {lost} of {len(found[chosen])} seeds diverged; "
        "the figures are those of the others")
    ] if lost else []  # fmt: skip
    # A cell that was not the best with fewer seeds has lost the models of those seeds.
    middle = kept[len(kept) // 2]["workdir"] if kept else None
    return {
        "task": problem.name, "main_metric": problem.main, "chosen": chosen,
        "seeds": len(found[chosen]), "metrics": spread, "model": middle,
        "cells": rows, "notes": [*problem.notes, *unsaid],
    }  # fmt: skip
