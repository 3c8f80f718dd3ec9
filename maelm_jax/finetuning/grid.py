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

from maelm_jax import config, gin_files, json_files
from maelm_jax.finetuning import initial_encoder, results
from maelm_jax.finetuning.initial_encoder import InitialEncoder
from maelm_jax.finetuning.session import UNFINISHED, FinetuneSession
from maelm_jax.finetuning.task_data import TaskData
from maelm_jax.training import loop, run_record, sharding

INPUTS = "inputs.json"  # fingerprint of a run's data, and checkpoint step of its encoder
SMALL_TASK = 10_000  # with fewer training examples, `small_task_epochs` are tried too

ResultsByCell = dict[str, list[dict]]  # {name of a cell: results of its runs, one a seed}


def cells(grid: config.Grid, examples: int) -> list[config.Grid]:
    """The cells of the grid, each as settings with one value of each hyper-parameter.

    `examples` is the number of training examples.
    """
    lists = {name: grid.listed(name) for name in results.HYPERPARAMETERS}
    if examples < SMALL_TASK:
        more = [value for value in grid.listed("small_task_epochs") if value not in lists["epochs"]]
        lists["epochs"] += tuple(more)
    return [
        dataclasses.replace(grid, small_task_epochs=(), **dict(zip(lists, values, strict=True)))
        for values in itertools.product(*lists.values())
    ]


def name_of(cell: config.Grid) -> str:
    """The name of a cell's folder, for example b32-lr3e-05-e3-w0.06."""
    return f"b{cell.batch_size}-lr{cell.learning_rate:g}-e{cell.epochs}-w{cell.warmup:g}"


def is_single(grid: config.Grid, examples: int) -> bool:
    """Whether the grid has one cell and one seed."""
    return len(cells(grid, examples)) * len(grid.listed("seeds")) == 1


def experiment_of(experiment: config.Experiment, cell: config.Grid, seed: int) -> config.Experiment:
    """The settings of one run of the grid. Its config.gin holds them."""
    run = dataclasses.replace(experiment.run, seed=seed, batch_size=cell.batch_size)
    grid = dataclasses.replace(cell, seeds=seed)
    finetune = dataclasses.replace(experiment.finetune, grid=grid)
    return dataclasses.replace(experiment, finetune=finetune, run=run)


@dataclasses.dataclass(frozen=True)
class GridRun:
    """What all runs of a grid share.

    Attributes:
        session: Data and compiled steps of the task.
        encoder: The encoder to start from.
        experiment: Settings of the grid.
        folder: Folder of the grid. A run has the folder FOLDER/CELL/seedN, so that cells and seeds
            can be added later.
        is_single: The grid is a single run, and its folder is `folder` itself.
    """

    session: FinetuneSession
    encoder: InitialEncoder
    experiment: config.Experiment
    folder: pathlib.Path
    is_single: bool

    def run_all(self) -> dict:
        """Does all runs of the grid that are not finished. Only the chosen cell keeps its models.

        Returns:
            The summary (see `summary`).

        Raises:
            ConfigError: A batch does not fit the mesh, or a folder holds a run that differs.
            Diverged: The single run diverged.
        """
        grid, task = self.experiment.finetune.grid, self.session.task
        all_cells, seeds = cells(grid, len(task.train.ids)), grid.listed("seeds")
        for cell in all_cells:
            sharding.check_mesh(experiment_of(self.experiment, cell, 0), self.session.mesh)
        results_by_cell: ResultsByCell = {}
        best = None
        for number, (cell, seed) in enumerate(itertools.product(all_cells, seeds), start=1):
            title = f"{name_of(cell)} seed {seed} ({number} of {len(all_cells) * len(seeds)})"
            result = self._result_of(cell, seed, title)
            name = name_of(cell)
            results_by_cell.setdefault(name, []).append(result)
            if len(results_by_cell[name]) == len(seeds):
                best = self._keep_better(best, name, results_by_cell)
        return summary(task, results_by_cell) | {"start_step": self.encoder.step}

    def _result_of(self, cell: config.Grid, seed: int, title: str) -> dict:
        """The results of a run, which is done if it is not finished."""
        folder = self.folder if self.is_single else self.folder / name_of(cell) / f"seed{seed}"
        experiment = experiment_of(self.experiment, cell, seed)
        inputs = {"start_step": self.encoder.step, **self.session.task.fingerprint}
        result = finished(folder, experiment, inputs)
        if result is None:
            print(f"{self.session.task.name} {self.encoder.label} {title}", flush=True)
            result = self._run(experiment, folder, inputs)
        return result | {"workdir": str(folder)}

    def _run(self, experiment: config.Experiment, folder: pathlib.Path, inputs: dict) -> dict:
        """One run. A run that diverges gets results without a score, unless it is single."""

        def record():
            run_record.write_start(folder, experiment, self.encoder.vocabulary)
            results.write_json(folder / INPUTS, inputs)

        # The caller holds the lock of the grid's folder, which is the folder of a single run.
        lock = contextlib.nullcontext() if self.is_single else run_record.locked(str(folder))
        try:
            with lock:
                return self.session.run(experiment, self.encoder, str(folder), record)
        except loop.Diverged as error:
            if self.is_single:
                raise
            # A grid also tries learning rates that are too high. It goes on, and this run ranks
            # last. metrics.jsonl keeps the loss up to this point.
            return self._write_diverged(experiment, folder, str(error))

    def _write_diverged(
        self, experiment: config.Experiment, folder: pathlib.Path, message: str
    ) -> dict:
        """Writes results without a score."""
        task = self.session.task
        result = {
            "task": task.name,
            "init_from": self.encoder.name,
            "seed": experiment.run.seed,
            "score": None,
            "diverged": message,
            "cell": results.cell_of(experiment.finetune.grid),
            "main_metric": task.main,
            "notes": task.notes,
        }
        results.write_json(folder / results.NAME, result)
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
        return result

    def _keep_better(self, best: str | None, name: str, results_by_cell: ResultsByCell) -> str:
        """The better one of the cells `best` and `name`. Removes the models of the other one."""
        if best is None:
            return name
        is_better = median(results_by_cell[name]) > median(results_by_cell[best])
        keep, drop = (name, best) if is_better else (best, name)
        for checkpoints in (self.folder / drop).glob("seed*/checkpoints"):
            shutil.rmtree(checkpoints)
        return keep


