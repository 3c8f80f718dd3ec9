"""A task as the training sees it: features to train on, dev sets that score and write down predictions. GLUE and SQuAD look alike from here on."""

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
SAMPLE_SEED = 0  # of Finetune.train_examples: the same sample for every seed


@dataclasses.dataclass(frozen=True)
class DevSet:
    """Examples to predict. `outputs`, below, is what heads.predict_of gives, for all examples in their order."""

    features: features.Features
    score: collections.abc.Callable[..., dict[str, float]]  # outputs -> {metric: value}
    write: collections.abc.Callable[..., pathlib.Path]  # (outputs, folder, stem) -> the file of predictions
    endings: tuple[str, ...]  # of the files that `write` writes, the predictions' first


@dataclasses.dataclass(frozen=True)
class TaskData:
    name: str
    classes: int  # of the classifier: 1 is a regression, 0 an answer's start and end
    labels: tuple[str, ...]  # of the classes; empty where there are none
    main: str  # the metric that picks the best evaluation
    train: features.Features
    dev: dict[str, DevSet]
    unscored: dict[str, DevSet]  # predicted at the end only
    notes: list[str]

    @functools.cached_property
    def fingerprint(self) -> dict[str, typing.Any]:
        """What tells this data, as tokenised, from other data."""
        digest = hashlib.sha256()
        for rows in (self.train, *(dev.features for dev in self.dev.values())):
            for part in (rows.lengths, np.concatenate(rows.ids), rows.targets):
                digest.update(part.tobytes())
        return {"train_examples": len(self.train.ids), "data": digest.hexdigest()[:16]}


def classes_of(name: str, settings: config.Finetune) -> tuple[int, tuple[str, ...]]:
    """(outputs of the classifier, or 0; label names) of a task. Raises ConfigError on an unknown one."""
    if name in squad.FILES:
        return 0, ()
    if name not in NAMES:
        raise config.ConfigError(f"Finetune.tasks: no task {name!r}; there are {', '.join(NAMES)}")
    labels = glue.task_of(name, settings).labels
    return max(len(labels), 1), labels


def check(name: str, settings: config.Finetune):
    """Raises ConfigError when the task is unknown, or its files are not in `data_dir`; reads none. TFDS is asked when the task's turn comes."""
    classes, _ = classes_of(name, settings)
    if settings.data_dir is None and name != glue.OWN:
        return
    if classes == 0:
        squad.locate(name, settings)
    else:
        glue.locate(glue.task_of(name, settings), settings)


def load(name: str, settings: config.Finetune, corpus: config.Corpus, vocabulary: Vocabulary, length: int) -> TaskData:
    """Reads and tokenises a task's data; at most `length` tokens an example. Raises ConfigError on data that is missing or wrong."""
    classes, labels = classes_of(name, settings)
    build = _squad if classes == 0 else _glue
    problem = build(name, classes, labels, settings, corpus, vocabulary, length)
    count = settings.train_examples
    if count is None or count >= len(problem.train.ids):
        return problem
    numbers = np.sort(np.random.default_rng(SAMPLE_SEED).permutation(len(problem.train.ids))[:count])
    note = f"trained on {count} of {len(problem.train.ids)} examples" if classes else f"trained on {count} of {len(problem.train.ids)} windows"
    return dataclasses.replace(problem, train=problem.train.take(numbers), notes=[*problem.notes, note])


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
    # The scores are found at STS-B's scale by a monotonous step (/ 5), which no correlation notices.
    main = "_".join(filter(None, (next(iter(dev)), task.metrics[0])))
    notes = [note for found in (train, *dev.values()) for note in found.notes]
    if name == glue.OWN and "f1" in task.metrics:
        notes.append(f"f1 is that of the label {labels[1]!r}")
    return TaskData(name, classes, labels, main, rows, dev_sets, unscored, notes)


def glue_features(found: glue.Examples, vocabulary: Vocabulary, length: int, which: str) -> features.Features:
    """Tokenised; what is cut is counted in `found.notes`. STS-B's 0..5 becomes 0..1, absent labels become class 0."""
    ids, cut = features.sentences(found.sentences, vocabulary, length)
    if cut:
        found.notes.append(f"{which}: {cut} of {len(ids)} examples cut to {length} tokens")
    targets = np.zeros(len(ids), np.int32) if found.labels is None else found.labels
    targets = targets / np.float32(5) if targets.dtype == np.float32 else targets
    return features.Features(ids, targets, np.zeros(len(ids), np.int32))


def glue_dev(task: glue.Task, found: glue.Examples, vocabulary: Vocabulary, length: int, which: str) -> DevSet:
    rows = glue_features(found, vocabulary, length, which)
    endings = (".tsv", "_probabilities.tsv") if task.labels else (".tsv",)

    def write(outputs, folder: pathlib.Path, stem: str) -> pathlib.Path:
        paths = [folder / (stem + ending) for ending in endings]
        glue.write_predictions(task, outputs, paths[0])
        if task.labels:
            glue.write_probabilities(task, outputs, paths[1])
        return paths[0]

    return DevSet(rows, lambda outputs: metrics.glue(task.metrics, rows.targets, outputs), write, endings)


def _squad(name, classes, labels, settings, corpus, vocabulary, length) -> TaskData:
    train, dev = squad.load(name, settings, corpus)
    rows = squad.windows(train, vocabulary, settings, length, training=True).rows
    if not rows.targets.any():
        raise config.ConfigError(
            f"{name}: none of the {len(train.questions)} training questions of {train.source} has an "
            f"answer that stands in its context at answer_start and fits into {length} tokens. "
            "Check text and answer_start of the answers."
        )
    dev_set = squad_dev(name, dev, vocabulary, settings, length)
    return TaskData(name, classes, labels, "best_f1" if name == "squad2" else "f1", rows, {"": dev_set}, {}, train.notes + dev.notes)


def squad_dev(name: str, found: squad.Questions, vocabulary: Vocabulary, settings: config.Finetune, length: int, threshold=None) -> DevSet:
    """With `threshold` given, written answers are empty above that null margin; otherwise above the dev set's best for F1 (SQuAD 2.0)."""
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
        return metrics.squad([metrics.Answered(g, *a) for g, a in zip(golds, answers(outputs), strict=True)], unanswerable=name == "squad2")

    def write(outputs, folder: pathlib.Path, stem: str) -> pathlib.Path:
        paths = [folder / (stem + ending) for ending in endings]
        given = dict(zip([question.id for question in found.questions], answers(outputs), strict=True))
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
    name: str, path: str, settings: config.Finetune, vocabulary: Vocabulary, length: int, best: dict[str, float]
) -> tuple[DevSet, list[str]]:
    """(a file to predict, notes). `best` are the figures of the run's best evaluation, SQuAD 2.0's null threshold among them."""
    if name in squad.FILES:
        questions = squad.Questions(squad.read_file(path), source=path)
        return squad_dev(name, questions, vocabulary, settings, length, best.get("best_f1_threshold")), questions.notes
    task = glue.task_of(name, settings)
    found = glue.read_file(task, path, labelled=False)
    return glue_dev(task, found, vocabulary, length, path), found.notes
