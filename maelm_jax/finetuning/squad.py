"""SQuAD 1.1 and 2.0, with the method of BERT (Devlin et al. 2019, file run_squad.py)."""

import dataclasses
import hashlib
import pathlib
import re
import typing

import numpy as np

from maelm_jax import config
from maelm_jax.data.vocabulary import Vocabulary
from maelm_jax.finetuning import features, files

FILES = {"squad1": ("train-v1.1.json", "dev-v1.1.json"),
         "squad2": ("train-v2.0.json", "dev-v2.0.json")}
TFDS = {"squad1": "squad/v1.1", "squad2": "squad/v2.0"}
BEST = 20  # starts, and ends, of a window; every pair of them is a candidate for the answer


@dataclasses.dataclass(frozen=True)
class Question:
    """One question about a context, which is a paragraph of an article."""

    id: str
    text: str
    context: str
    answers: tuple[tuple[str, int], ...]  # (text, first character in `context`); (): unanswerable
    article: str  # title


@dataclasses.dataclass
class Questions:
    """A training or dev set."""

    questions: list[Question]
    notes: list[str] = dataclasses.field(default_factory=list)  # for the user
    source: str = ""  # the file or dataset, for messages


def load(
    task: str, settings: config.Finetune, corpus: config.Corpus
) -> tuple[Questions, Questions]:
    """Returns training and dev set, from the files in `settings.data_dir` or, if None, from TFDS.

    Without a training set, the share `settings.dev_share` of the dev set's articles is evaluated
    and the other articles are trained on. Raises ConfigError when data is missing or malformed.
    """
    if settings.data_dir is None:
        train, dev = _from_tfds(task, "train", corpus), _from_tfds(task, "validation", corpus)
    else:
        train, dev = (
            Questions(read_file(path), source=str(path)) if path else None
            for path in locate(task, settings))
    _require(task, train, dev, settings)
    if train is None:
        train, dev = _split(dev, settings.dev_share, FILES[task][1])
    if task == "squad2" and all(
        question.answers for question in (*train.questions, *dev.questions)):
        dev.notes.append(
            "squad2: no question is unanswerable in these files; "
            "the null threshold has nothing to decide")
    return train, dev


def locate(task: str, settings: config.Finetune) -> list[pathlib.Path | None]:
    """The training file and the dev file. Raises ConfigError when a needed one is missing."""
    paths = [files.locate(settings.data_dir, name) for name in FILES[task]]
    _require(task, *paths, settings)
    return paths


def _require(task: str, train, dev, settings: config.Finetune):
    if dev is None or (train is None and not settings.dev_share):
        where, absent = (settings.data_dir or f"TFDS dataset {TFDS[task]}",
                         FILES[task][0 if dev else 1])
        part = ("; --gin.Finetune.dev_share=0.25 trains on three quarters of the dev file's "
                "articles" if dev else "")
        raise config.ConfigError(f"{task}: no {absent} in {where} "
                                 f"(also in its squad/; .json, .json.xz or .json.gz){part}")


def _split(found: Questions, share: float, name: str) -> tuple[Questions, Questions]:
    """Splits by article, so that no context is in both. The smallest hashes are the dev set."""
    key = lambda article: hashlib.sha256(article.encode()).hexdigest()  # noqa: E731
    articles = sorted({question.article for question in found.questions}, key=key)
    kept = set(articles[: max(1, round(share * len(articles)))])
    if len(kept) == len(articles):
        raise config.ConfigError(f"Finetune.dev_share {share}: nothing is left to train on of the "
                                 f"{len(articles)} articles in {name}")
    dev = [question for question in found.questions if question.article in kept]
    train = [question for question in found.questions if question.article not in kept]
    note = (f"no training file: trained on {len(articles) - len(kept)} articles of {name}, "
            f"evaluated on its other {len(kept)}; not the official split")
    return Questions(train, source=found.source), Questions(dev, [note], found.source)


def read_file(path) -> list[Question]:
    """Reads a file in SQuAD's JSON format. Raises ConfigError at a missing or malformed field."""
    found = []
    content = _typed(path, "the file", files.read_json(path), dict)
    for a, article in enumerate(_field(path, "the file", content, "data", list)):
        place = f"data[{a}]"
        title = _field(path, place, article, "title", str, str(a))
        for p, paragraph in enumerate(_field(path, place, article, "paragraphs", list)):
            here = f"{place}.paragraphs[{p}]"
            context = _field(path, here, paragraph, "context", str)
            for q, entry in enumerate(_field(path, here, paragraph, "qas", list)):
                found.append(_question(path, f"{here}.qas[{q}]", entry, context, title))
    if not found:
        raise config.ConfigError(f"{path}: holds no question")
    return found


