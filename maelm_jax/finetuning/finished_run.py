"""A finished fine-tuning run, and the predictions of its model."""

import functools
import os
import pathlib

import numpy as np

from maelm_jax import config, gin_files
from maelm_jax.data import vocabularies
from maelm_jax.finetuning import batches, input_format, predictor, results, table, tasks
from maelm_jax.finetuning.task_data import DevSet

# Settings that change where examples come from and how they are computed, not what is predicted of
# them. SQuAD's say how answers are read from the scores.
FREE = (
    "Model.dtype",
    "Finetune.max_length",
    "Squad.",
    "CustomTask.columns",
    "CustomTask.label",
    "Conll.word_column",
    "Conll.label_column",
)
# Folders of models in a grid or a table.
MODELS = [f"{'*/' * depth}seed*/checkpoints" for depth in range(4)]


class FinishedRun:
    """A finished run that has its model.

    Attributes:
        folder: Its workdir.
        results: The content of results.json.
        experiment: Its settings.
    """

    def __init__(self, folder: pathlib.Path, content: dict, experiment: config.Experiment):
        self.folder, self.results, self.experiment = folder, content, experiment
        self.task: str = content["task"]
        self.labels: tuple[str, ...] = tuple(content.get("labels", ()))

    @functools.cached_property
    def input_format(self) -> input_format.InputFormat:
        """How the encoder reads examples."""
        vocabulary = vocabularies.load(self.folder / "vocabulary")
        return input_format.of(self.experiment, vocabulary)

    def outputs(self, dev_sets: list[DevSet]) -> list:
        """Outputs of the model for all examples of each set. See Predictor.outputs."""
        head = tasks.head_of(self.task, self.experiment.finetune, self.labels)
        vocabulary, length, _ = self.input_format
        model = predictor.restore(str(self.folder), self.experiment, head, vocabulary)
        lengths = np.concatenate([dev.features.lengths for dev in dev_sets])
        sizes = batches.padded_lengths(lengths, length)
        return [model.predictor.outputs(model.params, dev, sizes) for dev in dev_sets]


def read(workdir: str | None, bindings: list[str], flag: str) -> FinishedRun:
    """Finds the finished run in --workdir.

    Args:
        workdir: The run.
        bindings: Settings that replace those of the run.
        flag: The flag that needs the run, for messages.

    Raises:
        ConfigError: `workdir` is not a finished fine-tuning run, or has no model.
    """
    folder = pathlib.Path(workdir or "")
    if not workdir or not os.path.isfile(folder / results.NAME):
        hint = _hint(folder) if workdir else ""
        raise config.ConfigError(
            f"{flag} needs --workdir=RUN of a finished fine-tuning run (with results.json){hint}"
        )
    content = results.read(folder)
    if "diverged" in content:
        raise config.ConfigError(f"{folder} holds no model: {content['diverged']}")
    if not (folder / "checkpoints").is_dir():
        raise config.ConfigError(
            f"{folder} holds no model: only the chosen cell of a grid keeps its own; "
            'table.json says which ("model")'
        )
    saved = folder / "config.gin"
    recorded = gin_files.load([str(saved)])
    if recorded.finetune is None:
        raise config.ConfigError(f"{saved}: no settings of fine-tuning. Is it a fine-tuning run?")
    experiment = gin_files.load([str(saved)], bindings)
    if changes := config.differences(recorded, experiment, FREE):
        raise config.ConfigError(
            f"{flag} uses the settings of the run in --workdir, and these differ from them: "
            f"{'; '.join(changes)}. Leave them out"
        )
    columns, trained = experiment.finetune.custom.columns, recorded.finetune.custom.columns
    if len(columns) != len(trained):
        raise config.ConfigError(
            f"CustomTask.columns must name {len(trained)} of the columns, as in the run. It names "
            f"{len(columns)}: {', '.join(columns)}"
        )
    return FinishedRun(folder, content, experiment)


def _hint(folder: pathlib.Path) -> str:
    """Says where the models of a table or a grid are. Empty for another folder."""
    if (folder / table.JSON_FILE).is_file():
        return f'; this is a table: give one of its runs, which {table.JSON_FILE} names ("model")'
    models = (path for pattern in MODELS for path in folder.glob(pattern))
    model = next(models, None)
    return f"; this is a grid: give one of its runs, as {model.parent}" if model else ""
