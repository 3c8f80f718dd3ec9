"""Preparing rows: the same store by every driver, after every kill; nothing damaged or changed is used."""

import contextlib
import dataclasses
import functools
import gzip
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import unittest.mock

import numpy as np
import pytest
from testing import ROOT, english, write_corpus

from maelm_jax import config, storage
from maelm_jax.data import batches, prepare, readers, rows, sources, vocabulary_training


def files_of(corpus) -> dict[str, bytes]:
    """Returns the files of the only store. Nothing else is left beside it but the record."""
    (folder,) = (path for path in pathlib.Path(corpus.rows_dir).iterdir() if path.suffix != ".json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def expected(undisturbed):
    """The files of an undisturbed preparation."""
    return files_of(undisturbed)


def prepared_rows(corpus, vocabulary) -> dict[str, np.ndarray]:
    """{split: rows} of a corpus of one source."""
    (splits,) = prepare.prepare(corpus, vocabulary).stores.values()
    return {split: store[np.arange(len(store))] for split, store in splits.items()}


def parts_of(corpus) -> pathlib.Path:
    (folder,) = pathlib.Path(corpus.rows_dir).glob("*.parts")
    return folder


# ---- what the rows are


def test_splits_are_disjoint_and_by_text(documents, corpus, vocabulary):
    (stores,) = prepare.prepare(corpus, vocabulary).stores.values()
    texts = ["\n".join(line.strip() for line in text[:1500].split("\n") if line.strip()) for text in documents[:60]]
    for split, store in stores.items():
        chosen = [text for text in texts if sources.is_heldout(text, 0.1) == (split == "heldout")]
        expected = [i for text in chosen for line in vocabulary.encode_batch(text.split("\n")) for i in line]
        table = store[np.arange(len(store))]
        special = (vocabulary.bos, vocabulary.eos, vocabulary.pad)
        assert table[~np.isin(table, special)].tolist() == expected, "the text in its order"
        assert store.statistics["documents"] == len(chosen) > 2
        assert store.statistics["words"] == sum(len(text.split()) for text in chosen)
        assert store.statistics["tokens"] == (table != vocabulary.pad).sum()
        assert store.statistics["segments"] == (table == vocabulary.bos).sum()
        assert store.statistics["bytes"] == sum(len(text.encode()) for text in chosen)


def test_small_files_are_packed_together(vocabulary, tmp_path):
    """Packing crosses the files of a part."""
    texts = [f"Document {number} says a few words and ends." for number in range(300)]
    tables = []
    for name, parts in (("one", [texts]), ("many", [[text] for text in texts])):
        (tmp_path / name).mkdir()
        for number, part in enumerate(parts):
            (tmp_path / name / f"{number:03d}.txt").write_text("\n\n".join(part))
        corpus = config.Corpus(
            text_files=f"{tmp_path}/{name}/*.txt",
            sequence_length=128,
            rows_dir=str(tmp_path / name),
            processes=1,
        )
        tables.append(prepared_rows(corpus, vocabulary)["train"])
    np.testing.assert_array_equal(*tables)


def test_what_determines_the_rows_is_in_their_name(corpus, vocabulary, small_vocabulary, tmp_path):
    def names(vocabulary=vocabulary, **change):
        return tuple(prepare.store_names(dataclasses.replace(corpus, **change), vocabulary).values())

    files = f"files:{corpus.text_files}"
    changes = ({"sequence_length": 32}, {"heldout_fraction": 0.2}, {"text_field": "body"}, {"documents": {files: 2}})
    found = {names(), names(small_vocabulary), *(names(**change) for change in changes)}
    assert names(processes=2, skip_bad_files=True) == names()
    os.utime(tmp_path / "a.txt", (1, 1))
    assert len(found | {names()}) == 7


def test_too_little_text_is_an_error(vocabulary, tmp_path):
    texts = (f"Document {number}." for number in range(1000))
    corpus = write_corpus(tmp_path, [next(text for text in texts if sources.is_heldout(text, 0.1))])
    for _ in range(2):  # also when the store is there already
        with pytest.raises(config.ConfigError):
            prepare.prepare(corpus, vocabulary)


def write_files(folder, **files) -> dict:
    """Writes files of documents; returns settings of a corpus without held-out text."""
    for name, texts in files.items():
        (folder / name).mkdir(exist_ok=True)
        for number, text in enumerate(texts):
            (folder / name / f"{number}.txt").write_text(text)
    return {"sequence_length": 32, "rows_dir": str(folder / "rows"), "processes": 1}


def words_of(table: np.ndarray, vocabulary) -> set[str]:
    return set(vocabulary.decode(table[table != vocabulary.pad].tolist()).replace("</s>", " ").replace("<s>", " ").split())


@pytest.mark.parametrize("tasks", [0, 3])
def test_heldout_files_are_the_heldout_rows_and_no_others(vocabulary, tmp_path, tasks):
    texts = {"train": ["one two\n\n" * 100, "three"], "more": ["four five"], "dev": ["six seven", "eight"]}
    settings = write_files(tmp_path, **texts)
    corpus = config.Corpus(sources={f"files:{tmp_path}/{name}/*": 1.0 for name in ("train", "more")}, heldout_files=f"{tmp_path}/dev/*", **settings)
    for task in range(tasks):
        prepare.make_parts(corpus, vocabulary, task, tasks)
    prepared = prepare.join(corpus, vocabulary) if tasks else prepare.prepare(corpus, vocabulary)
    found = {split: set() for split in rows.SPLITS}
    for split in rows.SPLITS:
        for store in prepared.split(split).values():
            found[split] |= words_of(store[np.arange(len(store))], vocabulary)
    assert {split: " ".join(sorted(words)) for split, words in found.items()} == {"train": "five four one three two", "heldout": "eight seven six"}
    before = prepare.store_names(corpus, vocabulary)
    os.utime(tmp_path / "dev" / "0.txt", (1, 1))
    assert prepare.store_names(corpus, vocabulary) != before


def test_heldout_text_that_is_not_clear_is_named(vocabulary, tmp_path):
    settings = write_files(tmp_path, train=["one two\nthree"] * 6, dev=[" \n"])
    (tmp_path / "dev" / "link.txt").symlink_to(tmp_path / "train" / "3.txt")
    files = f"{tmp_path}/train/*"
    with pytest.raises(config.ConfigError, match="heldout_files.*heldout_fraction"):
        config.Corpus(text_files=files, heldout_files=files, heldout_fraction=0.1)
    with pytest.raises(config.ConfigError, match=r"dev/link\.txt: in files:.*Corpus\.heldout_files"):
        prepare.prepare(config.Corpus(text_files=files, heldout_files=f"{tmp_path}/dev/*", **settings), vocabulary)
    twice = {f"files:{files}": "all", f"files:{tmp_path}/train/2*": "all"}
    with pytest.raises(config.ConfigError, match=r"train/2\.txt: in files:.*in files:"):
        prepare.prepare(config.Corpus(sources=twice, heldout_fraction=0.1, **settings), vocabulary)
    with pytest.raises(config.ConfigError, match="Corpus.heldout_files"):
        prepare.prepare(config.Corpus(text_files=files, heldout_files=f"{tmp_path}/dev/0*", **settings), vocabulary)
    with pytest.raises(config.ConfigError, match="Corpus.heldout_fraction"):
        prepare.prepare(config.Corpus(text_files=files, heldout_fraction=0.0001, **settings), vocabulary)


def test_all_reads_each_row_of_every_source_once_an_epoch(vocabulary, tmp_path):
    many, few = english()[:-5], english()[-5:]
    write_corpus(tmp_path, many, few)
    sources_of = {f"files:{tmp_path}/{name}.txt": "all" for name in "ab"}
    whole = dataclasses.replace(write_corpus(tmp_path), text_files=None, sources=sources_of)
    alike = dataclasses.replace(whole, sources=dict.fromkeys(sources_of, 1.0))
    prepared = prepare.prepare(whole, vocabulary)
    counts = {source: len(store) for source, store in prepared.split("train").items()}
    total, (large, small) = sum(counts.values()), sorted(counts.values(), reverse=True)
    assert large > 5 * small > 10
    assert prepared.rates == pytest.approx({source: count / total for source, count in counts.items()})
    reader = batches.Batches(prepared.split("train"), prepared.rates, 1, seed=0)
    read = reader.locate(np.arange(2 * total))
    for source, count in enumerate(counts.values()):
        times = np.bincount(read.row[read.source == source], minlength=count)
        assert abs(times.sum() - 2 * count) <= 1 and set(times[times != 2]) <= {1, 3} and (times != 2).sum() <= 1
    assert prepare.hash_settings(whole, vocabulary) != prepare.hash_settings(alike, vocabulary)
    assert set(prepare.prepare(alike, vocabulary).rates.values()) == {0.5}
    assert prepare.find(whole, vocabulary).rates == prepared.rates


def test_rows_without_text_are_counted(vocabulary, tmp_path, caplog):
    records = [{"text": f"Document {number} of a few words."} for number in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [*records, {"text": None}, {"text": " "}]))
    (tmp_path / "b.csv").write_text("id,text\n1,\n2,two\n")
    corpus = config.Corpus(text_files=f"{tmp_path}/*.*", heldout_fraction=0.2, rows_dir=str(tmp_path / "rows"), processes=1)
    prepare.prepare(corpus, vocabulary)
    assert "3 rows without text" in caplog.text


