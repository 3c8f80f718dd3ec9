"""Folders in a bucket, against emulators of Google Cloud Storage and S3: text, rows and files are read and sent; a refusal is one line."""

import dataclasses
import gzip
import os
import pathlib
import shutil

import numpy as np
import pytest
from emulators import put, put_folder
from testing import english, finish, start, write_corpus

from maelm_jax import config, finetune, storage, train
from maelm_jax.data import batches, prepare, readers, rows, sources, vocabulary_training
from maelm_jax.encoders import opened
from maelm_jax.measuring import runs

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of gcsfs and aiohttp, about loops that are not closed


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Rows that were prepared on this machine: their corpus, vocabulary and record."""
    folder = tmp_path_factory.mktemp("prepared")
    corpus = write_corpus(folder, english())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "SHARD_ROWS", 256)
        vocabulary = vocabulary_training.vocabulary_for(config.Vocabulary(size=400), corpus)
        return corpus, vocabulary, prepare.prepare(corpus, vocabulary)


def test_rows_are_read_in_place_from_a_bucket(bucket, prepared):
    """Also where the text is gone or has another time; a file that is missing or damaged is named."""
    corpus, vocabulary, here = prepared
    folder = pathlib.Path(corpus.rows_dir)
    put_folder(folder, f"{bucket}/rows")
    elsewhere = dataclasses.replace(corpus, rows_dir=f"{bucket}/rows/")
    assert vocabulary_training.vocabulary_for(config.Vocabulary(size=400), elsewhere).fingerprint == vocabulary.fingerprint
    there = prepare.prepare(elsewhere, vocabulary)
    assert there.record == here.record
    ((source, splits),) = here.stores.items()
    for split, store in splits.items():
        every = np.arange(len(store))
        np.testing.assert_array_equal(there.stores[source][split][every], store[every])
    for shards in (0, 2):
        one, other = (batches.Batches(prepared.split("train"), prepared.rates, 16, 5, shuffle_shards=shards) for prepared in (here, there))
        for step in (0, 1, 7):
            np.testing.assert_array_equal(one.batch(step), other.batch(step))
    without_text = dataclasses.replace(elsewhere, text_files="/nowhere/*.txt")
    assert prepare.open_record(here.record, without_text).record == here.record
    os.utime(folder.parent / "a.txt", (1, 1))
    assert prepare.prepare(elsewhere, vocabulary).record == here.record, "no rows of this state of the text, so the last ones"
    files, root = storage.file_system(f"{bucket}/rows")
    (entry,) = here.record["sources"].values()
    name = f"{entry['store']}/train/c/1/0"
    content = bytearray(files.cat_file(f"{root}/{name}"))
    content[-50] ^= 1
    files.pipe_file(f"{root}/{name}", bytes(content))
    files.rm_file(f"{root}/{entry['store']}/train/c/2/0")
    broken = prepare.prepare(elsewhere, vocabulary).split("train")[source]
    for number in (511, 512):
        with pytest.raises(config.ConfigError, match=f"c/{number // 256}/0"):
            broken[np.array([number])]
    with pytest.raises(config.ConfigError, match="launch/prepare_data.sh"):
        prepare.prepare(dataclasses.replace(elsewhere, sequence_length=16), vocabulary)
    with pytest.raises(config.ConfigError, match="launch/prepare_data.sh"):
        vocabulary_training.vocabulary_for(config.Vocabulary(size=300), elsewhere)


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)  # files of workdirs, which S3 has none of
def test_files_are_sent_and_fetched(bucket, cache):
    place = f"{bucket}/runs/x"
    (storage.local_path(place) / "tensorboard").mkdir()
    (storage.local_path(place) / "tensorboard" / "events").write_bytes(b"12")
    (storage.local_path(place) / "metrics.jsonl").write_text("{}\n")
    storage.send(place)
    shutil.rmtree(cache)
    (storage.local_path(place) / "config.gin").write_text("of another run")
    storage.fetch_files(place, ("metrics.jsonl", "config.gin"))
    assert [path.name for path in storage.local_path(place).iterdir()] == ["metrics.jsonl"]


def test_what_knows_no_bucket_says_so(tmp_path):
    with pytest.raises(config.ConfigError, match="gs://bucket/run"):
        opened.find_model("gs://bucket/run")
    with pytest.raises(config.ConfigError, match="gs://bucket/run"):
        runs.open_runs(["gs://bucket/run"], [], [])
    with pytest.raises(config.ConfigError, match="gs://bucket/out"):
        finetune.main(["--gin_file=finetune/rte.gin", f"--init_from={tmp_path}", "--workdir=gs://bucket/out"])
    with pytest.raises(config.ConfigError, match="s3://bucket/run"):
        train.main(["--gin_file=tiny.gin", "--workdir=s3://bucket/run"])


def test_text_in_a_bucket_is_read_where_it_lies(bucket, tmp_path, monkeypatch):
    """A nested glob of several formats, a file cut into ranges; a changed file is another text."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["three", "four"]}), tmp_path / "c.parquet")
    put(f"{bucket}/text/a/a.txt", b"one\n\ntwo")
    put(f"{bucket}/text/b/c.parquet", (tmp_path / "c.parquet").read_bytes())
    put(f"{bucket}/text/b/d.jsonl.gz", gzip.compress(b'{"text": "five"}'))
    source = f"files:{bucket}/text/**/*.*"
    corpus = config.Corpus(sources={source: 1.0}, rows_dir=str(tmp_path / "rows"))
    for size in (8_000_000, 5):
        monkeypatch.setattr(sources, "PART_BYTES", size)
        assert list(sources.documents_of(source, corpus)) == ["one", "two", "three", "four", "five"]
    assert len(sources.parts(source, corpus)) == 4
    first = sources.identity(source, corpus)
    assert first == sources.identity(source, corpus)
    put(f"{bucket}/text/a/a.txt", b"one\n\nTWO")
    assert sources.identity(source, corpus) != first
    with pytest.raises(readers.Unavailable, match=rf"{bucket}/nothing/\*\.txt"):
        sources.parts(f"files:{bucket}/nothing/*.txt", corpus)


