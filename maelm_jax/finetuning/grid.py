"""The runs that a command asks for: tasks by encoders, each with cells and seeds. None runs twice.

A cell is one combination of batch size, learning rate, epochs and warm-up. Each run has a folder of
its own. A cell is chosen by the median of its seeds.
"""

import collections
import contextlib
import dataclasses
import itertools
import pathlib
import shutil
import time
import typing

import numpy as np

from maelm_jax import config, gin_files
from maelm_jax.encoders.results import Results
from maelm_jax.finetuning import (
    glue,
    initial_encoder,
    question,
    sentence,
    session,
    table,
    token,
)
from maelm_jax.finetuning.initial_encoder import InitialEncoder
from maelm_jax.finetuning.session import Run, Session
from maelm_jax.finetuning.task import InputFormat, Task
from maelm_jax.training import attention_report, loop, metrics, sharding
from maelm_jax.training.workdir import Workdir

KINDS = (sentence.SentenceTask, question.QuestionTask, token.TokenTask)
BASE = "finetune/base.gin"
SMALL_TASK = 10_000  # with fewer training examples, `small_task_epochs` are tried too


def create_task(name: str, settings: config.Finetune, results: Results | None = None) -> Task:
    """Makes the task of a name. `results` are those of the finished run whose model is used."""
    kind = next(kind for kind in KINDS if name in kind.names)
    return kind(name, settings, results)


class Finished(typing.NamedTuple):
    """A finished run."""

    results: Results
    place: str  # its folder inside that of the command


class Planned(typing.NamedTuple):
    """One task with one encoder: a single run or a grid."""

    task: str
    encoder: InitialEncoder
    label: str  # name of the encoder in the table
    experiment: config.Experiment
    is_listed: bool  # in a list of tasks, which makes a table, even if it is of one


def plan(
    names: list[str],
    files: list[str],
    bindings: list[str],
    step: int | None = None,
    labels: dict[str, str] | None = None,
) -> list[Planned]:
    """Reads and checks all settings before the first run starts.

    `names` are the encoders, as in --init_from. `step` is that of their checkpoints; None: the
    newest. `labels` are those of a table that is there already, {encoder: label}.

    Returns:
        All pairs, task by task, so that encoders share data and compiled steps.

    Raises:
        ConfigError: A setting is wrong, or an encoder or a file of a task is missing.
    """
    encoders = [initial_encoder.load(name, step) for name in names]
    finetune = _load(encoders[0], files, bindings).finetune
    if not finetune.tasks:
        raise config.ConfigError(
            "Finetune.tasks names no task; stack a task's file, as in "
            f"--gin_file=finetune/rte.gin, on {', '.join(files)}"
        )
    is_listed = isinstance(finetune.tasks, tuple)
    counts = collections.Counter(encoder.label for encoder in encoders)
    planned = []
    for task, encoder in itertools.product(finetune.listed("tasks"), encoders):
        path = encoder.name.strip("/").replace("/", "-")
        label = encoder.label if counts[encoder.label] == 1 else path
        label = (labels or {}).get(encoder.name, label)
        experiment = settings_of(task, encoder, files, bindings)
        planned.append(Planned(task, encoder, label, experiment, is_listed))
    return planned


def settings_of(
    task: str, encoder: InitialEncoder, files: list[str], bindings: list[str]
) -> config.Experiment:
    """Returns the settings of a task with an encoder. Checks that the files of the task exist.

    Later sources win: the encoder's own settings, finetune/base.gin, the task's file, the gin files
    and the settings of the command line. The shape of the encoder wins over all of them.
    """
    files, bindings = [f"finetune/{task}.gin", *files], [*bindings, f"Finetune.tasks={task}"]
    experiment = _load(encoder, files, bindings)
    finetune = dataclasses.replace(experiment.finetune, init_from=encoder.name)
    if task == glue.OWN:
        finetune = glue.completed(finetune)
    create_task(task, finetune).check_files()
    metrics.find_logger(experiment.run.log_to)  # raises ConfigError if it is missing
    return encoder.with_shape(dataclasses.replace(experiment, finetune=finetune))


