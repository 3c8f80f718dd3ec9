"""Which answers can be given at all: every token, and every span that fits a window, whatever the lengths are."""

import hypothesis
import numpy as np
from hypothesis import strategies

from maelm_jax import config
from maelm_jax.finetuning import squad, windows


class Words:
    """A vocabulary whose tokens are the words of a text between single spaces."""

    bos, eos = 0, 2

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[5] * len(text.split()) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ends = np.cumsum([len(word) + 1 for word in text.split()]) - 1
        return self.encode_batch([text])[0], [
            (int(end) - len(word), int(end)) for word, end in zip(text.split(), ends, strict=True)
        ]


def questions_of(
    context_tokens: int, question_tokens: int, spans: list[tuple[int, int]]
) -> squad.Questions:
    """One context `w0 w1 ...` and a question for each span (first word, last word) of it."""
    words = [f"w{number}" for number in range(context_tokens)]
    answers = [" ".join(words[first : last + 1]) for first, last in spans]
    starts = [len(" ".join(words[:first])) + (first > 0) for first, _ in spans]
    asked = " ".join(["what"] * question_tokens)
    return squad.Questions(
        [
            squad.Question(str(number), asked, " ".join(words), (answer,), "A")
            for number, answer in enumerate(zip(answers, starts, strict=True))
        ]
    )


def certain_model(made: windows.Windows) -> windows.Spans:
    """The scores of a model that gives the gold start and end all weight, and slot 0 where the window does not hold them."""
    count = len(made.rows.ids)
    slots = np.zeros((count, 2, windows.BEST), np.int32)
    slots[:, :, 0] = made.rows.targets
    slots[:, :, 1:] = made.rows.context[:, None, None] + np.arange(windows.BEST - 1)
    scores = np.zeros((count, windows.BEST), np.float32)
    scores[:, 0] = 9.0
    return windows.Spans(scores, slots[:, 0], scores.copy(), slots[:, 1], np.zeros(count, np.float32))


def given_answers(
    found: squad.Questions, settings: config.Squad, length: int
) -> list[tuple[str, str]]:
    """(gold answer, answer given) of each question that has a window which holds its answer."""
    made = windows.make(found, Words(), settings, length, training=True)
    held = np.zeros(len(found.questions), bool)
    np.logical_or.at(held, made.question, made.rows.targets.any(axis=1))
    given = windows.answers(found, made, certain_model(made), settings.answer_length)
    return [
        (question.answers[0][0], answer.text)
        for question, answer, one in zip(found.questions, given, held, strict=True)
        if one
    ]


def test_the_last_token_of_a_context_of_377_is_reached():
    found = questions_of(377, 4, [(376, 376)])
    assert given_answers(found, config.Squad(), 384) == [("w376", "w376")]


SIZES = {
    "context_tokens": strategies.integers(1, 400),
    "question_tokens": strategies.integers(0, 40),
    "question_length": strategies.integers(1, 40),
    "length": strategies.integers(10, 400),
    "stride": strategies.integers(1, 200),
}


def spread(count: int) -> list[int]:
    """The first and the last of `count` numbers, and up to 20 between them."""
    return sorted({int(number) for number in np.linspace(0, count - 1, 22)})


@hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
@hypothesis.given(**SIZES)
@hypothesis.example(
    context_tokens=377, question_tokens=4, question_length=64, length=384, stride=128
)
def test_every_token_is_reached(context_tokens, question_tokens, question_length, length, stride):
    settings = config.Squad(stride=stride, question_length=question_length)
    tokens = spread(context_tokens)
    pairs = given_answers(
        questions_of(context_tokens, question_tokens, [(token, token) for token in tokens]),
        settings,
        length,
    )
    assert len(pairs) == len(tokens) and all(gold == given for gold, given in pairs)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
@hypothesis.given(answer_length=strategies.integers(1, 60), **SIZES)
def test_every_span_that_fits_a_window_is_reached(
    context_tokens, question_tokens, question_length, length, stride, answer_length
):
    settings = config.Squad(
        stride=stride, question_length=question_length, answer_length=answer_length
    )
    longest = min(answer_length, context_tokens)
    spans = [
        (first, first + size - 1)
        for size in {longest, (longest + 1) // 2}
        for first in spread(context_tokens - size + 1)
    ]
    pairs = given_answers(questions_of(context_tokens, question_tokens, spans), settings, length)
    assert all(gold == given for gold, given in pairs)


def test_a_start_whose_best_window_does_not_hold_the_end_is_answered_from_one_that_does():
    """Windows of 8 tokens that begin at 0, 4, 8: w4 has more context on both sides in the first, and only the second holds w4 to w11."""
    found = questions_of(16, 0, [(4, 11)])
    settings = config.Squad(stride=4)
    made = windows.make(found, Words(), settings, 12, training=True)
    assert made.start.tolist() == [0, 4, 8]
    assert given_answers(found, settings, 12) == [
        ("w4 w5 w6 w7 w8 w9 w10 w11", "w4 w5 w6 w7 w8 w9 w10 w11")
    ]


def test_of_two_windows_that_hold_a_token_the_one_with_less_context_is_not_heard():
    """A lure: the second window scores its first token highest, which the first window holds with more context."""
    found = questions_of(16, 0, [(1, 1)])
    made = windows.make(found, Words(), config.Squad(stride=4), 12, training=True)
    spans = certain_model(made)
    for scores, slots in ((spans.start, spans.start_slot), (spans.end, spans.end_slot)):
        scores[1, 0], slots[1, 0] = 99.0, made.rows.context[1]
    assert windows.answers(found, made, spans, longest=1)[0].text == "w1"
