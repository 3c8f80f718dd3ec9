"""What a run records of its rows: it goes on only with those that it began with, unless told to."""

import contextlib
import dataclasses
import os
import shutil

import numpy as np
import pytest
from testing import call, english, steps_of, training, write_corpus

from maelm_jax import config
from maelm_jax.data import prepare, sources, vocabulary_training
from maelm_jax.measuring import runs
from maelm_jax.training import run_rows
from maelm_jax.training.workdir import Workdir


@pytest.fixture(scope="module")
def vocabulary():
    return vocabulary_training.train(english(), config.Vocabulary(size=400))


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path, english()[:40], english()[40:60])


@pytest.fixture
def workdir(tmp_path, corpus, vocabulary):
    """The folder of a run that stands at step 10."""
    folder = Workdir(tmp_path / "run")
    os.mkdir(folder)
    run_rows.write(folder, run_rows.choose_rows(folder, corpus, vocabulary), 0)
    return folder


def table(chosen):
    (splits,) = chosen.stores.values()
    return splits["train"][np.arange(len(splits["train"]))]


def change_text(tmp_path):
    (tmp_path / "b.txt").write_text("Another text, and a short one.")


def test_a_run_goes_on_with_its_rows_where_the_text_has_changed(workdir, corpus, vocabulary, tmp_path, caplog):
    before = table(run_rows.choose_rows(workdir, corpus, vocabulary))
    assert not caplog.records
    change_text(tmp_path)
    prepare.prepare(corpus, vocabulary)  # as a second run on the changed text does
    caplog.clear()
    np.testing.assert_array_equal(table(run_rows.choose_rows(workdir, corpus, vocabulary)), before)
    assert f"{tmp_path}/*.txt has changed" in caplog.text


def test_a_run_without_its_text_goes_on_with_its_rows(workdir, corpus, vocabulary, tmp_path):
    before = table(run_rows.choose_rows(workdir, corpus, vocabulary))
    for name in ("a.txt", "b.txt", "rows/rows-*.json"):
        for path in tmp_path.glob(name):
            path.unlink()
    np.testing.assert_array_equal(table(run_rows.choose_rows(workdir, corpus, vocabulary)), before)
    assert run_rows.open_recorded(workdir, corpus, vocabulary) is not None


def test_rows_that_are_gone_are_made_again_of_the_same_text(workdir, corpus, vocabulary, tmp_path):
    before = table(run_rows.choose_rows(workdir, corpus, vocabulary))
    shutil.rmtree(tmp_path / "rows")
    np.testing.assert_array_equal(table(run_rows.choose_rows(workdir, corpus, vocabulary)), before)


def test_text_that_was_only_copied_gives_the_same_rows(workdir, corpus, vocabulary, tmp_path):
    """The copy has other times, so its rows are made by `prepare`, or accepted; they are the same."""
    before, recorded = table(run_rows.choose_rows(workdir, corpus, vocabulary)), workdir.read_rows()
    shutil.rmtree(tmp_path / "rows")
    os.utime(tmp_path / "a.txt", (1, 1))
    with pytest.raises(config.ConfigError, match="--accept_new_data"):
        run_rows.choose_rows(workdir, corpus, vocabulary)
    accepted = run_rows.choose_rows(workdir, corpus, vocabulary, accept_new_data=True)
    run_rows.write(workdir, accepted, 10)
    assert run_rows.fingerprints(workdir.read_rows()) == run_rows.fingerprints(recorded)
    os.utime(tmp_path / "a.txt", (2, 2))
    shutil.rmtree(tmp_path / "rows")
    prepare.prepare(corpus, vocabulary)
    np.testing.assert_array_equal(table(run_rows.choose_rows(workdir, corpus, vocabulary)), before)


def test_other_rows_are_refused_before_anything_is_made(workdir, corpus, vocabulary, tmp_path):
    shutil.rmtree(tmp_path / "rows")
    change_text(tmp_path)
    recorded = workdir.read_rows()
    with pytest.raises(config.ConfigError, match="--accept_new_data") as caught:
        run_rows.choose_rows(workdir, corpus, vocabulary)
    assert str(workdir) in str(caught.value)
    assert workdir.read_rows() == recorded and not (tmp_path / "rows").exists()


def test_rows_of_the_same_name_that_hold_something_else_are_refused(workdir, corpus, vocabulary, tmp_path, monkeypatch):
    """As where another version of the tokenizer cuts the same text otherwise."""
    shutil.rmtree(tmp_path / "rows")
    original = sources.text_hash
    monkeypatch.setattr(sources, "text_hash", lambda text: original(text + "!"))
    with pytest.raises(config.ConfigError, match="the present text gives others"):
        run_rows.choose_rows(workdir, corpus, vocabulary)
    with pytest.raises(config.ConfigError, match="not the recorded rows"):
        run_rows.choose_rows(workdir, corpus, vocabulary)


