"""Sources: how text is divided into parts, what identifies it, which documents are left out."""

import dataclasses
import json
import os

import pytest

from maelm_jax import config
from maelm_jax.data import readers, sources

TEXTS = [f"Document {number} of these files.\nIt has a second line." for number in range(400)]


def write(folder, sizes) -> config.Corpus:
    """Writes files with so many of the documents each."""
    start = 0
    for number, size in enumerate(sizes):
        (folder / f"{number:03d}.txt").write_text("\n\n".join(TEXTS[start : start + size]))
        start += size
    return config.Corpus(text_files=f"{folder}/*.txt", rows_dir=str(folder / "rows"))


@pytest.mark.parametrize("sizes", [[400], [1] * 400, [3, 390, 7], [100] * 4])
def test_parts_have_a_size_and_hold_each_document_once(tmp_path, monkeypatch, sizes):
    monkeypatch.setattr(sources, "PART_BYTES", 1000)
    corpus = write(tmp_path, sizes)
    parts = sources.parts(f"files:{corpus.text_files}", corpus)
    found = [list(sources.documents_of_part(part, corpus)) for part in parts]
    assert [text for part in found for text in part] == TEXTS
    assert len(parts) > 15 and all(sum(map(len, part)) < 2000 for part in found)


def test_a_packed_file_is_not_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PART_BYTES", 10)
    (tmp_path / "a.txt.gz").write_bytes(bytes(100))
    corpus = config.Corpus(rows_dir=str(tmp_path))
    assert [len(part) for part in sources.parts(f"files:{tmp_path}/*.gz", corpus)] == [1]


def test_a_document_can_be_consecutive_rows(tmp_path):
    """BookCorpus has a sentence in each row."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    books = [7, 7, 7, 9, 9, 7]
    texts = ["a", " ", "b", "c\n\nd", "e", "f"]
    parquet.write_table(pa.table({"text": texts, "book": books}), tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, pa.schema({"text": pa.string(), "book": pa.int64()})) as stream:
        stream.write_table(pa.table({"text": texts, "book": books}), 2)
    records = [{"text": text, "book": book} for text, book in zip(texts, books, strict=True)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "a.csv").write_text("book,text\n" + "".join(f'{book},"{text}"\n' for text, book in zip(texts, books, strict=True)))
    for name in ("a.parquet", "a.arrow", "a.jsonl", "a.csv"):
        source = f"files:{tmp_path}/{name}"

        def read(rule, source=source):
            corpus = config.Corpus(sources={source: 1.0}, documents={source: rule}, rows_dir=str(tmp_path))
            return list(sources.documents_of(source, corpus))

        assert read(1) == ["a", "b", "c\nd", "e", "f"]
        assert read(2) == ["a\nb", "c\nd\ne", "f"]
        assert read("book") == ["a\nb", "c\nd\ne", "f"]
        assert read(100) == ["a\nb\nc\nd\ne\nf"]
        with pytest.raises(readers.BadFile, match=f"{name}.*'chapter'.*book"):
            read("chapter")
    with pytest.raises(config.ConfigError, match="documents: 'files:other'"):
        config.Corpus(documents={"files:other": 2})


def test_identity_is_of_names_sizes_and_times_not_of_folders(tmp_path):
    (tmp_path / "a").mkdir()
    write(tmp_path / "a", [3, 3])
    corpus = config.Corpus(rows_dir=str(tmp_path))

    def identity(folder="a"):
        return sources.identity(f"files:{tmp_path}/{folder}/*.txt", corpus)

    first = identity()
    (tmp_path / "a").rename(tmp_path / "b")
    assert identity("b") == first
    os.utime(tmp_path / "b" / "000.txt", (1, 1))
    older = identity("b")
    (tmp_path / "b" / "000.txt").write_text("another size")
    os.utime(tmp_path / "b" / "000.txt", (1, 1))
    assert len({first, older, identity("b")}) == 3
    os.rename(tmp_path / "b" / "000.txt", os.fsencode(tmp_path) + b"/b/caf\xe9.txt")
    assert len(identity("b")) == 12, "a name that is not UTF-8"


def test_the_first_texts_are_cut_at_so_many_characters(tmp_path):
    corpus = write(tmp_path, [400])
    assert sources.first_texts(corpus, 20) == [TEXTS[0], TEXTS[1][: 80 - len(TEXTS[0])]]
    (tmp_path / "b.txt").write_text(" \n")
    with pytest.raises(config.ConfigError, match="b.txt"):
        sources.first_texts(dataclasses.replace(corpus, text_files=f"{tmp_path}/b.txt"), 20)


def test_a_bad_file_is_read_to_its_bad_place_if_asked(tmp_path):
    corpus = write(tmp_path, [3, 3])
    (tmp_path / "000.txt").write_bytes(f"{TEXTS[0]}\n\ncaf".encode() + b"\xe9")
    with pytest.raises(readers.BadFile, match="000.txt"):
        list(sources.documents_of(f"files:{corpus.text_files}", corpus))
    skipping = dataclasses.replace(corpus, skip_bad_files=True)
    found = list(sources.documents_of(f"files:{corpus.text_files}", skipping))
    assert found == [TEXTS[0], *TEXTS[3:6]]
