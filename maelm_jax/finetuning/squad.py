"""Questions and contexts of SQuAD 1.1 and 2.0, from files in SQuAD's JSON format or from TFDS."""

import dataclasses
import hashlib
import pathlib
import re
import typing

from maelm_jax import config
from maelm_jax.finetuning import files, samples

FILES = {
    "squad1": ("train-v1.1.json", "dev-v1.1.json"),
    "squad2": ("train-v2.0.json", "dev-v2.0.json"),
}
TFDS = {"squad1": "squad/v1.1", "squad2": "squad/v2.0"}
TOP = "the file"  # stands for the path of the outermost JSON object in messages


class GoldAnswer(typing.NamedTuple):
    """A right answer."""

    text: str
    start: int  # its first character in the context; can be wrong in a file


@dataclasses.dataclass(frozen=True)
class Question:
    """One question about a context, which is a paragraph of an article."""

    id: str
    text: str
    context: str
    answers: tuple[GoldAnswer, ...]  # (): unanswerable, or not known
    article: str  # title
    is_impossible: bool = False  # said to be unanswerable


@dataclasses.dataclass
class Questions:
    """A training or dev set."""

    questions: list[Question]
    notes: list[str] = dataclasses.field(default_factory=list)  # for the user
    source: str = ""  # the file or dataset, for messages

    def sample(self, count: int | None) -> "Questions":
        """Returns a sample of the questions as a dev set. None: all of them."""
        numbers = samples.numbers(count, len(self.questions))
        if numbers is None:
            return self
        note = samples.dev_note(len(numbers), len(self.questions), "questions")
        chosen = [self.questions[number] for number in numbers]
        return Questions(chosen, [*self.notes, note], self.source)


class QuestionData(typing.NamedTuple):
    """What `load` reads."""

    train: Questions
    dev: Questions


def load(task: str, settings: config.Finetune, corpus: config.Corpus) -> QuestionData:
    """Reads the data of a task from the files in `settings.data_dir`, or from TFDS if it is None.

    Without a training set, the share `Squad.dev_share` of the dev set's articles is evaluated and
    the other articles are trained on. Raises ConfigError when data is missing or malformed.
    """
    if settings.data_dir is None:
        train, dev = (_from_tfds(task, split, corpus) for split in ("train", "validation"))
    else:
        train, dev = (
            Questions(read_file(path), source=str(path)) if path else None
            for path in locate(task, settings)
        )
    _require(task, train, dev, settings)
    if train is None:
        train, dev = _split(dev, settings.squad.dev_share, FILES[task][1])
    if task == "squad2" and all(
        question.answers for question in (*train.questions, *dev.questions)
    ):
        dev.notes.append(
            "squad2: no question is unanswerable in these files; "
            "the null threshold has nothing to decide"
        )
    return QuestionData(train, dev)


def locate(task: str, settings: config.Finetune) -> list[pathlib.Path | None]:
    """The training file and the dev file. Raises ConfigError when a needed one is missing."""
    paths = [files.locate(settings.data_dir, name) for name in FILES[task]]
    _require(task, *paths, settings)
    return paths


def _require(task: str, train, dev, settings: config.Finetune):
    """Raises ConfigError when the dev set is missing, or the training set and no `dev_share`."""
    train_name, dev_name = FILES[task]
    source = settings.data_dir or f"TFDS dataset {TFDS[task]}"
    folders = f"{source} (also in its squad/; also packed as .gz, .xz or .zst)"
    if dev is None:
        raise config.ConfigError(f"{task}: no {dev_name} in {folders}")
    if train is None and not settings.squad.dev_share:
        raise config.ConfigError(
            f"{task}: no {train_name} in {folders}; --gin.Squad.dev_share=0.25 trains on three "
            "quarters of the dev file's articles"
        )


