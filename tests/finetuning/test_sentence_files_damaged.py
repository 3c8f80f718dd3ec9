"""Every reader of labelled data: whatever the bytes are, it reads them or ends in one line that names the file."""

import errno
import gzip
import json
import lzma
import os
import pathlib

import hypothesis
import pytest
from hypothesis import strategies
from testing import input_format

from maelm_jax import config, paths
from maelm_jax.finetuning import (
    glue,
    question_task,
    sentence_files,
    sentence_task,
    squad,
)

OWN = config.CustomTask(
    train_file="a",
    dev_file="b",
    columns=("question", "answer"),
    label="good",
    labels=("no", "yes"),
)
PACK = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress}
fuzzed = hypothesis.settings(deadline=None, derandomize=True, max_examples=100, database=None)

STRANGE_CELLS = [
    "",
    "0",
    "2.5",
    "nan",
    "1e999",
    "9" * 5000,
    "entailment",
    "\0",
    "\u2028",
    "\x85",
    "\r",
    '"',
    "é" * 300,
]
STRANGE_COLUMNS = ["sentence", "label", "question", "#1 String", "pairID", "", "\x0b", "x" * 3000]


@strategies.composite
def tables(draw, task: glue.Task) -> bytes:
    """A table of the task, in part with strange columns, rows, cells or bytes; or bytes alone."""
    if draw(strategies.integers(0, 9)) == 0:
        return draw(strategies.binary(max_size=200))
    header = list(task.headless) if task.headless and draw(strategies.booleans()) else ["index", *task.sentences, task.label]
    lines = [] if header == list(task.headless) else [header]
    for _ in range(draw(strategies.integers(0, 3))):
        label = draw(strategies.sampled_from(task.labels or ("0", "3.25")))
        lines.append([label if column == task.label else "The cat." for column in header])
    for line in lines:
        for _ in range(draw(strategies.sampled_from([0, 0, 0, 1, 2]))):
            place = draw(strategies.integers(0, len(line)))
            line[place : place + draw(strategies.integers(0, 2))] = draw(
                strategies.lists(strategies.sampled_from(STRANGE_CELLS + STRANGE_COLUMNS), max_size=2)
            )
    return damaged(draw, "\n".join("\t".join(line) for line in lines).encode())


