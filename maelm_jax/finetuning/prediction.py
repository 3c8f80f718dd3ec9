"""Labels a file with a finished run (--predict), and scores the labels (--score)."""

import hashlib
import json
import os
import pathlib
import typing

from maelm_jax import config, json_files, paths, storage
from maelm_jax.data import readers
from maelm_jax.finetuning import finished_run, glue, results, tasks

RECORD = ".source.json"  # suffix of the record, which names the file that was predicted
SCORES = "_scores.json"  # ending of the file with the scores
REMEDY = "Name another file with --output=FILE, or remove it."


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
        output: Path of the predictions. None: see `default_stem`.
        bindings: Settings that replace those of the run.
        with_scores: Whether to compare the predictions with the labels in the file, and to write
            the metrics beside the predictions. If not, scores of earlier predictions are removed
            with them.

    Returns:
        What was done, for the user.

    Raises:
        ConfigError: The run, the file or the output cannot be used.
    """
    run = finished_run.read(workdir, bindings, "--predict")
    if not os.path.isfile(input_file):
        raise config.ConfigError(f"--predict={input_file}: no such file. Give the path of a file")
    dev = tasks.read_file(
        run.task,
        input_file,
        run.experiment.finetune,
        run.input_format,
        run.results,
        labelled=with_scores,
    )
    flag = "--workdir" if output is None else "--output"
    endings = (*dev.endings, SCORES) if with_scores else dev.endings
    stem = default_stem(run.task, input_file, for_submission=not with_scores)
    target = target_of(output, Target(run.folder, stem, endings))
    replacement = check_target(target, input_file, flag)
    outputs = run.outputs([dev])
    with paths.writing(flag, target.folder):
        replace(target, replacement)
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


def target_of(output: str | None, default: Target) -> Target:
    """Where predictions are written: to `output`, or to `default` if it is None.

    Raises:
        ConfigError: `output` has another ending than the predictions of `default`.
    """
    if output is None:
        return default
    path, ending = pathlib.Path(output), default.endings[0]
    if not path.name.endswith(ending) or path.name == ending:
        raise config.ConfigError(
            f"--output={output}: the predictions of this task are a {ending} file. "
            f"Name a file that ends in {ending}."
        )
    return Target(path.parent, path.name.removesuffix(ending), default.endings)


def default_stem(task: str, input_file: str, for_submission: bool = True) -> str:
    """Name of the predictions without its ending: predictions_STEM, where STEM is of `input_file`.

    In a task of GLUE and with `for_submission`, it is the name that GLUE's server asks for.
    """
    stem = pathlib.Path(readers.without_packing(input_file)).stem
    if task not in glue.TASKS or not for_submission:
        return f"predictions_{stem}"
    parts = glue.TASKS[task].parts
    if len(parts) == 1:
        return glue.TASKS[task].submission(parts[0])
    if stem in glue.DIAGNOSTIC_STEMS:
        return glue.DIAGNOSTIC
    named = [part for part in parts if stem.endswith(f"_{part}")]
    return glue.TASKS[task].submission(named[0] if named else parts[0])


class Replacement(typing.NamedTuple):
    """What new predictions replace."""

    earlier: list[pathlib.Path]  # the files of the earlier predictions
    record: dict[str, str | bool]  # of the new ones: input, its SHA-256, whether there are scores


def check_target(target: Target, input_file: str, flag: str) -> Replacement:
    """Checks that predictions can be written, and makes their folder.

    Args:
        target: Where they are written.
        input_file: The file to predict.
        flag: The flag that named the folder, for messages.

    Raises:
        ConfigError: The folder cannot be written to; or one of the files exists, and --predict did
            not write it or wrote it for another input.
    """
    record = {
        "input": os.path.abspath(input_file),
        "sha256": _digest(input_file),
        "scores": SCORES in target.endings,
    }
    paths.check_folder(flag, target.folder)
    earlier = _earlier(target, record)
    known = (*earlier, target.record()) if earlier else ()
    for path in (*target.paths(), target.record()):
        if os.path.lexists(path) and path not in known:
            raise config.ConfigError(
                f"{path} is there already, and --predict did not write it. {REMEDY}"
            )
    paths.make_folder(flag, target.folder)
    return Replacement(earlier, record)


def replace(target: Target, replacement: Replacement):
    """Removes earlier predictions and their scores, and writes the record of the next ones.

    The record comes first. After a kill before the predictions are complete, the same command thus
    recognises the files as its own.
    """
    for path in replacement.earlier:
        path.unlink(missing_ok=True)
    storage.write(target.record(), json.dumps(replacement.record, indent=1) + "\n")


def _earlier(target: Target, record: dict[str, str | bool]) -> list[pathlib.Path]:
    """The files that --predict wrote before, by the record beside them.

    Raises:
        ConfigError: The record is damaged, or it has neither the path nor the digest of `record`.
    """
    if not os.path.isfile(target.record()):
        return []
    remedy = "name another file with --output=FILE, or remove it"
    recorded = json_files.read(target.record(), _is_record, remedy)
    if recorded["input"] != record["input"] and recorded["sha256"] != record["sha256"]:
        raise config.ConfigError(
            f"{target.paths()[0]} holds the predictions of another file, {recorded['input']}. "
            f"{REMEDY}"
        )
    endings = [ending for ending in target.endings if ending != SCORES]
    if recorded.get("scores") is True:  # earlier versions had no scores
        endings.append(SCORES)
    return target._replace(endings=tuple(endings)).paths()


def _is_record(value) -> bool:
    return json_files.has_fields(value, {"input": str, "sha256": str})


def _digest(path: str) -> str:
    """SHA-256 of a file. Raises ConfigError when it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise config.ConfigError(
            f"--predict={path}: cannot be read ({error.strerror}). Check its permissions."
        ) from error
