"""Tables of labelled data as users keep them: tab-separated, .csv and .jsonl, packed or not, give the same examples."""

import csv
import io
import json
import pathlib

import pytest
from testing import write_text

from maelm_jax import config
from maelm_jax.finetuning import glue, sentence_files, table_rows

COLUMNS = ("question", "good", "answer")
ROWS = [("What is\u00a0it?", "no", 'A "word", quoted.'), ("Why, then?", "yes", "It is; so. \u00e9\u4e2d"), ("", "no", "1,000"), ("'", "yes", "\\n")]
TASK = glue.task_of("own", config.CustomTask(columns=("question", "answer"), label="good", labels=("no", "yes")))


def write(path: pathlib.Path, rows=ROWS):
    name = path.name.lower()
    if ".jsonl" in name:
        text = "".join(json.dumps(dict(zip(COLUMNS, row, strict=True)), ensure_ascii=False) + "\n" for row in rows)
    elif ".csv" in name:
        file = io.StringIO()
        csv.writer(file).writerows([COLUMNS, *rows])
        text = "\ufeff" + file.getvalue()  # as spreadsheets write it
    else:
        text = "".join("\t".join(row) + "\n" for row in [COLUMNS, *rows])
    write_text(path, text)
    return path


@pytest.mark.parametrize("name", ["a.tsv", "a", "a.csv", "a.CSV", "a.jsonl", "a.csv.gz", "a.jsonl.xz", "a.tsv.gz", "a.csv.zst", "a.jsonl.zst"])
def test_every_form_gives_the_same_examples(name, tmp_path):
    examples = sentence_files.read(TASK, write(tmp_path / name), labelled=True)
    assert examples.sentences == [(question.strip(), answer.strip()) for question, _, answer in ROWS]
    assert examples.labels.tolist() == [0, 1, 0, 1]


def test_a_cell_of_csv_with_several_lines_is_one(tmp_path):
    (tmp_path / "a.csv").write_text('question,good,answer\r\n"two\r\nlines",yes,"a ""b"""\r\n\r\nlast,no,\r\n')
    rows = list(table_rows.rows(tmp_path / "a.csv"))
    assert [row.cells for row in rows] == [list(COLUMNS), ["two\nlines", "yes", 'a "b"'], ["last", "no", ""]]
    assert [row.number for row in rows] == [1, 3, 5]


def test_fields_of_jsonl_that_nobody_reads_may_hold_anything(tmp_path):
    lines = [{"question": "a", "meta": {"x": 1}, "good": "no", "answer": 2, "comment": None}, {"answer": "b", "good": "yes", "question": "c"}]
    (tmp_path / "a.ndjson").write_text("\n".join(map(json.dumps, lines)))
    examples = sentence_files.read(TASK, tmp_path / "a.ndjson", labelled=True)
    assert examples.sentences == [("a", "2"), ("c", "b")] and examples.labels.tolist() == [0, 1]
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(line | {"good": None}) for line in lines))
    assert len(sentence_files.read(TASK, tmp_path / "b.jsonl", labelled=False).sentences) == 2


def test_a_cell_of_csv_may_be_long_and_a_header_may_have_spaces(tmp_path):
    (tmp_path / "a.csv").write_text(f'question, good, answer\n"{"long " * 50_000}",no,x\n')
    examples = sentence_files.read(TASK, tmp_path / "a.csv", labelled=True)
    assert len(examples.sentences[0][0]) == 249_999


def test_fields_of_jsonl_are_found_by_name_and_numbers_are_labels(tmp_path):
    lines = [{"text": "a", "label": 1, "more": True}, {"label": 0, "more": False, "text": "b", "extra": [1]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert [row.cells for row in table_rows.rows(tmp_path / "a.jsonl")] == [["text", "label", "more"], ["a", "1", "true"], ["b", "0", "false"]]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", 'question,good,answer\nfine,no,x\n"open,no,x\n' + "more,no,x\n" * 9, r"a.csv:3: not CSV from this line on \(unexpected end"),
        ("a.csv", 'question,good,answer\n"a"b,no,x\n', r"a.csv:2: not CSV"),
        ("a.csv", "question,good,answer\na,no\n", r"a.csv:2: 2 columns, expected 3 \(question, good, answer\), separated by commas"),
        ("a.csv", "question\tgood\tanswer\na\tno\tx\n", "Separate the columns with commas, or name the file .tsv"),
        ("a.csv", "question;good;answer\na;no;x\n", "Separate the columns with commas, not semicolons"),
        ("a.json", '[{"question": "a"}]', "a .json file cannot be read as a table. Write one JSON object on each line, and name the file .jsonl"),
        ("a.jsonl", '{"question": "cut \\ud83d", "good": "no", "answer": "b"}\n', "a.jsonl:1: the field 'question' has half of a surrogate pair"),
        ("a.tsv", "question,good,answer\na,no,x\n", "Separate the columns with tabs, or name the file .csv"),
        ("a.tsv", "question\tgood\tanswer\na\tno\n", "separated by tabs. If cells have quotes around them, name the file .csv"),
        ("a.jsonl", '{"question": "a", "answer": "b"}\n', "no column 'good'; own needs question, answer, good, the first object has"),
        (
            "a.jsonl",
            '{"question": "a", "good": "no", "answer": "b"}\n{"question": "a", "good": "no"}\n',
            "a.jsonl:2: no field 'answer', which the first",
        ),
        ("a.jsonl", '{"question": "a", "good": null, "answer": "b"}\n', "a.jsonl:1: the field 'good' is null. Give text, a number"),
        ("a.jsonl", "[1]\n", "a.jsonl:1: the line holds a list, not a JSON object"),
        ("a.jsonl", "{\n", r"a.jsonl:1: not JSON \(.*\); each line holds one object"),
        ("a.jsonl", '{"question": "a", "good": "maybe", "answer": "b"}\n', "a.jsonl:1: unknown label 'maybe' in column good"),
        ("a.csv", "\n\n", "a.csv: only empty lines"),
        ("a.jsonl", "", "a.jsonl: the file is empty"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(config.ConfigError, match=message):
        sentence_files.read(TASK, tmp_path / name, labelled=True)


def test_csv_may_have_a_space_after_the_comma(tmp_path):
    (tmp_path / "a.csv").write_text('question, good, answer\n"Why, then?", "yes", "It is, so."\n')
    examples = sentence_files.read(TASK, tmp_path / "a.csv", labelled=True)
    assert examples.sentences == [("Why, then?", "It is, so.")] and examples.labels.tolist() == [1]


def test_an_empty_line_is_no_example_unless_it_is_an_empty_text(tmp_path):
    (tmp_path / "a.tsv").write_text("question\tgood\tanswer\na\tno\tb\n\nc\tyes\td\n\n")
    assert sentence_files.read(TASK, tmp_path / "a.tsv", labelled=True).labels.tolist() == [0, 1]
    one_column = glue.task_of("own", config.CustomTask(columns=("question",), label="good", labels=("no", "yes")))
    (tmp_path / "b.tsv").write_text("question\na\n\nb\n")
    assert sentence_files.read(one_column, tmp_path / "b.tsv", labelled=False).sentences == [("a",), ("",), ("b",)]
