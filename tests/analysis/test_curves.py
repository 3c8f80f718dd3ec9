"""The hours of a report: steps times the median step time, whatever a single line says."""

import json

import pytest

from maelm_jax import gin_files
from maelm_jax.analysis import curves


def hours(tmp_path, lines, *bindings, last_step=1000):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    experiment = gin_files.load(["tiny.gin"], ["BATCH_SIZE=10", "SEQUENCE_LENGTH=20", *bindings])  # 200 tokens a step
    return curves.heldout_curve(str(tmp_path), experiment, last_step)["hours"]


def test_hours_are_steps_times_the_median_step_time(tmp_path):
    lines = [{"step": 10 * n, "tokens_per_second": 200.0, "step_seconds": 2.0, "eval_loss": 5.0, "unigram": 6.0} for n in range(1, 6)]
    lines[1] |= {"step_seconds": 90.0}  # the machine was busy
    assert hours(tmp_path, lines) == pytest.approx([10 * n * 2.0 / 3600 for n in range(1, 6)])


def test_evaluations_after_the_measured_step_are_left_out(tmp_path):
    lines = [{"step": n, "tokens_per_second": 200.0, "step_seconds": 3600.0, "eval_loss": 5.0, "unigram": 6.0} for n in (1, 2, 3)]
    assert hours(tmp_path, lines, last_step=2) == [1.0, 2.0] and hours(tmp_path, lines, last_step=0) == []


def test_each_plateau_of_the_mask_rate_has_its_own_step_time(tmp_path):
    lines = [{"step": n, "tokens_per_second": 1.0, "step_seconds": 1.0 if n <= 2 else 3.0, "eval_loss": 5.0, "unigram": 6.0} for n in range(1, 9)]
    expected = [(n if n <= 2 else 2 + 3 * (n - 2)) / 3600 for n in range(1, 9)]
    assert hours(tmp_path, lines, "TRAIN_STEPS=8", "Masking.rate_plateaus=((0, 0.3), (0.25, 0.15))") == pytest.approx(expected)


def test_a_line_stands_for_the_steps_since_the_line_before(tmp_path):
    steps = [(1, 9.0), (2, 9.0), (3, 9.0), (103, 1.0)]
    lines = [{"step": step, "tokens_per_second": 1.0, "step_seconds": seconds} for step, seconds in steps]
    assert hours(tmp_path, [*lines, {"step": 103, "eval_loss": 5.0, "unigram": 6.0}]) == pytest.approx([103 / 3600])


def test_workdirs_written_before_have_their_inflated_lines_outvoted(tmp_path):
    lines = [{"step": 10 * n, "tokens_per_second": 100.0} for n in range(1, 6)]
    lines[2] |= {"tokens_per_second": 2.55e6, "eval_loss": 5.0, "unigram": 6.0}  # the step after an evaluation
    assert hours(tmp_path, lines) == pytest.approx([30 * 2.0 / 3600])


def test_a_run_without_a_timed_step_has_no_hours(tmp_path):
    assert hours(tmp_path, [{"step": 1, "tokens_per_second": None, "eval_loss": 5.0, "unigram": 6.0}]) == [0.0]


def test_the_ranks_that_a_run_logged(tmp_path):
    lines = ['{"step": 0, "rank_plain_last": 9, "rank_real_last": 8}', '{"step": 1, "loss": 2.0}', '{"step": 4, "loss": 1.0, "rank_plain_last": 7}']
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert curves.rank_curve(str(tmp_path)) == {"steps": [0, 4], "ranks": [9, 7]}