def _question(path, place: str, entry: typing.Any, context: str, article: str) -> Question:
    """The question in one entry of `qas`."""
    text, name = (_field(path, place, entry, field, str) for field in ("question", "id"))
    impossible = _field(path, place, entry, "is_impossible", bool, False)
    answers = [] if impossible else _field(path, place, entry, "answers", list, [])
    spans = []
    for number, answer in enumerate(answers):
        here = f"{place}.answers[{number}]"
        start = _field(path, here, answer, "answer_start", int, -1)
        spans.append((_field(path, here, answer, "text", str), start))
    return Question(name, text, context, tuple(spans), article)


def _field(path, place: str, record, name: str, kind: type, default=None) -> typing.Any:
    """A field of a JSON object. Raises ConfigError unless it is of type `kind`."""
    value = _typed(path, place, record, dict).get(name, default)
    return _typed(path, f"{place}.{name}" if place != "the file" else name, value, kind)


def _typed(path, place: str, value: typing.Any, kind: type) -> typing.Any:
    """Returns `value`. Raises ConfigError for another type (bool is no int) or half a surrogate."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise config.ConfigError(
            f"{path}: {place}: expected {kind.__name__}, got {type(value).__name__}; "
            "SQuAD's JSON is data > paragraphs > qas")
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = value[error.start].encode("ascii", "backslashreplace").decode()
            raise config.ConfigError(
                f"{path}: {place}: character {error.start} is {half}, half of a surrogate pair. "
                "Remove it or write both halves.") from error
    return value


def _from_tfds(task: str, split: str, corpus: config.Corpus) -> Questions | None:
    records = files.records(TFDS[task], split, corpus)
    if records is None:
        return None
    spans = lambda answers: tuple(  # noqa: E731
        zip(answers["text"], map(int, answers["answer_start"]), strict=True))
    questions = [Question(r["id"], r["question"], r["context"], spans(r["answers"]), r["title"])
                 for r in records]
    return Questions(questions, source=f"TFDS dataset {TFDS[task]}")


def answer_range(question: Question) -> tuple[int, int] | None:
    """Characters [start, end) of the first answer, or of its nearest occurrence. None: absent."""
    text, start = question.answers[0]
    if text and start >= 0 and question.context.startswith(text, start):
        return start, start + len(text)
    places = (
        [found.start() for found in re.finditer(re.escape(text), question.context)] if text else [])
    if not places:
        return None
    start = min(places, key=lambda place: abs(place - start))
    return start, start + len(text)


class Windows(typing.NamedTuple):
    """n windows: `<s> question </s> </s> part of the context </s>`."""

    rows: features.Features
    question: np.ndarray  # int32 [n]: index of the question; ascending
    start: np.ndarray  # int32 [n]: index in the context of its first token in the window
    offsets: list[np.ndarray]  # of each question, int32 [tokens of the context, 2]: characters


def windows(
    found: Questions, vocabulary: Vocabulary, settings: config.Finetune, length: int, training: bool
) -> Windows:
    """Makes windows of at most `length` tokens. Adds notes of what is cut or left out to `found`.

    In training, targets are the (first, last) slot of the answer, or (0, 0) in a window that does
    not hold all of one. A question whose answer is not in its context gets no window.
    """
    contexts: dict[str, tuple[list[int], np.ndarray]] = {}
    ids, targets, first, owner, begins, offsets = [], [], [], [], [], []
    cut = lost = windowed = 0
    texts = features.encode(vocabulary, [question.text for question in found.questions])
    for number, (question, asked) in enumerate(zip(found.questions, texts, strict=True)):
        if question.context not in contexts:
            tokens, places = vocabulary.encode_with_offsets(question.context)
            contexts[question.context] = tokens, np.asarray(places, np.int32).reshape(-1, 2)
        tokens, places = contexts[question.context]
        offsets.append(places)
        answer = answer_range(question) if training and question.answers else None
        if training and question.answers and answer is None:
            lost += 1
            continue
        limit = min(settings.question_length, length // 2 - 4)
        cut += len(asked) > limit
        prefix = [vocabulary.bos, *asked[:limit], vocabulary.eos, vocabulary.eos]
        room = length - len(prefix) - 1
        step = max(1, min(settings.stride, room // 2))
        span = (np.flatnonzero((places[:, 0] < answer[1]) & (places[:, 1] > answer[0]))
                if answer else [])
        starts = range(0, max(len(tokens) - room, 0) + step, step)
        windowed += len(starts) > 1
        for start in starts:
            part = tokens[start : start + room]
            inside = len(span) > 0 and span[0] >= start and span[-1] < start + len(part)
            ids.append(np.asarray([*prefix, *part, vocabulary.eos], np.int32))
            targets.append((len(prefix) + span[0] - start, len(prefix) + span[-1] - start)
                           if inside else (0, 0))
            first.append(len(prefix))
            owner.append(number)
            begins.append(start)
    which = "training" if training else "dev"
    for count, what in ((cut, "questions cut to their first tokens"),
                        (lost, "questions left out: the answer is not in the context")):
        if count:
            found.notes.append(f"{which}: {count} {what}")
    if windowed:
        found.notes.append(
            f"{which}: {windowed} of {len(found.questions)} questions do not fit {length} tokens "
            f"with their context: {len(ids)} windows")
    rows = features.Features(
        ids, np.asarray(targets, np.int32).reshape(-1, 2), np.asarray(first, np.int32))
    return Windows(rows, np.asarray(owner, np.int32), np.asarray(begins, np.int32), offsets)


class Spans(typing.NamedTuple):
    """The model's output for n windows: the BEST highest scores of starts and ends."""

    start: np.ndarray  # float32 [n, BEST]
    start_slot: np.ndarray  # int32 [n, BEST]
    end: np.ndarray  # float32 [n, BEST]
    end_slot: np.ndarray  # int32 [n, BEST]
    null: np.ndarray  # float32 [n]: score of "no answer", the sum of start and end score of slot 0


