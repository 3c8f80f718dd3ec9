"""Questions from JSON, windows, and answers out of scores; where it can be, on the real dev sets."""

import json
import random

import numpy as np
import pytest

from maelm_jax import config
from maelm_jax.finetuning import metrics, squad, windows

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
    cut = windows.make(found, vocabulary, config.Squad(stride=20), 48, training=True)
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
    cut = windows.make(one(), vocabulary, config.Squad(stride=20), 48, training=True)
    inside = [(row, target) for row, target in zip(cut.rows.ids, cut.rows.targets, strict=True) if target.any()]
    assert 1 <= len(inside) < len(cut.rows.ids)
    for row, (first, last) in inside:
        assert vocabulary.decode(row[first : last + 1]) == "green bird"


def test_an_answer_of_a_window_with_more_context_wins(vocabulary):
    found = one()
    cut = windows.make(found, vocabulary, config.Squad(stride=20), 48, training=True)
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
    cut = windows.make(found, vocabulary, config.Squad(), 48, training=True)
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
    cut = windows.make(found, vocabulary, config.Squad(stride=20), 48, training=True)
    spans = perfect(cut)
    assert windows.answers(found, cut, spans, 30)[0].null_margin == pytest.approx(0.0 - 18.0)
    unanswerable = one(answers=())
    cut = windows.make(unanswerable, vocabulary, config.Squad(stride=20), 48, training=True)
    assert not cut.rows.targets.any()
    assert windows.answers(unanswerable, cut, perfect(cut), 30)[0].null_margin > 0


def test_answers_out_of_place_are_found_or_counted(vocabulary):
    assert squad.answer_span(one("one two one", answers=(("one", 7),)).questions[0]) == (8, 11)
    assert squad.answer_span(one("one two one", answers=(("one", -1),)).questions[0]) == (0, 3)
    lost = one("one two one", answers=(("three", 0),))
    cut = windows.make(lost, vocabulary, config.Squad(), 48, training=True)
    assert len(cut.rows.ids) == 0 and lost.notes == ["training: 1 questions left out: the answer is not in the context"]
    assert len(windows.make(lost, vocabulary, config.Squad(), 48, training=False).rows.ids) == 1


def test_a_long_question_is_cut_and_counted(vocabulary):
    found = one(question="what " * 100)
    cut = windows.make(found, vocabulary, config.Squad(question_length=10), 48, training=True)
    assert (cut.rows.context == 13).all() and "training: 1 questions cut to their first tokens" in found.notes


@pytest.mark.parametrize("name", ["dev-v1.1.json.xz", "dev-v2.0.json.xz"])
def test_perfect_scores_give_the_gold_answers_of_the_real_dev_sets(name, shared_data, corpus_vocabulary):
    questions = squad.read_file(shared_data / "squad" / name)
    assert len(questions) == {"1": 10570, "2": 11873}[name[5]]
    assert sum(not question.answers for question in questions) == {"1": 0, "2": 5945}[name[5]]
    found = squad.Questions(random.Random(0).sample(questions, 400))
    cut = windows.make(found, corpus_vocabulary, config.Squad(), 128, training=True)
    assert len(cut.rows.ids) > 500
    given = [
        metrics.Answered(tuple(t for t, _ in q.answers), *a)
        for q, a in zip(found.questions, windows.answers(found, cut, perfect(cut), 60), strict=True)
    ]
    scored = metrics.squad(given, unanswerable="v2" in name)
    # What is missing: tokens that hold more than the answer.
    assert scored["exact"] > 97 and scored["f1"] > 98, scored


@pytest.mark.parametrize("content,message", [
    ("{", "not JSON"),
    ('{"version": "1.1"}', "data: expected list, got NoneType"),
    ('{"data": [{"title": "a", "paragraphs": [{"qas": []}]}]}', "data[0].paragraphs[0].context: expected str, got NoneType"),
    ('{"data": [{"paragraphs": [{"context": "c", "qas": [{"id": "1"}]}]}]}', "data[0].paragraphs[0].qas[0].question: expected str"),
    ('{"data": []}', "holds no question"),
])  # fmt: skip
def test_wrong_json(tmp_path, content, message):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(config.ConfigError) as error:
        squad.read_file(tmp_path / "x.json")
    assert message in str(error.value) and "x.json" in str(error.value)


def test_a_dev_file_alone_is_split_by_article(data_dir, tmp_path):
    (tmp_path / "dev-v2.0.json").write_text((data_dir / "squad" / "dev-v2.0.json").read_text())
    with pytest.raises(config.ConfigError, match="no train-v2.0.json in .*dev_share=0.25 trains on three quarters"):
        squad.load("squad2", config.Finetune(data_dir=str(tmp_path)), config.Corpus())
    train, dev = squad.load("squad2", config.Finetune(data_dir=str(tmp_path), squad=config.Squad(dev_share=0.25)), config.Corpus())
    assert {q.article for q in train.questions}.isdisjoint(q.article for q in dev.questions)
    assert (len(train.questions), len(dev.questions)) == (24, 8) and "not the official split" in dev.notes[0]


def test_no_unanswerable_question_in_2_0_is_said(data_dir, tmp_path):
    content = json.loads((data_dir / "squad" / "dev-v1.1.json").read_text())
    for part in ("train", "dev"):
        (tmp_path / f"{part}-v2.0.json").write_text(json.dumps(content))
    _, dev = squad.load("squad2", config.Finetune(data_dir=str(tmp_path)), config.Corpus())
    assert "no question is unanswerable" in dev.notes[0]


@pytest.mark.filterwarnings("ignore")  # of TensorFlow and TFDS
def test_tfds(tmp_path):
    """A dataset of SQuAD's name in TFDS format, read by the real reader."""
    pytest.importorskip("tensorflow_datasets")
    import tensorflow as tf
    import tensorflow_datasets as tfds

    folder = tmp_path / "squad" / "v2.0" / "3.0.0"
    folder.mkdir(parents=True)
    features = tfds.builder("squad/v2.0", data_dir=str(tmp_path / "none")).info.features
    for split in ("train", "validation"):
        with tf.io.TFRecordWriter(str(folder / f"squad-{split}.tfrecord-00000-of-00001")) as writer:
            for number in range(2):
                answers = {"text": ["été", "of"] * number, "answer_start": [3, 7] * number}
                record = {"id": f"{split}{number}", "title": "T", "context": "un été of", "question": "Q?", "answers": answers}
                record |= {"is_impossible": number == 0, "plausible_answers": {"text": [], "answer_start": []}}
                writer.write(features.serialize_example(record))
    splits = [tfds.core.SplitInfo(name=split, shard_lengths=[2], num_bytes=0) for split in ("train", "validation")]
    template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    tfds.folder_dataset.write_metadata(data_dir=str(folder), features=features, split_infos=splits, filename_template=template)
    train, dev = squad.load("squad2", config.Finetune(), config.Corpus(tfds_data_dir=str(tmp_path)))
    assert dev.questions[1] == squad.Question("validation1", "Q?", "un été of", (("été", 3), ("of", 7)), "T")
    assert train.questions[0].answers == () and squad.answer_span(train.questions[1]) == (3, 6)
