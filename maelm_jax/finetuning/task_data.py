"""The data of a task in a form that is the same for GLUE and SQuAD.

It has tokenised training examples, and dev sets that score predictions and write them to files.
"""

import collections
import collections.abc
import dataclasses
import functools
import hashlib
import json
import pathlib
import typing

import numpy as np

from maelm_jax import config, storage
from maelm_jax.data.vocabulary import Vocabulary
from maelm_jax.finetuning import features, glue, metrics, squad

NAMES = (*glue.TASKS, *squad.FILES, glue.OWN)
SAMPLE_SEED = 0  # draws the sample of Finetune.train_examples; runs of all seeds share it


@dataclasses.dataclass(frozen=True)
class DevSet:
    """Examples to predict. `outputs` are those of heads.predict_of for all examples, in order.

    Attributes:
        features: The examples.
        score: outputs -> {metric: value}.
        write: (outputs, folder, stem) -> path of the predictions. Writes FOLDER/STEM + each ending.
        endings: Endings of the files that `write` writes. The first one is of the predictions.
    """

    features: features.Features
    score: collections.abc.Callable[..., dict[str, float]]
    write: collections.abc.Callable[..., pathlib.Path]
    endings: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class TaskData:
    """A task with its data."""

    name: str
    classes: int  # outputs of the classifier; 1 is a regression; 0: start and end of an answer
    labels: tuple[str, ...]  # names of the classes; empty without classes
    main: str  # the metric that selects the best evaluation
    train: features.Features
    dev: dict[str, DevSet]  # by name; the name is "" in tasks with one dev set
    unscored: dict[str, DevSet]  # predicted at the end of a run and not scored
    notes: list[str]  # for the user

    @functools.cached_property
    def fingerprint(self) -> dict[str, typing.Any]:
        """Number of training examples and a hash of the tokenised training and dev data."""
        digest = hashlib.sha256()
        for rows in (self.train, *(dev.features for dev in self.dev.values())):
            for part in (rows.lengths, np.concatenate(rows.ids), rows.targets):
                digest.update(part.tobytes())
        return {"train_examples": len(self.train.ids), "data": digest.hexdigest()[:16]}


def classes_of(name: str, settings: config.Finetune) -> tuple[int, tuple[str, ...]]:
    """`classes` and `labels` of TaskData. Raises ConfigError when the task is unknown."""
    if name in squad.FILES:
        return 0, ()
    if name not in NAMES:
        raise config.ConfigError(f"Finetune.tasks: no task {name!r}; there are {', '.join(NAMES)}")
    labels = glue.task_of(name, settings).labels
    return max(len(labels), 1), labels


def check(name: str, settings: config.Finetune):
    """Checks that a task and its files exist. Does not read them, and does not check TFDS.

    Raises:
        ConfigError: The task is unknown, or a file is missing.
    """
    classes, _ = classes_of(name, settings)
    if settings.data_dir is None and name != glue.OWN:
        return
    if classes == 0:
        squad.locate(name, settings)
    else:
        glue.locate(glue.task_of(name, settings), settings)


def load(
    name: str, settings: config.Finetune, corpus: config.Corpus, vocabulary: Vocabulary, length: int
) -> TaskData:
    """Reads and tokenises the data of a task.

    Args:
        name: One of NAMES.
        settings: Settings of fine-tuning.
        corpus: Settings of TFDS.
        vocabulary: Encodes the text.
        length: Largest number of tokens of an example.

    Raises:
        ConfigError: The task is unknown, or data is missing or malformed.
    """
    classes, labels = classes_of(name, settings)
    build = _squad if classes == 0 else _glue
    problem = build(name, classes, labels, settings, corpus, vocabulary, length)
    count = settings.train_examples
    if count is None or count >= len(problem.train.ids):
        return problem
    numbers = np.sort(
        np.random.default_rng(SAMPLE_SEED).permutation(len(problem.train.ids))[:count]
    )
    note = (
        f"trained on {count} of {len(problem.train.ids)} examples"
        if classes
        else f"trained on {count} of {len(problem.train.ids)} windows"
    )
    return dataclasses.replace(
        problem, train=problem.train.select(numbers), notes=[*problem.notes, note]
    )


def _glue(name, classes, labels, settings, corpus, vocabulary, length) -> TaskData:
    task = glue.task_of(name, settings)
    train, dev = glue.load(task, settings, corpus)
    rows = glue_features(train, vocabulary, length, "training")
    dev_sets = {}
    for which, found in dev.items():
        dev_sets[which] = glue_dev(task, found, vocabulary, length, which or "dev")
    unscored = {}
    if name == "mnli" and (diagnostic := glue.diagnostic(settings, corpus)):
        unscored["ax"] = glue_dev(task, diagnostic, vocabulary, length, "diagnostic")
    main = "_".join(filter(None, (next(iter(dev)), task.metrics[0])))
    notes = [note for found in (train, *dev.values()) for note in found.notes]
    if name == glue.OWN and "f1" in task.metrics:
        notes.append(f"f1 is that of the label {labels[1]!r}")
    return TaskData(name, classes, labels, main, rows, dev_sets, unscored, notes)


