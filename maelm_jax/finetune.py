"""Fine-tune a pretrained encoder on GLUE or SQuAD, as one run, as a grid, or as the whole table.

    python -m maelm_jax.finetune --gin_file=finetune/rte.gin --init_from=runs/tiny --workdir=runs/rte --gin.DATA_DIR=glue_data
    python -m maelm_jax.finetune --gin_file=finetune/rte.gin --gin_file=finetune/grid.gin --init_from=runs/tiny    the paper's grid, five seeds
    python -m maelm_jax.finetune --gin_file=finetune/glue.gin --init_from=runs/tiny,runs/tiny-mlm --workdir=runs/table   all tasks, two encoders
    python -m maelm_jax.finetune --workdir=runs/rte --predict=test.tsv                                              labels for an unlabelled file
    python -m maelm_jax.finetune --workdir=runs/rte --predict=test.tsv --output=labels.tsv                          the same, written elsewhere

Data is read from DATA_DIR (GLUE's folders, SQuAD's files), or from TFDS. `--init_from=random:RUN` is the control: RUN's model with fresh weights.
A run's folder holds results.json, predictions, config.gin, inputs.json (which data, which step of RUN), vocabulary/, metrics.jsonl and the best
parameters in checkpoints/. A grid or table has such a folder for each run, and table.md, table.json and differences.png. Finished runs are not run
again. Exit status as in maelm_jax.train.
"""

import collections
import dataclasses
import logging
import os
import pathlib
import sys
import time
import typing

from maelm_jax import cli, config, gin_files, storage

BASE = "finetune/base.gin"


