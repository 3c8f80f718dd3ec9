"""The sentence tasks as training sees them."""

import dataclasses

import numpy as np
import pytest
from testing import input_format, write_text

from maelm_jax import config
from maelm_jax.finetuning import glue, sentence_data, sentence_files, sentence_task, tasks


def test_own_names_the_label_of_its_f1(tmp_path, monkeypatch):
    (tmp_path / "own.tsv").write_text("sentence\tlabel\na\tno\nb\tyes\n")
    path = str(tmp_path / "own.tsv")
    custom = config.CustomTask(train_file=path, dev_file=path, labels=("no", "yes"))
    settings = config.Finetune(tasks="own", custom=custom)

    class Letters:
        bos, eos = 0, 2

        def encode_batch(self, texts):
            return [[ord(character) for character in text] for text in texts]

    found = sentence_task.load("own", settings, config.Corpus(), input_format(Letters(), 16))
    assert "f1 is that of the label 'yes'" in found.notes


def test_the_submission_format(tmp_path):
    sentence_task.write_predictions(glue.TASKS["rte"], np.asarray([[0.0, 1.0], [2.0, 1.0]]), tmp_path / "p.tsv")
    assert (tmp_path / "p.tsv").read_text() == "index\tprediction\n0\tnot_entailment\n1\tentailment\n"
    sentence_task.write_predictions(glue.TASKS["stsb"], np.asarray([[0.5], [1.2]]), tmp_path / "p.tsv")
    assert (tmp_path / "p.tsv").read_text() == "index\tprediction\n0\t2.5\n1\t5\n"


OWN = {"columns": ("question", "answer"), "label": "good", "labels": ("no", "yes", "unclear")}


def test_a_task_of_ones_own(tmp_path):
    write_text(tmp_path / "train.tsv.xz", "good\tquestion\tanswer\nyes\tWhy?\tBecause.\nunclear\tWho?\t\nno\tWhen?\tThere.\n")
    write_text(tmp_path / "dev.tsv", "answer\tquestion\tgood\nHere.\tWhere?\tyes\n")
    custom = config.CustomTask(train_file=str(tmp_path / "train.tsv.xz"), dev_file=str(tmp_path / "dev.tsv"), **OWN)
    chosen = config.Finetune(tasks="own", custom=custom)
    task = glue.task_of("own", custom)
    train, dev = sentence_data.load(task, chosen, config.Corpus())
    assert train.sentences == [("Why?", "Because."), ("Who?", ""), ("When?", "There.")] and list(train.labels) == [1, 2, 0]
    assert dev[""].sentences == [("Where?", "Here.")] and list(dev[""].labels) == [1]
    assert "1 examples with an empty sentence" in train.notes[0]
    assert tasks.head_of("own", chosen, ()) == ("sentence", 3)
    sentence_task.write_predictions(task, np.eye(3)[[2, 0]], tmp_path / "predictions.tsv")
    assert (tmp_path / "predictions.tsv").read_text() == "index\tprediction\n0\tunclear\n1\tno\n"
    sentence_task.write_probabilities(task, np.log([[0.25, 0.5, 0.25], [1, 3, 4]]).astype(np.float32), tmp_path / "p.tsv")
    shown = "index\tno\tyes\tunclear\n0\t0.250000\t0.500000\t0.250000\n1\t0.125000\t0.375000\t0.500000\n"
    assert (tmp_path / "p.tsv").read_text() == shown
    tasks.check("own", chosen)
    with pytest.raises(config.ConfigError, match="gone.tsv"):
        tasks.check("own", config.Finetune(tasks="own", custom=dataclasses.replace(custom, dev_file="gone.tsv")))
    for change, message in [
        ({"labels": ("yes",)}, "two classes .*In a regression, give CustomTask.score_range"),
        ({"score_range": (1.0, 5.0)}, "CustomTask.labels and score_range are both given. Leave one"),
        ({"labels": (), "score_range": (5.0, 1.0)}, "score_range must be the lowest and the highest score"),
        ({"labels": (), "score_range": (5.0,)}, "score_range must be the lowest and the highest score"),
        ({"labels": (), "score_range": (-1e308, 1e308)}, "score_range must be the lowest and the highest score"),
        ({"columns": ()}, "one or two"),
        ({"columns": ("question", "good")}, r"columns and label must be different columns, got \('question', 'good'\) and 'good'"),
        ({"train_file": None}, "CustomTask.train_file is missing. Give --gin_file=finetune/own.gin"),
    ]:
        with pytest.raises(config.ConfigError, match=message):
            dataclasses.replace(chosen, custom=dataclasses.replace(custom, **change))


def test_scores_of_ones_own(tmp_path):
    """A regression with any range: what is learned is from 0 to 1, what is written has the range of the file."""
    write_text(tmp_path / "train.jsonl", '{"text": "good", "stars": 5}\n{"text": "bad", "stars": 1}\n{"text": "fair", "stars": 2.5}\n')
    path = str(tmp_path / "train.jsonl")
    custom = config.CustomTask(train_file=path, dev_file=path, columns=("text",), label="stars", score_range=(1, 5))
    task = glue.task_of("own", custom)
    examples = sentence_data.load(task, config.Finetune(tasks="own", custom=custom), config.Corpus()).train
    learned = task.normalise_scores(examples.labels)
    assert learned.tolist() == [1.0, 0.0, 0.375] and learned.dtype == np.float32
    outputs = np.append(learned, [1.5, -2.0])[:, None]
    sentence_task.write_predictions(task, outputs, tmp_path / "p.tsv")
    written = [float(line.split("\t")[1]) for line in (tmp_path / "p.tsv").read_text().splitlines()[1:]]
    assert written == [5.0, 1.0, 2.5, 5.0, 1.0]
    assert (task.metrics[0], task.selected_by) == ("spearman", ("pearson", "spearman"))
    write_text(tmp_path / "train.jsonl", '{"text": "good", "stars": 6}\n')
    with pytest.raises(config.ConfigError, match="train.jsonl:1: unknown label '6' in column stars; own has numbers from 1 to 5"):
        sentence_data.load(task, config.Finetune(tasks="own", custom=custom), config.Corpus())


