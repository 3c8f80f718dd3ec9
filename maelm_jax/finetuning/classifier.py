"""Classifiers of texts for Python: a fine-tuned run, or its export."""

import os
import pathlib
import typing

from flax import traverse_util

from maelm_jax import config, storage
from maelm_jax.encoders import adoption, families, family, hub, layouts, opened, weight_files
from maelm_jax.finetuning import glue
from maelm_jax.finetuning.labels import AnyOf, Labels, OneOf, Score
from maelm_jax.finetuning.predict import FinishedModel, FinishedRun
from maelm_jax.finetuning.sentence import SentenceTask
from maelm_jax.finetuning.task import InputFormat
from maelm_jax.training.workdir import STOCK_CONFIG, Workdir

# Few shapes, because each is compiled: batches have the smallest rows that hold all texts, and
# the smallest multiple of the length by a power of two.
ROWS, LENGTH = (1, 8, 64), 32


class Prediction(typing.NamedTuple):
    """What a classifier says about a text.

    Attributes:
        label: The class; the labels, where a text can have several; or the score.
        probability: That of the class, or of each of the labels. None for a score.
        probabilities: {class: probability}; {} for a score.
    """

    label: str | list[str] | float
    probability: float | list[float] | None
    probabilities: dict[str, float]


class Classifier:
    """A classifier of texts, or of pairs of texts.

    Attributes:
        labels: The names of the classes; () if it gives scores.
    """

    def __init__(self, model: FinishedModel):
        self._model = model
        self.labels = model.task.labels

    @classmethod
    def load(cls, path: str | os.PathLike) -> typing.Self:
        """Loads a classifier as `maelm_jax.load_classifier`."""
        if hub.is_name(os.fspath(path)):
            folder = pathlib.Path(hub.download(os.fspath(path)).folder)
            if not (folder / STOCK_CONFIG).is_file():
                raise config.ConfigError(f"{path} has no {STOCK_CONFIG}, so it is no classifier")
            return cls(ExportedModel(folder))
        workdir = Workdir(pathlib.Path(path).expanduser())
        if not workdir.is_run and (workdir.folder / STOCK_CONFIG).is_file():
            return cls(ExportedModel(workdir.folder))
        run = FinishedRun(workdir, [], "load_classifier")
        if not isinstance(run.task, SentenceTask):
            raise config.ConfigError(
                f"{path} is of the task {run.task.name}, no classifier of texts. Use "
                "maelm_jax.finetune --predict=FILE"
            )
        return cls(run)

    def predict(self, texts: list[str] | list[tuple[str, str]]) -> list[Prediction]:
        """Predicts the label of each text, or of each pair of texts.

        The numbers are those of `maelm_jax.finetune --predict`. A text is cut to the longest input.

        Returns:
            A `Prediction` for each text or pair, in order.

        Raises:
            ConfigError: `texts` is no list of strings or of pairs, or holds both.
        """
        if isinstance(texts, str):
            raise config.ConfigError("texts is one string: give a list, as in predict(['A text.'])")
        examples = [
            glue.Example(_checked(text, number), None, number) for number, text in enumerate(texts)
        ]
        if len({len(example.texts) for example in examples}) > 1:
            raise config.ConfigError("texts holds single texts and pairs: give one of the two")
        if not examples:
            return []
        model, kind = self._model, self._model.task.kind
        columns = model.task.spec.texts  # an export does not say how many texts it was trained on
        if isinstance(model, FinishedRun) and len(examples[0].texts) != len(columns):
            raise config.ConfigError(
                f"the run was trained on {' and '.join(map(repr, columns))}: give "
                f"{'pairs' if len(columns) == 2 else 'single texts'}"
            )
        longest, lengths = model.input_format.length, [LENGTH]
        while lengths[-1] < longest:
            lengths.append(2 * lengths[-1])
        lengths[-1] = min(lengths[-1], longest)
        rows = next((rows for rows in ROWS if rows >= len(examples)), ROWS[-1])
        scores = model.outputs(model.encode(examples, "texts"), lengths, rows)
        model.task.notes.clear()  # of texts that were cut; nobody reads them here
        values, certainties = kind.values(kind.predict(scores)), kind.certainties(scores)
        return [
            Prediction(value, certainty, dict(zip(self.labels, of_text, strict=True)))
            for value, certainty, of_text in zip(
                values, certainties, kind.probabilities(scores).tolist(), strict=True
            )
        ]


