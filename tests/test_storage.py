"""Folders in a bucket, against emulators of Google Cloud Storage and S3: text, rows and files are read and sent; a refusal is one line."""

import gzip
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
from pydoc_data import topics

import numpy as np
import pytest
from emulators import put

from maelm_jax import config, finetune, storage, train
from maelm_jax.analysis import runs
from maelm_jax.data import block_files, prepared_folders, rows_dir, rows_in_place, sources, store
from maelm_jax.data.documents import Unavailable
from maelm_jax.encoders import source

ROOT = pathlib.Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of gcsfs and aiohttp, about loops that are not closed


def test_stores_are_copied_once_and_only_whole_ones(bucket, cache):
    for name in ("a-1/store.json", "a-1/train/c/0/0", "a-2/train/c/0/0", "b-1/store.json"):
        put(f"{bucket}/rows/{name}", name.encode())
    storage.fetch_folders(f"{bucket}/rows", "a-*", "store.json", storage.local_path(f"{bucket}/rows"))
    folder = storage.local_path(f"{bucket}/rows")
    copied = sorted(str(path.relative_to(folder)) for path in folder.glob("a-*/**/*") if path.is_file())
    assert copied == ["a-1/store.json", "a-1/train/c/0/0"]
    put(f"{bucket}/rows/a-1/store.json", b"another")
    storage.fetch_folders(f"{bucket}/rows", "a-*", "store.json", storage.local_path(f"{bucket}/rows"))
    assert (folder / "a-1" / "store.json").read_bytes() == b"a-1/store.json"


def test_what_a_killed_copy_left_is_removed(bucket, cache):
    put(f"{bucket}/rows5/a-1/store.json", b"{}")
    folder = storage.local_path(f"{bucket}/rows5")
    left = folder / f".a-1.{os.uname().nodename}.partial"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x")
    storage.fetch_folders(f"{bucket}/rows5", "a-*", "store.json", folder)
    assert [path.name for path in (folder / "a-1").iterdir()] == ["store.json"] and not left.exists()


