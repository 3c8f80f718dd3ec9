"""An objective that the package does not know and with a head of its own trains, is evaluated, exported and analysed."""

import dataclasses
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from testing import call, steps_of, training

import maelm_jax
from maelm_jax import config
from maelm_jax.measuring import scoring
from maelm_jax.model import keys, layers, loss, maelm, masking
from maelm_jax.model.model_inputs import take_at_slots
from maelm_jax.pretraining import objective as objectives
from maelm_jax.training import run_rows

pytestmark = pytest.mark.long


class Network(nnx.Module):
    """An encoder, and a linear map to one number."""

    def __init__(self, model, vocabulary_size, special, rngs, target):
        self.encoder = maelm.Encoder(model, vocabulary_size, special.pad, rngs, target)
        self.own_head = layers.Linear(model.encoder.width, 1, model.encoder_settings, rngs)

    def __call__(self, inputs):
        segments = take_at_slots(inputs.segments, inputs.encoder_slots)
        states = self.encoder(inputs.encoder_ids, inputs.encoder_positions, segments)
        is_read = (segments > 0).astype(jnp.float32)[:, :, None]
        return self.own_head((states * is_read).sum(axis=1) / jnp.maximum(is_read.sum(axis=1), 1))[:, 0]


class RowLength(objectives.Objective):
    """Predicts the share of a row's slots that hold tokens, from the mean of the encoder's states."""

    description = "squared error of the share of slots that hold tokens"

    @staticmethod
    def define(*settings):
        *others, target = settings
        return maelm.define(lambda rngs: Network(*others, rngs, target))

    def loss(self, params, rows, row_numbers, key, train):
        settings = self.experiment.objective
        sizes = masking.budget(settings, rows.shape[1])
        inputs = masking.draw(keys.make_row_keys(key, row_numbers), rows, settings, sizes, self.special)
        predicted = maelm.apply(self.definition.graph, params)(inputs)
        share = (rows != self.special.pad).mean(axis=1)
        counts = (share > 0).astype(jnp.float32)  # rows of padding fill the last batch of an evaluation
        errors = jnp.square(predicted - share)
        return loss.Sums((errors * counts).sum(), ((errors < 0.01).astype(jnp.float32) * counts).sum(), counts.sum())


@pytest.fixture
def run(text, tmp_path, monkeypatch) -> pathlib.Path:
    """A workdir of that objective under the name "mlm", as a line of config.OBJECTIVES and a line in `CLASSES` would make it."""
    kind = config.ObjectiveKind("row lengths", "The encoder reads [MASK] at these", predicts_tokens=False)
    monkeypatch.setitem(config.OBJECTIVES, "mlm", kind)
    monkeypatch.setitem(objectives.CLASSES, "mlm", RowLength)
    short = ("TRAIN_STEPS=12", "Run.eval_every=12", "Run.rank_every=0", "Run.checkpoint_every=12", "Dropout.hidden=0.0")
    settings = (f"--gin.{setting}" for setting in short)
    done = call("train", *training(text, tmp_path / "run", "--gin_file=mlm.gin", *settings))
    assert done.status == 0 and "unigram" not in done.stdout, done.stderr
    lines = steps_of(tmp_path / "run")
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"] and "unigram" not in lines[-1]
    return tmp_path / "run"


def test_an_objective_that_predicts_no_tokens_has_no_causal_rows(monkeypatch):
    monkeypatch.setitem(config.OBJECTIVES, "mlm", config.ObjectiveKind("row lengths", "", predicts_tokens=False))
    with pytest.raises(config.ConfigError, match="Objective.causal_share"):
        config.Objective(name="mlm", causal_share=0.5)


def test_an_objective_is_measured_on_its_held_out_rows(run, text, tmp_path):
    [logged] = [line["eval_loss"] for line in steps_of(run) if "eval_loss" in line]
    done = call("evaluate", f"--models={run}", f"--output={tmp_path / 'scores.json'}")
    assert done.status == 0 and RowLength.description in done.stdout, done.stderr
    [score] = json.loads((tmp_path / "scores.json").read_text())["scores"]
    assert score["loss"] == pytest.approx(logged, rel=1e-5) and score["unigram"] is None
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"sentence_good": "a number", "sentence_bad": "number a"}\n')
    for other in (f"--text={text}/*.txt", f"--pairs={pairs}"):  # it predicts no tokens
        done = call("evaluate", f"--models={run}", other)
        assert done.status == 2 and str(run) in done.stderr, done.stderr


def test_the_encoder_of_an_objective_is_exported_embedded_and_reported(run, tmp_path):
    done = call("export", f"--workdir={run}", f"--output={tmp_path / 'out'}", "--no-verify")
    assert done.status == 0 and "own_head/kernel" in done.stdout, done.stderr
    card = (tmp_path / "out" / "README.md").read_text()
    assert "own_head/kernel" in card and "row lengths" in card
    texts = ["A class.", "A value is a number."]
    vectors = [maelm_jax.load_encoder(path).encode(texts) for path in (run, tmp_path / "out")]
    np.testing.assert_array_equal(*vectors)

    done = call("analyze", f"--runs={run}", f"--workdir={tmp_path / 'report'}", "--tokens=3000")
    assert done.status == 0, done.stderr
    [reported] = json.loads((tmp_path / "report" / "ranks.json").read_text())["runs"]
    assert reported["objective"] == "row lengths" and not reported["curve"]["losses"]


def test_its_loss_is_not_compared_with_that_of_predicted_tokens(run):
    model = scoring.open_model(str(run), [None], needs_rows=True)
    objective = dataclasses.replace(model.experiment.objective, name="between", mask_fraction=1.0)
    other = model._replace(experiment=dataclasses.replace(model.experiment, objective=objective, decoder=config.Decoder()))
    rows = scoring.heldout_rows(model)
    assert run_rows.describe_differences([model, model], [rows, rows], [0, 0]) == []
    assert len(run_rows.describe_differences([model, other], [rows, rows], [0, 0])) == 1
