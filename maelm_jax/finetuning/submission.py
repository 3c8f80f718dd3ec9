"""A submission to GLUE: a zip file with the predictions of all test sets (--submission)."""

import os
import pathlib
import tempfile
import zipfile

from maelm_jax import config, paths, storage
from maelm_jax.finetuning import finished_run, glue, sentence_data, sentence_task, table

# The files that GLUE's server asks for.
EXPECTED = (
    *(task.submission(part) for task in glue.TASKS.values() for part in task.parts),
    glue.DIAGNOSTIC,
)


def write(workdir: str | None, output: str, init_from: str | None, bindings: list[str]) -> str:
    """Predicts the test sets of GLUE with the finished models in `workdir`.

    Args:
        workdir: A finished run, grid or table.
        output: The zip file. It must not exist.
        init_from: In a table of several encoders: the encoder, by its name in the table.
        bindings: Settings that replace those of the runs, for example Finetune.data_dir.

    Returns:
        What the zip file holds and lacks, for the user.

    Raises:
        ConfigError: There is no model of a task of GLUE, no test set, or a file is not as expected.
    """
    _check_output(output)
    models = models_of(workdir, init_from)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            lines += _predict(model, pathlib.Path(folder), bindings)
        predictions = sorted(pathlib.Path(folder).iterdir())
        if not predictions:
            raise config.ConfigError(
                "--submission: no test file of GLUE (as CoLA/test.tsv) was found. "
                "Give its folder with --gin.Finetune.data_dir=FOLDER."
            )
        target = pathlib.Path(output)
        with paths.writing("--submission", target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with storage.atomic_file(target) as file, zipfile.ZipFile(file, "w") as archive:
                for path in predictions:
                    archive.write(path, path.name)
    stems = {path.stem for path in predictions}
    lacking = [f"{name}.tsv" for name in EXPECTED if name not in stems]
    lines.append(f"{output}: {', '.join(path.name for path in predictions)}")
    if lacking:
        lines.append(f"GLUE's server also asks for {', '.join(lacking)}")
    return "\n".join(lines)


def _check_output(output: str):
    if not output.endswith(".zip") or os.path.basename(output) == ".zip":
        raise config.ConfigError(f"--submission={output}: name a file that ends in .zip.")
    if os.path.lexists(output):
        raise config.ConfigError(f"--submission={output} exists. Name another file, or remove it.")
    paths.check_folder("--submission", os.path.dirname(os.path.abspath(output)))


def models_of(workdir: str | None, init_from: str | None) -> list[str]:
    """The workdirs of the models, one for each task of GLUE.

    Raises:
        ConfigError: `workdir` is neither a finished run nor a table, its table.json is damaged, or
            the encoder is not clear.
    """
    folder = pathlib.Path(workdir or "")
    if not workdir or not (folder / table.JSON_FILE).is_file():
        run = finished_run.read(workdir, [], "--submission")
        if init_from is not None:
            raise config.ConfigError(
                f"--submission: {folder} holds one run and no table. Leave --init_from out."
            )
        return _of_glue({run.task: str(run.folder)}, workdir)
    reports = table.read(folder)
    if init_from is None and len(reports) == 1:
        (init_from,) = reports
    if init_from not in reports:
        raise config.ConfigError(
            f"--submission: {folder} has the encoders {', '.join(reports)}. "
            "Name one of them with --init_from=NAME."
        )
    models = {task: report["model"] for task, report in reports[init_from].items()}
    return _of_glue(models, workdir)


def _of_glue(models: dict[str, str | None], workdir: str) -> list[str]:
    chosen = [model for task, model in models.items() if task in glue.TASKS and model]
    if not chosen:
        raise config.ConfigError(
            f"--submission: {workdir} has no model of a task of GLUE. Fine-tune on one first."
        )
    return chosen


def _predict(model: str, folder: pathlib.Path, bindings: list[str]) -> list[str]:
    """Writes the predictions of one model into `folder`. Returns notes for the user."""
    run = finished_run.read(model, bindings, "--submission")
    settings, task = run.experiment.finetune, glue.TASKS[run.task]
    tests = sentence_data.tests(task, settings, run.experiment.corpus)
    if not tests:
        return [f"{run.task}: no test file of {task.folder} in {settings.data_dir or 'TFDS'}"]
    dev_sets = {
        name: sentence_task.dev_set(task, examples, run.input_format, name)
        for name, examples in tests.items()
    }
    for name, outputs in zip(dev_sets, run.outputs(list(dev_sets.values())), strict=True):
        sentence_task.write_predictions(task, outputs, folder / f"{name}.tsv")
    return [note for dev in dev_sets.values() for note in dev.notes]