def test_new_data_is_accepted_when_told_to(workdir, corpus, vocabulary, tmp_path, capsys):
    before = workdir.read_rows()
    change_text(tmp_path)
    chosen = run_rows.choose_rows(workdir, corpus, vocabulary, accept_new_data=True)
    run_rows.write(workdir, chosen, 10)
    assert "new data after step 10" in capsys.readouterr().out
    after = workdir.read_rows()
    assert after["sources"] == chosen.record["sources"] != before["sources"]
    for step, accept in ((20, True), (30, False)):
        run_rows.write(workdir, run_rows.choose_rows(workdir, corpus, vocabulary, accept), step)
        assert workdir.read_rows() == after, "nothing new"


@pytest.fixture
def mixture(corpus, vocabulary, tmp_path):
    """(workdir, settings of its two sources) of a run on a mixture."""
    rates = {f"files:{tmp_path}/a.txt": 0.75, f"files:{tmp_path}/b.txt": 0.25}
    mixed = dataclasses.replace(corpus, text_files=None, sources=rates)
    workdir = Workdir(tmp_path / "run")
    os.mkdir(workdir)
    run_rows.write(workdir, run_rows.choose_rows(workdir, mixed, vocabulary), 0)
    return workdir, mixed


def test_a_mixture_that_has_changed_is_mixed_as_recorded(mixture, vocabulary):
    workdir, mixed = mixture
    one, other = mixed.sources
    changed = dataclasses.replace(mixed, sources={one: 0.5, other: 0.5})
    assert run_rows.choose_rows(workdir, changed, vocabulary).rates == {one: 0.75, other: 0.25}
    accepted = run_rows.choose_rows(workdir, changed, vocabulary, accept_new_data=True)
    assert accepted.rates == {one: 0.5, other: 0.5}
    assert run_rows.open_recorded(workdir, changed, vocabulary) is None


def test_the_order_of_sources_does_not_depend_on_the_settings(mixture, vocabulary, tmp_path):
    """Batches depend on the order of the sources."""
    workdir, mixed = mixture
    one, other = mixed.sources
    backwards = dataclasses.replace(mixed, sources={other: 0.25, one: 0.75})
    for gone in (False, True):
        if gone:
            shutil.rmtree(tmp_path / "rows")
        for accept in (False, True):
            chosen = run_rows.choose_rows(workdir, backwards, vocabulary, accept_new_data=accept)
            assert list(chosen.stores) == list(chosen.rates) == [one, other]


def test_another_vocabulary_is_refused(workdir, corpus):
    other = vocabulary_training.train(english()[:80], config.Vocabulary(size=380))
    for accept in (False, True):
        with pytest.raises(config.ConfigError, match="is not the vocabulary that the run began with"):
            run_rows.choose_rows(workdir, corpus, other, accept)


def test_processes_but_the_first_open_what_it_prepared(workdir, corpus, vocabulary, tmp_path, monkeypatch):
    """Their text may have other times, as where each has a copy."""
    expected = table(run_rows.choose_rows(workdir, corpus, vocabulary))
    monkeypatch.setattr(run_rows.jax, "process_index", lambda: 1)
    monkeypatch.setattr(run_rows.distributed, "process_zero_first", contextlib.nullcontext)
    monkeypatch.setattr(run_rows.distributed, "check_equal", lambda *_: None)
    os.utime(tmp_path / "a.txt", (1, 1))
    before = sorted((tmp_path / "rows").iterdir())
    for folder in (workdir, Workdir(tmp_path / "other")):
        found = run_rows.choose_rows(folder, corpus, vocabulary)
        np.testing.assert_array_equal(table(found), expected)
    assert sorted((tmp_path / "rows").iterdir()) == before


def test_a_run_whose_text_has_changed_resumes_if_new_data_is_accepted(uninterrupted, text, tmp_path):
    """The command itself. A run that is refused is left as it was."""
    workdir = shutil.copytree(uninterrupted, tmp_path / "run", ignore=shutil.ignore_patterns("[1-4]?", "5", "60"))
    before, recorded = losses(workdir), Workdir(workdir).read_rows()
    settings = workdir / "config.gin"
    settings.write_text(settings.read_text().replace(str(text), str(tmp_path)))
    (tmp_path / "a.txt").write_text("\n\n".join(english()[::2]))

    def files():
        found = (path for path in workdir.rglob("*") if path.is_file() and path.name != "run.lock")
        return sorted((path, path.stat().st_mtime_ns) for path in found)

    unchanged = files()
    refused = call("train", *training(tmp_path, workdir))
    assert refused.status == 2 and "--accept_new_data" in refused.stderr and files() == unchanged
    other = call("train", *training(tmp_path, workdir, "--gin.SEED=5"))
    assert other.status == 2 and "Run.seed: 0 -> 5" in other.stderr and files() == unchanged
    accepted = call("train", *training(tmp_path, workdir, "--accept_new_data"))
    assert accepted.status == 0 and "new data after step 55" in accepted.stdout
    assert losses(workdir)[:55] == before[:55] and losses(workdir)[55:] != before[55:]
    heldout = runs.read_heldout_rows(runs.open_runs([str(workdir)], [], [])[0], 10**9)
    (splits,) = prepare.open_record(Workdir(workdir).read_rows(), config.Corpus(rows_dir=str(tmp_path / "rows"))).stores.values()
    assert Workdir(workdir).read_rows() != recorded and len(heldout) == len(splits["heldout"]), "analysed on the rows of the run"


def losses(workdir):
    return [line["loss"] for line in steps_of(workdir)]
