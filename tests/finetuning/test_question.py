"""SQuAD: its files, windows over contexts, and answers. Every span that fits a window can be answered, and the best one is."""

import json
import pathlib
import random
import shutil
import unittest.mock

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies
from testing import input_format

from maelm_jax import config, finetune
from maelm_jax.finetuning import grid, question
from maelm_jax.finetuning.task import EvaluationSet


class Words:
    """A vocabulary whose tokens are the words of a text between single spaces."""

    bos, eos = 0, 2

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[5] * len(text.split()) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ends = np.cumsum([len(word) + 1 for word in text.split()]) - 1
        return self.encode_batch([text])[0], [(int(end) - len(word), int(end)) for word, end in zip(text.split(), ends, strict=True)]


def limits(**values):
    """Within it, windows and answers have other limits: `stride`, `question_length`, `answer_length`."""
    return unittest.mock.patch.multiple(question, **{name.upper(): value for name, value in values.items()})


def questions_of(context_tokens: int, question_tokens: int, spans: list[tuple[int, int]]) -> list[question.Question]:
    """One context `w0 w1 ...` and a question for each span (first word, last word) of it."""
    words = [f"w{number}" for number in range(context_tokens)]
    answers = [" ".join(words[first : last + 1]) for first, last in spans]
    starts = [len(" ".join(words[:first])) + (first > 0) for first, _ in spans]
    asked = " ".join(["what"] * question_tokens)
    return [
        question.Question(str(number), asked, " ".join(words), (question.GoldAnswer(*answer),))
        for number, answer in enumerate(zip(answers, starts, strict=True))
    ]


def make(questions: list[question.Question], vocabulary, length: int, name="squad1", training=True) -> tuple[EvaluationSet, list[str]]:
    """Windows with the targets of training, and the notes."""
    task = grid.create_task(name, config.Finetune())
    encoded = task._windows(questions, input_format(vocabulary, length), "training", training)
    return EvaluationSet(questions, *encoded, ""), task.notes


def given_answers(questions: list[question.Question], length: int) -> list[tuple[str, str]]:
    """(gold answer, answer given) of each question that has a window which holds its answer, by a certain model."""
    made, _ = make(questions, Words(), length)
    held = np.zeros(len(questions), bool)
    np.logical_or.at(held, made.layout.question, made.features.targets.any(axis=1))
    given = question.answers(made, perfect(made, null=0.0))
    return [(one.answers[0].text, answer.text) for one, answer, is_held in zip(questions, given, held, strict=True) if is_held]


