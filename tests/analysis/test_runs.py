"""The held-out rows of a trained run, and what keeps runs from being compared."""

import dataclasses
import types

import numpy as np
import pytest

from maelm_jax import config, gin_files
from maelm_jax.analysis import runs
from maelm_jax.training import run_rows


def trained(name: str, *bindings: str, vocabulary=None) -> runs.TrainedRun:
    experiment = gin_files.load(["tiny.gin"], list(bindings))
    return runs.TrainedRun(name, f"runs/{name}", experiment, experiment, vocabulary, 7, {})


class Named:
    """A vocabulary, as far as a comparison reads it."""

    fingerprint = "0" * 64


def test_more_tokens_than_there_are_is_all_of_them():
    held_rows = np.arange(12).reshape(3, 4) + 2
    assert np.array_equal(runs.first_rows(held_rows, pad=1, tokens=10**30), held_rows)
    assert np.array_equal(runs.first_rows(held_rows, pad=1, tokens=5), held_rows[:2])
    assert np.array_equal(runs.first_rows(held_rows, pad=1, tokens=4), held_rows[:1])


@pytest.mark.parametrize("start", ["runs/tiny", "random:runs/tiny"])
def test_a_fine_tuned_run_is_measured_on_the_rows_of_the_run_it_began_from(monkeypatch, start):
    class Found(Exception):
        pass

    def open_recorded(workdir, corpus, vocabulary):
        raise Found(workdir)

    monkeypatch.setattr(run_rows, "open_recorded", open_recorded)
    run = trained("seed1", "Optimizer.kind='adamw'")
    tuned = dataclasses.replace(run.experiment, finetune=config.Finetune(tasks="rte", init_from=start))
    for experiment, workdir in ((run.experiment, "runs/seed1"), (tuned, "runs/tiny")):
        with pytest.raises(Found, match=f"^{workdir}$"):
            runs.heldout_rows(run._replace(experiment=experiment), 1000)


def test_other_rows_and_other_masks_are_noted():
    same = np.arange(12).reshape(3, 4)
    a, b = trained("a", vocabulary=Named()), trained("b", vocabulary=Named())
    assert runs.differences([a, b], [same, same.copy()], None) == []
    (note,) = runs.differences([a, b], [same, same + 1], None)
    assert note.startswith("the runs have different held-out rows (a: 3 rows, sha256 ") and note.endswith("; each is analysed on its own text")
    c = trained("c", "Masking.heldout_rate=0.4", vocabulary=Named())
    (note,) = runs.differences([a, c], [same, same], None)
    assert "different masks (a: 0.15 of the tokens by token, c: 0.4 of the tokens by token); losses and ranks" in note


def test_masks_of_losses_and_of_ranks_are_compared_apart():
    rows = np.arange(12).reshape(3, 4)
    a, b = trained("a", "Masking.heldout_rate=0.3", vocabulary=Named()), trained("b", "Masking.heldout_rate=0.3", vocabulary=Named())
    b = b._replace(training=trained("b", "Masking.heldout_rate=0.4").experiment)  # measured with another rate than evaluated
    assert runs.differences([a, b], [rows, rows], None) == [
        "the runs have different masks (a: 0.3 of the tokens by token, b: 0.4 of the tokens by token); losses do not compare"
    ]
    a, b = b, b._replace(name="c", experiment=b.training)
    (note,) = runs.differences([a, b], [rows, rows], None)
    assert note.endswith("(b: 0.3 of the tokens by token, c: 0.4 of the tokens by token); ranks of masked input do not compare")


def test_runs_of_one_name_are_told_apart():
    one, two, other = (trained("tiny")._replace(workdir=path) for path in ("runs/tiny", "../runs/tiny", "./runs/x/tiny"))
    names = [run.name for run in runs.with_unique_names([one, two, other])]
    assert len(set(names)) == 3 and all(name.endswith(("runs-tiny", "x-tiny")) for name in names)
    assert [run.name for run in runs.with_unique_names([one, trained("other")])] == ["tiny", "other"]


@pytest.mark.parametrize(
    "paths,names",
    [
        (("/x/b/a", "/x/c/a", "/x/b-a"), ["b-a-2", "c-a", "b-a"]),
        (("/x/a", "/x/a/b/a"), ["a", "a-b-a"]),
    ],
)
def test_a_path_that_names_a_run_is_no_other_name(paths, names):
    opened = [trained(path.rpartition("/")[2])._replace(workdir=path) for path in paths]
    assert [run.name for run in runs.with_unique_names(opened)] == names


def test_a_run_that_was_fine_tuned_from_a_folder_needs_text(tmp_path, monkeypatch):
    """Without it, base.gin's corpus would be downloaded."""
    run = trained("seed1")
    finetune = types.SimpleNamespace(init_from="exported")
    run = run._replace(experiment=types.SimpleNamespace(corpus=run.experiment.corpus, finetune=finetune))
    monkeypatch.setattr(run_rows, "open_recorded", lambda *_: None)
    with pytest.raises(config.ConfigError, match=r"fine-tuned from exported, which has no rows .* --gin.Corpus.text_files"):
        runs.heldout_rows(run, 10)


def test_of_many_heldout_rows_only_some_are_read(monkeypatch):
    store = np.arange(40_000, dtype=np.int32).reshape(10_000, 4) + 5
    store[:2000, 1:] = 1  # padding: the first rows hold one token each
    counts = []

    def heldout(stores, rates, count):
        counts.append(count)
        return store[:count]

    recorded = types.SimpleNamespace(split=lambda name: {"a": store}, rates={"a": 1.0})
    monkeypatch.setattr(run_rows, "open_recorded", lambda *_: recorded)
    monkeypatch.setattr(runs.batches, "heldout", heldout)
    monkeypatch.setattr(runs, "check_enough", lambda *_: None)
    run = trained("a", "SEQUENCE_LENGTH=8", vocabulary=types.SimpleNamespace(pad=1))
    assert len(runs.heldout_rows(run, 1000)) == 1000 and counts == [251, 502, 1004]
    assert len(runs.heldout_rows(run, 10**6)) == 10_000 and counts[-1] == 10_000


def test_code_that_a_run_names_is_not_run_by_an_analysis(tmp_path, monkeypatch):
    """The record of a run may be a stranger's."""
    (tmp_path / "a.txt").write_text("One text.")
    monkeypatch.setattr(run_rows, "open_recorded", lambda *_: None)
    for binding in ("Corpus.document_filter='os:system'", "Corpus.task_modules=('antigravity',)"):
        run = trained("a", f"TEXT_FILES='{tmp_path}/a.txt'", f"Corpus.rows_dir='{tmp_path}/rows'", binding)
        with pytest.raises(config.ConfigError, match="Corpus.document_filter or Corpus.task_modules"):
            runs.heldout_rows(run, 10)
