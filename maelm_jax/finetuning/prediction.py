"""Labels a file with a finished run (--predict), and scores the labels (--score)."""

import hashlib
import json
import os
import pathlib
import typing

from maelm_jax import config, paths, storage
from maelm_jax.finetuning import files, finished_run, glue, results, tasks

PACKINGS = (".gz", ".xz")  # endings of packed files, before which stands that of their format
RECORD = ".source.json"  # suffix of the record, which names the file that was predicted
SCORES = "_scores.json"  # ending of the file with the scores


def predict(
    workdir: str | None,
    input_file: str,
    output: str | None,
    bindings: list[str],
    with_scores: bool = False,
) -> str:
    """Predicts a file with the finished run in `workdir`, and writes the predictions.

    Args:
        workdir: The run.
        input_file: The file to predict.
        output: Path of the predictions. None: in the workdir, named as in a submission to GLUE, or
            predictions_STEM.tsv (.json, .txt) in other tasks.
        bindings: Settings that replace those of the run.
        with_scores: Whether to compare the predictions with the labels in the file, and to write
            the metrics beside the predictions.

    Returns:
        What was done, for the user.

    Raises:
        ConfigError: The run, the file or the output cannot be used.
    """
    run = finished_run.read(workdir, bindings, "--predict")
    if not os.path.isfile(input_file):
        raise config.ConfigError(f"--predict={input_file}: no such file")
    dev = tasks.read_file(
        run.task,
        input_file,
        run.experiment.finetune,
        run.vocabulary,
        run.length,
        run.results,
        run.pair,
        labelled=with_scores,
    )
    flag = "--workdir" if output is None else "--output"
    endings = (*dev.endings, SCORES)  # new predictions replace the scores of earlier ones too
    target = target_of(run.task, run.folder, input_file, output, endings)
    source = check_target(target, input_file, flag)
    outputs = run.outputs([dev])
    with paths.writing(flag, target.folder):
        replace(target, source)
        path = dev.write(outputs[0], target.folder, target.stem)
        lines = [*dev.notes, f"{dev.count} predicted: {path}"]
        if with_scores:
            scores = dev.score(outputs[0])
            results.write_json(target.folder / (target.stem + SCORES), scores)
            lines += [results.metric_line(name, value) for name, value in scores.items()]
    return "\n".join(lines)


class Target(typing.NamedTuple):
    """Where predictions are written: FOLDER/STEM + each ending."""

    folder: pathlib.Path
    stem: str
    endings: tuple[str, ...]  # the first one is of the predictions

    def paths(self) -> list[pathlib.Path]:
        return [self.folder / (self.stem + ending) for ending in self.endings]

    def record(self) -> pathlib.Path:
        """The file that names the input."""
        return self.folder / (self.stem + self.endings[0] + RECORD)


def target_of(
    task: str, workdir: pathlib.Path, input_file: str, output: str | None, endings: tuple[str, ...]
) -> Target:
    """Where predictions are written. Raises ConfigError when `output` has another ending.

    Args:
        task: The task of the run.
        workdir: Folder of the run. Predictions are written there if `output` is None.
        input_file: The file to predict.
        output: Path of the predictions, or None.
        endings: Endings of the files of the predictions.
    """
    if output is None:
        return Target(workdir, default_stem(task, input_file), endings)
    path, ending = pathlib.Path(output), endings[0]
    if not path.name.endswith(ending) or path.name == ending:
        raise config.ConfigError(
            f"--output={output}: the predictions of this task are a {ending} file. "
            f"Name a file that ends in {ending}."
        )
    return Target(path.parent, path.name.removesuffix(ending), endings)


def default_stem(task: str, input_file: str) -> str:
    """Name of the predictions without its ending: in GLUE, that of a submission."""
    name = pathlib.Path(input_file).name
    packing = next((ending for ending in PACKINGS if name.endswith(ending)), "")
    stem = pathlib.Path(name.removesuffix(packing)).stem
    if task not in glue.TASKS:
        return f"predictions_{stem}"
    parts = glue.TASKS[task].parts
    if len(parts) == 1:
        return glue.TASKS[task].submission(parts[0])
    if stem in glue.DIAGNOSTIC_STEMS:
        return glue.DIAGNOSTIC
    named = [part for part in parts if stem.endswith(f"_{part}")]
    return glue.TASKS[task].submission(named[0] if named else parts[0])


def check_target(target: Target, input_file: str, flag: str) -> dict[str, str]:
    """Checks that predictions can be written, and makes their folder.

    Args:
        target: Where they are written.
        input_file: The file to predict.
        flag: The flag that named the folder, for messages.

    Returns:
        Content of the record: path and SHA-256 of `input_file`.

    Raises:
        ConfigError: The folder cannot be written to; or one of the files exists, and --predict did
            not write it or wrote it for another input.
    """
    source = {"input": os.path.abspath(input_file), "sha256": _digest(input_file)}
    paths.check_folder(flag, target.folder)
    in_the_way = [path for path in (*target.paths(), target.record()) if os.path.lexists(path)]
    if in_the_way:
        _check_record(target.record(), in_the_way[0], source)
    paths.make_folder(flag, target.folder)
    return source


def replace(target: Target, source: dict[str, str]):
    """Removes earlier predictions and writes the record `source` of the next ones.

    The record comes first. After a kill before the predictions are complete, the same command thus
    recognises the files as its own.
    """
    for path in target.paths():
        path.unlink(missing_ok=True)
    storage.write(target.record(), json.dumps(source, indent=1) + "\n")


def _check_record(record: pathlib.Path, existing: pathlib.Path, source: dict[str, str]):
    """Raises ConfigError unless `record` has the path or the digest of `source`."""
    remedy = "Name another file with --output=FILE, or remove it."
    if not os.path.isfile(record):
        raise config.ConfigError(
            f"{existing} is there already, and --predict did not write it. {remedy}"
        )
    recorded = files.read_record(record, remedy, input=str, sha256=str)
    if recorded["input"] != source["input"] and recorded["sha256"] != source["sha256"]:
        raise config.ConfigError(
            f"{existing} holds the predictions of another file, {recorded['input']}. {remedy}"
        )


def _digest(path: str) -> str:
    """SHA-256 of a file. Raises ConfigError when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise config.ConfigError(
            f"--predict={path}: cannot be read ({error.strerror}). Check its permissions."
        ) from error