def _load(encoder: InitialEncoder, files: list[str], bindings: list[str]) -> config.Experiment:
    """Returns settings from gin files and bindings, above those of the encoder's pretraining."""
    # Of an encoder that is not a workdir, only the shape is known.
    pretraining = encoder.source.experiment or gin_files.load(["base.gin"])
    base = dataclasses.replace(pretraining, finetune=None)
    return gin_files.load([BASE, *files], bindings, base=base, runs_modules=True)


def cells(grid: config.Grid, examples: int) -> list[config.Grid]:
    """Returns the cells of a grid, each as settings with one value of each hyper-parameter.

    `examples` is the number of training examples.
    """
    lists = {name: grid.listed(name) for name in session.HYPERPARAMETERS}
    if examples < SMALL_TASK:
        epochs = (*lists["epochs"], *grid.listed("small_task_epochs"))
        lists["epochs"] = tuple(dict.fromkeys(epochs))
    return [
        dataclasses.replace(grid, small_task_epochs=(), **dict(zip(lists, values, strict=True)))
        for values in itertools.product(*lists.values())
    ]


def name_cell(cell: config.Grid) -> str:
    """Returns the name of a cell's folder, for example b32-lr3e-05-e3-w0.06."""
    return f"b{cell.batch_size}-lr{cell.learning_rate:g}-e{cell.epochs}-w{cell.warmup:g}"


def all_runs(planned: Planned, current: Session) -> list[config.Experiment]:
    """Returns the settings of all runs of a pair, cell by cell. Their config.gin holds them."""
    experiment, finetune = planned.experiment, planned.experiment.finetune
    return [
        dataclasses.replace(
            experiment,
            finetune=dataclasses.replace(finetune, grid=dataclasses.replace(cell, seeds=seed)),
            run=dataclasses.replace(experiment.run, seed=seed, batch_size=cell.batch_size),
        )
        for cell in cells(finetune.grid, len(current.data.train.ids))
        for seed in finetune.grid.listed("seeds")
    ]


class Part(typing.NamedTuple):
    """A share of the cells of a command, for one of several machines."""

    number: int  # from 0
    count: int

    def has(self, index: int) -> bool:
        """Returns whether the part has the cell with this index among all cells."""
        return index % self.count == self.number


def run_part(workdir: Workdir, plan: list[Planned], part: Part):
    """Does the runs of a part of the cells that are not finished, and writes no table.

    Each run has a lock of its own, so that parts run at the same time in one folder. Of its cells,
    the part keeps the models of the best one of each pair.

    Raises:
        ConfigError: As `run_all`, also if a run of another part has other settings.
    """
    began, first = time.perf_counter(), 0  # index of the first cell of a pair
    _require_no_run(workdir)
    for planned, current in _sessions(plan):
        every_run = all_runs(planned, current)
        for experiment in every_run:  # refused now, and not by --join after all parts
            place = workdir.folder / _place_of(planned, experiment)
            finished(Run(current, experiment, planned.encoder, Workdir(place)))
        by_cell = _by_cell(every_run)
        chosen = [
            experiment
            for index, runs in enumerate(by_cell.values(), start=first)
            if part.has(index)
            for experiment in runs
        ]
        first += len(by_cell)
        _do_runs(current, planned, chosen, workdir, is_single=False, locks=True)
        del current  # so that its memory is free before the next one is made
    print(
        f"part {part.number} of {part.count} is done in {time.perf_counter() - began:.0f} s; "
        "--join joins all parts"
    )


def _by_cell(runs: list[config.Experiment]) -> dict[str, list[config.Experiment]]:
    """Returns the runs by the name of their cell."""
    by_cell: dict[str, list[config.Experiment]] = {}
    for experiment in runs:
        by_cell.setdefault(name_cell(experiment.finetune.grid), []).append(experiment)
    return by_cell


def _sessions(plan: list[Planned]) -> typing.Iterator[tuple[Planned, Session]]:
    """Yields each pair with its session, which following pairs may share."""
    key = current = None
    for planned in plan:
        if session_key(planned) != key:
            current = None
            key, current = session_key(planned), open_session(planned)
        yield planned, current


