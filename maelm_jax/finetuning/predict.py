"""Predictions of finished runs: for a file (--predict, --score), and for GLUE's server."""

import abc
import dataclasses
import functools
import os
import pathlib
import zipfile

from maelm_jax import config, gin_files, storage
from maelm_jax.data import readers, vocabularies
from maelm_jax.encoders.results import Results
from maelm_jax.finetuning import glue, grid, session, table
from maelm_jax.finetuning.batches import choose_lengths
from maelm_jax.finetuning.task import EvaluationSet, InputFormat, Task
from maelm_jax.training import checkpoint
from maelm_jax.training.workdir import Workdir

SCORES = "_scores.json"  # ending of the file with the scores
# Settings that change where examples come from and how they are computed, not what is predicted.
FREE = (
    "Compute.dtype",
    "Finetune.max_length",
    "CustomTask.columns",
    "CustomTask.label",
    "Conll.word_column",
    "Conll.label_column",
)


class FinishedModel(abc.ABC):
    """A model of a task, and how it reads examples.

    Attributes:
        task: Its task.
        input_format: How it reads an example.
        model: The settings of the model.
        mesh: How devices are divided.
    """

    task: Task
    input_format: InputFormat
    model: config.Model
    mesh: config.Mesh

    def encode(self, examples: list, which: str) -> EvaluationSet:
        """Tokenises examples, which `which` names in notes."""
        encoded = self.task.encode(examples, self.input_format, which)
        return EvaluationSet(examples, *encoded, f"{len(examples):,} {self.task.unit}")

    @abc.abstractmethod
    def read_params(self, shapes: dict) -> dict:
        """Reads the parameters. `shapes` are those of `session.Model`."""

    @functools.cached_property
    def compiled(self) -> session.Model:
        return session.Model(self.model, self.mesh, self.task, self.input_format.vocabulary)

    @functools.cached_property
    def params(self) -> dict:
        return self.read_params(self.compiled.shapes)

    def outputs(
        self,
        dev: EvaluationSet,
        lengths: list[int] | None = None,
        rows: int = session.EVALUATION_ROWS,
    ):
        """Returns the outputs of the model for all examples of a set.

        `lengths` are those that batches of `rows` rows are padded to. By default, they suit the
        set.
        """
        if lengths is None:
            worth = 3 * session.slots_of_compilation(self.compiled.mesh, self.model)
            lengths = choose_lengths(dev.features.lengths, self.input_format.length, worth)
        return self.compiled.outputs(self.params, dev, lengths, rows)


class FinishedRun(FinishedModel):
    """A finished run that has its model. `workdir` is its folder."""

    def __init__(self, workdir: Workdir | None, bindings: list[str], flag: str):
        """Finds the run. `flag` is the flag that needs it, for messages.

        Raises:
            ConfigError: `workdir` is not a finished fine-tuning run, or has no model.
        """
        self.workdir = workdir
        if workdir:
            storage.require_own_files(workdir.folder)
        if not workdir or not workdir.results_file.is_file():
            reports = table.read(workdir).values() if workdir else ()
            models = [report["model"] for by_task in reports for report in by_task.values()]
            model = next(filter(None, models), None)  # None: all seeds of the task diverged
            reason = f"{workdir} is none" if workdir else "give --workdir=RUN"
            if model:
                reason += f". In this table, give {storage.inside(workdir.folder, model).path}"
            raise config.ConfigError(f"{flag} needs a fine-tuned run, and {reason}")
        results = Results.of_run(workdir)
        if not workdir.checkpoints.is_dir():
            reason = results.diverged or "only the chosen cell of a grid keeps its own"
            raise config.ConfigError(
                f"{workdir.folder} holds no model: {reason}; "
                'table.json names the chosen one ("model")'
            )
        recorded = workdir.read_settings()
        experiment = gin_files.load([str(workdir.settings_file)], bindings)
        changes = config.differences(recorded, experiment, FREE)
        columns, trained = (settings.finetune.custom.columns for settings in (experiment, recorded))
        if len(columns) != len(trained):
            changes.append(f"CustomTask.columns: {len(trained)} columns -> {len(columns)}")
        if changes:
            raise config.ConfigError(
                f"{flag} uses the settings of the run in --workdir, and these differ from them: "
                f"{'; '.join(changes)}. Leave them out"
            )
        # StopIteration: no task of this version has the name.
        with storage.reading(workdir.results_file, errors=(StopIteration, *storage.MALFORMED)):
            self.task = grid.create_task(results.task, experiment.finetune, results)
        vocabulary = vocabularies.load(workdir.vocabulary_folder)
        self.input_format = InputFormat.of_run(experiment, vocabulary)
        self.model, self.mesh = experiment.model, experiment.mesh

    def read_params(self, shapes):
        return checkpoint.restore_params(self.workdir, shapes)