def finished(folder: pathlib.Path, experiment: config.Experiment, inputs: dict) -> dict | None:
    """The results of a finished run.

    Args:
        folder: Folder of the run.
        experiment: Settings that the run must have.
        inputs: Content that its INPUTS file must have.

    Returns:
        The content of results.json; None when the run is not finished.

    Raises:
        ConfigError: The folder holds a run with other settings, on other data, or from another
            checkpoint of its encoder.
    """
    _check_settings(folder, experiment)
    if (folder / INPUTS).exists():
        recorded = json_files.read(folder / INPUTS, _is_object, f"remove {folder} and run again")
        changed = [
            f"{name}: {recorded.get(name)} -> {value}"
            for name, value in inputs.items()
            if recorded.get(name) != value and (name in recorded or name != "answers")
        ]
        if changed:
            raise config.ConfigError(
                f"{folder} holds a run with other data or answers, or one that started from "
                f"another checkpoint step ({'; '.join(changed)}): give another --workdir"
            )
    if not (folder / results.NAME).exists():
        return None
    # The folder remains when a kill came after the results were written and before its removal.
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    return results.read(folder)


def _is_object(value) -> bool:
    return isinstance(value, dict)


def _check_settings(folder: pathlib.Path, experiment: config.Experiment):
    """Raises ConfigError if the run in `folder` has other settings."""
    path = folder / "config.gin"
    if not path.exists():
        return
    recorded = gin_files.load([str(path)])
    if recorded.finetune and recorded.finetune.init_from:
        name = initial_encoder.normalised(recorded.finetune.init_from)
        same_spelling = dataclasses.replace(recorded.finetune, init_from=name)
        recorded = dataclasses.replace(recorded, finetune=same_spelling)
    if changes := config.differences(recorded, experiment):
        raise config.ConfigError(
            f"{folder} holds a run with other settings ({'; '.join(changes)}): "
            "give another --workdir, or the same settings"
        )


def median(runs: list[dict]) -> float:
    """The median score of the seeds of a cell. A run that diverged counts as -inf.

    The median is -inf when half of the runs or more diverged, so that such a cell ranks last.
    """
    scores = sorted(-np.inf if run["score"] is None else run["score"] for run in runs)
    half = len(scores) // 2
    return scores[half] if len(scores) % 2 else (scores[half - 1] + scores[half]) / 2


def summary(task: TaskData, results_by_cell: ResultsByCell) -> dict:
    """The report of a task with one encoder.

    Returns:
        "cells": median, least and highest score of every cell over its seeds. "chosen": the cell
        with the highest median. "metrics": median, least and highest value of every metric in the
        chosen cell. "model": the workdir with its middle score among those with a checkpoint, or
        None. "init_from": the encoder's name in --init_from. Besides these: task, main_metric,
        seeds, notes.
    """
    chosen = max(results_by_cell, key=lambda name: median(results_by_cell[name]))
    runs = results_by_cell[chosen]
    scored = [run for run in runs if run["score"] is not None]
    notes = list(task.notes)
    if lost := len(runs) - len(scored):
        notes.append(
            f"{runs[0]['init_from']}: {lost} of {len(runs)} seeds diverged; "
            "the figures are those of the others"
        )
    return {
        "task": task.name,
        "init_from": runs[0]["init_from"],
        "main_metric": task.main,
        "chosen": chosen,
        "seeds": len(runs),
        "metrics": _spread(scored),
        "model": _middle_model(scored),
        "cells": [_cell_report(name, of_cell) for name, of_cell in results_by_cell.items()],
        "notes": notes,
    }


def _cell_report(name: str, runs: list[dict]) -> dict:
    """Scores of one cell. Its median is None when half of its runs or more diverged."""
    scores = [run["score"] for run in runs]
    known = [score for score in scores if score is not None]
    middle = median(runs)
    return {
        "name": name,
        **runs[0]["cell"],
        "median": middle if np.isfinite(middle) else None,
        "least": min(known, default=None),
        "highest": max(known, default=None),
        "scores": scores,
        "seeds": [run["seed"] for run in runs],
    }


def _spread(runs: list[dict]) -> dict[str, dict[str, float]]:
    """{metric: median, least and highest value}, of the best evaluation of each run."""
    spread = {}
    for name in runs[0]["best"] if runs else ():
        if name not in ("step", "epoch"):
            values = [run["best"][name] for run in runs]
            spread[name] = {
                "median": float(np.median(values)),
                "least": min(values),
                "highest": max(values),
            }
    return spread


def _middle_model(runs: list[dict]) -> str | None:
    """The workdir with the middle score. A run without a checkpoint does not count.

    A cell that was not the best with fewer seeds has lost the models of those seeds.
    """
    ranked = sorted(runs, key=lambda run: run["score"])
    with_model = [
        run["workdir"] for run in ranked if (pathlib.Path(run["workdir"]) / "checkpoints").is_dir()
    ]
    return with_model[len(with_model) // 2] if with_model else None
