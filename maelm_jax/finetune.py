r"""Fine-tune a pretrained encoder on GLUE or SQuAD: one run, a grid, or a table of tasks.

    # One run.
    python -m maelm_jax.finetune --gin_file=finetune/rte.gin --init_from=runs/tiny \
        --workdir=runs/rte --gin.DATA_DIR=glue_data
    # A grid: the hyperparameters of the paper, five seeds each.
    python -m maelm_jax.finetune --gin_file=finetune/rte.gin --gin_file=finetune/grid.gin \
        --init_from=runs/tiny
    # A table: every task of glue.gin with two encoders.
    python -m maelm_jax.finetune --gin_file=finetune/glue.gin \
        --init_from=runs/tiny,runs/tiny-mlm --workdir=runs/table
    # Labels for an unlabelled file. --output writes them to another file.
    python -m maelm_jax.finetune --workdir=runs/rte --predict=test.tsv
    python -m maelm_jax.finetune --workdir=runs/rte --predict=test.tsv --output=labels.tsv

DATA_DIR is the folder of GLUE's folders or of SQuAD's files. Without it, data comes from TFDS.
`--init_from=random:RUN` is the control: the model of RUN with fresh weights.

The workdir of a run holds results.json, predictions, metrics.jsonl, config.gin, vocabulary/,
inputs.json (fingerprint of the data and checkpoint step of RUN) and checkpoints/ with the best
parameters. A grid or table has one such folder for each run, and table.md and table.json. With
two encoders or more it also has differences.png. In a grid, only the chosen cell keeps its
checkpoints. Finished runs are skipped. The exit status is that of maelm_jax.train.
"""

import collections
import dataclasses
import logging
import os
import pathlib
import sys
import time
import typing

from maelm_jax import cli, config, gin_files, paths, storage, tables