class Answer(typing.NamedTuple):
    """The answer to one question."""

    text: str  # the best span, however low its score is
    null_margin: float  # null score minus score of the span; high where an answer is unlikely


def answers(found: Questions, cut: Windows, spans: Spans, longest: int) -> list[Answer]:
    """The best span of at most `longest` tokens for each question.

    A span in several windows has the score of one of them (see `_window_of`). The null score of a
    question is the smallest of its windows.
    """
    bounds = np.searchsorted(cut.question, np.arange(len(found.questions) + 1))
    return [
        _best_answer(question.context, cut, spans, np.arange(*bounds[number : number + 2]), longest)
        for number, question in enumerate(found.questions)]


def _best_answer(
    context: str, cut: Windows, spans: Spans, windows: np.ndarray, longest: int
) -> Answer:
    """The answer to one question. `windows` are the indices of its windows."""
    offsets = cut.offsets[cut.question[windows[0]]]
    begin, prefix = cut.start[windows], cut.rows.context[windows]
    end = begin + np.asarray([len(cut.rows.ids[window]) for window in windows]) - prefix - 1
    slot_to_token = (begin - prefix)[:, None]
    first, last = spans.start_slot[windows] + slot_to_token, spans.end_slot[windows] + slot_to_token
    inside_first, inside_last = (
        (token >= begin[:, None]) & (token < end[:, None]) for token in (first, last))
    size = last[:, None, :] - first[:, :, None] + 1
    allowed = inside_first[:, :, None] & inside_last[:, None, :] & (size >= 1) & (size <= longest)
    total = spans.start[windows][:, :, None] + spans.end[windows][:, None, :]
    score = np.where(allowed, total, -np.inf)
    null = float(spans.null[windows].min())
    for index in np.argsort(-score, axis=None, kind="stable"):
        window, i, j = np.unravel_index(index, score.shape)
        if not np.isfinite(score[window, i, j]):
            break
        if window == _window_of(first[window, i], last[window, j], begin, end):
            text = context[offsets[first[window, i], 0] : offsets[last[window, j], 1]].strip()
            return Answer(text, null - float(score[window, i, j]))
    return Answer("", 0.0)


def _window_of(first: int, last: int, begin: np.ndarray, end: np.ndarray) -> int:
    """Of the windows [begin, end) that hold a whole span, the one with most context around `first`.

    This is the rule of BERT's run_squad.py with one difference. BERT picks the window among all
    that hold `first`, so that it never gives an answer that ends after that window.
    """
    holds = (begin <= first) & (last < end)
    context = np.minimum(first - begin, end - 1 - first) + 0.01 * (end - begin)
    return int(np.where(holds, context, -np.inf).argmax())
