"""The runner of Apache Beam: its flags and its errors. tests/beam.sh runs pipelines, in an environment of their own; CI does not run it."""

import dataclasses
import importlib.util
import pickle
import threading

import pytest

from maelm_jax import config, prepare
from maelm_jax.data import beam_runner, blocks, rows

WORKER = """Traceback (most recent call last):
  File "x.py", line 3, in f
maelm_jax.data.documents.BadFile: a.txt: not UTF-8 at byte 3; convert it [while running 'Rows']

During handling of the above exception, another one ended the bundle"""


def test_flags_become_options_of_beam():
    assert beam_runner.options(["--beam_runner=X", "--beam_a=b=--beam_c"]) == ["--runner=X", "--a=b=--beam_c"]
    with pytest.raises(config.ConfigError, match="--beam_a: give a value, as in --beam_a=VALUE"):
        beam_runner.options(["--beam_a"])


@pytest.mark.parametrize(
    "error,kind,message",
    [
        (RuntimeError(WORKER), config.ConfigError, "a.txt: not UTF-8 at byte 3; convert it"),
        (RuntimeError(WORKER.replace("data.documents.BadFile", "settings.RunError")), config.RunError, "a.txt: not UTF-8 at byte 3; convert it"),
        (config.ConfigError("a.txt: empty [while running 'Rows']"), config.ConfigError, "a.txt: empty"),
        (ValueError("no such\nrunner"), config.RunError, "the Beam pipeline failed (ValueError: no such runner)"),
    ],
)
def test_errors_of_a_pipeline_are_one_line(error, kind, message):
    told = beam_runner._error(error)
    assert type(told) is kind and str(told) == message


def worker_ends(then):
    """A pipeline of which a worker ends with an error in its thread, as Beam's do, before the pipeline calls `then`."""

    def ended():
        raise RuntimeError("Worker subprocess exited with return code 137")

    def pipeline():
        thread = threading.Thread(target=ended, name=beam_runner.WORKER_THREAD)
        thread.start()
        thread.join()
        then()

    return pipeline


def test_a_killed_worker_ends_the_command_instead_of_a_wait_for_ever(monkeypatch):
    exits, forever = [], threading.Event()
    monkeypatch.setattr(beam_runner, "_exit_without_workers", lambda: exits.append(True))
    monkeypatch.setattr(beam_runner, "PATIENCE", 0.2)
    hook = threading.excepthook
    with pytest.raises(config.RunError, match=r"a worker process of Beam was killed, .* it goes on where it stopped$"):
        beam_runner._call_watching_workers(worker_ends(forever.wait))
    assert exits and threading.excepthook is hook
    forever.set()


def test_workers_that_end_with_their_pipeline_change_nothing_of_its_outcome():
    def fail():
        raise config.ConfigError("a.txt: empty")

    beam_runner._call_watching_workers(worker_ends(lambda: None))
    for pipeline in (fail, worker_ends(fail)):
        with pytest.raises(config.ConfigError, match=r"a\.txt: empty"):
            beam_runner._call_watching_workers(pipeline)


@pytest.mark.parametrize(
    "flags,message",
    [
        (["--beam_runner=X"], "--beam_runner=X: give --runner=beam as well"),
        (["--runner=beam", "--hosts=2"], "give one of them"),
        (["--runner=beam", "--join"], "give one of them"),
        (["--runner=spark"], "--runner"),
    ],
)
def test_flags_that_do_not_fit_together_are_one_line(flags, message):
    with pytest.raises(config.ConfigError, match=message):
        prepare.main(["--gin_file=tiny.gin", *flags])


def test_the_files_of_all_sources_in_any_order_make_the_same_stores(small_corpus, small_vocabulary, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_CHARACTERS", 200)
    (tmp_path / "b.jsonl").write_text("\n".join(f'{{"text": "Record {number} says a few words."}}' for number in range(60)))
    (tmp_path / "c.txt").write_text("\n\n".join(f"Another text of the number {number}." for number in range(40)))
    both = {f"files:{tmp_path}/*.txt": 1.0, f"files:{tmp_path}/*.jsonl": 1.0}
    corpus = dataclasses.replace(small_corpus, text_files=None, sources=both)
    expected = [splits["train"].folder for splits in rows.prepare(corpus, small_vocabulary).values()]
    other = dataclasses.replace(corpus, rows_dir=str(tmp_path / "other"))
    jobs = list(beam_runner._jobs(other, small_vocabulary))
    assert len(jobs) == 3
    for job in [*reversed(jobs), jobs[0]]:  # an element may run twice
        beam_runner._write(pickle.loads(pickle.dumps(job)), small_vocabulary)
    rows.join(other, small_vocabulary)
    for folder in expected:
        assert (tmp_path / "other" / folder.name / "store.json").read_bytes() == (folder / "store.json").read_bytes()
    assert list(beam_runner._jobs(other, small_vocabulary)) == []


@pytest.mark.skipif(importlib.util.find_spec("apache_beam") is not None, reason="Apache Beam is installed")
def test_without_beam_its_requirements_are_named():
    with pytest.raises(config.ConfigError, match=r"--runner=beam needs Apache Beam \(.*requirements-beam.txt"):
        beam_runner.import_beam()