BASE = "finetune/base.gin"


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit status."""
    flags = cli.parser(__doc__)
    flags.add_argument(
        "--init_from", metavar="RUN[,RUN...]",
        help="pretrained workdirs, exported or stock folders; "
        "random:RUN: RUN's model with fresh weights",
    )  # fmt: skip
    flags.add_argument(
        "--predict", metavar="FILE",
        help="label this file with the fine-tuned model in --workdir, and stop",
    )  # fmt: skip
    flags.add_argument(
        "--output", metavar="FILE",
        help="with --predict: the predictions; "
        "default predictions_STEM.tsv (or .json) in --workdir",
    )  # fmt: skip
    args, bindings = cli.arguments(flags, argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if args.predict is not None:
        return predict(args, bindings)
    if args.output is not None:
        raise config.ConfigError(
            "--output names the predictions of --predict. Give --predict=FILE too."
        )
    if not args.gin_file or not args.init_from:
        raise config.ConfigError(
            "give --gin_file=finetune/TASK.gin (configs/finetune/ has one for each task) "
            "and --init_from=RUN"
        )

    storage.require_local(args.workdir)

    from maelm_jax.training import workdir_lock

    paths.check_folder("--workdir", args.workdir)
    planned, as_table = plan_runs(args, bindings)
    with workdir_lock.held(args.workdir):
        return tune(pathlib.Path(args.workdir), planned, as_table)


class Planned(typing.NamedTuple):
    """One task with one encoder. It is a single run or a grid."""

    task: str
    start: typing.Any  # encoder_source.EncoderSource; its module is imported late, after the flags
    label: str  # name of the encoder, unique among the encoders of the command
    experiment: config.Experiment


def plan_runs(args, bindings: list[str]) -> tuple[list[Planned], bool]:
    """Reads and checks all settings before the first run starts.

    Returns:
        The pairs of task and encoder, task by task, and whether the results make a table.

    Raises:
        ConfigError: A setting is wrong, an encoder or a file of a task is missing, or there is
            more than one process.
    """
    from maelm_jax.finetuning import encoder_source

    names = args.init_from.split(",")
    if len(set(names)) < len(names):
        raise config.ConfigError(f"--init_from={args.init_from} names a run twice")
    starts = [encoder_source.load(name) for name in names]
    settings = {one.name: experiments(one, args.gin_file, bindings) for one in starts}
    # A list of tasks makes a table, even a list of one. A task given as a string does not.
    listed = not isinstance(
        gin_files.load([starts[0].gin_file, BASE, *args.gin_file], bindings).finetune.tasks, str
    )
    labels = [one.label for one in starts]
    twice = [label for label, count in collections.Counter(labels).items() if count > 1]
    label_of = {
        one.name: one.name.strip("/").replace("/", "-") if one.label in twice else one.label
        for one in starts
    }
    # The order is task by task: `tune` then reads data and compiles steps once for all encoders.
    planned = [
        Planned(task, one, label_of[one.name], settings[one.name][task])
        for task in settings[starts[0].name]
        for one in starts
    ]
    cli.deterministic_operations(any(one.experiment.run.deterministic for one in planned))

    import jax

    from maelm_jax.finetuning import task_data

    if jax.process_count() > 1:
        raise config.ConfigError(
            "fine-tuning runs in one process; give each of your hosts other tasks or seeds"
        )
    for one in planned:
        task_data.check(one.task, one.experiment.finetune)
    return planned, listed or len(planned) > 1


def tune(folder: pathlib.Path, planned: list[Planned], as_table: bool) -> int:
    """Does all runs that are not finished, and returns the exit status.

    The workdir `folder` is that of the run, if it is a single run and `as_table` is false. Else it
    gets the table and a folder ENCODER/TASK for each pair of task and encoder. `planned` has these
    pairs task by task. The caller holds the lock of `folder`.
    """
    from maelm_jax.encoders import source
    from maelm_jax.finetuning import grid, session, table, task_data
    from maelm_jax.training import run_record

    began = time.perf_counter()
    tuners: dict[tuple, session.FinetuneSession] = {}
    reports: dict[str, dict[str, dict]] = {one.label: {} for one in planned}
    for task, start, label, experiment in planned:
        # Fine-tuning drops the decoder. The key leaves it out, so that MAE-LM and MLM runs share
        # data and compiled steps.
        defaults = {name: getattr(config.Model(), name) for name in source.DECODER_FIELDS}
        encoder = dataclasses.replace(experiment.model, **defaults)
        key = (task, start.vocabulary.fingerprint, encoder, experiment.finetune.max_length)
        if key not in tuners:
            tuners.clear()
            length = session.length_of(experiment)
            data = task_data.load(
                task, experiment.finetune, experiment.corpus, start.vocabulary, length
            )
            tuners[key] = session.FinetuneSession(experiment, data, start.vocabulary)
            describe_data(data, tuners[key], length, experiment)
        alone = not as_table and grid.is_single(
            experiment.finetune, len(tuners[key].problem.train.ids)
        )
        place = folder if alone else folder / label / task

        def describe(where, settings, vocabulary=start.vocabulary):
            run_record.write(pathlib.Path(where), settings, vocabulary)

        with paths.writing("--workdir", folder):
            report = grid.run_all(tuners[key], start, experiment, place, describe, alone)
        if report is None:
            print("stopped by SIGTERM; the same command goes on from there")
            return session.STOPPED
        reports[label][task] = report
        if not alone:
            with paths.writing("--workdir", folder):
                # After every task, so that a stopped command leaves the table of what is done.
                table.write(reports, folder, dict.fromkeys(one.task for one in planned))
    shown = summary_of_run(folder) if alone else table.markdown(reports) + f"\n{folder}/table.md"
    print(f"{shown}\n{time.perf_counter() - began:.0f} s in all")
    return 0


def experiments(start, given: list[str], bindings: list[str]) -> dict[str, config.Experiment]:
    """Returns {task: settings} for the encoder `start`, an EncoderSource.

    Later sources win: the encoder's own settings, finetune/base.gin, the task's file, the files of
    --gin_file (`given`), the command line (`bindings`). The shape of an encoder that is not a
    workdir comes from the encoder and wins over all of them. Raises ConfigError when there is no
    task or a value is wrong.
    """
    from maelm_jax.finetuning import task_data

    below = [start.gin_file, BASE]
    named = gin_files.load([*below, *given], bindings).finetune.listed("tasks")
    if not named:
        raise config.ConfigError(
            "Finetune.tasks names no task; stack a task's file, as in "
            f"--gin_file=finetune/rte.gin, on {', '.join(given)}"
        )
    found = {}
    for task in named:
        # task_data.check reports an unknown task later.
        own = [f"finetune/{task}.gin"] if task in task_data.NAMES else []
        found[task] = start.fit(
            gin_files.load([*below, *own, *given], [*bindings, f"Finetune.tasks={task}"])
        )
    return {
        task: dataclasses.replace(e, finetune=dataclasses.replace(e.finetune, init_from=start.name))
        for task, e in found.items()
    }


def describe_data(data, tuner, length: int, experiment: config.Experiment):
    """Prints the sizes of a task's data and the notes made while reading it."""
    dev = ", ".join(
        f"{len(found.features.ids):,}" + (f" {name}" if name else "")
        for name, found in data.dev.items()
    )
    sizes = ", ".join(map(str, tuner.sizes))
    print(
        f"{data.name}: {len(data.train.ids):,} training rows, {dev} dev rows "
        f"of at most {length} tokens, padded to {sizes}"
    )
    if length < experiment.finetune.max_length:
        print(
            f"{data.name}: the encoder has {length} positions, "
            f"MAX_LENGTH is {experiment.finetune.max_length}"
        )
    for note in data.notes:
        print(f"{data.name}: {note}")
    sys.stdout.flush()


