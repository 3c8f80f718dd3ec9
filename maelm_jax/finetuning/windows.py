"""Windows over long contexts, and answers from the scores of their slots.

The method is that of BERT (Devlin et al. 2019, file run_squad.py).
"""

import typing

import numpy as np

from maelm_jax import config
from maelm_jax.finetuning import features, squad
from maelm_jax.finetuning.input_format import InputFormat

BEST = 20  # starts, and ends, of a window; every pair of them is a candidate for the answer


class Windows(typing.NamedTuple):
    """n windows: `<s> question </s> part of the context </s>`."""

    rows: features.Features
    question: np.ndarray  # int32 [n]: index of the question; ascending
    start: np.ndarray  # int32 [n]: index in the context of its first token in the window
    offsets: list[np.ndarray]  # of each question, int32 [tokens of the context, 2]: characters


class _Context(typing.NamedTuple):
    """A tokenised context."""

    tokens: list[int]
    offsets: np.ndarray  # int32 [tokens, 2]: first character of each token, and the one after it


def make(
    questions: squad.Questions, input_format: InputFormat, settings: config.Squad, training: bool
) -> Windows:
    """Makes windows of the tokens of questions. Adds notes of what is cut or left out.

    In training, targets are the (first, last) slot of the answer, or (0, 0) in a window that does
    not hold all of one. A question whose answer is not in its context gets no window.
    """
    maker = _Maker(input_format, settings)
    texts = [question.text for question in questions.questions]
    encoded = features.encode(input_format.vocabulary, texts)
    for number, (question, tokens) in enumerate(zip(questions.questions, encoded, strict=True)):
        maker.add(number, question, tokens, training)
    which = "training" if training else "dev"
    questions.notes += [f"{which}: {note}" for note in maker.notes(len(texts))]
    return maker.windows()


class _Maker:
    """Collects the windows of one question after the other."""

    def __init__(self, input_format: InputFormat, settings: config.Squad):
        self.input_format, self.settings = input_format, settings
        self.vocabulary, self.length = input_format.vocabulary, input_format.length
        self.contexts: dict[str, _Context] = {}
        self.offsets: list[np.ndarray] = []
        # Of each window: ids, slots of the answer, first slot of the context, number of the
        # question, first token of the context.
        self.ids, self.targets, self.prefixes, self.owners, self.starts = [], [], [], [], []
        self.cut = self.lost = self.split = 0  # questions: cut, without window, of several windows

    def add(self, number: int, question: squad.Question, tokens: list[int], training: bool):
        """Adds the windows of a question. `tokens` are those of its text."""
        context = self._tokenised(question.context)
        self.offsets.append(context.offsets)
        answer = squad.answer_span(question) if training and question.answers else None
        if training and question.answers and answer is None:
            self.lost += 1
            return
        limit = min(self.settings.question_length, self.length // 2 - 4)
        self.cut += len(tokens) > limit
        prefix = self.input_format.prefix(tokens[:limit])
        size = self.length - len(prefix) - 1  # largest number of tokens of the context
        step = max(1, min(self.settings.stride, size // 2))
        starts = range(0, max(len(context.tokens) - size, 0) + step, step)
        self.split += len(starts) > 1
        answer_tokens = _tokens_of(answer, context.offsets)
        for start in starts:
            part = context.tokens[start : start + size]
            self.ids.append(np.asarray([*prefix, *part, self.vocabulary.eos], np.int32))
            self.targets.append(_target(answer_tokens, start, len(part), len(prefix)))
            self.prefixes.append(len(prefix))
            self.owners.append(number)
            self.starts.append(start)

    def _tokenised(self, text: str) -> _Context:
        if text not in self.contexts:
            tokens, offsets = self.vocabulary.encode_with_offsets(text)
            self.contexts[text] = _Context(tokens, np.asarray(offsets, np.int32).reshape(-1, 2))
        return self.contexts[text]

    def notes(self, questions: int) -> list[str]:
        """What was cut, left out or split of so many questions."""
        notes = []
        if self.cut:
            notes.append(f"{self.cut} questions cut to their first tokens")
        if self.lost:
            notes.append(f"{self.lost} questions left out: the answer is not in the context")
        if self.split:
            notes.append(
                f"{self.split} of {questions} questions do not fit {self.length} tokens "
                f"with their context: {len(self.ids)} windows"
            )
        return notes

    def windows(self) -> Windows:
        targets = np.asarray(self.targets, np.int32).reshape(-1, 2)
        rows = features.Features(self.ids, targets, np.asarray(self.prefixes, np.int32))
        owners, starts = (np.asarray(values, np.int32) for values in (self.owners, self.starts))
        return Windows(rows, owners, starts, self.offsets)


def _tokens_of(answer: squad.CharacterSpan | None, offsets: np.ndarray) -> np.ndarray:
    """Indices of the tokens that hold characters of the answer."""
    if answer is None:
        return np.zeros(0, np.int64)
    return np.flatnonzero((offsets[:, 0] < answer.end) & (offsets[:, 1] > answer.start))


class _Target(typing.NamedTuple):
    """Slots of the answer in a window. (0, 0): the window does not hold all of it."""

    first: int
    last: int


def _target(answer_tokens: np.ndarray, start: int, size: int, prefix: int) -> _Target:
    """The target of a window that holds `size` tokens of the context from `start` on."""
    if not len(answer_tokens):
        return _Target(0, 0)
    first, last = answer_tokens[0], answer_tokens[-1]
    if first < start or last >= start + size:
        return _Target(0, 0)
    return _Target(prefix + first - start, prefix + last - start)


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


def answers(
    questions: squad.Questions, windows: Windows, spans: Spans, longest: int
) -> list[Answer]:
    """The best span of at most `longest` tokens for each question.

    A span in several windows has the score of one of them (see `_window_of`). The null score of a
    question is the smallest of its windows.
    """
    bounds = np.searchsorted(windows.question, np.arange(len(questions.questions) + 1))
    return [
        _best_answer(question.context, windows, spans, np.arange(first, last), longest)
        for question, first, last in zip(questions.questions, bounds[:-1], bounds[1:], strict=True)
    ]


def _best_answer(
    context: str, windows: Windows, spans: Spans, indices: np.ndarray, longest: int
) -> Answer:
    """The answer to one question. `indices` are those of its windows."""
    offsets = windows.offsets[windows.question[indices[0]]]
    begin, prefix = windows.start[indices], windows.rows.context[indices]
    end = begin + windows.rows.lengths[indices] - prefix - 1
    slot_to_token = (begin - prefix)[:, None]
    first, last = spans.start_slot[indices] + slot_to_token, spans.end_slot[indices] + slot_to_token
    inside_first, inside_last = (
        (token >= begin[:, None]) & (token < end[:, None]) for token in (first, last)
    )
    size = last[:, None, :] - first[:, :, None] + 1
    allowed = inside_first[:, :, None] & inside_last[:, None, :] & (size >= 1) & (size <= longest)
    total = spans.start[indices][:, :, None] + spans.end[indices][:, None, :]
    score = np.where(allowed, total, -np.inf)
    null = float(spans.null[indices].min())
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
