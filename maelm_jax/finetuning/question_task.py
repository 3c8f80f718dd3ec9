"""SQuAD as training sees it: tokenised windows, scores, files of answers."""

import collections
import dataclasses
import json
import pathlib

import numpy as np

from maelm_jax import config, storage
from maelm_jax.finetuning import metrics, squad, windows
from maelm_jax.finetuning.input_format import InputFormat
from maelm_jax.finetuning.task_data import SPAN, DevSet, TaskData


def load(
    name: str, settings: config.Finetune, corpus: config.Corpus, input_format: InputFormat
) -> TaskData:
    """Reads and tokenises the data of "squad1" or "squad2". See tasks.load."""
    data = squad.load(name, settings, corpus)
    _check_answers(name, data.train)
    _check_answers(name, data.dev)
    train = windows.make(data.train, input_format, settings.squad, training=True).rows
    if not train.targets.any():
        raise config.ConfigError(
            f"{name}: none of the {len(data.train.questions)} training questions of "
            f"{data.train.source} has an answer that stands in its context at answer_start and "
            f"fits into {input_format.length} tokens. Check text and answer_start of the answers."
        )
    sampled = data.dev.sample(settings.dev_examples)
    dev = dev_set(name, sampled, input_format, settings)
    main = "best_f1" if name == "squad2" else "f1"
    notes = data.train.notes + sampled.notes
    return TaskData(name, SPAN, (), main, train, {"": dev}, {}, notes)


def read_file(
    name: str,
    path: str,
    settings: config.Finetune,
    input_format: InputFormat,
    best: dict[str, float],
    labelled: bool = False,
) -> DevSet:
    """Reads a file to predict. See tasks.read_file."""
    questions = squad.Questions(squad.read_file(path), source=path)
    if labelled:
        _check_answers(name, questions)
    return dev_set(name, questions, input_format, settings, best.get("best_f1_threshold"))


def _check_answers(name: str, questions: squad.Questions):
    """Raises ConfigError unless every question has a right answer, or is said to have none."""
    for question in questions.questions:
        location = f"{questions.source}: the question {question.id[:50]!r}"
        if question.is_impossible and name == "squad1":
            raise config.ConfigError(
                f"{location} is unanswerable, and SQuAD 1.1 has no such questions. Give a file of "
                "SQuAD 1.1, or a run on squad2."
            )
        if not question.answers and not question.is_impossible:
            remedy = "one, or is_impossible: true" if name == "squad2" else "one"
            raise config.ConfigError(
                f"{location} has no right answer. Give a file in which every question has {remedy}."
            )


def dev_set(
    name: str,
    questions: squad.Questions,
    input_format: InputFormat,
    settings: config.Finetune,
    threshold: float | None = None,
) -> DevSet:
    """Questions to answer.

    Args:
        name: "squad1" or "squad2".
        questions: The questions. Notes are added to them.
        input_format: How the encoder reads question and context.
        settings: Settings of fine-tuning.
        threshold: SQuAD 2.0: answers whose null margin is above it are empty, in files and scores.
            None: in files, the threshold with the best F1 on these questions. See metrics.squad.

    Raises:
        ConfigError: Two questions have the same id.
    """
    ids = collections.Counter(question.id for question in questions.questions)
    if len(ids) < len(questions.questions):
        repeated = ids.most_common(1)[0][0][:50]
        raise config.ConfigError(
            f"{questions.source}: more than one question has the id {repeated!r}, and answers are "
            "written by id. Give each question its own."
        )
    cut = windows.make(questions, input_format, settings.squad, training=False)
    answering = _Answering(
        name == "squad2", questions, cut, settings.squad.answer_length, threshold
    )
    endings = (".json", "_null_margins.json") if answering.unanswerable else (".json",)
    answers = [
        (question.id, [gold.text for gold in question.answers]) for question in questions.questions
    ]
    count = f"{len(answers):,} questions"
    return DevSet(
        cut.rows, answering.score, answering.write, endings, questions.notes, count, answers
    )


@dataclasses.dataclass(frozen=True)
class _Answering:
    """Turns outputs of the model into answers, scores and files."""

    unanswerable: bool  # whether questions can be unanswerable (SQuAD 2.0)
    questions: squad.Questions
    windows: windows.Windows
    answer_length: int
    threshold: float | None

    def answers(self, outputs) -> list[windows.Answer]:
        spans = windows.Spans(*outputs)
        return windows.answers(self.questions, self.windows, spans, self.answer_length)

    def score(self, outputs) -> dict[str, float]:
        threshold = self.threshold or 0.0
        pairs = zip(self.questions.questions, self.answers(outputs), strict=True)
        answered = [
            metrics.Answered(
                tuple(gold.text for gold in question.answers),
                answer.text,
                answer.null_margin - threshold,
            )
            for question, answer in pairs
        ]
        scores = metrics.squad(answered, self.unanswerable)
        if self.threshold is None:
            return scores
        # The best threshold of these questions would be chosen by their right answers.
        return {name: value for name, value in scores.items() if not name.startswith("best_")}

    def write(self, outputs, folder: pathlib.Path, stem: str) -> pathlib.Path:
        ids = [question.id for question in self.questions.questions]
        answers = dict(zip(ids, self.answers(outputs), strict=True))
        limit = np.inf
        if self.unanswerable:
            limit = self.threshold
            if limit is None:
                limit = self.score(outputs)["best_f1_threshold"]
            margins = {name: answer.null_margin for name, answer in answers.items()}
            storage.write(folder / f"{stem}_null_margins.json", json.dumps(margins, indent=1))
        texts = {
            name: "" if answer.null_margin > limit else answer.text
            for name, answer in answers.items()
        }
        path = folder / f"{stem}.json"
        storage.write(path, json.dumps(texts, indent=1, ensure_ascii=False))
        return path
