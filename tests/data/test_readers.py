"""Files of text: the same documents of every format; what is wrong in a file is a line that names it."""

import errno
import gzip
import itertools
import json
import lzma
import os
import pickle
import random

import pytest
from testing import PACK

from maelm_jax import config
from maelm_jax.data import readers

TEXTS = [f"Document {number}.\nIts second line, naïve." for number in range(1500)]


def read(pattern, field="text"):
    return [text for file in readers.list_files(str(pattern)) for text in readers.documents(file.path, field) if text.strip()]


# ---- text and JSON


@pytest.mark.parametrize("packing", PACK)
def test_text_and_json_files_of_every_packing(tmp_path, packing):
    paragraphs = "\ufeff" + "\n \n\n".join(TEXTS) + "\n\n"
    records = "\n".join(json.dumps({"body": text, "id": 1}) for text in [*TEXTS, "", "  \n"])
    for name, content in (("a.txt", paragraphs), ("b.txt", paragraphs.replace("\n", "\r\n")), ("c.jsonl", records)):
        with PACK[packing](tmp_path / f"{name}{packing}", "wb") as file:
            file.write(content.encode())
    assert read(tmp_path / "*", "body") == TEXTS * 3


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_ranges_of_a_file_hold_each_document_once_wherever_it_is_cut(tmp_path, name):
    texts = [text * (number % 4 + 1) for number, text in enumerate(TEXTS[:40])]
    if name == "a.txt":
        content = "\n\n".join(texts).replace("\n\n", "\n \n\n", 7) + "\n\n\n"
    else:
        content = "\n".join(json.dumps({"text": text}) for text in texts)
    path = tmp_path / name
    path.write_bytes(content.encode())
    size, rng = path.stat().st_size, random.Random(0)
    for cuts in range(1, 60):
        bounds = [0, *sorted(rng.sample(range(1, size), cuts)), size]
        found = [text for start, end in itertools.pairwise(bounds) for text in readers.documents(str(path), "text", start, end)]
        assert found == texts, bounds


@pytest.mark.parametrize("name", ["a.train", "a.dev", "a.text", "a.TXT", "books", "a.train.gz", "A.TXT.XZ", "a.1"])
def test_a_file_of_any_name_is_text_if_it_looks_so(tmp_path, name):
    packing = next((packing for packing in PACK if packing and name.lower().endswith(packing)), "")
    with PACK[packing](tmp_path / name, "wb") as file:
        file.write("\n\n".join(TEXTS).encode())
    assert read(tmp_path / "*") == TEXTS
    assert readers.can_be_cut(name) == (packing == "")


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.CSV.gz", "a.tsv.xz"])
def test_tables_of_cells_are_text(tmp_path, name):
    packing = next((packing for packing in PACK if packing and name.lower().endswith(packing)), "")
    with PACK[packing](tmp_path / name, "wb") as file:
        if ".csv" in name.lower():
            file.write('\ufeffid, text\r\n1,"one ""a"", b\nits second line"\r\n\r\n2,\r\n3,two\r\n'.encode())
        else:
            file.write(b'id\ttext\n1\t"one\n\n2\t\n3\ttwo\n')
    assert read(tmp_path / "*") == ['one "a", b\nits second line' if ".csv" in name.lower() else '"one', "two"]
    assert not readers.can_be_cut(name)