def _require_no_run(workdir: Workdir):
    """Raises ConfigError if a folder holds a single run."""
    if workdir.is_run:
        raise config.ConfigError(
            f"{workdir} holds a single run: give another --workdir for a table or a grid"
        )


def run_all(workdir: Workdir, plan: list[Planned], join: bool = False):
    """Does all runs that are not finished. With `join`, all must be: those of `run_part`.

    The workdir is that of the run, if it is a single run and no table is there. Else it
    gets the table and a folder ENCODER/TASK/CELL/seedN for each run. The results of other pairs in
    a table that is there already are kept.

    Raises:
        ConfigError: Data is malformed, a batch does not fit the mesh, a folder holds a run with
            other settings or data, or a run to join is not finished.
        Diverged: The single run diverged.
    """
    began = time.perf_counter()
    with workdir.locked():
        reports = _earlier_reports(workdir, plan)
        # A run beside a table is one of the table.
        is_listed = len(plan) > 1 or plan[0].is_listed
        as_table = is_listed or join or (workdir.folder / table.JSON_FILE).is_file()
        for planned, current in _sessions(plan):
            runs = all_runs(planned, current)
            is_single = not as_table and len(runs) == 1
            if not is_single:
                _require_no_run(workdir)
            if join:
                _require_finished(current, planned, runs, workdir)
            results = _do_runs(current, planned, runs, workdir, is_single)
            reports[planned.label][planned.task] = _report(current, planned, results, workdir)
            if not is_single:
                # After every task, so that a stopped command leaves the table of what is done.
                table.write(reports, workdir, [one.task for one in plan])
            del current  # so that its memory is free before the next one is made
    if is_single:
        print(session.describe_results(workdir))
    else:
        print(f"{table.markdown(reports)}\n{workdir.folder / table.MARKDOWN_FILE}")
    print(f"{time.perf_counter() - began:.0f} s in all")


def _earlier_reports(workdir: Workdir, plan: list[Planned]) -> table.Reports:
    """Returns the reports of the table in `workdir`, with a row for each encoder of `plan`.

    Raises:
        ConfigError: The table has another encoder of that name, or other weights of it.
    """
    reports = {label: by_task for label, by_task in table.read(workdir).items() if by_task}
    for planned in plan:
        wanted = _start(planned.encoder)
        for report in reports.setdefault(planned.label, {}).values():
            recorded = {name: report.get(name, value) for name, value in wanted.items()}
            if recorded != wanted:
                raise config.ConfigError(
                    f"{workdir.folder / table.JSON_FILE}: {planned.label} is {recorded}, not "
                    f"{wanted}. Give that --init_from and --step, or another --workdir"
                )
    return reports


def _start(encoder: InitialEncoder) -> dict[str, str | int | None]:
    """Returns what table.json says of the encoder of a row. Version 1.0 has no "encoder"."""
    return {
        "init_from": encoder.name,
        "start_step": encoder.step,
        "encoder": encoder.fingerprint,
    }


def session_key(planned: Planned) -> tuple:
    """Returns a key that pairs of task and encoder share if they can share a session."""
    experiment = planned.experiment
    # Fine-tuning has no decoder, so MAE-LM and MLM runs share data and compiled steps.
    encoder = experiment.model
    vocabulary = planned.encoder.vocabulary.fingerprint
    return planned.task, vocabulary, encoder, experiment.finetune.max_length


def open_session(planned: Planned) -> Session:
    """Reads the data of a pair of task and encoder, and prints what it is."""
    experiment, vocabulary = planned.experiment, planned.encoder.vocabulary
    task = create_task(planned.task, experiment.finetune)
    data = task.load(InputFormat.of_run(experiment, vocabulary))
    current = Session(experiment, task, data, vocabulary)
    runs = all_runs(planned, current)
    for run in runs:
        sharding.check_mesh(run, current.model.mesh)
    print(describe_data(current, planned))
    lengths = Run(current, runs[0], planned.encoder, Workdir("")).lengths
    print(attention_report.describe_encoder(experiment, lengths, current.model.mesh), flush=True)
    return current


