"""Windows and answers: every span that fits a window can be answered, and the best one is."""

import random

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies
from testing import input_format

from maelm_jax import config
from maelm_jax.finetuning import metrics, squad, windows


class Words:
    """A vocabulary whose tokens are the words of a text between single spaces."""

    bos, eos = 0, 2

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[5] * len(text.split()) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ends = np.cumsum([len(word) + 1 for word in text.split()]) - 1
        return self.encode_batch([text])[0], [(int(end) - len(word), int(end)) for word, end in zip(text.split(), ends, strict=True)]


def questions_of(context_tokens: int, question_tokens: int, spans: list[tuple[int, int]]) -> squad.Questions:
    """One context `w0 w1 ...` and a question for each span (first word, last word) of it."""
    words = [f"w{number}" for number in range(context_tokens)]
    answers = [" ".join(words[first : last + 1]) for first, last in spans]
    starts = [len(" ".join(words[:first])) + (first > 0) for first, _ in spans]
    asked = " ".join(["what"] * question_tokens)
    return squad.Questions(
        [squad.Question(str(number), asked, " ".join(words), (answer,), "A") for number, answer in enumerate(zip(answers, starts, strict=True))]
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


def given_answers(found: squad.Questions, settings: config.Squad, length: int) -> list[tuple[str, str]]:
    """(gold answer, answer given) of each question that has a window which holds its answer."""
    made = windows.make(found, input_format(Words(), length), settings, training=True)
    held = np.zeros(len(found.questions), bool)
    np.logical_or.at(held, made.question, made.rows.targets.any(axis=1))
    given = windows.answers(found, made, certain_model(made), settings.answer_length)
    return [(question.answers[0][0], answer.text) for question, answer, one in zip(found.questions, given, held, strict=True) if one]


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
@hypothesis.example(context_tokens=377, question_tokens=4, question_length=64, length=384, stride=128)
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
def test_every_span_that_fits_a_window_is_reached(context_tokens, question_tokens, question_length, length, stride, answer_length):
    settings = config.Squad(stride=stride, question_length=question_length, answer_length=answer_length)
    longest = min(answer_length, context_tokens)
    spans = [(first, first + size - 1) for size in {longest, (longest + 1) // 2} for first in spread(context_tokens - size + 1)]
    pairs = given_answers(questions_of(context_tokens, question_tokens, spans), settings, length)
    size = length - (min(question_tokens, question_length, length // 2 - 4) + 3) - 1
    step = max(1, min(stride, size // 2))
    starts = range(0, max(context_tokens - size, 0) + step, step)
    held = sum(any(start <= a and b < start + size for start in starts) for a, b in spans)
    assert len(pairs) == held and all(gold == given for gold, given in pairs)


def test_a_start_whose_best_window_does_not_hold_the_end_is_answered_from_one_that_does():
    """Windows of 8 tokens that begin at 0, 4, 8: w4 has more context on both sides in the first, and only the second holds w4 to w11."""
    found = questions_of(16, 0, [(4, 11)])
    settings = config.Squad(stride=4)
    made = windows.make(found, input_format(Words(), 12), settings, training=True)
    assert made.start.tolist() == [0, 4, 8]
    assert given_answers(found, settings, 12) == [("w4 w5 w6 w7 w8 w9 w10 w11", "w4 w5 w6 w7 w8 w9 w10 w11")]


def test_of_two_windows_that_hold_a_token_the_one_with_less_context_is_not_heard():
    """A lure: the second window scores its first token highest, which the first window holds with more context."""
    found = questions_of(16, 0, [(1, 1)])
    made = windows.make(found, input_format(Words(), 12), config.Squad(stride=4), training=True)
    spans = certain_model(made)
    for scores, slots in ((spans.start, spans.start_slot), (spans.end, spans.end_slot)):
        scores[1, 0], slots[1, 0] = 99.0, made.rows.context[1]
    assert windows.answers(found, made, spans, longest=1)[0].text == "w1"


LONG = "The river runs. " * 30 + "A small green bird sleeps near the old house at night. " + "It rains. " * 30


def one(context=LONG, text="green bird", answers=None, question="What sleeps near the old house?"):
    answers = ((text, context.find(text)),) if answers is None else answers
    return squad.Questions([squad.Question("q", question, context, answers, "A")])


def perfect(cut: windows.Windows) -> windows.Spans:
    """Scores that are high at each window's target alone."""
    count = len(cut.rows.ids)
    high = np.concatenate([np.full((count, 1), 9.0), np.zeros((count, windows.BEST - 1))], axis=1).astype(np.float32)
    slots = np.zeros((count, 2, windows.BEST), np.int32)
    slots[:, :, 0] = cut.rows.targets
    spread = np.arange(1, windows.BEST) + cut.rows.context[:, None]
    slots[:, :, 1:] = spread[:, None]
    null = np.where(cut.rows.targets[:, 0] == 0, 18.0, 0.0).astype(np.float32)
    return windows.Spans(high, slots[:, 0], high.copy(), slots[:, 1], null)


def test_windows_hold_the_question_and_all_of_the_context(vocabulary):
    found = one()
    cut = windows.make(found, input_format(vocabulary, 48), config.Squad(stride=20), training=True)
    asked, tokens = vocabulary.encode(found.questions[0].text), vocabulary.encode(LONG)
    prefix = [vocabulary.bos, *asked, vocabulary.eos, vocabulary.eos]
    covered = np.zeros(len(tokens), int)
    for row, start, first in zip(cut.rows.ids, cut.start, cut.rows.context, strict=True):
        assert row[:first].tolist() == prefix and row[-1] == vocabulary.eos and len(row) <= 48
        part = row[first:-1].tolist()
        assert part == tokens[start : start + len(part)]
        covered[start : start + len(part)] += 1
    assert covered.min() >= 1 and set(np.diff(cut.start)) <= {(48 - len(prefix) - 1) // 2, 20}
    assert "1 of 1 questions do not fit 48 tokens" in found.notes[0]


def test_targets_are_the_answer_where_it_is_and_0_elsewhere(vocabulary):
    cut = windows.make(one(), input_format(vocabulary, 48), config.Squad(stride=20), training=True)
    inside = [(row, target) for row, target in zip(cut.rows.ids, cut.rows.targets, strict=True) if target.any()]
    assert 1 <= len(inside) < len(cut.rows.ids)
    for row, (first, last) in inside:
        assert vocabulary.decode(row[first : last + 1]) == "green bird"


def test_an_answer_of_a_window_with_more_context_wins(vocabulary):
    found = one()
    cut = windows.make(found, input_format(vocabulary, 48), config.Squad(stride=20), training=True)
    assert windows.answers(found, cut, perfect(cut), 30)[0].text == "green bird"
    homes = []
    for window in np.flatnonzero(cut.rows.targets.any(axis=1)):
        spans = perfect(cut)
        spans.start[np.arange(len(spans.start)) != window] = -1e9  # only this window says anything
        homes.append(windows.answers(found, cut, spans, 30)[0].text == "green bird")
    assert sum(homes) == 1


def test_what_is_no_answer_is_never_given(vocabulary):
    """Question tokens, ends before starts and long spans score highest, and are passed over."""
    found = one(context="The cat sees a dog and a bird.", text="dog")
    cut = windows.make(found, input_format(vocabulary, 48), config.Squad(), training=True)
    first, (start, end) = int(cut.rows.context[0]), cut.rows.targets[0]
    spans = perfect(cut)
    spans.start[:], spans.end[:] = -1e9, -1e9
    last = len(cut.rows.ids[0]) - 2
    spans.start_slot[0, :4], spans.start[0, :4] = (1, last, first, start), (50.0, 40.0, 30.0, 20.0)
    spans.end_slot[0, :4], spans.end[0, :4] = (2, first - 1, last, end), (50.0, 40.0, 10.0, 20.0)
    short = windows.answers(found, cut, spans, longest=int(end - first))[0]
    # (last, last) scores 50; with that end gone, dog..dog is what is left within the length.
    assert short.text == "." or short.text.endswith(".")
    spans.end[0, 2] = -1e9
    assert windows.answers(found, cut, spans, longest=int(end - first))[0].text == "dog"
    assert windows.answers(found, cut, spans, longest=30)[0].text == "The cat sees a dog"


def test_the_null_margin_is_against_the_smallest_null_score(vocabulary):
    found = one()
    cut = windows.make(found, input_format(vocabulary, 48), config.Squad(stride=20), training=True)
    spans = perfect(cut)
    assert windows.answers(found, cut, spans, 30)[0].null_margin == pytest.approx(0.0 - 18.0)
    unanswerable = one(answers=())
    cut = windows.make(unanswerable, input_format(vocabulary, 48), config.Squad(stride=20), training=True)
    assert not cut.rows.targets.any()
    assert windows.answers(unanswerable, cut, perfect(cut), 30)[0].null_margin > 0


def test_answers_out_of_place_are_found_or_counted(vocabulary):
    assert squad.answer_span(one("one two one", answers=(("one", 7),)).questions[0]) == (8, 11)
    assert squad.answer_span(one("one two one", answers=(("one", -1),)).questions[0]) == (0, 3)
    lost = one("one two one", answers=(("three", 0),))
    cut = windows.make(lost, input_format(vocabulary, 48), config.Squad(), training=True)
    assert len(cut.rows.ids) == 0 and lost.notes == ["training: 1 questions left out: the answer is not in the context"]
    assert len(windows.make(lost, input_format(vocabulary, 48), config.Squad(), training=False).rows.ids) == 1


def test_a_long_question_is_cut_and_counted(vocabulary):
    found = one(question="what " * 100)
    cut = windows.make(found, input_format(vocabulary, 48), config.Squad(question_length=10), training=True)
    assert (cut.rows.context == 13).all() and "training: 1 questions cut to their first tokens" in found.notes


@pytest.mark.parametrize("name", ["dev-v1.1.json.xz", "dev-v2.0.json.xz"])
def test_perfect_scores_give_the_gold_answers_of_the_real_dev_sets(name, shared_data, corpus_vocabulary):
    questions = squad.read_file(shared_data / "squad" / name)
    assert len(questions) == {"1": 10570, "2": 11873}[name[5]]
    assert sum(not question.answers for question in questions) == {"1": 0, "2": 5945}[name[5]]
    found = squad.Questions(random.Random(0).sample(questions, 400))
    cut = windows.make(found, input_format(corpus_vocabulary, 128), config.Squad(), training=True)
    assert len(cut.rows.ids) > 500
    given = [
        metrics.Answered(tuple(t for t, _ in q.answers), *a)
        for q, a in zip(found.questions, windows.answers(found, cut, perfect(cut), 60), strict=True)
    ]
    scored = metrics.squad(given, unanswerable="v2" in name)
    # What is missing: tokens that hold more than the answer.
    assert scored["exact"] > 97 and scored["f1"] > 98, scored
