"""The files of a glob: their order, their identity, and files that cannot be read."""

import contextlib
import dataclasses
import errno
import gzip
import json
import os

import pytest
from testing import DAMAGED_JSON, one_line

from maelm_jax import config
from maelm_jax.data import file_access, file_sources, rows, sources, store_manifest


def read(pattern, **settings):
    return list(sources.documents_of(f"files:{pattern}", config.Corpus(**settings)))


def test_files_come_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(f"document {name}")
    assert read(tmp_path / "*.txt") == ["document a", "document b", "document c"]


def test_a_nested_glob_mixes_formats(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for folder in ("a", "b/c", "d"):
        (tmp_path / folder).mkdir(parents=True)
    parquet.write_table(pyarrow.table({"text": ["one", "two"]}), tmp_path / "a" / "part.parquet")
    (tmp_path / "b" / "c" / "part.json.gz").write_bytes(gzip.compress(b'{"text": "three"}\n{"text": "four"}\n'))
    (tmp_path / "d" / "part.txt").write_text("five")
    assert read(tmp_path / "**") == ["one", "two", "three", "four", "five"]


def test_every_format_gives_the_same_rows(small_vocabulary, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"Document {number} says a few words.\nIts second line, naïve." for number in range(300)]
    records = "\n".join(json.dumps({"text": text}) for text in texts).encode()
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(records))
    with pyarrow.CompressedOutputStream(str(tmp_path / "a.json.zst"), "zstd") as file:
        file.write(records)
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=70)
    contents = set()
    for name in ("a.txt", "a.jsonl.gz", "a.json.zst", "a.parquet"):
        corpus = config.Corpus(
            text_files=str(tmp_path / name), sequence_length=32, heldout_fraction=0.1, rows_dir=str(tmp_path / "rows"), processes=1
        )
        (splits,) = rows.prepare(corpus, small_vocabulary).values()
        contents.add(store_manifest.fingerprint(splits["train"].folder))
    assert len(contents) == 1


def test_a_link_to_nothing_is_named_and_only_left_out_when_told_to(small_corpus, tmp_path):
    (tmp_path / "z.txt").symlink_to(tmp_path / "gone.txt")
    source = f"files:{small_corpus.text_files}"
    for look in (sources.identity, lambda *args: list(sources.documents_of(*args))):
        with pytest.raises(config.ConfigError, match=r"z\.txt: cannot be read \(No such file"):
            look(source, small_corpus)
    assert "z.txt 000" in file_sources.identity(source, dataclasses.replace(small_corpus, skip_bad_files=True))


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
    with pytest.raises(config.ConfigError, match=f"{hidden}/?: cannot be read .*permissions"):
        read(tmp_path / pattern)


def test_no_match_says_the_pattern():
    with pytest.raises(config.ConfigError, match=r"no text file matches '/nowhere/\*\.txt'"):
        read("/nowhere/*.txt")


def test_identity_is_of_the_bytes(tmp_path):
    """Not of the names of folders, also where one looks like a format."""
    corpus = config.Corpus(rows_dir=str(tmp_path / "rows"))
    for folder in ("plain", "of.jsonl.d"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("one")
    assert len({sources.identity(f"files:{tmp_path}/{folder}/*.txt", corpus) for folder in ("plain", "of.jsonl.d")}) == 1
    source = f"files:{tmp_path}/*.txt"
    (tmp_path / "a.txt").write_text("one")
    first = sources.identity(source, corpus)
    (tmp_path / "a.txt").touch()
    assert sources.identity(source, corpus) == first
    (tmp_path / "a.txt").write_text("two")
    assert sources.identity(source, corpus) != first


def test_a_file_whose_name_is_not_utf8_is_read(small_corpus, small_vocabulary, tmp_path):
    os.rename(tmp_path / "a.txt", os.fsencode(tmp_path) + b"/caf\xe9.txt")
    (splits,) = rows.prepare(small_corpus, small_vocabulary).values()
    assert len(splits["train"]) > 0


@pytest.mark.parametrize("name", DAMAGED_JSON)
def test_damaged_hashes_of_files_are_one_line(small_corpus, tmp_path, name):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "file_hashes.json").write_bytes(DAMAGED_JSON[name])
    with pytest.raises(config.ConfigError, match=r"file_hashes\.json: damaged.*remove") as caught:
        sources.identity(f"files:{small_corpus.text_files}", small_corpus)
    one_line(caught)


def refusing(original, paths, number):
    """`open` or `os.stat` that fails on some files, as the system does for want of permission (tests may run as root)."""

    def refuse(path, *args, **kwargs):
        if any(str(path).endswith(end) for end in paths):
            raise OSError(number, os.strerror(number), str(path))
        return original(path, *args, **kwargs)

    return refuse


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.ESTALE, errno.EMFILE, errno.EIO], ids=errno.errorcode.get)
def test_a_file_that_cannot_be_read_at_the_moment_is_not_left_out(small_corpus, tmp_path, monkeypatch, number):
    import builtins

    monkeypatch.setattr(builtins, "open", refusing(open, ["a.txt"], number))
    skipping = dataclasses.replace(small_corpus, skip_bad_files=True)
    for read in (sources.identity, lambda *args: list(sources.documents_of(*args))):
        with pytest.raises(config.RunError, match=r"a\.txt: could not be read now .*the same command again"):
            read(f"files:{small_corpus.text_files}", skipping)


def test_a_bucket_that_does_not_answer_is_no_damage(tmp_path, monkeypatch):
    """The error of fsspec has no number, like pyarrow's for damaged data."""
    fsspec = pytest.importorskip("fsspec")
    for name in ("a.parquet", "a.jsonl.zst"):
        (tmp_path / name).write_bytes(b"any")

        @contextlib.contextmanager
        def opened(path):
            raise fsspec.exceptions.FSTimeoutError("no answer")
            yield

        monkeypatch.setattr(file_access, "opened", opened)
        with pytest.raises(config.RunError, match="could not be read now"):
            read(tmp_path / name)


def test_files_beside_a_dataset_are_not_half_read(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "wiki").mkdir()
    (tmp_path / "wiki" / "state.json").write_text("{}")
    with pytest.raises(config.ConfigError, match="wiki: a folder of Hugging Face datasets beside files; narrow the glob"):
        read(tmp_path / "*")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM], ids=errno.errorcode.get)
def test_a_file_that_cannot_be_read_is_one_line(small_corpus, tmp_path, monkeypatch, number):
    import builtins

    monkeypatch.setattr(builtins, "open", refusing(open, ["a.txt"], number))
    for read in (sources.identity, lambda *args: list(sources.documents_of(*args))):
        with pytest.raises(config.ConfigError, match=r"a\.txt: cannot be read") as caught:
            read(f"files:{small_corpus.text_files}", small_corpus)
        one_line(caught)
