"""Runs in this process: 32 examples learned by heart, and the best evaluation kept."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from testing import input_format, only_devices

from maelm_jax import config, gin_files
from maelm_jax.finetuning import batches, initial_encoder, predictor, session, tasks

SETTINGS = ["BATCH_SIZE=32", "Finetune.evaluations=1", "Model.dropout=0.0", "Model.attention_dropout=0.0"]
FEW = ["Run.log_every=60", "Run.checkpoint_every=1000", "Run.rank_every=0", "MAX_LENGTH=64"]


def experiment_of(pretrained, task, data_dir, *more) -> config.Experiment:
    bindings = [f"DATA_DIR={data_dir}", *SETTINGS, *FEW, *more]
    return gin_files.load([str(pretrained / "config.gin"), "finetune/base.gin", f"finetune/{task}.gin"], bindings)


@pytest.mark.parametrize(
    "task,best,epochs,devices",
    [
        ("rte", 1.0, 120, 8),
        pytest.param("stsb", 1.0, 400, 1, marks=pytest.mark.slow),
        pytest.param("squad2", 100.0, 120, 1, marks=pytest.mark.slow),
    ],
)
def test_32_examples_are_learned_by_heart(task, best, epochs, devices, pretrained, data_dir, tmp_path, monkeypatch):
    only_devices(monkeypatch, devices)
    monkeypatch.setattr(batches, "MOST_LENGTHS", 1)  # one shape to compile
    experiment = experiment_of(pretrained, task, data_dir, f"EPOCHS={epochs}", "LEARNING_RATE=5e-3")
    begin = initial_encoder.load(str(pretrained))
    data = tasks.load(task, experiment.finetune, experiment.corpus, input_format(begin.vocabulary, 64))
    tuner = session.FinetuneSession(experiment, data, begin.vocabulary)
    experiment = dataclasses.replace(experiment, run=dataclasses.replace(experiment.run, batch_size=32, seed=1))
    results = tuner.run(experiment, begin, str(tmp_path), record=lambda: None)
    assert results["score"] == pytest.approx(best, abs=1e-3 * best), results["best"]
    # What is kept is the best evaluation's model: loaded again, it gives the same score.
    model, params = predictor.restore(str(tmp_path), experiment, data.head, begin.vocabulary)
    again = data.dev[""].score(model.outputs(params, data.dev[""], tuner.sizes))
    assert again[data.main] == pytest.approx(results["score"], abs=1e-6)
    assert json.loads((tmp_path / "results.json").read_text())["best"]["step"] == int(next((tmp_path / "checkpoints").iterdir()).name)
    assert not (tmp_path / session.UNFINISHED).exists()


def test_what_is_kept_is_the_best_evaluation_not_the_last(one_device, pretrained, data_dir, tmp_path, monkeypatch):
    """Scores come from a script, so that the second of four evaluations is the best; the weights and predictions kept are its own."""
    monkeypatch.setattr(batches, "MOST_LENGTHS", 1)
    experiment = experiment_of(pretrained, "rte", data_dir, "EPOCHS=4", "LEARNING_RATE=5e-3")
    begin = initial_encoder.load(str(pretrained))
    data = tasks.load("rte", experiment.finetune, experiment.corpus, input_format(begin.vocabulary, 64))
    tuner, seen, script = session.FinetuneSession(experiment, data, begin.vocabulary), [], [0.5, 0.9, 0.1, 0.9]
    outputs = tuner.predictor.outputs

    def recorded(params, *more):
        seen.append((jax.device_get(params), outputs(params, *more)))
        return seen[-1][1]

    monkeypatch.setattr(tuner.predictor, "outputs", recorded)
    monkeypatch.setattr(tuner, "score", lambda outputs: {"accuracy": script[len(seen) - 1]})
    experiment = dataclasses.replace(experiment, run=dataclasses.replace(experiment.run, batch_size=32, seed=1))
    results = tuner.run(experiment, begin, str(tmp_path), record=lambda: None)
    assert (results["best"]["epoch"], results["last"]["epoch"], results["score"]) == (2, 4, 0.9)
    kept = predictor.restore(str(tmp_path), experiment, data.head, begin.vocabulary)[1]
    equal = [all(map(np.array_equal, jax.tree.leaves(kept), jax.tree.leaves(params))) for params, _ in seen]
    assert equal == [False, True, False, False], "and no fifth prediction for the file"
    for number, (_, outputs_then) in enumerate(seen):
        data.dev[""].write(outputs_then, tmp_path, str(number))
    written = [(tmp_path / f"{name}_probabilities.tsv").read_text() for name in ("predictions", *range(4))]
    assert [written[0] == other for other in written[1:]] == [False, True, False, False]