def test_files_that_name_their_text_differently_are_read_together(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one", "id": "1"}\n{"content": "two"}\n')
    (tmp_path / "b.csv").write_text("title,body\nx,three\n")
    write_parquet(tmp_path / "c.parquet", table(["four"], "content"))
    assert read(tmp_path / "*", ("content", "body")) == ["one", "two", "three", "four"]
    with pytest.raises(readers.BadFile, match=r"a\.jsonl:1: .*'content' or 'txt'.*body, id"):
        read(tmp_path / "*", ("content", "txt"))


BAD = {
    "latin.txt": (b"one\n\nna\xefve", "byte 7"),
    "empty.txt": (b"", ""),
    "cut.txt.gz": (gzip.compress(bytes(range(256)) * 50)[:60], ""),
    "cut.txt.xz": (lzma.compress(b"x y" * 5000)[:-20], ""),
    "field.jsonl": (b'{"text": "a"}\n{"txt": "b"}', r":2: .*'text'.*txt.*text_field"),
    "number.jsonl": (b'{"text": 3}', ":1: "),
    "broken.jsonl": (b'{"text": "a"}\n\n{"text"', ":3: "),
    "no.jsonl.zst": (b"plain text", ""),
    "table.csv": (b"a,b\n1,2", "'text'"),
    "cells.tsv": (b"id\ttext\n1\tone\n2", ":3: "),
    "quotes.csv": (b'id,text\n1,"one', ":2: "),
    "a.parquet.gz": (gzip.compress(b"PAR1\0"), ""),
    "a.zip": (b"PK\x03\x04\0\0", ""),
    "latin.train": (b"na\xefve", ""),
    "records.train": (b'{"text": "one"}\n', ""),
    "spaced.train": (b' [ { "text": "one" }, ', ""),
    "cut.train.gz": (gzip.compress(bytes(range(256)) * 50)[:60], ""),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named(tmp_path, name):
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(config.ConfigError, match=f"{name}.*{message}"):
        read(tmp_path / "*")


def test_the_error_of_a_bad_file_travels_from_a_worker_process():
    error = pickle.loads(pickle.dumps(readers.BadFile("a.txt", ": empty")))
    assert (str(error), error.path) == ("a.txt: empty", "a.txt")


def test_a_lone_surrogate_in_the_text_is_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a \ud800 b"}))
    assert read(tmp_path / "a.jsonl") == ["a ? b"]


def test_a_text_that_is_null_is_no_document_as_in_a_table(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": null}\n{"text": "b"}\n')
    assert read(tmp_path / "a.jsonl") == ["a", "b"]


def test_a_range_inside_a_document_ends_at_once(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a line\n" * 1000)
    decoded, decode = [], readers.decode
    monkeypatch.setattr(readers, "decode", lambda *line: decoded.append(line) or decode(*line))
    assert list(readers.documents(str(tmp_path / "a.txt"), "text", 700, 1400)) == []
    assert len(decoded) <= 101, "not to the end of the file"


def test_zstd_data_that_is_cut_off_is_named(tmp_path):
    with PACK[".zst"](tmp_path / "a.txt.zst", "wb") as file:
        file.write(random.Random(0).randbytes(300_000).hex().encode())
    whole = (tmp_path / "a.txt.zst").read_bytes()
    (tmp_path / "a.txt.zst").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(readers.BadFile, match=r"a\.txt\.zst"):
        read(tmp_path / "*")


@pytest.mark.parametrize("packing", [".gz", ".xz", ".zst"])
def test_data_of_several_streams_is_read_to_the_end(tmp_path, packing):
    for text in TEXTS[:3]:
        with PACK[packing](tmp_path / "part", "wb") as file:
            file.write(f"{text}\n\n".encode())
        with open(tmp_path / f"a.txt{packing}", "ab") as file:
            file.write((tmp_path / "part").read_bytes())
    assert read(tmp_path / "a.txt*") == TEXTS[:3]


XZ = [lzma.compress(f"{text}\n\n".encode()) for text in TEXTS[:3]]


@pytest.mark.parametrize("padding", [0, 4, 8, 2_000_000])
def test_padding_between_streams_of_xz_is_no_end(tmp_path, padding):
    """https://github.com/python/cpython/issues/88300"""
    (tmp_path / "a.txt.xz").write_bytes(b"".join(stream + bytes(padding) for stream in XZ))
    assert read(tmp_path / "a.txt.xz") == TEXTS[:3]


@pytest.mark.parametrize(
    "content",
    [
        XZ[0] + bytes([XZ[1][0] ^ 4]) + XZ[1][1:],
        XZ[0] + XZ[1][:2] + bytes([XZ[1][2] ^ 4]) + XZ[1][3:],
        XZ[0] + bytes(3) + XZ[1],
        XZ[0] + bytes(3),
        bytes(4) + XZ[0],
        XZ[0] + b"garbage!",
        XZ[0] + XZ[1][:-1],
        XZ[0] + XZ[1][:3],
    ],
)
def test_anything_else_after_a_stream_of_xz_is_damage(tmp_path, content):
    (tmp_path / "a.txt.xz").write_bytes(content)
    with pytest.raises(readers.BadFile, match=r"a\.txt\.xz"):
        read(tmp_path / "a.txt.xz")


# ---- tables


def write_stream(path, content):
    pa = pytest.importorskip("pyarrow")
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, content.schema) as stream:
        stream.write_table(content, 100)


def table(texts=TEXTS, column="text", kind=None):
    pa = pytest.importorskip("pyarrow")
    return pa.table({"id": list(range(len(texts))), column: pa.array(texts, kind)})


def write_parquet(path, content, **settings):
    pytest.importorskip("pyarrow.parquet").write_table(content, path, **settings)


def write_dataset(folder, parts: list[list[str]], **state):
    """Writes a folder as `Dataset.save_to_disk` does."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        write_stream(folder / name, table(part))
    (folder / "dataset_info.json").write_text("{}")
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files} | state))


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view"])
def test_parquet_files_of_every_kind_of_text(tmp_path, kind):
    pa = pytest.importorskip("pyarrow")
    write_parquet(tmp_path / "a.parquet", table(kind=getattr(pa, kind)()), row_group_size=700)
    assert read(tmp_path / "*.parquet") == TEXTS


def test_missing_texts_and_categories(tmp_path):
    pa = pytest.importorskip("pyarrow")
    texts = pa.array(["one", None, " ", "two", "one"]).dictionary_encode()
    write_parquet(tmp_path / "a.parquet", pa.table({"body": texts}))
    assert read(tmp_path / "a.parquet", "body") == ["one", "two", "one"]


def test_arrow_streams_and_files(tmp_path):
    pa = pytest.importorskip("pyarrow")
    write_stream(tmp_path / "a.arrow", table(TEXTS[:700]))
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as file:
        with pa.ipc.new_file(file, table().schema) as out:
            out.write_table(table(TEXTS[700:]), 400)
    assert read(tmp_path / "*.arrow") == TEXTS


def test_a_dataset_folder_is_its_files_in_their_order(tmp_path):
    write_dataset(tmp_path / "books", [TEXTS[:5], TEXTS[5:9]])
    write_stream(tmp_path / "books" / "cache-1.arrow", table(["not a part of the dataset"]))
    assert read(tmp_path / "books") == TEXTS[:9]
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(config.ConfigError, match="books"):
        read(tmp_path / "*")


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("a.parquet", lambda path: write_parquet(path, table(["x"], "content")), "content.*text_f"),
        ("a.parquet", lambda path: write_parquet(path, table([1, 2])), "int64"),
        ("books", lambda path: path.mkdir(), "books"),
        ("books", lambda path: write_dataset(path, [["x"]], _indices_files=["i"]), "books"),
        (
            "books",
            lambda path: (write_dataset(path, []), (path / "dataset_dict.json").write_text("{}")),
            "books",
        ),
        ("books", lambda path: (path.mkdir(), (path / "state.json").write_text("{")), "state.json"),
    ],
)
def test_a_table_of_another_form_is_refused(tmp_path, name, write, message):
    write(tmp_path / name)
    with pytest.raises(config.ConfigError, match=message) as caught:
        read(tmp_path / name)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_table_that_is_cut_off_is_named(tmp_path, name):
    (write_parquet if name == "a.parquet" else write_stream)(tmp_path / name, table())
    whole = (tmp_path / name).read_bytes()
    # pyarrow takes a stream that ends between two batches for a whole one.
    batches = [at for at in range(0, len(whole), 8) if whole[at : at + 4] == b"\xff\xff\xff\xff"]
    for end in (len(whole) // 2, *batches[1:]):
        (tmp_path / name).write_bytes(whole[:end])
        with pytest.raises(readers.BadFile, match=name):
            read(tmp_path / name)


# ---- records


def example(*texts: bytes, feature="text") -> bytes:
    train = pytest.importorskip("tensorflow").train
    values = train.Feature(bytes_list=train.BytesList(value=texts))
    return train.Example(features=train.Features(feature={feature: values})).SerializeToString()


def write_records(path, records):
    if "tfrecord" in path.name:
        with pytest.importorskip("tensorflow").io.TFRecordWriter(str(path)) as writer:
            for record in records:
                writer.write(record)
    else:
        module = pytest.importorskip("array_record.python.array_record_module")
        writer = module.ArrayRecordWriter(str(path), "group_size:7")
        for record in records:
            writer.write(record)
        writer.close()


of_tensorflow = pytest.mark.filterwarnings("ignore")  # its warnings


@of_tensorflow
@pytest.mark.parametrize("name", ["a.tfrecord", "a.tfrecord-00000-of-00001", "a.array_record", "a.arrayrecord"])
def test_records_come_back_in_order(tmp_path, name):
    write_records(tmp_path / name, [example(text.encode(), feature="body") for text in TEXTS])
    assert read(tmp_path / "a.*", "body") == TEXTS


@of_tensorflow
@pytest.mark.parametrize("name", ["a.tfrecord", "a.array_record"])
@pytest.mark.parametrize("what", ["feature", "two", "utf-8", "example", "cut", "zeros", "none"])
def test_bad_records_are_named(tmp_path, name, what):
    records = {
        "feature": [example(b"x", feature="body")],
        "two": [example(b"x", b"y")],
        "utf-8": [example(b"\xff\xfe")],
        "example": [b"\xff\xff\xff no example"],
        "none": [],
    }
    path = tmp_path / name
    write_records(path, records.get(what, [example(text.encode()) for text in TEXTS]))
    content = path.read_bytes()
    if what == "cut":
        path.write_bytes(content[: len(content) // 2])
    if what == "zeros":
        path.write_bytes(content[:200] + bytes(100) + content[300:])
    with pytest.raises(readers.BadFile, match=name):
        read(path)


# ---- which files


def test_a_name_with_brackets_gets_a_hint(tmp_path):
    (tmp_path / "books[v1].txt").write_text("one")
    with pytest.raises(readers.Unavailable, match=r"books\[\[\]v1\]\.txt"):
        read(tmp_path / "books[v1].txt")
    assert read(tmp_path / "books[[]v1].txt") == ["one"]
    with pytest.raises(readers.Unavailable):
        read(tmp_path / "other*.txt")


def test_a_file_that_links_lead_to_is_read_once(tmp_path):
    books = tmp_path / "books"
    (books / "old").mkdir(parents=True)
    for name in ("old/a.txt", "b.txt"):
        (books / name).write_text(name)
    (books / "all").symlink_to(books)
    (books / "old" / "up").symlink_to("..")
    (books / "c.txt").symlink_to("b.txt")
    found = [file.path for file in readers.list_files(f"{books}/**/*.txt")]
    assert found == [f"{books}/b.txt", f"{books}/old/a.txt"]


def test_what_is_no_regular_file_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    os.mkfifo(tmp_path / "b.txt")  # to read it would wait forever
    with pytest.raises(config.ConfigError, match=r"b\.txt"):
        readers.list_files(f"{tmp_path}/*.txt")


@pytest.mark.parametrize("pattern", ["**/*.txt", "**/a.txt", "*/*.txt", "*/b/*.txt"])
def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch, pattern):
    """`glob` would leave out its files without a word."""
    for folder in ("a/b", "c/b"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.txt").write_text("one")
        (tmp_path / folder).with_name("a.txt").write_text("two")
    scandir, hidden = os.scandir, str(tmp_path / ("c/b" if pattern == "*/b/*.txt" else "c"))

    def refusing_scandir(path="."):
        if os.path.normpath(str(path)) == hidden:
            raise PermissionError(errno.EACCES, "Permission denied", hidden)
        return scandir(path)

    assert len(read(tmp_path / pattern)) > 1
    monkeypatch.setattr(os, "scandir", refusing_scandir)
    with pytest.raises(PermissionError) as caught:
        read(tmp_path / pattern)
    assert caught.value.filename == hidden


@pytest.mark.parametrize(
    ("path", "error", "kind"),
    [
        ("gs://b/a.txt", OSError("Forbidden: https://storage.googleapis.com"), config.RunError),
        ("gs://b/a.txt", FileNotFoundError("b/a.txt"), readers.BadFile),
        ("gs://b/a.txt.gz", gzip.BadGzipFile("Not a gzipped file"), readers.BadFile),
        ("gs://b/a.jsonl.zst", OSError("ZSTD decompression failed"), readers.BadFile),
        ("gs://b/a.parquet", TimeoutError("no answer"), config.RunError),
        ("gs://b/a.tfrecord", PermissionError("The provided token has expired."), config.RunError),
        ("a.txt", PermissionError(13, "Permission denied"), readers.BadFile),
        ("a.txt", OSError(errno.EIO, "Input/output error"), config.RunError),
    ],
)
def test_only_the_fault_of_a_file_itself_may_leave_it_out(path, error, kind):
    """The libraries of a bucket raise the same error for an expired token as for a forbidden file."""
    with pytest.raises(kind, match=path), readers._naming(path):
        raise error


def test_an_error_of_the_program_leaves_no_file_out(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("A document.")

    def fail(*_):
        raise TypeError("of the program")

    monkeypatch.setattr(readers, "_paragraph_documents", fail)
    with pytest.raises(TypeError):
        read(tmp_path / "a.txt")
