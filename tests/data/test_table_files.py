""".parquet and .arrow files, and folders of Hugging Face datasets: the same documents; what is wrong is one line."""

import json
import pathlib

import pytest

from maelm_jax import config
from maelm_jax.data import file_sources, sources

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TEXTS = [f"Document {number}.\nIts second line, naïve." for number in range(3000)]


def read(pattern, **settings):
    corpus = config.Corpus(rows_dir="nowhere", **settings)
    return list(sources.documents_of(f"files:{pattern}", corpus))


def table(texts=TEXTS, column="text", kind=None):
    return pa.table({"id": list(range(len(texts))), column: pa.array(texts, kind)})


def write_stream(path: pathlib.Path, content):
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, content.schema) as stream:
        stream.write_table(content, 100)


def dataset(folder: pathlib.Path, parts: list[list[str]], **state) -> pathlib.Path:
    """A folder as `Dataset.save_to_disk` writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(parts):05d}.arrow" for number in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        write_stream(folder / name, table(part))
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]} | state))
    return folder


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view"])
def test_parquet_files_of_every_kind_of_text(tmp_path, kind):
    pq.write_table(table(kind=getattr(pa, kind)()), tmp_path / "a.parquet", row_group_size=700)
    assert read(tmp_path / "*.parquet") == TEXTS


def test_arrow_streams_and_files(tmp_path):
    write_stream(tmp_path / "a.arrow", table(TEXTS[:1500]))
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as file, pa.ipc.new_file(file, table().schema) as out:
        out.write_table(table(TEXTS[1500:]), 400)
    assert read(tmp_path / "*.arrow") == TEXTS


def test_a_dataset_folder_is_its_files_in_their_order(tmp_path):
    folder = dataset(tmp_path / "books", [TEXTS[:5], TEXTS[5:9]])
    write_stream(folder / "cache-1.arrow", table(["not a part of the dataset"]))
    assert read(folder) == TEXTS[:9]


def test_a_column_of_another_name(tmp_path):
    pq.write_table(table(TEXTS[:3], "content"), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", text_column="content") == TEXTS[:3]
    corpora = [config.Corpus(rows_dir=str(tmp_path / "rows"), text_column=name) for name in ("content", "id")]
    first, second = (sources.identity(f"files:{tmp_path}/a.parquet", corpus) for corpus in corpora)
    assert first != second


def test_a_missing_text_is_no_document(tmp_path):
    pq.write_table(table(["one", None, " ", "two"]), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ["one", "two"]


def test_categories_of_text_are_text(tmp_path):
    pq.write_table(pa.table({"text": pa.array(["one", "two", "one"]).dictionary_encode()}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ["one", "two", "one"]


LATIN = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\4\0\0\0"), pa.py_buffer(b"caf\xe9")])


@pytest.mark.parametrize(
    "name,write,message",
    [
        ("a.parquet", lambda path: pq.write_table(pa.table({"text": LATIN}), path), r"a\.parquet: a text that is not UTF-8 \(byte 0xe9 at 3\)"),
        ("a.parquet", lambda path: path.write_bytes(b"PAR1 no parquet"), r"a\.parquet: damaged \.parquet data"),
        ("a.arrow", lambda path: path.write_bytes(b"no arrow at all"), r"a\.arrow: damaged \.arrow data"),
        ("a.parquet", lambda path: pq.write_table(table(["x"], "content"), path), r"no column 'text' \(it has .*\"content\"\); set Corpus"),
        ("a.parquet", lambda path: pq.write_table(pa.table({"text": [1, 2]}), path), r"column 'text' holds int64, not text"),
        ("a.parquet", lambda path: pq.write_table(pa.table([["x"], ["y"]], ["text", "text"]), path), r"several columns 'text'"),
        ("books", lambda path: path.mkdir(), r"books: a folder without state\.json"),
        ("books", lambda path: dataset(path, [["x"]], _indices_data_files=[{"filename": "i.arrow"}]), r"flatten_indices"),
        ("books", lambda path: (dataset(path / "train", [["x"]]), (path / "dataset_dict.json").write_text("{}")), r"several splits.*\(train\)"),
        ("books", lambda path: (path.mkdir(), (path / "state.json").write_text('{"_data_files": [3]}')), r"state\.json: damaged"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, name, write, message):
    write(tmp_path / name)
    with pytest.raises(config.ConfigError, match=message) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_file_that_is_cut_off_is_named(tmp_path, name):
    path = tmp_path / name
    pq.write_table(table(), path) if name == "a.parquet" else write_stream(path, table())
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(config.ConfigError, match="damaged"):
        read(path)


def test_a_stream_that_is_cut_off_between_two_batches_is_named(tmp_path):
    """pyarrow takes it for a whole one."""
    write_stream(tmp_path / "a.arrow", table())
    whole = (tmp_path / "a.arrow").read_bytes()
    batches = [at for at in range(0, len(whole), 8) if whole[at : at + 4] == b"\xff\xff\xff\xff"]
    assert len(batches) == 32, "the schema, 30 batches and the end"
    for end in batches[1:]:
        (tmp_path / "a.arrow").write_bytes(whole[:end])
        with pytest.raises(config.ConfigError, match="damaged .arrow data .it has no end"):
            read(tmp_path / "a.arrow")


def test_only_files_of_text_are_taken(tmp_path):
    (tmp_path / "a.txt.parquet.gz").write_bytes(b"")
    with pytest.raises(config.ConfigError, match=r"not a \.txt, \.jsonl"):
        file_sources.matching(f"files:{tmp_path}/*")
