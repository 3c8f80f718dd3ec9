"""Questions and contexts of SQuAD 1.1 and 2.0, from files in SQuAD's JSON format or from TFDS."""

import dataclasses
import json
import pathlib
import re
import typing

from maelm_jax import config, storage
from maelm_jax.finetuning import tables
from maelm_jax.finetuning.task import Splits

FILES = {
    "squad1": ("train-v1.1.json", "dev-v1.1.json"),
    "squad2": ("train-v2.0.json", "dev-v2.0.json"),
}
TFDS = {"squad1": "squad/v1.1", "squad2": "squad/v2.0"}


class GoldAnswer(typing.NamedTuple):
    """A right answer."""

    text: str
    start: int  # its first character in the context; can be wrong in a file


@dataclasses.dataclass(frozen=True)
class Question:
    """One question about a context."""

    id: str
    text: str
    context: str
    answers: tuple[GoldAnswer, ...]  # (): unanswerable, or not known
    is_impossible: bool = False  # said to be unanswerable


def read(task: str, settings: config.Finetune, notes: list[str]) -> Splits:
    """Reads the data of a task from the files in `settings.data_dir`, or from TFDS if it is None.

    Raises:
        ConfigError: Data is missing or malformed, or a question has no right answer.
    """
    if settings.data_dir is None:
        sources = [f"TFDS dataset {TFDS[task]}"] * 2
        train, dev = (_read_tfds(task, split) for split in ("train", "validation"))
    else:
        sources = find_files(task, settings)
        train, dev = map(read_file, sources)
    for source, questions in zip(sources, (train, dev), strict=True):
        check_answers(task, questions, source)
    if task == "squad2" and all(question.answers for question in (*train, *dev)):
        notes.append("no question is unanswerable: the null threshold has nothing to decide")
    return Splits(train, {"": dev})


def find_files(task: str, settings: config.Finetune) -> list[pathlib.Path]:
    """Returns the training file and the dev file. Raises ConfigError if one is missing."""
    paths = [tables.find_file(settings.data_dir, name) for name in FILES[task]]
    for name, path in zip(FILES[task], paths, strict=True):
        if path is None:
            raise config.ConfigError(
                f"{task}: no {name} in {settings.data_dir} (also in its squad/). Give the folder "
                "with --gin.DATA_DIR=FOLDER"
            )
    return paths


def read_file(path: str | pathlib.Path) -> list[Question]:
    """Reads a file in SQuAD's JSON format. Raises ConfigError if it is of another form."""
    questions = []
    with storage.reading(path, "SQuAD's JSON is data > paragraphs > qas"):
        for article in json.loads("\n".join(tables.read_lines(path)))["data"]:
            for paragraph in article["paragraphs"]:
                for entry in paragraph["qas"]:
                    impossible = entry.get("is_impossible", False)
                    golds = [] if impossible else entry.get("answers", [])
                    questions.append(
                        Question(
                            entry["id"],
                            entry["question"],
                            paragraph["context"],
                            tuple(
                                GoldAnswer(gold["text"], gold.get("answer_start", -1))
                                for gold in golds
                            ),
                            impossible,
                        )
                    )
    if not questions:
        raise config.ConfigError(f"{path}: holds no question. Give a file with questions")
    return questions


def check_answers(task: str, questions: list[Question], source: typing.Any):
    """Raises ConfigError unless every question has a right answer, or is said to have none."""
    for question in questions:
        if not question.answers and (task == "squad1" or not question.is_impossible):
            remedy = "one" if task == "squad1" else "one, or is_impossible: true"
            raise config.ConfigError(
                f"{source}: the question {question.id[:50]!r} has no right answer. Give a file in "
                f"which every question has {remedy}"
            )


def _read_tfds(task: str, split: str) -> list[Question]:
    questions = []
    for record in tables.tfds_records(TFDS[task], split):
        answers = record["answers"]
        pairs = zip(answers["text"], map(int, answers["answer_start"]), strict=True)
        golds = tuple(GoldAnswer(*pair) for pair in pairs)
        questions.append(
            Question(
                record["id"],
                record["question"],
                record["context"],
                golds,
                is_impossible=task == "squad2" and not golds,
            )
        )
    return questions


class CharacterSpan(typing.NamedTuple):
    """A part of a context, in characters."""

    start: int
    end: int  # the character after the last one


def answer_span(question: Question) -> CharacterSpan | None:
    """Returns where the first answer stands, or its nearest occurrence; None if nowhere."""
    text, start = question.answers[0]
    # The tokens of a space at an end may be those of the next word.
    start += len(text) - len(text.lstrip())
    text = text.strip()
    if not text:
        return None
    if not (start >= 0 and question.context.startswith(text, start)):
        occurrences = [match.start() for match in re.finditer(re.escape(text), question.context)]
        if not occurrences:
            return None
        start = min(occurrences, key=lambda occurrence: abs(occurrence - start))
    return CharacterSpan(start, start + len(text))
