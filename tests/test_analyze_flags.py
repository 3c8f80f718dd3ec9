"""Flags of analyze that no data can fulfil: bounded by the data, or refused in one line."""

import numpy as np
import pytest

from maelm_jax import analyze, config


@pytest.mark.parametrize("asked,rows,visible,sets", [
    (5, 1000, 1_000_000, 5), (5, 3, 1_000_000, 3), (5, 1000, 800, 2), (5, 1000, 300, 1), (1, 1, 1, 1),
    (10**30, 10**6, 10**9, analyze.MOST_SETS), (10**30, 7, 10**9, 7),
])  # fmt: skip
def test_sets_are_bounded_by_the_data(asked, rows, visible, sets):
    assert analyze.number_of_sets(asked, rows, visible, width=16) == sets


@pytest.mark.parametrize("flag,message", [
    ("--seed=-1", "--seed: must be"), (f"--seed={2**32}", "--seed: must be"), (f"--seed={10**400}", "--seed: must be"),
    ("--sets=0", "--sets: must be"), ("--tokens=-1", "--tokens: must be"), ("--tau=nan", "tau must lie in"),
    ("--tau=inf", "tau must lie in"), ("--tau=-1", "tau must lie in"), ("--workdir=", "is empty"),
    ("--workdir=/proc/version/report", "is a file"), ("--workdir=/proc/version", "is a file"),
])  # fmt: skip
def test_a_flag_out_of_range_is_one_line(flag, message):
    with pytest.raises(config.ConfigError, match=message) as error:
        analyze.main(["--runs=nowhere", flag])
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_more_tokens_than_there_are_is_all_of_them():
    held_rows = np.arange(12).reshape(3, 4) + 2
    assert np.array_equal(analyze.first_rows(held_rows, pad=1, tokens=10**30), held_rows)
    assert np.array_equal(analyze.first_rows(held_rows, pad=1, tokens=5), held_rows[:2])
    assert np.array_equal(analyze.first_rows(held_rows, pad=1, tokens=4), held_rows[:1])


def test_names_of_runs_that_are_nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(config.ConfigError, match="nowhere"):
        analyze.main(["--runs=nowhere", "--workdir=report"])
    assert list(tmp_path.iterdir()) == []