def damaged(draw, content: bytes) -> bytes:
    """The content, or the content with a part of it taken out, or with other bytes put in."""
    if not content or draw(strategies.integers(0, 3)):
        return content
    start = draw(strategies.integers(0, len(content)))
    stop = draw(strategies.integers(start, min(start + 20, len(content))))
    return content[:start] + draw(strategies.binary(max_size=4)) + content[stop:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    return tmp_path_factory.mktemp("damaged")


def outcome(path: pathlib.Path, read):
    """What `read` gives, or None where it ends in ConfigError; that is one line, not long, and names the file."""
    try:
        return read()
    except config.ConfigError as error:
        message = str(error)
        assert len(message.splitlines()) == 1 and len(message) < 700 + len(str(path)) and path.name in message, message
        return None


def write(folder: pathlib.Path, name: str, content: bytes, packing: str, draw) -> pathlib.Path:
    """A file, packed; the packed bytes may be damaged too."""
    path = folder / (name + packing)
    packed = PACK[packing](content)
    path.write_bytes(damaged(draw, packed) if packing else packed)
    return path


@fuzzed
@hypothesis.given(
    task=strategies.sampled_from([*glue.TASKS.values(), glue.task_of("own", OWN)]),
    labelled=strategies.booleans(),
    data=strategies.data(),
)
def test_any_file_of_a_task_is_read_or_named(task, labelled, data, folder, vocabulary):
    path = write(
        folder,
        "x.tsv",
        data.draw(tables(task)),
        data.draw(strategies.sampled_from(sorted(PACK))),
        data.draw,
    )
    found = outcome(path, lambda: sentence_files.read(task, path, labelled))
    if found is not None:
        encoded = sentence_task.encode(task, found, input_format(vocabulary, 32), "dev")
        assert len(encoded.ids) == len(found.sentences) > 0
        assert not labelled or len(found.labels) == len(found.sentences)


STRANGE = [
    None,
    True,
    -1,
    10**4000,
    0.5,
    "",
    "\ud800",
    "a\udc00b",
    "\0",
    "The cat.",
    [],
    {},
    [[]],
    float("nan"),
    float("inf"),
]

LEAVES = strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | strategies.text(max_size=5)
VALUES = strategies.recursive(
    LEAVES,
    lambda inner: strategies.lists(inner) | strategies.dictionaries(strategies.text(), inner),
)


@strategies.composite
def documents(draw) -> bytes:
    """Bytes of every kind, JSON of every kind, and SQuAD's JSON with strange values in places."""
    kind = draw(strategies.integers(0, 9))
    if kind == 0:
        return draw(strategies.binary(max_size=200))
    if kind == 1:
        return json.dumps(draw(VALUES)).encode()
    answer = {"text": "cat", "answer_start": 4}
    question = {"id": "1", "question": "Who?", "answers": [answer], "is_impossible": False}
    paragraph = {"context": "The cat sleeps.", "qas": [question]}
    article = {"title": "A", "paragraphs": [paragraph]}
    content = {"version": "2.0", "data": [article]}
    for record in draw(strategies.lists(strategies.sampled_from([answer, question, paragraph, article, content]), max_size=2)):
        record[draw(strategies.sampled_from(sorted(record)))] = draw(strategies.sampled_from(STRANGE))
    return damaged(draw, json.dumps(content).encode())


@fuzzed
@hypothesis.given(content=documents(), data=strategies.data())
def test_any_squad_file_is_read_or_named(content, data, folder, vocabulary):
    path = write(folder, "x.json", content, data.draw(strategies.sampled_from(sorted(PACK))), data.draw)
    found = outcome(path, lambda: squad.read_file(path))
    if found is not None:
        dev = outcome(
            path,
            lambda: question_task.dev_set(
                "squad2",
                squad.Questions(found, source=str(path)),
                input_format(vocabulary, 64),
                config.Finetune(),
            ),
        )
        assert dev is None or len(dev.features.ids) >= len(found)


def nested(value: str) -> str:
    """SQuAD's JSON with a value as it stands in place of the title."""
    return '{"data": [{"title": ' + value + ', "paragraphs": []}]}'


@pytest.mark.parametrize(
    "text,message",
    [
        (nested("[" * 200_000 + "]" * 200_000), "nested too deeply"),
        (nested('{"a":' * 200_000 + "1" + "}" * 200_000), "nested too deeply"),
        (nested("9" * 5000), "not JSON (Exceeds the limit"),
        (nested('"\\ud800"'), "data[0].title: character 0 is \\ud800, half of a surrogate pair"),
        ('{"data": [{"paragraphs": [{"context": "c", "qas": [{"id": "1", "question": "a\\udfff?"}]}]}]}', "qas[0].question: character 1 is \\udfff"),
        (
            '{"data": [{"paragraphs": [{"context": "c", "qas": [{"id": "1", "question": "?", "is_impossible": "false"}]}]}]}',
            "data[0].paragraphs[0].qas[0].is_impossible: expected bool, got str",
        ),
        (
            '{"data": [{"paragraphs": [{"context": "c", "qas": [{"id": "1", "question": "?", "answers": [{"text": "c", "answer_start": true}]}]}]}]}',
            "qas[0].answers[0].answer_start: expected int, got bool",
        ),
    ],
)
def test_json_that_is_no_squad_is_named(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(config.ConfigError) as error:
        squad.read_file(tmp_path / "x.json")
    assert message in str(error.value) and "x.json" in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("start", [10**4000, -(10**4000), 3])
def test_an_answer_far_out_of_place_is_found_where_it_is(tmp_path, start):
    answer = {"text": "cat", "answer_start": start}
    paragraph = {
        "context": "The cat.",
        "qas": [{"id": "1", "question": "Who?", "answers": [answer]}],
    }
    (tmp_path / "x.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    assert squad.answer_span(squad.read_file(tmp_path / "x.json")[0]) == (4, 7)


@pytest.mark.parametrize(
    "number,name,kind",
    [
        (errno.EROFS, "out/metrics.jsonl", config.ConfigError),
        (errno.EACCES, "out", config.ConfigError),
        (errno.ENOTDIR, "", config.ConfigError),
        (errno.ENOSPC, "out/metrics.jsonl", OSError),
        (errno.EIO, "out/metrics.jsonl", OSError),
        (errno.EACCES, "elsewhere", OSError),
    ],
)
def test_only_a_path_that_cannot_be_written_is_the_user_s_mistake(tmp_path, number, name, kind):
    with pytest.raises(kind) as error, paths.writing("--workdir", tmp_path / "out"):
        raise OSError(number, os.strerror(number), str(tmp_path / name))
    assert (os.strerror(number) in str(error.value)) and str(tmp_path / name) in str(error.value)