@pytest.mark.slow
def test_processes_read_text_in_a_bucket_together(bucket, tmp_path):
    """Two processes make the rows that one makes of the same files on disk."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number, document in enumerate(english()):
        (folder / f"{number:03}.txt.gz").write_bytes(gzip.compress(document.encode()))
    put_folder(folder, f"{bucket}/topics")
    for text, processes in ((folder, 1), (f"{bucket}/topics", 2)):
        settings = {"TEXT_FILES": f"{text}/*.gz", "Corpus.processes": processes, "Corpus.rows_dir": tmp_path / str(processes)}
        flags = [f"--gin.{name}={value}" for name, value in settings.items()]
        done = finish(start("prepare", "--gin_file=tiny.gin", "--gin.Vocabulary.size=400", "--gin.Corpus.heldout_fraction=0.1", *flags))
        assert done.status == 0, done.stderr
    one, two = (sorted((path.parts[-4:], path.read_bytes()) for path in (tmp_path / name).rglob("c/*/*")) for name in "12")
    assert one == two and {parts[0] for parts, _ in one} == {"train", "heldout"}


def test_a_write_is_whole_or_absent(tmp_path):
    storage.write(tmp_path / "file", "one")
    with pytest.raises(OSError), storage.atomic_file(tmp_path / "file") as file:
        file.write(b"half")
        raise OSError
    assert (tmp_path / "file").read_text() == "one" and len(list(tmp_path.iterdir())) == 1


def test_an_error_about_the_content_of_a_file_names_it(tmp_path):
    (tmp_path / "cut.json").write_text('{"a": ')
    with pytest.raises(config.ConfigError, match=r"cut\.json"):
        storage.read_json(tmp_path / "cut.json")
    with pytest.raises(FileNotFoundError):
        storage.read_json(tmp_path / "absent.json")


def test_an_empty_name_of_the_cache_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert storage.local_path("gs://bucket/run").is_relative_to(tmp_path / ".cache")