def _split(questions: Questions, share: float, name: str) -> QuestionData:
    """Splits by article, so that no context is in both. The smallest hashes are the dev set."""
    articles = sorted({question.article for question in questions.questions}, key=_hash)
    in_dev = set(articles[: max(1, round(share * len(articles)))])
    if len(in_dev) == len(articles):
        raise config.ConfigError(
            f"Squad.dev_share {share}: nothing is left to train on of the "
            f"{len(articles)} articles in {name}"
        )
    dev = [question for question in questions.questions if question.article in in_dev]
    train = [question for question in questions.questions if question.article not in in_dev]
    note = (
        f"no training file: trained on {len(articles) - len(in_dev)} articles of {name}, "
        f"evaluated on its other {len(in_dev)}; not the official split"
    )
    source = questions.source
    return QuestionData(Questions(train, source=source), Questions(dev, [note], source))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_file(path) -> list[Question]:
    """Reads a file in SQuAD's JSON format. Raises ConfigError at a missing or malformed field."""
    questions = []
    content = _typed(path, TOP, files.read_json(path), dict)
    for a, article in enumerate(_field(path, TOP, content, "data", list)):
        in_data = f"data[{a}]"
        title = _field(path, in_data, article, "title", str, str(a))
        for p, paragraph in enumerate(_field(path, in_data, article, "paragraphs", list)):
            in_article = f"{in_data}.paragraphs[{p}]"
            context = _field(path, in_article, paragraph, "context", str)
            for q, entry in enumerate(_field(path, in_article, paragraph, "qas", list)):
                questions.append(_question(path, f"{in_article}.qas[{q}]", entry, context, title))
    if not questions:
        raise config.ConfigError(f"{path}: holds no question. Give a file with questions.")
    return questions


def _question(path, json_path: str, entry: typing.Any, context: str, article: str) -> Question:
    """The question in one entry of `qas`."""
    text, name = (_field(path, json_path, entry, field, str) for field in ("question", "id"))
    impossible = _field(path, json_path, entry, "is_impossible", bool, False)
    answers = [] if impossible else _field(path, json_path, entry, "answers", list, [])
    golds = []
    for number, answer in enumerate(answers):
        in_question = f"{json_path}.answers[{number}]"
        start = _field(path, in_question, answer, "answer_start", int, -1)
        golds.append(GoldAnswer(_field(path, in_question, answer, "text", str), start))
    return Question(name, text, context, tuple(golds), article, impossible)


def _field(path, json_path: str, record, name: str, kind: type, default=None) -> typing.Any:
    """A field of a JSON object. Raises ConfigError unless it is of type `kind`."""
    value = _typed(path, json_path, record, dict).get(name, default)
    return _typed(path, name if json_path == TOP else f"{json_path}.{name}", value, kind)


def _typed(path, json_path: str, value: typing.Any, kind: type) -> typing.Any:
    """Returns `value`. Raises ConfigError for another type (bool is no int) or half a surrogate."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise config.ConfigError(
            f"{path}: {json_path}: expected {kind.__name__}, got {type(value).__name__}; "
            "SQuAD's JSON is data > paragraphs > qas"
        )
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = value[error.start].encode("ascii", "backslashreplace").decode()
            raise config.ConfigError(
                f"{path}: {json_path}: character {error.start} is {half}, half of a surrogate "
                "pair. Remove it or write both halves."
            ) from error
    return value


def _from_tfds(task: str, split: str, corpus: config.Corpus) -> Questions | None:
    records = files.records(TFDS[task], split, corpus)
    if records is None:
        return None
    questions = []
    for record in records:
        answers = record["answers"]
        pairs = zip(answers["text"], map(int, answers["answer_start"]), strict=True)
        golds = tuple(GoldAnswer(*pair) for pair in pairs)
        questions.append(
            Question(
                record["id"],
                record["question"],
                record["context"],
                golds,
                record["title"],
                is_impossible=task == "squad2" and not golds,
            )
        )
    return Questions(questions, source=f"TFDS dataset {TFDS[task]}")


class CharacterSpan(typing.NamedTuple):
    """A part of a context, in characters."""

    start: int
    end: int  # the character after the last one


def answer_span(question: Question) -> CharacterSpan | None:
    """Where the first answer stands, or its nearest occurrence. None: not in the context."""
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