def summary_of_run(folder: pathlib.Path) -> str:
    """Metrics of the best and the last evaluation of a finished run, as text."""
    from maelm_jax.finetuning import session

    results = session.read_results(folder)
    best, last = results["best"], results["last"]
    names = [name for name in best if name not in ("step", "epoch")]
    scores = [(name, f"{best[name]:.4f}", f"{last[name]:.4f}") for name in names]
    best_epoch = f"best (epoch {best['epoch']:g})"
    predictions = ", ".join(str(folder / name) for name in results["predictions"])
    return (
        f"{results['task']}, {len(results['evaluations'])} evaluations:\n"
        f"{tables.plain(('', best_epoch, 'last'), scores)}\n"
        f"predictions: {predictions}"
    )


def predict(args, bindings: list[str]) -> int:
    """Predicts the file of --predict with the finished run in --workdir.

    Writes predictions_STEM.tsv (.json for SQuAD) into the workdir, or the file of --output. Returns
    the exit status. Raises ConfigError when the run, the file or the output cannot be used.
    """
    from maelm_jax.finetuning import prediction

    folder, results = prediction.read_run(args.workdir)
    if not os.path.isfile(args.predict):
        raise config.ConfigError(f"--predict={args.predict}: no such file")
    experiment = gin_files.load([str(folder / "config.gin")], bindings)
    if experiment.finetune is None:
        saved = folder / "config.gin"
        raise config.ConfigError(f"{saved}: no settings of fine-tuning. Is it a fine-tuning run?")

    from maelm_jax.data import vocabulary as vocabularies
    from maelm_jax.finetuning import batches, session, task_data

    task, length = results["task"], session.length_of(experiment)
    vocabulary = vocabularies.load(folder / "vocabulary")
    dev, notes = task_data.unlabelled(
        task, args.predict, experiment.finetune, vocabulary, length, results["best"]
    )
    flag = "--workdir" if args.output is None else "--output"
    stem, target = prediction.stem_and_folder(folder, args.predict, args.output, dev.endings[0])
    source_record = prediction.check_target(target, stem, dev.endings, args.predict, flag)
    predictor, params = session.restore(
        str(folder), experiment, task_data.classes_of(task, experiment.finetune)[0], vocabulary
    )
    outputs = predictor.outputs(params, dev, batches.padded_lengths(dev.features.lengths, length))
    with paths.writing(flag, target):
        prediction.replace(target, stem, dev.endings, source_record)
        path = dev.write(outputs, target, stem)
    print("\n".join([*notes, f"{len(dev.features.ids):,} rows predicted: {path}"]))
    return 0


if __name__ == "__main__":
    cli.run(main, trains=True)