# ---- drivers


def test_any_number_of_processes_makes_the_same_store(corpus, vocabulary, expected):
    # The parts are small in this process alone, so the children get them from the plan.
    prepare.prepare(dataclasses.replace(corpus, processes=2), vocabulary)
    assert files_of(corpus) == expected


def test_a_store_whose_copying_was_interrupted_is_made_again(corpus, vocabulary, expected):
    prepare.prepare(corpus, vocabulary)
    (manifest,) = pathlib.Path(corpus.rows_dir).glob("*/store.json")  # launch/prepare_data.sh copies it last
    manifest.unlink()
    prepare.prepare(corpus, vocabulary)
    assert files_of(corpus) == expected


@pytest.mark.parametrize("tasks", [2, 20])
def test_tasks_of_an_array_job_make_the_same_store(corpus, vocabulary, expected, tasks):
    """In any order, one of them twice; with more tasks than parts."""
    order = [*reversed(range(tasks)), 0]
    for task in order[:-2]:
        prepare.make_parts(corpus, vocabulary, task, tasks)
    with pytest.raises(config.ConfigError, match="--part"):
        prepare.join(corpus, vocabulary)
    for task in order[-2:]:
        prepare.make_parts(corpus, vocabulary, task, tasks)
    for _ in range(2):  # once more changes nothing
        prepare.join(corpus, vocabulary)
        assert files_of(corpus) == expected
    prepare.make_parts(corpus, vocabulary, 0, tasks)  # a late task
    assert files_of(corpus) == expected


