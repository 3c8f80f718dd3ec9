"""The held-out rows of a run, and what keeps runs from being compared."""

import dataclasses
import types

import numpy as np
import pytest

from maelm_jax import config, gin_files
from maelm_jax.measuring import runs
from maelm_jax.training import run_rows
from maelm_jax.training.workdir import Workdir

VOCABULARY = types.SimpleNamespace(pad=1, fingerprint="0" * 64)


def opened(name: str, *bindings: str) -> runs.MeasuredRun:
    experiment = gin_files.load(["tiny.gin"], list(bindings))
    return runs.MeasuredRun(name, f"runs/{name}", experiment, experiment, VOCABULARY, 7, {})


def test_more_tokens_than_there_are_is_all_of_them():
    held_rows = np.arange(12).reshape(3, 4) + 2
    assert np.array_equal(runs.first_rows(held_rows, pad=1, tokens=10**30), held_rows)
    assert np.array_equal(runs.first_rows(held_rows, pad=1, tokens=5), held_rows[:2])
    assert np.array_equal(runs.first_rows(held_rows, pad=1, tokens=4), held_rows[:1])


@pytest.mark.parametrize("start", ["runs/tiny", "random:runs/tiny"])
def test_a_fine_tuned_run_is_measured_on_the_rows_of_the_run_it_began_from(monkeypatch, start):
    asked = []
    monkeypatch.setattr(run_rows, "open_recorded", lambda path, *_: asked.append(path))
    run = opened("seed1", "Optimizer.kind='adamw'")
    tuned = dataclasses.replace(run.experiment, finetune=config.Finetune(tasks="rte", init_from=start))
    with pytest.raises(config.ConfigError, match="Corpus.text_files"):
        runs.read_heldout_rows(run._replace(experiment=tuned), 1000)
    assert asked == [Workdir("runs/tiny")]


def test_other_rows_and_other_masks_are_noted():
    rows = np.arange(12).reshape(3, 4)
    a, b, c = opened("a"), opened("b"), opened("c", "Masking.heldout_rate=0.4")
    assert run_rows.describe_differences([a, b], [rows, rows.copy()], [0, 0]) == []
    (note,) = run_rows.describe_differences([a, b], [rows, rows + 1], [0, 0])
    assert "different rows" in note
    (note,) = run_rows.describe_differences([a, c], [rows, rows], [0, 0])
    assert "different masks" in note and "runs/a: 0.15 of the tokens" in note and "runs/c: 0.4 of the tokens" in note
    for model, seed in ((b, 1), (opened("d", "Masking.mask_special_tokens=True"), 0)):
        (note,) = run_rows.describe_differences([a, model], [rows, rows], [0, seed])
        assert "different masks" in note
    other = a._replace(vocabulary=types.SimpleNamespace(pad=1, fingerprint="1" * 64))
    (note,) = run_rows.describe_differences([a, other], [rows, rows], [0, 0])
    assert "different vocabularies" in note
    (note,) = runs.describe_other_masks([a._replace(experiment=c.experiment), b])
    assert "ranks of a " in note


def test_of_many_heldout_rows_only_some_are_read(monkeypatch):
    store = np.arange(40_000, dtype=np.int32).reshape(10_000, 4) + 5
    store[:2000, 1:] = 1  # padding: the first rows hold one token each
    counts = []

    def heldout(stores, rates, count):
        counts.append(count)
        return store[:count]

    recorded = types.SimpleNamespace(split=lambda name: {"a": store}, rates={"a": 1.0})
    monkeypatch.setattr(run_rows, "open_recorded", lambda *_: recorded)
    monkeypatch.setattr(runs.batches, "read_heldout", heldout)
    run = opened("a", "SEQUENCE_LENGTH=8", "Encoder.width=4", "Encoder.heads=1")
    assert len(runs.read_heldout_rows(run, 1000)) == 1000 and counts == [251, 502, 1004]
    assert len(runs.read_heldout_rows(run, 10**6)) == 10_000 and counts[-1] == 10_000


@pytest.mark.parametrize("requested,rows,visible,sets", [(5, 1000, 10**6, 5), (5, 3, 10**6, 3), (5, 1000, 800, 2), (5, 1000, 300, 1), (1, 1, 1, 1)])
def test_sets_are_bounded_by_the_data(requested, rows, visible, sets):
    assert runs.count_sets(requested, rows, visible, width=16) == sets


def test_code_that_a_run_names_is_not_run_by_an_analysis(tmp_path, monkeypatch):
    """The record of a run may be a stranger's."""
    (tmp_path / "a.txt").write_text("One text.")
    monkeypatch.setattr(run_rows, "open_recorded", lambda *_: None)
    run = opened("a", f"TEXT_FILES='{tmp_path}/a.txt'", f"Corpus.rows_dir='{tmp_path}/rows'", "Corpus.task_modules=('antigravity',)")
    with pytest.raises(config.ConfigError, match="Corpus.task_modules"):
        runs.read_heldout_rows(run, 10)