def describe_data(current: Session, planned: Planned) -> str:
    """Returns the sizes of a task's data and the notes made while reading it, as text."""
    data, encoder = current.data, planned.encoder
    length = InputFormat.of_run(planned.experiment, encoder.vocabulary).length
    dev = ", ".join(f"{name or 'dev'}: {dev.size}" for name, dev in data.dev.items())
    lines = [f"training: {len(data.train.ids):,} rows of at most {length} tokens; {dev}"]
    # Without a checkpoint of ours, it is not known which positions were trained.
    if encoder.step is not None and length > encoder.source.length:
        lines.append(
            f"pretraining read rows of {encoder.source.length} tokens, and trained no later "
            "position"
        )
    lines += current.task.describe_training(data.train)
    return "\n".join(f"{planned.task}: {line}" for line in [*lines, *current.task.notes])


def _place_of(planned: Planned, experiment: config.Experiment) -> str:
    """Returns the folder of a run of a grid, inside that of the command."""
    cell, seed = name_cell(experiment.finetune.grid), f"seed{experiment.run.seed}"
    return str(pathlib.Path(planned.label, planned.task, cell, seed))


def _require_finished(
    current: Session, planned: Planned, runs: list[config.Experiment], workdir: Workdir
):
    """Raises ConfigError unless all runs of a pair are finished."""
    places = [_place_of(planned, experiment) for experiment in runs]
    missing = [
        place
        for place, experiment in zip(places, runs, strict=True)
        if finished(Run(current, experiment, planned.encoder, Workdir(workdir.folder / place)))
        is None
    ]
    if missing:
        raise config.ConfigError(
            f"--join: {len(missing)} of {len(runs)} runs of {planned.task} with {planned.label} "
            f"are not finished, the first is {workdir.folder / missing[0]}. Run the parts to their "
            "end, with the settings of this command"
        )


def _do_runs(
    current: Session,
    planned: Planned,
    runs: list[config.Experiment],
    workdir: Workdir,
    is_single: bool,
    locks: bool = False,
) -> dict[str, list[Finished]]:
    """Does runs that are not finished. Of their cells, only the best one keeps its models.

    `locks` takes the lock of each run, where none is held of the folder.

    Returns:
        The results by cell.
    """
    seeds = planned.experiment.finetune.grid.listed("seeds")
    results: dict[str, list[Finished]] = {}  # by cell
    best = None
    for number, experiment in enumerate(runs, start=1):
        cell = name_cell(experiment.finetune.grid)
        place = "." if is_single else _place_of(planned, experiment)
        run = Run(current, experiment, planned.encoder, Workdir(workdir.folder / place))
        with run.workdir.locked() if locks else contextlib.nullcontext():
            result = finished(run)
            if result is None:
                seed = f"seed{experiment.run.seed}"
                title = f"{planned.task} {planned.label} {cell} {seed} ({number} of {len(runs)})"
                print(title, flush=True)
                result = _train(run, is_single)
        results.setdefault(cell, []).append(Finished(result, place))
        if len(results[cell]) == len(seeds):
            complete = [best, cell] if best else [cell]
            best = max(complete, key=lambda name: median(results[name]))  # of equal ones the first
            for other in itertools.chain(*(results[name] for name in complete if name != best)):
                lost = Workdir(workdir.folder / other.place)
                shutil.rmtree(lost.checkpoints, ignore_errors=True)
    return results


def _train(run: Run, is_single: bool) -> Results:
    """Does one run. In a grid, one that diverges gets results without a score.

    A grid also tries learning rates that are too high: such a run ranks last, and the grid goes on.
    metrics.jsonl keeps the loss up to this point.
    """
    try:
        return run.train()
    except loop.Diverged as error:
        if is_single:
            raise
        result = Results(
            task=run.session.task.name,
            seed=run.experiment.run.seed,
            cell=session.cell_of(run.experiment.finetune.grid),
            diverged=str(error),
        )
        result.write(run.workdir.results_file)
        shutil.rmtree(run.workdir.unfinished.folder, ignore_errors=True)
        return result


