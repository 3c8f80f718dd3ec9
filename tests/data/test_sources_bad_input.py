"""Wrong text and wrong folders: one line that names the file, never a traceback, never without end."""

import errno
import json
import os
import time

import pytest

from maelm_jax import config, storage
from maelm_jax.data import packing, rows, rows_dir, sources, vocabulary_training
from maelm_jax.data.documents import SENTENCE_CHARACTERS, Unavailable, sentences

FILE_OF_OURS = {
    "empty": b"",
    "text": b"no JSON",
    "list": b"[1, 2]",
    "null": b"null",
    "binary": b"\x80\xff",
    "number": b'{"a": 3}',
    "deep": b"[" * 100_000,
    "digits": b'{"a": ' + b"9" * 5000 + b"}",
    "short hash": b'{"a": "12ab"}',
}
RECORDS = {
    "deep": b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "digits": b'{"text": "a", "id": ' + b"7" * 5000 + b"}",
    "surrogate in a name": b'{"\\ud800": "a"}',
    "line in a name": b'{"a\\nb": "c"}',
}


@pytest.fixture(scope="module")
def vocabulary():
    from pydoc_data import topics

    return vocabulary_training.train(topics.topics.values(), config.Vocabulary(size=400))


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(f"Document {number} says a few words." for number in range(50)))
    return config.Corpus(
        text_files=f"{tmp_path}/*.txt", sequence_length=16, heldout_fraction=0.1, rows_dir=str(tmp_path / "rows"), processes=1
    )


def one_line(caught) -> str:
    said = str(caught.value)
    assert "\n" not in said and said.isprintable()
    return said


@pytest.mark.parametrize("name", RECORDS)
def test_a_bad_record_is_one_line_with_its_place(tmp_path, name):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + RECORDS[name])
    with pytest.raises(config.ConfigError, match=r"a\.jsonl:2: ") as caught:
        list(sources.documents_of(f"files:{tmp_path}/a.jsonl", config.Corpus()))
    one_line(caught)


def test_a_lone_surrogate_in_the_text_is_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a \ud800 b"}))
    assert list(sources.documents_of(f"files:{tmp_path}/a.jsonl", config.Corpus())) == ["a ? b"]


def test_a_file_whose_name_is_not_utf8_is_read(corpus, vocabulary, tmp_path):
    os.rename(tmp_path / "a.txt", os.fsencode(tmp_path) + b"/caf\xe9.txt")
    (splits,) = rows.prepare(corpus, vocabulary).values()
    assert len(splits["train"]) > 0


@pytest.mark.parametrize("name", FILE_OF_OURS)
def test_damaged_hashes_of_files_are_one_line(corpus, tmp_path, name):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "file_hashes.json").write_bytes(FILE_OF_OURS[name])
    with pytest.raises(config.ConfigError, match=r"file_hashes\.json: damaged.*remove") as caught:
        sources.identity(f"files:{corpus.text_files}", corpus)
    one_line(caught)


@pytest.mark.parametrize("name", FILE_OF_OURS)
def test_a_damaged_mixture_is_one_line(tmp_path, monkeypatch, name):
    def unavailable(*_):
        raise Unavailable("no seqio here")

    monkeypatch.setattr(sources.seqio_tasks, "members", unavailable)
    corpus = config.Corpus(sources={"seqio:both": 1.0}, rows_dir=str(tmp_path))
    with pytest.raises(Unavailable):
        sources.rates(corpus)
    import hashlib

    (tmp_path / f"mixture-{hashlib.sha256(b'seqio:both').hexdigest()[:12]}.json").write_bytes(FILE_OF_OURS[name])
    with pytest.raises(config.ConfigError, match=r"mixture-\w+\.json: damaged") as caught:
        sources.rates(corpus)
    one_line(caught)