def test_processes_of_a_machine_copy_a_store_once(bucket, cache, monkeypatch):
    put(f"{bucket}/rows6/a-1/store.json", b"{}")
    folder = storage.local_path(f"{bucket}/rows6")
    copies = []
    files, _ = storage.file_system(f"{bucket}/rows6")
    get = files.get
    monkeypatch.setattr(files, "get", lambda *arguments, **options: copies.append(1) or time.sleep(0.5) or get(*arguments, **options))
    monkeypatch.setattr(storage, "file_system", lambda path: (files, path.partition("://")[2]))
    threads = [threading.Thread(target=storage.fetch_folders, args=(f"{bucket}/rows6", "a-*", "store.json", folder)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert copies == [1] and (folder / "a-1" / "store.json").read_bytes() == b"{}"


def test_where_the_text_is_not_the_rows_that_came_last_into_the_bucket_are_taken(bucket, cache, caplog):
    """Not those that were copied last to this machine. Only they are copied."""
    corpus = config.Corpus(text_files="gone/*.txt", rows_dir=f"{bucket}/rows7")
    for state in ("s-c", "s-a", "s-b", "s-a"):  # the last one was prepared again
        put(f"{bucket}/rows7/{state}/store.json", state.encode())
        time.sleep(1.1)  # S3 counts in seconds
    folder = prepared_folders.find(corpus, "s", ["files:gone/*.txt"], "store.json")
    assert folder.name == "s-a" and (folder / "store.json").read_bytes() == b"s-a"
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["s-a"]
    assert "the newest of 3 states of the text" in caplog.text


def test_rows_stay_in_the_bucket_and_are_read_through_a_cache(bucket, cache, tmp_path):
    table = np.arange(400, dtype=np.uint16).reshape(50, 8)
    counts = {split: dict.fromkeys(block_files.COUNTS, 50) for split in block_files.SPLITS}
    with open(tmp_path / "block.npz", "wb") as file:
        np.savez(file, counts=json.dumps(counts), train=table, heldout=table)
    (tmp_path / "s-1").mkdir()
    store.write(tmp_path / "s-1", [tmp_path / "block.npz"], "here", "0", 8, np.dtype(np.uint16), 16)
    for path in (tmp_path / "s-1").rglob("*"):
        if path.is_file():
            put(f"{bucket}/rows4/{path.relative_to(tmp_path)}", path.read_bytes())
    corpus = config.Corpus(rows_dir=f"{bucket}/rows4/", cache_gb=600e-9)  # two of four files
    rows_dir.fetch(corpus, "s-*", "store.json")
    folder = rows_dir.prepared_folder(corpus) / "s-1"
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["store.json", "zarr.json", "zarr.json"]
    rows = rows_in_place.open_stores({"here": folder}, corpus)["here"]["train"]
    for numbers in (np.arange(50), np.array([49, 3, 17, 3])):
        assert (rows[numbers] == table[numbers]).all()
    files, root = storage.file_system(corpus.rows_dir)
    files.rm_file(f"{root}/s-1/train/c/2/0")
    with pytest.raises(config.ConfigError, match=f"{bucket}/rows4/s-1/train/c/2/0: missing"):
        rows[np.array([40])]
    copied = config.Corpus(rows_dir=f"{bucket}/rows4/")  # a copy is another folder
    rows_dir.fetch(copied, "s-*", "store.json")
    assert (rows_dir.prepared_folder(copied) / "s-1" / "train" / "c" / "1" / "0").is_file()


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


def test_a_file_is_removed_here_and_in_the_bucket(bucket, cache):
    put(f"{bucket}/run/origin.json", b"{}")
    storage.fetch_files(f"{bucket}/run", ("origin.json",))
    for _ in range(2):  # the second time there is nothing to remove
        storage.remove(f"{bucket}/run", "origin.json")
        storage.fetch_files(f"{bucket}/run", ("origin.json",))
        assert not (storage.local_path(f"{bucket}/run") / "origin.json").exists()


def test_what_knows_no_bucket_says_so(tmp_path):
    with pytest.raises(config.ConfigError, match="gs://bucket/run: only train and prepare"):
        source.find_encoder("gs://bucket/run")
    with pytest.raises(config.ConfigError, match="gs://bucket/run: only train and prepare"):
        runs.open_run("gs://bucket/run", [], [])
    with pytest.raises(config.ConfigError, match="gs://bucket/out: only train and prepare"):
        finetune.main(["--gin_file=finetune/rte.gin", f"--init_from={tmp_path}", "--workdir=gs://bucket/out"])
    with pytest.raises(config.ConfigError, match="s3://bucket/run: Orbax writes no checkpoints to s3://"):
        train.main(["--gin_file=tiny.gin", "--workdir=s3://bucket/run"])


def test_text_in_a_bucket_is_read_where_it_lies(bucket, tmp_path, monkeypatch):
    """A nested glob of several formats; unchanged files are not read again, changed ones are another text."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["three", "four"]}), tmp_path / "c.parquet")
    put(f"{bucket}/text/a/a.txt", b"one\n\ntwo")
    put(f"{bucket}/text/b/c.parquet", (tmp_path / "c.parquet").read_bytes())
    put(f"{bucket}/text/b/d.jsonl.gz", gzip.compress(b'{"text": "five"}'))
    source = f"files:{bucket}/text/**/*.*"
    corpus = config.Corpus(sources={source: 1.0}, rows_dir=str(tmp_path / "rows"))
    assert list(sources.documents_of(source, corpus)) == ["one", "two", "three", "four", "five"]
    first = sources.identity(source, corpus)
    assert first == sources.identity(source, corpus)
    put(f"{bucket}/text/a/a.txt", b"one\n\nTWO")
    assert sources.identity(source, corpus) != first
    with pytest.raises(Unavailable, match=rf"no text file matches '{bucket}/nothing/\*\.txt'"):
        sources.shards(f"files:{bucket}/nothing/*.txt", corpus)


@pytest.mark.slow
def test_processes_read_text_in_a_bucket_together(bucket, tmp_path):
    """Two processes make the rows that one makes of the same files on disk."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number, topic in enumerate(sorted(topics.topics)):
        (folder / f"{number:03}.txt.gz").write_bytes(gzip.compress(" ".join(topics.topics[topic].split()).encode()))
    for path in folder.iterdir():
        put(f"{bucket}/topics/{path.name}", path.read_bytes())
    common = [sys.executable, "-m", "maelm_jax.prepare", "--gin_file=tiny.gin", "--gin.Vocabulary.size=400", "--gin.Corpus.heldout_fraction=0.1"]
    for text, processes in ((folder, 1), (f"{bucket}/topics", 2)):
        flags = [f"--gin.TEXT_FILES={text}/*.gz", f"--gin.Corpus.processes={processes}", f"--gin.Corpus.rows_dir={tmp_path / str(processes)}"]
        subprocess.run([*common, *flags], check=True, cwd=ROOT, timeout=300)
    one, two = (sorted((path.parts[-4:], path.read_bytes()) for path in (tmp_path / name).rglob("c/*/*")) for name in "12")
    assert one == two and {parts[0] for parts, _ in one} == {"train", "heldout"}


def test_what_a_mixture_holds_is_read_from_the_bucket(bucket, cache, monkeypatch):
    """Where seqio is not installed; what the bucket does not have stays an error."""

    def unavailable(*_):
        raise Unavailable("no seqio here")

    monkeypatch.setattr(sources.seqio_tasks, "members", unavailable)
    corpus = config.Corpus(sources={"seqio:both": 1.0}, rows_dir=f"{bucket}/rows3")
    with pytest.raises(Unavailable):
        sources.rates(corpus)
    put(f"{bucket}/rows3/mixture-{hashlib.sha256(b'seqio:both').hexdigest()[:12]}.json", b'{"seqio:a": 0.25, "seqio:b": 0.75}')
    assert sources.rates(corpus) == {"seqio:a": 0.25, "seqio:b": 0.75}


def test_a_write_is_whole_or_absent(tmp_path):
    storage.write(tmp_path / "file", "one")
    with pytest.raises(OSError), storage.atomic_file(tmp_path / "file") as file:
        file.write(b"half")
        raise OSError
    assert (tmp_path / "file").read_text() == "one" and len(list(tmp_path.iterdir())) == 1


def test_an_error_about_the_content_of_a_file_names_it(tmp_path):
    (tmp_path / "cut.json").write_text('{"a": ')
    with pytest.raises(config.ConfigError, match=r"cut\.json.*JSONDecodeError"):
        storage.read_json(tmp_path / "cut.json")
    with pytest.raises(FileNotFoundError):
        storage.read_json(tmp_path / "absent.json")


def test_an_empty_name_of_the_cache_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert storage.local_path("gs://bucket/run").is_relative_to(tmp_path / ".cache")
