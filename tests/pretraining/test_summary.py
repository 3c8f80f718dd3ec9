"""What a run says at its start."""

import json
import time

import jax
import numpy as np
import pytest
from testing import english, write_corpus

from maelm_jax import config
from maelm_jax.data import prepare, vocabulary_training
from maelm_jax.pretraining import summary, unigram
from maelm_jax.training import kept_steps
from maelm_jax.training.workdir import Workdir


@pytest.mark.parametrize(("schedule", "warmup", "is_told"), [("linear", 100, True), ("wsd", 300, True), ("linear", 99, False), ("decay", 300, False)])
def test_a_warm_up_that_the_run_cuts_is_told(capsys, schedule, warmup, is_told):
    experiment = config.Experiment(
        optimizer=config.Optimizer(schedule=schedule, warmup_steps=warmup),
        run=config.Run(train_steps=100, continue_from="other" if schedule == "decay" else None),
    )
    summary.print_start(experiment, {}, jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]), config.SpecialIds.of_size(400), [])
    assert ("Optimizer.warmup_steps" in capsys.readouterr().out) == is_told


@pytest.mark.parametrize("place", ["gs://bucket/runs/a", "{}/runs/a"])
def test_the_loss_curve_is_named_where_the_user_finds_it(place, tmp_path, cache, capsys, monkeypatch):
    """On the first worker of a slice, the folder of a run in a bucket is a cache."""
    workdir = Workdir(place.format(tmp_path))
    monkeypatch.setattr(Workdir, "send", lambda workdir: None)
    workdir.folder.mkdir(parents=True, exist_ok=True)
    line = {"step": 10, "loss": 2.5, "accuracy": 0.5, "eval_loss": 2.25, "eval_accuracy": 0.5, "unigram": 3.0}
    workdir.metrics_file.write_text(json.dumps(line) + "\n")
    experiment = config.Experiment(run=config.Run(train_steps=10))
    summary.report_result(workdir, experiment, time.perf_counter(), unigram.Unigram(np.zeros(8), ()))
    assert workdir.loss_curve_file.is_file()
    assert f"{workdir}/loss_curve.png" in capsys.readouterr().out


def test_numbers_of_words_that_a_run_does_not_reach_are_told_at_its_start(capsys, tmp_path):
    text = english()
    rows = prepare.prepare(write_corpus(tmp_path, text), vocabulary_training.train(text, config.Vocabulary(size=400)))
    for first, is_told in ((10**6, True), (10, False)):
        run = config.Run(batch_size=4, train_steps=3, keep_at_words=[first, 10**9])
        summary.print_passes(run, rows, kept_steps.by_name(run, rows.words_per_row))
        assert ("Run.keep_at_words" in capsys.readouterr().out) == is_told