def refusing(original, paths, number):
    """`open` or `os.stat` that fails on some files, as the system does for want of permission (tests may run as root)."""

    def refuse(path, *args, **kwargs):
        if any(str(path).endswith(end) for end in paths):
            raise OSError(number, os.strerror(number), str(path))
        return original(path, *args, **kwargs)

    return refuse


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_a_file_that_cannot_be_read_is_one_line(corpus, tmp_path, monkeypatch, number):
    import builtins

    monkeypatch.setattr(builtins, "open", refusing(open, ["a.txt"], number))
    for read in (sources.identity, lambda *args: list(sources.documents_of(*args))):
        with pytest.raises(config.ConfigError, match=r"a\.txt: cannot be read") as caught:
            read(f"files:{corpus.text_files}", corpus)
        one_line(caught)


@pytest.mark.parametrize("place", ["a.txt", "a.txt/rows", "a.txt/deep/rows"])
def test_a_rows_dir_that_is_no_folder_is_one_line(corpus, vocabulary, tmp_path, place):
    corpus = config.dataclasses.replace(corpus, rows_dir=str(tmp_path / place))
    for work in (lambda: rows.prepare(corpus, vocabulary), lambda: vocabulary_training.vocabulary_for(config.Vocabulary(size=300), corpus)):
        with pytest.raises(config.ConfigError, match="Corpus.rows_dir") as caught:
            work()
        one_line(caught)


def read_only(monkeypatch, folder):
    """Makes writing under `folder` fail as on a read-only disk."""
    import pathlib

    original = pathlib.Path.mkdir

    def mkdir(path, *args, **kwargs):
        if not path.is_dir():
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return original(path, *args, **kwargs)

    def write(path, content):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(pathlib.Path, "mkdir", mkdir)
    monkeypatch.setattr(storage, "write", write)


def test_rows_on_a_read_only_disk_are_read(corpus, vocabulary, tmp_path, monkeypatch):
    (before,) = rows.prepare(corpus, vocabulary).values()
    (tmp_path / "rows" / "file_hashes.json").unlink()
    read_only(monkeypatch, tmp_path / "rows")
    (after,) = rows.prepare(corpus, vocabulary).values()
    assert after["train"].folder == before["train"].folder


def test_a_read_only_disk_without_rows_is_one_line(corpus, vocabulary, tmp_path, monkeypatch):
    read_only(monkeypatch, tmp_path)
    for work in (lambda: rows.prepare(corpus, vocabulary), lambda: vocabulary_training.vocabulary_for(config.Vocabulary(size=300), corpus)):
        with pytest.raises(config.ConfigError, match="Corpus.rows_dir=.*: cannot be written to .*Read-only") as caught:
            work()
        one_line(caught)


def test_a_full_disk_is_not_a_wrong_setting(corpus):
    with pytest.raises(OSError, match="No space"), rows_dir.writing(corpus):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "rows")


@pytest.mark.parametrize("text", ["x" * 100_000, "ab " * 40_000 + "x" * 40_000 + " end. Next.", "." * 100_000, "\u3042" * 50_000, ""])
def test_sentences_are_bounded_and_join_to_the_line(text):
    parts = sentences(text)
    assert "".join(parts) == text
    assert max(map(len, parts)) <= SENTENCE_CHARACTERS
    assert max(len(part.encode()) for part in parts) <= 1 << 16, "what the trainer takes"
    if " " in text:
        assert all(part[0] == " " for part in parts[1:3]), "cut before white space where there is any"


def test_a_text_without_a_space_is_done_in_proportion_to_its_length(tmp_path):
    """20 MB were never done: the time grew with the square of the length. The work is counted, as times depend on the machine."""
    copied = 0

    class Counted(list):
        def __getitem__(self, index):
            nonlocal copied
            found = list.__getitem__(self, index)
            copied += len(found) if isinstance(index, slice) else 1
            return Counted(found) if isinstance(index, slice) else found

    class Vocabulary:
        bos, pad, eos = 0, 1, 2

    packer = packing.Packer(Vocabulary(), 8)
    packer.add([[Counted(range(3, 100_003))]])
    assert len(packer.finish()) == -(-100_000 // 6)
    assert copied <= 2 * 100_000


def test_two_megabytes_without_a_space_become_rows(vocabulary, tmp_path):
    import random

    text = "".join(random.Random(0).choices("abcdefgh", k=2_000_000))
    began = time.process_time()
    table, _ = packing.pack([text], vocabulary, 64)
    assert (table > 2).sum() > 500_000 and time.process_time() - began < 60, "a second or two"