SCRIPT = """
import json, sys, time
from maelm_jax import config
from maelm_jax.data import prepare, rows, sources, vocabularies
sources.PART_BYTES, rows.SHARD_ROWS = 8_000, 64
make_part = prepare.make_part
def slow(folder, number):
    make_part(folder, number)
    print(number, flush=True)
    time.sleep(float(sys.argv[3]))
prepare.make_part = slow
prepare.prepare(config.Corpus(**json.loads(sys.argv[1])), vocabularies.load(sys.argv[2]))
"""


def test_when_the_one_that_works_is_killed_those_that_wait_go_on(corpus, vocabulary, expected, tmp_path):
    """Each part is made once."""
    (tmp_path / "script.py").write_text(SCRIPT)
    settings, saved = json.dumps(dataclasses.asdict(corpus)), str(vocabulary.save(tmp_path / "vocabulary"))

    def start(pause: float) -> subprocess.Popen:
        line = [sys.executable, str(tmp_path / "script.py"), settings, saved, str(pause)]
        return subprocess.Popen(line, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    first = start(600)  # after its first part
    while not list(pathlib.Path(corpus.rows_dir).glob("*.parts/*.zip")):
        assert first.poll() is None
        time.sleep(0.01)
    others = [start(0) for _ in range(2)]
    for other in others:
        assert "waiting for it" in other.stderr.readline()
    first.send_signal(signal.SIGKILL)
    made = [number for process in (first, *others) for number in process.communicate(timeout=120)[0].split()]
    assert [other.returncode for other in others] == [0, 0] and files_of(corpus) == expected
    assert len(made) == len(set(made)) > 5


# ---- kills, full disks, damage


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("tasks", [0, 3])
@pytest.mark.parametrize("seed", range(3))
def test_preparations_killed_at_random_make_the_same_store(corpus, vocabulary, expected, monkeypatch, tasks, seed):
    """A preparation, or each task of an array job, ends before, in or after a random write."""
    rng, write = np.random.default_rng(seed), storage.atomic_file
    rename = pathlib.Path.rename

    @contextlib.contextmanager
    def killed_at_random(path):
        moment = rng.integers(0, 9)
        if moment == 0:
            raise Killed
        with write(path) as file:
            yield file
            if moment == 1:
                raise Killed
        if moment == 2:
            raise Killed

    def renamed_or_killed(path, target):
        moment = rng.integers(0, 4)
        if moment == 0:
            raise Killed
        rename(path, target)
        if moment == 1:
            raise Killed

    monkeypatch.setattr(storage, "atomic_file", killed_at_random)
    monkeypatch.setattr(pathlib.Path, "rename", renamed_or_killed)
    work = [functools.partial(prepare.make_parts, corpus, vocabulary, task, tasks) for task in range(tasks)]
    work.append(functools.partial(prepare.join if tasks else prepare.prepare, corpus, vocabulary))
    kills = 0
    while work:
        try:
            work[0]()
            work.pop(0)
        except Killed:
            kills += 1
    assert kills > 1 and files_of(corpus) == expected


def test_a_disk_that_is_full_at_the_join_is_told(corpus, vocabulary, expected, monkeypatch):
    def full(*_):
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(rows, "_write_array", full)
        with pytest.raises(config.RunError, match="No space left"):
            prepare.prepare(corpus, vocabulary)
    prepare.prepare(corpus, vocabulary)
    assert files_of(corpus) == expected


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_part_is_made_again(corpus, vocabulary, expected, damage):
    prepare.make_parts(corpus, vocabulary, 0, 1)
    path = sorted(parts_of(corpus).glob("*.zip"))[2]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes({"flip": content, "cut": content[:-100]}[damage])
    with pytest.raises(config.RunError, match=str(path)):
        prepare.join(corpus, vocabulary)
    prepare.prepare(corpus, vocabulary)
    assert files_of(corpus) == expected


@pytest.mark.parametrize("work", [prepare.prepare, prepare.join])
def test_text_that_changes_while_it_is_read_is_not_used(corpus, vocabulary, tmp_path, monkeypatch, work):
    if work is prepare.join:
        prepare.make_parts(corpus, vocabulary, 0, 1)
    original = prepare._write_plan

    def change(*args):
        original(*args)
        (tmp_path / "b.txt").write_text("Another text. ")

    monkeypatch.setattr(prepare, "_write_plan", change)
    with pytest.raises(config.ConfigError):
        work(corpus, vocabulary)
    assert not list((tmp_path / "rows").glob("*"))


# ---- bad files


def test_bad_files_end_the_command_or_are_left_out_as_a_whole(corpus, vocabulary, tmp_path, expected):
    """Of a file that breaks off after some documents no row is made. The finished parts are kept."""
    lines = [json.dumps({"text": f"Record {number} of a file."}) for number in range(30)]
    (tmp_path / "c.jsonl").write_text("\n".join([*lines, '{"text": "Rec']))
    (tmp_path / "d.txt").write_bytes(b"")
    (tmp_path / "e.train.gz").write_bytes(gzip.compress(" ".join(map(str, range(5000))).encode())[:-60])
    more = dataclasses.replace(corpus, text_files=f"{tmp_path}/*.[tj]*")
    with pytest.raises(readers.BadFile, match=r"c\.jsonl:31"):
        prepare.prepare(more, vocabulary)
    finished = {path: path.stat().st_mtime_ns for path in parts_of(more).glob("*.zip")}
    assert len(finished) > 3
    prepared = prepare.prepare(dataclasses.replace(more, skip_bad_files=True), vocabulary)
    (entry,) = prepared.record["sources"].values()
    manifest = rows.read_manifest(rows.path_of(more, entry["store"]))
    assert list(manifest["left_out"]) == [f"{tmp_path}/{name}" for name in ("c.jsonl", "d.txt", "e.train.gz")]
    assert manifest["fingerprint"] == json.loads(expected["store.json"])["fingerprint"]


def test_when_every_file_is_left_out_the_reason_is_shown(small_vocabulary, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "a text"}\n')
    corpus = config.Corpus(text_files=f"{tmp_path}/*.jsonl", rows_dir=str(tmp_path / "rows"), skip_bad_files=True)
    with pytest.raises(config.ConfigError, match=r"a\.jsonl:1"):
        prepare.prepare(corpus, small_vocabulary)


# ---- rows that were prepared before


def test_rows_copied_to_a_machine_without_the_text_are_used(corpus, vocabulary, tmp_path, caplog):
    here = prepared_rows(corpus, vocabulary)
    shutil.copytree(tmp_path / "rows", tmp_path / "copy")
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).unlink()
    copied = dataclasses.replace(corpus, rows_dir=str(tmp_path / "copy"))
    np.testing.assert_array_equal(prepared_rows(copied, vocabulary)["train"], here["train"])
    assert "prepared before" in caplog.text
    with pytest.raises(readers.Unavailable):
        prepare.prepare(dataclasses.replace(corpus, sequence_length=32), vocabulary)