TOPICS = {"columns": ("text",), "label": "topics", "labels": ("sport", "war", "art"), "label_separator": "|"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.tsv", "text\ttopics\nA match.\tsport\nNothing.\t\nA film about it.\tart | war\n"),
        ("a.csv", 'text,topics\nA match.,sport\nNothing.,""\nA film about it.,art|war\n'),
        ("a.jsonl", '{"text": "A match.", "topics": "sport|"}\n{"text": "Nothing.", "topics": []}\n{"text": "A film.", "topics": ["war", "art"]}\n'),
    ],
)
def test_a_text_can_have_several_labels_or_none(tmp_path, name, text):
    write_text(tmp_path / name, text)
    custom = config.CustomTask(train_file=str(tmp_path / name), dev_file=str(tmp_path / name), **TOPICS)
    task = glue.task_of("own", custom)
    examples = sentence_data.load(task, config.Finetune(tasks="own", custom=custom), config.Corpus()).train
    assert examples.labels.tolist() == [[1, 0, 0], [0, 0, 0], [0, 1, 1]] and examples.labels.dtype == np.float32
    sentence_task.write_predictions(task, 2 * examples.labels - 1, tmp_path / "p.tsv")
    assert (tmp_path / "p.tsv").read_text() == "index\tprediction\n0\tsport\n1\t\n2\twar|art\n"
    sentence_task.write_probabilities(task, np.log([[1.0, 3.0, 1 / 3]]).astype(np.float32), tmp_path / "q.tsv")
    assert (tmp_path / "q.tsv").read_text().splitlines()[1] == "0\t0.500000\t0.750000\t0.250000"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": ("a|b", "c")}, r"labels: \['a\|b'\] contain the label_separator '\|'. Choose another"),
        ({"label_separator": "\t"}, r"label_separator='\\t' separates cells or lines. Choose another separator"),
        ({"labels": (), "score_range": (0, 1)}, "label_separator and score_range are both given. Leave one"),
    ],
)
def test_settings_of_several_labels_that_contradict_each_other(change, message):
    with pytest.raises(config.ConfigError, match=message):
        config.Finetune(tasks="own", custom=config.CustomTask(train_file="a", dev_file="a", **TOPICS | change))


def test_an_unknown_label_among_several_is_named(tmp_path):
    write_text(tmp_path / "a.tsv", "text\ttopics\nA match.\tsport|chess\n")
    task = glue.task_of("own", config.CustomTask(**TOPICS))
    with pytest.raises(config.ConfigError, match="a.tsv:2: unknown label 'chess' in column topics; own has sport, war, art$"):
        sentence_files.read(task, tmp_path / "a.tsv", labelled=True)
    write_text(tmp_path / "a.tsv", "text\ttopics\nA match.\tsport|war\n")
    single = glue.task_of("own", config.CustomTask(**TOPICS | {"label_separator": None}))
    with pytest.raises(config.ConfigError, match="'sport|war' .* If a text can have several labels, set CustomTask.label_separator"):
        sentence_files.read(single, tmp_path / "a.tsv", labelled=True)
    write_text(tmp_path / "a.jsonl", '{"text": "A match.", "topics": ["sport|war"]}\n')
    with pytest.raises(config.ConfigError, match=r"a.jsonl:1: 'sport\|war' contains '\|', which separates labels"):
        sentence_files.read(task, tmp_path / "a.jsonl", labelled=True)


def test_a_field_of_labels_that_is_absent_is_named_and_in_a_file_to_predict_it_may_hold_anything(tmp_path):
    write_text(tmp_path / "a.jsonl", '{"text": "A match.", "topics": ["sport|war"]}\n{"text": "A film."}\n')
    task = glue.task_of("own", config.CustomTask(**TOPICS | {"label_separator": ","}))
    assert sentence_files.read(task, tmp_path / "a.jsonl", labelled=False).sentences == [("A match.",), ("A film.",)]
    write_text(tmp_path / "a.jsonl", '{"text": "A match.", "topics": ["sport"]}\n{"text": "A film."}\n')
    with pytest.raises(config.ConfigError, match="a.jsonl:2: no field 'topics', which the first object has"):
        sentence_files.read(task, tmp_path / "a.jsonl", labelled=True)
    write_text(tmp_path / "a.jsonl", '{"text": "A match.", "topics": ["sport,war"]}\n')
    assert sentence_files.read(task, tmp_path / "a.jsonl", labelled=False).sentences == [("A match.",)]


def test_labels_are_numbers_in_json_lists_too(tmp_path):
    write_text(tmp_path / "a.jsonl", '{"text": "A match.", "topics": [1, 3]}\n{"text": "A film.", "topics": [3]}\n')
    task = glue.task_of("own", config.CustomTask(**TOPICS | {"labels": ("1", "2", "3")}))
    labels = sentence_files.read(task, tmp_path / "a.jsonl", labelled=True).labels
    assert labels.tolist() == [[1, 0, 1], [0, 0, 1]]