def perfect(made: EvaluationSet, null: float = 18.0) -> question.Spans:
    """The scores of a model that gives the gold start and end all weight, and slot 0 where the window does not hold them."""
    count = len(made.features.ids)
    slots = np.zeros((count, 2, question.BEST), np.int32)
    slots[:, :, 0] = made.features.targets
    slots[:, :, 1:] = made.features.context[:, None, None] + np.arange(question.BEST - 1)
    scores = np.zeros((count, question.BEST), np.float32)
    scores[:, 0] = 9.0
    nulls = np.where(made.features.targets[:, 0] == 0, null, 0.0).astype(np.float32)
    return question.Spans(scores, slots[:, 0], scores.copy(), slots[:, 1], nulls, np.full(count, 18.0, np.float32))


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
@hypothesis.given(answer_length=strategies.integers(1, 60), **SIZES)
@hypothesis.example(context_tokens=377, question_tokens=4, question_length=64, length=384, stride=128, answer_length=30)
def test_every_token_and_every_span_that_fits_a_window_is_reached(context_tokens, question_tokens, question_length, length, stride, answer_length):
    longest = min(answer_length, context_tokens)
    sizes = {1, longest, (longest + 1) // 2}
    spans = [(first, first + size - 1) for size in sizes for first in spread(context_tokens - size + 1)]
    with limits(stride=stride, question_length=question_length, answer_length=answer_length):
        pairs = given_answers(questions_of(context_tokens, question_tokens, spans), length)
    size = length - (min(question_tokens, question_length, length // 2 - 4) + 3) - 1
    step = max(1, min(stride, size // 2))
    starts = range(0, max(context_tokens - size, 0) + step, step)
    held = [any(start <= a and b < start + size for start in starts) for a, b in spans]
    assert all(is_held for is_held, (a, b) in zip(held, spans, strict=True) if a == b)
    assert len(pairs) == sum(held) and all(gold == given for gold, given in pairs)


def test_a_start_whose_best_window_does_not_hold_the_end_is_answered_from_one_that_does():
    """Windows of 8 tokens that begin at 0, 4, 8: w4 has more context on both sides in the first, and only the second holds w4 to w11."""
    found = questions_of(16, 0, [(4, 11)])
    with limits(stride=4):
        made, _ = make(found, Words(), 12)
        assert made.layout.start.tolist() == [0, 4, 8]
        assert given_answers(found, 12) == [("w4 w5 w6 w7 w8 w9 w10 w11", "w4 w5 w6 w7 w8 w9 w10 w11")]


def test_of_two_windows_that_hold_a_token_the_one_with_less_context_is_not_heard():
    """A lure: the second window scores its first token highest, which the first window holds with more context."""
    with limits(stride=4, answer_length=1):
        made, _ = make(questions_of(16, 0, [(1, 1)]), Words(), 12)
        spans = perfect(made, null=0.0)
        for scores, slots in ((spans.start, spans.start_slot), (spans.end, spans.end_slot)):
            scores[1, 0], slots[1, 0] = 99.0, made.features.context[1]
        assert question.answers(made, spans)[0].text == "w1"


LONG = "The river runs. " * 30 + "A small green bird sleeps near the old house at night. " + "It rains. " * 30


def one(context=LONG, text="green bird", answers=None, asked="What sleeps near the old house?"):
    answers = (question.GoldAnswer(text, context.find(text)),) if answers is None else answers
    return [question.Question("q", asked, context, answers)]


def test_windows_hold_the_question_and_all_of_the_context(vocabulary):
    with limits(stride=20):
        cut, notes = make(one(), vocabulary, 48)
    asked, tokens = vocabulary.encode(one()[0].text), vocabulary.encode(LONG)
    prefix = [vocabulary.bos, *asked, vocabulary.eos, vocabulary.eos]
    covered = np.zeros(len(tokens), int)
    for row, start, first in zip(cut.features.ids, cut.layout.start, cut.features.context, strict=True):
        assert row[:first].tolist() == prefix and row[-1] == vocabulary.eos and len(row) <= 48
        part = row[first:-1].tolist()
        assert part == tokens[start : start + len(part)]
        covered[start : start + len(part)] += 1
    assert covered.min() >= 1 and set(np.diff(cut.layout.start)) <= {(48 - len(prefix) - 1) // 2, 20}
    assert "1 of 1 questions do not fit 48 tokens" in notes[0]


def test_what_is_no_answer_is_never_given(vocabulary):
    """Question tokens, ends before starts and long spans score highest, and are passed over."""
    cut, _ = make(one(context="The cat sees a dog and a bird.", text="dog"), vocabulary, 48)
    first, (start, end) = int(cut.features.context[0]), cut.features.targets[0]
    spans = perfect(cut)
    spans.start[:], spans.end[:] = -1e9, -1e9
    last = len(cut.features.ids[0]) - 2
    spans.start_slot[0, :4], spans.start[0, :4] = (1, last, first, start), (50.0, 40.0, 30.0, 20.0)
    spans.end_slot[0, :4], spans.end[0, :4] = (2, first - 1, last, end), (50.0, 40.0, 10.0, 20.0)
    with limits(answer_length=int(end - first)):
        # (last, last) scores 50; with that end gone, dog..dog is what is left within the length.
        assert question.answers(cut, spans)[0].text.endswith(".")
        spans.end[0, 2] = -1e9
        assert question.answers(cut, spans)[0].text == "dog"
    assert question.answers(cut, spans)[0].text == "The cat sees a dog"


def test_the_null_margin_is_against_the_smallest_null_score(vocabulary):
    cut, _ = make(one(), vocabulary, 48)
    assert question.answers(cut, perfect(cut))[0].null_margin == pytest.approx(0.0 - 18.0)
    cut, _ = make(one(answers=()), vocabulary, 48)
    assert not cut.features.targets.any() and question.answers(cut, perfect(cut))[0].null_margin > 0


def test_answers_out_of_place_are_found_or_counted(vocabulary):
    for start, span in ((7, (8, 11)), (-1, (0, 3)), (10**400, (8, 11))):
        assert question.answer_span(one("one two one", answers=(question.GoldAnswer("one", start),))[0]) == span
    lost = one("one two one", answers=(question.GoldAnswer("three", 0),))
    cut, notes = make(lost, vocabulary, 48)
    assert len(cut.features.ids) == 0 and notes == ["training: 1 questions left out: the answer is not in the context"]
    assert len(make(lost, vocabulary, 48, training=False)[0].features.ids) == 1


@pytest.mark.parametrize("text,start,span", [("Denmark", 8, (8, 15)), ("Denmark ", 8, (8, 15)), (" Denmark ", 7, (8, 15)), (" ", 7, None)])
def test_an_answer_has_no_space_at_its_ends(text, start, span):
    """With SentencePiece, the space belongs to the token of the next word."""
    assert question.answer_span(one("ings of Denmark and Norway", answers=(question.GoldAnswer(text, start),))[0]) == span


def test_a_long_question_is_cut_and_counted(vocabulary):
    with limits(question_length=10):
        cut, notes = make(one(asked="what " * 100), vocabulary, 48)
    assert (cut.features.context == 13).all() and "training: 1 questions cut to their first tokens" in notes


def test_the_baseline_answers_nothing(vocabulary):
    task = grid.create_task("squad2", config.Finetune())
    dev, _ = make([*one(), *one(answers=())], vocabulary, 48, "squad2", training=False)
    scores = task.score(dev, task.constant_outputs(dev.features, dev))
    assert scores["best_f1"] == scores["exact"] == 50.0


@pytest.mark.parametrize("name", ["dev-v1.1.json.xz", "dev-v2.0.json.xz"])
def test_perfect_scores_give_the_gold_answers_of_the_real_dev_sets(name, shared_data, corpus_vocabulary):
    questions = question.read_questions(shared_data / "squad" / name)
    assert len(questions) == {"1": 10570, "2": 11873}[name[5]]
    assert sum(not one.answers for one in questions) == {"1": 0, "2": 5945}[name[5]]
    task = f"squad{name[5]}"
    with limits(answer_length=60):
        cut, _ = make(random.Random(0).sample(questions, 400), corpus_vocabulary, 128, task)
        assert len(cut.features.ids) > 500
        scored = grid.create_task(task, config.Finetune()).score(cut, perfect(cut))
    # What is missing: tokens that hold more than the answer.
    assert scored["exact"] > 97 and scored["f1"] > 98, scored


# Files.


@pytest.mark.parametrize(
    "content,message",
    [
        ("{", "x.json"),
        ('{"version": "1.1"}', "x.json.*'data'"),
        ('{"data": [{"title": "a", "paragraphs": [{"qas": [{"id": "1", "question": "?"}]}]}]}', "x.json.*'context'"),
        ('{"data": [{"paragraphs": [{"context": "c", "qas": [{"id": "1"}]}]}]}', "x.json.*'question'"),
        ('{"data": []}', "x.json"),
    ],
)
def test_wrong_json(tmp_path, content, message):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(config.ConfigError, match=message):
        question.read_questions(tmp_path / "x.json")


def squad2(**settings) -> question.QuestionTask:
    return grid.create_task("squad2", config.Finetune(**settings))


def squad_files(folder: pathlib.Path, data_dir: pathlib.Path, change, changed="train-v1.1.json") -> pathlib.Path:
    """SQuAD's files, of which `change` is made to each question of the file `changed`."""
    shutil.copytree(data_dir / "squad", folder, dirs_exist_ok=True)
    content = json.loads((folder / changed).read_text())
    for entry in (entry for article in content["data"] for paragraph in article["paragraphs"] for entry in paragraph["qas"]):
        change(entry)
    (folder / changed).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda entry: entry.update(answers=[{"text": "not there at all", "answer_start": 0}]), "32"),
        (lambda entry: entry.update(answers=[]), "train-v1.1.json.*'q0'"),
    ],
)
def test_squad_without_an_answer_to_train_on_is_refused_and_leaves_nothing(tmp_path, data_dir, pretrained, change, message):
    argv = ["--gin_file=finetune/squad1.gin", f"--init_from={pretrained}", f"--workdir={tmp_path / 'out'}", "--gin.MAX_LENGTH=64"]
    with pytest.raises(config.ConfigError, match=message):
        finetune.main([*argv, f"--gin.DATA_DIR={squad_files(tmp_path / 'data', data_dir, change)}"])
    assert not (tmp_path / "out").exists()


def test_two_questions_of_one_id_are_refused_where_answers_are_written(tmp_path, data_dir, vocabulary):
    path = squad_files(tmp_path, data_dir, lambda entry: entry.update(id="q")) / "train-v1.1.json"
    task = grid.create_task("squad1", config.Finetune())
    with pytest.raises(config.ConfigError, match="train-v1.1.json.*'q'"):
        task.encode(task.read_file(str(path), False), input_format(vocabulary, 64), str(path))


@pytest.mark.parametrize("changed", ["train-v2.0.json", "dev-v2.0.json"])
def test_squad2_has_an_answer_to_every_question_or_says_that_there_is_none(tmp_path, data_dir, changed):
    """Without both, a file of questions would count as unanswerable, and empty answers would have F1 100."""

    def change(entry):
        del entry["answers"], entry["is_impossible"]

    task = squad2(data_dir=str(squad_files(tmp_path, data_dir, change, changed)))
    with pytest.raises(config.ConfigError, match=f"{changed}.*'q0'"):
        task.read()


def test_a_missing_file_is_named(data_dir, tmp_path):
    shutil.copy(data_dir / "squad" / "dev-v2.0.json", tmp_path)
    with pytest.raises(config.ConfigError, match="train-v2.0.json.*DATA_DIR"):
        squad2(data_dir=str(tmp_path)).check_files()


def test_no_unanswerable_question_in_2_0_is_said(data_dir, tmp_path):
    for part in ("train", "dev"):
        shutil.copy(data_dir / "squad" / "dev-v1.1.json", tmp_path / f"{part}-v2.0.json")
    task = squad2(data_dir=str(tmp_path))
    task.read()
    assert "no question is unanswerable" in task.notes[0]


@pytest.mark.filterwarnings("ignore")  # of TensorFlow and TFDS
def test_tfds(tmp_path, tfds_folder):
    """A dataset of SQuAD's name in TFDS format, read by the real reader."""
    tfds = pytest.importorskip("tensorflow_datasets")
    features = tfds.builder("squad/v2.0", data_dir=str(tmp_path / "none")).info.features

    def records(split):
        for number in range(2):
            answers = {"text": ["été", "of"] * number, "answer_start": [3, 7] * number}
            record = {"id": f"{split}{number}", "title": "T", "context": "un été of", "question": "Q?", "answers": answers}
            yield record | {"is_impossible": number == 0, "plausible_answers": {"text": [], "answer_start": []}}

    tfds_folder("squad/v2.0/3.0.0", features, lambda split: list(records(split)))
    train, dev = squad2().read()
    assert dev[""][1] == question.Question("validation1", "Q?", "un été of", (("été", 3), ("of", 7)))
    assert [one.is_impossible for one in train] == [True, False] and question.answer_span(train[1]) == (3, 6)