def test_a_wrong_glob_of_heldout_files_claims_no_earlier_rows(corpus, tmp_path, caplog):
    (tmp_path / "a.dev").write_text("A document that is held out.")
    settings, right = config.Vocabulary(size=500), dataclasses.replace(corpus, heldout_fraction=None, heldout_files=f"{tmp_path}/*.dev")
    vocabulary_training.vocabulary_for(settings, right)
    caplog.clear()  # what a test of a command has made loggers say
    wrong = dataclasses.replace(right, heldout_files=f"{tmp_path}/*.test")
    with pytest.raises(readers.Unavailable, match=r"\*\.test"):
        prepare.prepare(wrong, vocabulary_training.vocabulary_for(settings, wrong))
    assert not caplog.text


def test_rows_on_a_read_only_disk_are_read(corpus, vocabulary, tmp_path, monkeypatch):
    before = prepared_rows(corpus, vocabulary)["train"]
    (next((tmp_path / "rows").glob("rows-*.json"))).unlink()

    def refuse(path, content):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(storage, "write", refuse)
    np.testing.assert_array_equal(prepared_rows(corpus, vocabulary)["train"], before)


def test_reading_rows_needs_neither_tensorflow_nor_seqio():
    heavy = "{'tensorflow', 'seqio', 'tensorflow_datasets', 'jax', 'pyarrow'}"
    code = f"import sys, maelm_jax.data.batches, maelm_jax.prepare; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "set()", done.stderr


def test_the_passes_are_those_that_batches_read():
    """A source gets at least one slot of the schedule, however few rows it has."""
    lengths = [8, 450, 1_000_000]
    stores = {str(length): {"train": unittest.mock.MagicMock(statistics={}, **{"__len__.return_value": length})} for length in lengths}
    prepared = prepare.Prepared(stores, {"sources": {str(length): {"rate": length} for length in lengths}})
    steps = 1_000_458 // 64
    told = [float(line.split(" are ")[1].split(" passes")[0]) for line in prepared.describe_passes(config.Run(batch_size=64, train_steps=steps))]
    schedule = batches.make_schedule(lengths)
    read = np.bincount(schedule.source[np.arange(64 * steps) % batches.PERIOD], minlength=3) / lengths
    np.testing.assert_allclose(told, read, rtol=0.05)
