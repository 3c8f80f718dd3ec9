"""What results.json tells of a run: which of its evaluations is the best."""

import json
import types

import jax.numpy as jnp
import numpy as np
import pytest

from maelm_jax import config
from maelm_jax.finetuning import glue, results, sentence_task, session
from maelm_jax.finetuning.task_data import TaskData


def task(name: str) -> TaskData:
    own = glue.TASKS[name]
    return TaskData(name, sentence_task.head_of(own), own.labels, own.metrics[0], None, {}, {}, [], own.selected_by)


@pytest.fixture
def workdir(tmp_path) -> str:
    """STS-B: of three evaluations the first has the highest Spearman, the second the highest mean with Pearson."""
    values = [(2, 0.90, 0.70), (4, 0.88, 0.80), (6, 0.80, 0.86)]
    lines = [{"step": step, "eval_spearman": spearman, "eval_pearson": pearson} for step, spearman, pearson in values]
    lines.insert(1, {"step": 3, "loss": 1.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(tmp_path)


def test_the_best_evaluation_of_stsb_has_the_highest_mean_of_both_correlations(workdir):
    found = results.evaluations(workdir, task("stsb"), 4)
    assert [line["step"] for line in found.lines] == [2, 4, 6]
    assert found.best == {"step": 4, "epoch": 1.0, "spearman": 0.88, "pearson": 0.80}


def test_of_equal_evaluations_the_first_is_the_best(tmp_path):
    lines = [{"step": step, "eval_accuracy": value} for step, value in ((1, 0.5), (2, 0.75), (3, 0.75))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert results.evaluations(str(tmp_path), task("rte"), 1).best["step"] == 2


@pytest.mark.parametrize("step,best,same", [(0, -np.inf, True), (4, 0.84, True), (4, 0.90, False), (6, 0.84, True), (2, 0.80, True)])
def test_an_unfinished_run_that_selected_by_other_metrics_is_refused(workdir, step, best, same):
    """Its state holds the parameters of the highest Spearman correlation."""
    state = types.SimpleNamespace(step=np.int32(step), best_score=jnp.float32(best))
    owner = types.SimpleNamespace(task=task("stsb"))
    if same:
        session.FinetuneSession._check_selection(owner, workdir, state)
        return
    with pytest.raises(config.ConfigError, match="selected by other metrics than pearson and spearman. Remove that folder"):
        session.FinetuneSession._check_selection(owner, workdir, state)