def glue_features(
    found: glue.Examples, vocabulary: Vocabulary, length: int, which: str
) -> features.Features:
    """Tokenises examples, and notes in `found` how many were cut. `which` names them in the note.

    Scores from 0 to 5 are divided by 5, which changes no correlation. Missing labels are class 0.
    """
    ids, cut = features.sentences(found.sentences, vocabulary, length)
    if cut:
        found.notes.append(f"{which}: {cut} of {len(ids)} examples cut to {length} tokens")
    targets = np.zeros(len(ids), np.int32) if found.labels is None else found.labels
    targets = targets / np.float32(5) if targets.dtype == np.float32 else targets
    return features.Features(ids, targets, np.zeros(len(ids), np.int32))


def glue_dev(
    task: glue.Task, found: glue.Examples, vocabulary: Vocabulary, length: int, which: str
) -> DevSet:
    """A dev set of GLUE. `which` names it in notes."""
    rows = glue_features(found, vocabulary, length, which)
    endings = (".tsv", "_probabilities.tsv") if task.labels else (".tsv",)

    def write(outputs, folder: pathlib.Path, stem: str) -> pathlib.Path:
        paths = [folder / (stem + ending) for ending in endings]
        glue.write_predictions(task, outputs, paths[0])
        if task.labels:
            glue.write_probabilities(task, outputs, paths[1])
        return paths[0]

    return DevSet(
        rows, lambda outputs: metrics.glue(task.metrics, rows.targets, outputs), write, endings
    )


def _squad(name, classes, labels, settings, corpus, vocabulary, length) -> TaskData:
    train, dev = squad.load(name, settings, corpus)
    rows = squad.windows(train, vocabulary, settings, length, training=True).rows
    if not rows.targets.any():
        raise config.ConfigError(
            f"{name}: none of the {len(train.questions)} training questions of {train.source} "
            "has an answer that stands in its context at answer_start and fits into "
            f"{length} tokens. "
            "Check text and answer_start of the answers."
        )
    dev_set = squad_dev(name, dev, vocabulary, settings, length)
    return TaskData(
        name, classes, labels, "best_f1" if name == "squad2" else "f1", rows, {"": dev_set}, {},
        train.notes + dev.notes,
    )  # fmt: skip


def squad_dev(
    name: str, found: squad.Questions, vocabulary: Vocabulary, settings: config.Finetune,
    length: int, threshold=None,
) -> DevSet:  # fmt: skip
    """A dev set of SQuAD, or a file to predict.

    Args:
        name: "squad1" or "squad2".
        found: The questions. Notes are added to it.
        vocabulary: Encodes the text.
        settings: Settings of fine-tuning.
        length: Largest number of tokens of a window.
        threshold: SQuAD 2.0: `write` leaves answers empty whose null margin is above it. None: the
            threshold with the best F1 on these questions.

    Raises:
        ConfigError: Two questions have the same id.
    """
    ids = collections.Counter(question.id for question in found.questions)
    if len(ids) < len(found.questions):
        twice = ids.most_common(1)[0][0][:50]
        raise config.ConfigError(
            f"{found.source}: more than one question has the id {twice!r}, and answers are written "
            "by id. Give each question its own."
        )
    cut = squad.windows(found, vocabulary, settings, length, training=False)
    endings = (".json", "_null_margins.json") if name == "squad2" else (".json",)

    def answers(outputs) -> list[squad.Answer]:
        return squad.answers(found, cut, squad.Spans(*outputs), settings.answer_length)

    def score(outputs) -> dict[str, float]:
        golds = [tuple(text for text, _ in question.answers) for question in found.questions]
        return metrics.squad(
            [metrics.Answered(g, *a) for g, a in zip(golds, answers(outputs), strict=True)],
            unanswerable=name == "squad2",
        )

    def write(outputs, folder: pathlib.Path, stem: str) -> pathlib.Path:
        paths = [folder / (stem + ending) for ending in endings]
        given = dict(
            zip([question.id for question in found.questions], answers(outputs), strict=True)
        )
        limit = np.inf
        if name == "squad2":
            limit = score(outputs)["best_f1_threshold"] if threshold is None else threshold
            margins = {key: a.null_margin for key, a in given.items()}
            storage.write(paths[1], json.dumps(margins, indent=1))
        shown = {key: "" if a.null_margin > limit else a.text for key, a in given.items()}
        storage.write(paths[0], json.dumps(shown, indent=1, ensure_ascii=False))
        return paths[0]

    return DevSet(cut.rows, score, write, endings)


def unlabelled(
    name: str, path: str, settings: config.Finetune, vocabulary: Vocabulary, length: int,
    best: dict[str, float],
) -> tuple[DevSet, list[str]]:  # fmt: skip
    """Reads a file to predict. Its labels can be missing.

    Args:
        name: The task.
        path: The file.
        settings: Settings of the fine-tuning run.
        vocabulary: Encodes the text.
        length: Largest number of tokens of an example.
        best: Metrics of the run's best evaluation. In SQuAD 2.0 they include the null threshold.

    Returns:
        The examples, and notes for the user.

    Raises:
        ConfigError: The file is malformed or belongs to another task.
    """
    if name in squad.FILES:
        questions = squad.Questions(squad.read_file(path), source=path)
        return squad_dev(
            name, questions, vocabulary, settings, length, best.get("best_f1_threshold")
        ), questions.notes
    task = glue.task_of(name, settings)
    found = glue.read_file(task, path, labelled=False)
    return glue_dev(task, found, vocabulary, length, path), found.notes