def finished(run: Run) -> Results | None:
    """Returns the results of a finished run; None when the run is not finished.

    Raises:
        ConfigError: The folder holds a run with other settings, on other data, or from other
            weights.
    """
    workdir = run.workdir
    settings = workdir.read_settings()
    if settings is None:
        return None
    changed = config.differences(settings, run.experiment)
    if recorded := workdir.read_inputs():
        changed += [
            f"{name} ({workdir.inputs_file.name}): {recorded[name]} -> {value}"
            for name, value in run.inputs.items()
            if recorded.get(name, value) != value  # version 1.0 records no encoder
        ]
    if changed:
        raise config.ConfigError(
            f"{workdir} holds a run with other settings, data or weights "
            f"({'; '.join(changed)}): give another --workdir, or the same settings"
        )
    if not workdir.results_file.exists():
        return None
    # The folder remains when a kill came after the results were written and before its removal.
    shutil.rmtree(workdir.unfinished.folder, ignore_errors=True)
    return Results.of_run(workdir)


def median(results: list[Finished]) -> float:
    """Returns the median score of the seeds of a cell. A run that diverged counts as -inf.

    The median is -inf when half of the runs or more diverged, so that such a cell ranks last.
    """
    scores = [run.results.score for run in results]
    scores = [-np.inf if score is None else score for score in scores]
    return float(np.median(scores))


def _report(
    current: Session, planned: Planned, results: dict[str, list[Finished]], workdir: Workdir
) -> dict:
    """Returns the report of a task with one encoder, as table.json has it.

    Returns:
        "columns": the table's columns of the task, in percent, with the median, least and highest
        value of the chosen cell, the values by seed, and the baseline. "model": the folder inside
        the table's with the middle score among those with a checkpoint, or None. "cells": the
        scores of each cell; the median is None when half of its runs or more diverged.
    """
    chosen = max(results, key=lambda cell: median(results[cell]))
    of_chosen = results[chosen]
    scored = [run for run in of_chosen if run.results.score is not None]
    scored.sort(key=lambda run: run.results.score)
    notes = list(current.task.notes)
    if lost := len(of_chosen) - len(scored):
        notes.append(
            f"{planned.encoder.name}: {lost} of {len(of_chosen)} seeds diverged; "
            "the figures are those of the others"
        )
    models = [
        run.place for run in scored if Workdir(workdir.folder / run.place).checkpoints.is_dir()
    ]
    return {
        "task": planned.task,
        **_start(planned.encoder),
        "main_metric": current.main_metric,
        "chosen": chosen,
        "seeds": len(of_chosen),
        "columns": _report_columns(current, scored),
        "model": models[len(models) // 2] if models else None,
        "cells": [_report_cell(cell, of_cell) for cell, of_cell in results.items()],
        "notes": notes,
    }


def _report_columns(current: Session, scored: list[Finished]) -> dict[str, dict[str, float]]:
    """Returns {column of the table: values of some runs}; {} without a run."""
    columns = {}
    for title, metric, factor in current.task.columns:
        if scored and metric in current.baseline:
            known = spread([run.results.best[metric] for run in scored])
            known["baseline"] = current.baseline[metric]
            columns[title] = {name: value * factor for name, value in known.items()}
            by_seed = {str(run.results.seed): run.results.best[metric] * factor for run in scored}
            columns[title]["by_seed"] = by_seed
    return columns


def _report_cell(name: str, runs: list[Finished]) -> dict:
    """Returns the scores of the runs of a cell."""
    scores = [run.results.score for run in runs]
    known = spread([score for score in scores if score is not None])
    if np.isinf(median(runs)):
        known["median"] = None
    seeds = [run.results.seed for run in runs]
    return {"name": name, **runs[0].results.cell, **known, "scores": scores, "seeds": seeds}


def spread(values: list[float]) -> dict[str, float | None]:
    """Returns the median, the least and the highest value; None for each if there is none."""
    if not values:
        return dict.fromkeys(("median", "least", "highest"))
    return {"median": float(np.median(values)), "least": min(values), "highest": max(values)}
