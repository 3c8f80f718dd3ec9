"""What a run says at its start."""

import jax
import pytest
from testing import english, write_corpus

from maelm_jax import config
from maelm_jax.data import prepare, vocabulary_training
from maelm_jax.pretraining import summary


@pytest.mark.parametrize(("schedule", "warmup", "is_told"), [("linear", 100, True), ("wsd", 300, True), ("linear", 99, False), ("decay", 300, False)])
def test_a_warm_up_that_the_run_cuts_is_told(capsys, schedule, warmup, is_told):
    experiment = config.Experiment(
        optimizer=config.Optimizer(schedule=schedule, warmup_steps=warmup),
        run=config.Run(train_steps=100, continue_from="other" if schedule == "decay" else None),
    )
    summary.print_start(experiment, {}, jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]), config.SpecialIds.of_size(400), [])
    assert ("Optimizer.warmup_steps" in capsys.readouterr().out) == is_told


def test_numbers_of_words_that_a_run_does_not_reach_are_told_at_its_start(capsys, tmp_path):
    text = english()
    rows = prepare.prepare(write_corpus(tmp_path, text), vocabulary_training.train(text, config.Vocabulary(size=400)))
    for first, is_told in ((10**6, True), (10, False)):
        summary.print_passes(config.Run(batch_size=4, train_steps=3, keep_at_words=[first, 10**9]), rows, {})
        assert ("Run.keep_at_words" in capsys.readouterr().out) == is_told