def _checked(text: str | tuple[str, str], number: int) -> tuple[str, ...]:
    """Returns texts[number] as a tuple of one or two texts, as they are read from a file."""
    parts = tuple(text) if isinstance(text, (tuple, list)) else (text,)
    if not (1 <= len(parts) <= 2 and all(isinstance(part, str) for part in parts)):
        raise config.ConfigError(f"texts[{number}] is neither a string nor a pair: {text!r:.60}")
    return tuple(part.encode("utf-8", "replace").decode("utf-8").strip() for part in parts)


class ExportedModel(FinishedModel):
    """A folder of a stock class for sequence classification."""

    def __init__(self, folder: pathlib.Path):
        """Reads all but the weights. Raises ConfigError if the folder is none of a classifier."""
        content = storage.read_json(folder / STOCK_CONFIG)
        found = opened.find_model(folder)
        with storage.reading(folder / STOCK_CONFIG):
            (class_name,) = content["architectures"]
            if not class_name.endswith(family.SEQUENCE_CLASSIFICATION):
                raise config.ConfigError(
                    f"{folder} holds {class_name}, no classifier of texts. Give an export of a run "
                    "that was fine-tuned on labels of texts"
                )
            kind = _kind_of_labels(content)
        self._folder, self._stock = folder, families.read_family(content, str(folder))
        pooling = content.get("classifier_pooling", "cls")  # of ModernBERT
        if self._stock.classifier.pools_mean and pooling != "mean":
            raise config.ConfigError(
                f"{folder}: its classifier scores the first state (classifier_pooling "
                f"{pooling!r}), and maelm_jax the mean of the states. Use it in transformers"
            )
        self._pad = (self._stock.defaults | content)["pad_token_id"]
        self._table_rows = content["vocab_size"]
        self.model, self.mesh = found.model, config.Mesh()
        spec = glue.Spec(glue.OWN, glue.OWN, ("text",), "label", kind, metrics=kind.metrics)
        self.task = SentenceTask(glue.OWN, config.Finetune(), spec=spec)
        pair = families.choose_pair_format(self.model.encoder)
        self.input_format = InputFormat(found.vocabulary, found.length, pair)

    def read_params(self, shapes):
        folder, encoder = str(self._folder), self.model.encoder
        by_path = traverse_util.flatten_dict(shapes, sep="/")
        by_path = {path: leaf.shape for path, leaf in by_path.items()}
        by_path = layouts.unpad_shapes(by_path, self._table_rows)
        tensors = weight_files.read_folder(self._folder)
        params = self._stock.import_params(tensors, encoder, self._pad, by_path, folder)
        mappings = self._stock.task_head_mappings(family.SEQUENCE_CLASSIFICATION)
        named = {mapping.name for mapping in mappings} & tensors.keys()
        head = {name: tensors[name] for name in named}
        params |= layouts.import_tensors(head, mappings, by_path, folder, {})
        size = self.input_format.vocabulary.size
        return adoption.load_params(params, shapes, size, folder).params


def _kind_of_labels(content: dict[str, typing.Any]) -> Labels:
    """Returns the kind of labels that the content of a config.json states."""
    by_index = content.get("id2label") or {
        str(index): f"LABEL_{index}" for index in range(content.get("num_labels", 2))
    }
    names = tuple(str(by_index[index]) for index in sorted(by_index, key=int))
    problem = content.get("problem_type")
    if problem == "multi_label_classification":
        return AnyOf(names)
    if len(names) == 1 or problem == "regression":
        return Score(is_cut=False)  # the class of transformers does not cut it
    return OneOf(names)