def main(argv: list[str]) -> int:
    flags = cli.parser(__doc__)
    flags.add_argument(
        "--init_from", metavar="RUN[,RUN...]", help="pretrained workdirs, exported or stock folders; random:RUN: RUN's model with fresh weights"
    )
    flags.add_argument("--predict", metavar="FILE", help="label this file with the fine-tuned model in --workdir, and stop")
    flags.add_argument("--output", metavar="FILE", help="with --predict: the predictions; default predictions_STEM.tsv (or .json) in --workdir")
    args, bindings = cli.arguments(flags, argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if args.predict is not None:
        return predict(args, bindings)
    if args.output is not None:
        raise config.ConfigError("--output names the predictions of --predict. Give --predict=FILE too.")
    if not args.gin_file or not args.init_from:
        raise config.ConfigError("give --gin_file=finetune/TASK.gin (configs/finetune/ has one for each task) and --init_from=RUN")

    storage.require_local(args.workdir)

    from maelm_jax.finetuning import files
    from maelm_jax.training import workdir_lock

    files.check_folder(args.workdir, "--workdir")
    planned, as_table = plan_runs(args, bindings)
    with workdir_lock.held(args.workdir):
        return tune(pathlib.Path(args.workdir), planned, as_table)


class Planned(typing.NamedTuple):
    """One task from one start."""

    task: str
    start: typing.Any  # an EncoderSource
    label: str  # of the start, unlike any other's
    experiment: config.Experiment


def plan_runs(args, bindings: list[str]) -> tuple[list[Planned], bool]:
    """(what is to be run, task by task; whether it makes a table). Raises ConfigError before the first has run for hours."""
    from maelm_jax.finetuning import encoder_source

    names = args.init_from.split(",")
    if len(set(names)) < len(names):
        raise config.ConfigError(f"--init_from={args.init_from} names a run twice")
    starts = [encoder_source.load(name) for name in names]
    settings = {one.name: experiments(one, args.gin_file, bindings) for one in starts}
    # One task by its name makes one run; a list of tasks makes a table, if only of one.
    listed = not isinstance(gin_files.load([starts[0].gin_file, BASE, *args.gin_file], bindings).finetune.tasks, str)
    labels = [one.label for one in starts]
    twice = [label for label, count in collections.Counter(labels).items() if count > 1]
    label_of = {one.name: one.name.strip("/").replace("/", "-") if one.label in twice else one.label for one in starts}
    # Task by task, so that data is read and steps are compiled once for all starts.
    planned = [
        Planned(task, one, label_of[one.name], settings[one.name][task]) for task in settings[starts[0].name] for one in starts
    ]
    cli.deterministic_operations(any(one.experiment.run.deterministic for one in planned))

    import jax

    from maelm_jax.finetuning import task_data

    if jax.process_count() > 1:
        raise config.ConfigError("fine-tuning runs in one process; give each of your hosts other tasks or seeds")
    for one in planned:
        task_data.check(one.task, one.experiment.finetune)
    return planned, listed or len(planned) > 1


def tune(folder: pathlib.Path, planned: list[Planned], as_table: bool) -> int:
    """All runs that are not finished; the exit status."""
    from maelm_jax.encoders import source
    from maelm_jax.finetuning import files, grid, session, table, task_data
    from maelm_jax.training import run_record

    began = time.perf_counter()
    tuners: dict[tuple, session.FinetuneSession] = {}
    reports: dict[str, dict[str, dict]] = {one.label: {} for one in planned}
    for task, start, label, experiment in planned:
        # Whatever decoder it was pretrained with, the encoder alone is fine-tuned: MAE-LM and MLM runs share data and compiled steps.
        encoder = dataclasses.replace(experiment.model, **{name: getattr(config.Model(), name) for name in source.DECODER})
        key = (task, start.vocabulary.fingerprint, encoder, experiment.finetune.max_length)
        if key not in tuners:
            tuners.clear()
            length = session.length_of(experiment)
            data = task_data.load(task, experiment.finetune, experiment.corpus, start.vocabulary, length)
            tuners[key] = session.FinetuneSession(experiment, data, start.vocabulary)
            describe_data(data, tuners[key], length, experiment)
        alone = not as_table and grid.is_single(experiment.finetune, len(tuners[key].problem.train.ids))
        place = folder if alone else folder / label / task

        def describe(where, settings, vocabulary=start.vocabulary):
            run_record.write(pathlib.Path(where), settings, vocabulary)

        with files.writing_to(folder, "--workdir"):
            report = grid.run_all(tuners[key], start, experiment, place, describe, alone)
        if report is None:
            print("stopped by SIGTERM; the same command goes on from there")
            return session.STOPPED
        reports[label][task] = report
        if not alone:
            with files.writing_to(folder, "--workdir"):
                table.write(reports, folder, dict.fromkeys(one.task for one in planned))  # as far as it is
    shown = summary_of_run(folder) if alone else table.markdown(reports) + f"\n{folder}/table.md"
    print(f"{shown}\n{time.perf_counter() - began:.0f} s in all")
    return 0


def experiments(start, given: list[str], bindings: list[str]) -> dict[str, config.Experiment]:
    """{task: settings}: the start's own settings, then fine-tuning's, the task's, the files given, the command line."""
    from maelm_jax.finetuning import task_data

    below = [start.gin_file, BASE]
    named = gin_files.load([*below, *given], bindings).finetune.listed("tasks")
    if not named:
        raise config.ConfigError(f"Finetune.tasks names no task; stack a task's file, as in --gin_file=finetune/rte.gin, on {', '.join(given)}")
    found = {}
    for task in named:
        own = [f"finetune/{task}.gin"] if task in task_data.NAMES else []  # an unknown one is named when its data is to be read
        found[task] = start.fit(gin_files.load([*below, *own, *given], [*bindings, f"Finetune.tasks={task}"]))
    return {task: dataclasses.replace(e, finetune=dataclasses.replace(e.finetune, init_from=start.name)) for task, e in found.items()}


def describe_data(data, tuner, length: int, experiment: config.Experiment):
    """Prints what the task's data is, and everything that was met while reading it."""
    dev = ", ".join(f"{len(found.features.ids):,}" + (f" {name}" if name else "") for name, found in data.dev.items())
    sizes = ", ".join(map(str, tuner.sizes))
    print(f"{data.name}: {len(data.train.ids):,} training rows, {dev} dev rows of at most {length} tokens, padded to {sizes}")
    if length < experiment.finetune.max_length:
        print(f"{data.name}: the encoder has {length} positions, MAX_LENGTH is {experiment.finetune.max_length}")
    for note in data.notes:
        print(f"{data.name}: {note}")
    sys.stdout.flush()


def summary_of_run(folder: pathlib.Path) -> str:
    from maelm_jax.finetuning import session

    results = session.read_results(folder)
    best, last = results["best"], results["last"]
    names = [name for name in best if name not in ("step", "epoch")]
    lines = [f"{results['task']}, best of {len(results['evaluations'])} evaluations (epoch {best['epoch']:g}) and last:"]
    lines += [f"  {name:<24}{best[name]:>10.4f}{last[name]:>10.4f}" for name in names]
    return "\n".join([*lines, f"predictions: {', '.join(str(folder / name) for name in results['predictions'])}"])


def predict(args, bindings: list[str]) -> int:
    """Labels FILE with a finished run. Writes predictions_STEM.tsv (.json) there, or --output."""
    from maelm_jax.finetuning import prediction

    folder, results = prediction.read_run(args.workdir)
    if not os.path.isfile(args.predict):
        raise config.ConfigError(f"--predict={args.predict}: no such file")
    experiment = gin_files.load([str(folder / "config.gin")], bindings)
    if experiment.finetune is None:
        saved = folder / "config.gin"
        raise config.ConfigError(f"{saved}: no settings of fine-tuning. Is it a fine-tuning run?")

    from maelm_jax.data import vocabulary as vocabularies
    from maelm_jax.finetuning import features, files, session, task_data

    task, length = results["task"], session.length_of(experiment)
    vocabulary = vocabularies.load(folder / "vocabulary")
    dev, notes = task_data.unlabelled(task, args.predict, experiment.finetune, vocabulary, length, results["best"])
    flag = "--workdir" if args.output is None else "--output"
    stem, target = prediction.stem_and_folder(folder, args.predict, args.output, dev.endings[0])
    source_record = prediction.check_target(target, stem, dev.endings, args.predict, flag)
    predictor, params = session.restore(str(folder), experiment, task_data.classes_of(task, experiment.finetune)[0], vocabulary)
    outputs = predictor.outputs(params, dev, features.padded_lengths(dev.features.lengths, length))
    with files.writing_to(target, flag):
        prediction.replace(target, stem, dev.endings, source_record)
        path = dev.write(outputs, target, stem)
    print("\n".join([*notes, f"{len(dev.features.ids):,} rows predicted: {path}"]))
    return 0


if __name__ == "__main__":
    cli.run(main, trains=True)