def predict(
    workdir: Workdir | None,
    input_file: str,
    output: str | None,
    bindings: list[str],
    with_scores: bool = False,
    with_all: bool = False,
) -> str:
    """Predicts a file with the finished run in `workdir`, and writes the predictions.

    The predictions are beside what the file holds. The default of `output` is predictions_STEM in
    the workdir, with the stem and the format of the input. `with_all` adds the probability of each
    class. `with_scores` compares the predictions with the labels in the file, and writes the
    metrics beside the predictions.

    Returns:
        What was done, for the user.

    Raises:
        ConfigError: The run, the file or the output cannot be used.
    """
    run = FinishedRun(workdir, bindings, "--predict")
    endings = run.task.endings(input_file)
    if output is None:
        name = pathlib.Path(readers.without_packing(input_file)).stem
        output = str(run.workdir.folder / f"predictions_{name}{endings[0]}")
    path = pathlib.Path(output)
    if path.suffix not in endings:
        raise config.ConfigError(
            f"--output={output}: name a file that ends in {' or '.join(dict.fromkeys(endings))}"
        )
    if os.path.exists(output) and os.path.samefile(output, input_file):
        raise config.ConfigError(f"--output={output} is the file to predict. Name another file")
    examples = run.task.read_file(input_file, labelled=with_scores)
    run.task.check_columns(input_file, with_all)
    dev = run.encode(examples, input_file)
    outputs = run.outputs(dev)
    score_file = path.with_name(path.stem + SCORES)
    path.parent.mkdir(parents=True, exist_ok=True)
    score_file.unlink(missing_ok=True)  # it is of earlier predictions
    run.task.write_predictions(input_file, dev, outputs, path, with_all)
    lines = [*run.task.notes, f"{dev.size} predicted: {path}"]
    if with_scores:
        scores, report = run.task.score(dev, outputs), run.task.class_report(dev, outputs)
        classes = {} if report is None else dataclasses.asdict(report)
        storage.write_json(score_file, scores | classes)
        lines += [session.metric_line(name, value) for name, value in scores.items()]
        if report:
            lines += ["", report.tables()]
    return "\n".join(lines)


def submit(workdir: Workdir | None, output: str, init_from: str | None, bindings: list[str]) -> str:
    """Predicts the test sets of GLUE with the finished models in `workdir` (--submission).

    `workdir` is a finished run, grid or table, `output` a new zip file. `init_from` is the name of
    the encoder, in a table of several.

    Returns:
        What the zip file holds and lacks, for the user.

    Raises:
        ConfigError: There is no model of a task of GLUE, no test set, or a file is not as expected.
    """
    if not output.endswith(".zip") or os.path.lexists(output):
        raise config.ConfigError(f"--submission={output}: name a new file that ends in .zip")
    notes, files = [], {}
    lacking = [f"{glue.DIAGNOSTIC}.tsv"]
    for spec in glue.SPECS.values():
        lacking += [f"{spec.submission(part)}.tsv" for part in spec.parts]
    for model in find_models(workdir, init_from):
        run = FinishedRun(model, bindings, "--submission")
        tests = glue.read_tests(run.task.spec, run.task.settings, run.task.notes)
        for name, examples in tests.items():
            dev = run.encode(examples, name)
            files[f"{name}.tsv"] = run.task.submission_table(dev, run.outputs(dev))
            lacking.remove(f"{name}.tsv")
        notes += run.task.notes
    if not files:
        raise config.ConfigError(
            "--submission: no test file of GLUE (as CoLA/test.tsv) was found. "
            "Give its folder with --gin.Finetune.data_dir=FOLDER"
        )
    os.makedirs(os.path.dirname(output) or ".", exist_ok=True)
    with storage.atomic_file(output) as file, zipfile.ZipFile(file, "w") as archive:
        for name, text in sorted(files.items()):
            archive.writestr(name, text)
    notes.append(f"{output}: {', '.join(sorted(files))}")
    if lacking:
        notes.append(f"GLUE's server also asks for {', '.join(lacking)}")
    return "\n".join(notes)


def find_models(workdir: Workdir | None, init_from: str | None) -> list[Workdir]:
    """Returns the workdirs of the models, one for each task of GLUE.

    Raises:
        ConfigError: `workdir` has no model of a task of GLUE, or the encoder is not clear.
    """
    reports = table.read(workdir) if workdir else {}
    if not reports:
        task = FinishedRun(workdir, [], "--submission").task.name
        models = {task: workdir}
    else:
        label = init_from or next(iter(reports))
        if label not in reports or (init_from is None and len(reports) > 1):
            raise config.ConfigError(
                f"--submission: {workdir} has the encoders {', '.join(reports)}. "
                "Name one of them with --init_from=NAME"
            )
        models = {
            task: Workdir(storage.inside(workdir.folder, report["model"]).path)
            for task, report in reports[label].items()
            if report["model"]
        }
    chosen = [model for task, model in models.items() if task in glue.SPECS]
    if not chosen:
        raise config.ConfigError(
            f"--submission: {workdir} has no model of a task of GLUE. Fine-tune on one first"
        )
    return chosen
