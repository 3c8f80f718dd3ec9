"""Tables of labelled data as users keep them: tab-separated, .csv and .jsonl, packed or not, give the same examples."""

import csv
import gzip
import io
import json
import lzma
import pathlib

import pytest

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
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(text.encode()))
    return path


@pytest.mark.parametrize("name", ["a.tsv", "a", "a.csv", "a.CSV", "a.jsonl", "a.csv.gz", "a.jsonl.xz", "a.tsv.gz"])
def test_every_form_gives_the_same_examples(name, tmp_path):
    examples = sentence_files.read(TASK, write(tmp_path / name), labelled=True)
    assert examples.sentences == [(question.strip(), answer.strip()) for question, _, answer in ROWS]
    assert examples.labels.tolist() == [0, 1, 0, 1]


def test_a_cell_of_csv_with_several_lines_is_one(tmp_path):
    (tmp_path / "a.csv").write_text('question,good,answer\r\n"two\r\nlines",yes,"a ""b"""\r\n\r\nlast,no,\r\n')
    rows = list(table_rows.rows(tmp_path / "a.csv"))
    assert [row.cells for row in rows] == [list(COLUMNS), ["two\nlines", "yes", 'a "b"'], ["last", "no", ""]]
    assert [row.number for row in rows] == [1, 3, 5]


def test_fields_of_jsonl_are_found_by_name_and_numbers_are_labels(tmp_path):
    lines = [{"text": "a", "label": 1, "more": True}, {"label": 0, "more": False, "text": "b", "extra": [1]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert [row.cells for row in table_rows.rows(tmp_path / "a.jsonl")] == [["text", "label", "more"], ["a", "1", "true"], ["b", "0", "false"]]


@pytest.mark.parametrize(("name", "text", "message"), [
    ("a.csv", 'question,good,answer\n"open,no,x\n', r"a.csv:2: not CSV \(unexpected end of data\). Quote a cell"),
    ("a.csv", 'question,good,answer\n"a"b,no,x\n', r"a.csv:2: not CSV"),
    ("a.csv", "question,good,answer\na,no\n", r"a.csv:2: 2 columns, expected 3 \(question, good, answer\), separated by commas"),
    ("a.csv", "question\tgood\tanswer\na\tno\tx\n", r"a.csv:1: no column 'question', 'answer', 'good'"),
    ("a.tsv", "question,good,answer\na,no,x\n", "Separate the columns with tabs, or name the file .csv"),
    ("a.tsv", "question\tgood\tanswer\na\tno\n", "separated by tabs"),
    ("a.jsonl", '{"question": "a", "good": "no", "answer": "b"}\n{"question": "a", "good": "no"}\n', "a.jsonl:2: no field 'answer', which the first"),
    ("a.jsonl", '{"question": "a", "good": null, "answer": "b"}\n', "a.jsonl:1: the field 'good' is NoneType: give text, a number"),
    ("a.jsonl", "[1]\n", "a.jsonl:1: list, no object"),
    ("a.jsonl", "{\n", r"a.jsonl:1: not JSON \(.*\); each line holds one object"),
    ("a.jsonl", '{"question": "a", "good": "maybe", "answer": "b"}\n', "a.jsonl:1: unknown label 'maybe' in column good"),
    ("a.csv", "\n\n", "a.csv: only empty lines"),
    ("a.jsonl", "", "a.jsonl: the file is empty"),
])  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(config.ConfigError, match=message):
        sentence_files.read(TASK, tmp_path / name, labelled=True)
