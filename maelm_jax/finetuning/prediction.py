"""Files of --predict: the finished run, the predictions, and the record of what they predict."""

import hashlib
import json
import os
import pathlib

from maelm_jax import config, paths, storage
from maelm_jax.finetuning import files

RECORD = ".source.json"  # suffix of the record, which names the file that was predicted
# Folders of models in a grid or a table.
MODELS = [f"{'*/' * depth}seed*/checkpoints" for depth in range(4)]


def stem_and_folder(
    workdir: pathlib.Path, input_file: str, output: str | None, ending: str
) -> tuple[str, pathlib.Path]:
    """Where predictions are written.

    Args:
        workdir: Folder of the run. Predictions are written there if `output` is None.
        input_file: The file to predict.
        output: Path of the predictions, or None.
        ending: Ending that `output` must have.

    Returns:
        Name of the predictions without its ending, and their folder.

    Raises:
        ConfigError: `output` has another ending.
    """
    if output is None:
        return f"predictions_{pathlib.Path(input_file).name.split('.')[0]}", workdir
    path = pathlib.Path(output)
    if not path.name.endswith(ending) or path.name == ending:
        raise config.ConfigError(
            f"--output={output}: the predictions of this task are a {ending} file. "
            f"Name a file that ends in {ending}."
        )
    return path.name.removesuffix(ending), path.parent


def check_target(
    folder: pathlib.Path, stem: str, endings: tuple[str, ...], input_file: str, flag: str
) -> dict[str, str]:
    """Checks that predictions can be written, and makes their folder.

    Args:
        folder: Folder of the predictions.
        stem: Their name without ending.
        endings: Endings of all files of the predictions.
        input_file: The file to predict.
        flag: The flag that named `folder`, for messages.

    Returns:
        Content of the record: path and SHA-256 of `input_file`.

    Raises:
        ConfigError: The folder cannot be written to; or one of the files exists, and --predict did
            not write it or wrote it for another input.
    """
    targets = [folder / (stem + ending) for ending in endings]
    record = folder / (targets[0].name + RECORD)
    source = {"input": os.path.abspath(input_file), "sha256": _digest(input_file)}
    paths.check_folder(flag, folder)
    existing = [path for path in (*targets, record) if os.path.lexists(path)]
    if existing:
        _check_record(record, existing[0], source)
    paths.make_folder(flag, folder)
    return source


def replace(folder: pathlib.Path, stem: str, endings: tuple[str, ...], source: dict[str, str]):
    """Removes earlier predictions and writes the record `source` of the next ones.

    The record comes first. After a kill before the predictions are complete, the same command thus
    recognises the files as its own.
    """
    for ending in endings:
        (folder / (stem + ending)).unlink(missing_ok=True)
    storage.write(folder / (stem + endings[0] + RECORD), json.dumps(source, indent=1) + "\n")


def _check_record(record: pathlib.Path, found: pathlib.Path, source: dict[str, str]):
    """Raises ConfigError unless `record` has the path or the digest of `source`."""
    remedy = "Name another file with --output=FILE, or remove it."
    if not os.path.isfile(record):
        raise config.ConfigError(
            f"{found} is there already, and --predict did not write it. {remedy}"
        )
    before = files.read_record(record, remedy, input=str, sha256=str)
    if before["input"] != source["input"] and before["sha256"] != source["sha256"]:
        raise config.ConfigError(
            f"{found} holds the predictions of another file, {before['input']}. {remedy}"
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


def read_run(workdir: str | None) -> tuple[pathlib.Path, dict]:
    """Finds the finished run in --workdir.

    Returns:
        Its folder, and the content of results.json.

    Raises:
        ConfigError: `workdir` is not a finished fine-tuning run, or has no model.
    """
    from maelm_jax.finetuning import session

    folder = pathlib.Path(workdir or "")
    if not workdir or not os.path.isfile(folder / session.RESULTS):
        models = (path for pattern in MODELS for path in folder.glob(pattern))
        inside = next(models, None) if workdir else None
        hint = f"; this is a grid: give one of its runs, as {inside.parent}" if inside else ""
        raise config.ConfigError(
            f"--predict needs --workdir=RUN of a finished fine-tuning run (with results.json){hint}"
        )
    results = session.read_results(folder)
    if "diverged" in results:
        raise config.ConfigError(f"{folder} holds no model: {results['diverged']}")
    if not (folder / "checkpoints").is_dir():
        raise config.ConfigError(
            f"{folder} holds no model: only the chosen cell of a grid keeps its own; "
            'table.json says which ("model")'
        )
    return folder, results
