"""An objective that the package does not know trains, is evaluated, exported and analysed like its own."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import pytest
from testing import call, steps_of, training

from maelm_jax.model import keys, loss, maelm, masking
from maelm_jax.pretraining import objective as objectives
from maelm_jax.training import sharding

pytestmark = pytest.mark.long


@dataclasses.dataclass(frozen=True)
class RowLength(objectives.MaskedTokens):
    """Predicts the share of a row's slots that hold tokens, from the mean of the encoder's states."""

    has_head: bool = False
    description = "squared error of the share of slots that hold tokens"

    def init(self, key):
        params = super().init(key)
        return params | {"head": params["head"] | {"share": jnp.zeros((32, 1))}} if self.has_head else params

    def loss(self, params, rows, row_numbers, key, train):
        settings, head = self.experiment.objective, params["head"].copy()
        weights = head.pop("share", jnp.eye(32, 1))
        sizes = masking.budget(settings, rows.shape[1])
        inputs = masking.draw(keys.make_row_keys(key, row_numbers), rows, settings, sizes, self.special)
        states = maelm.apply(self.definition.graph, params | {"head": head}).encode(inputs)
        is_read = (inputs.encoder_slots < rows.shape[1]).astype(jnp.float32)
        mean = (states * is_read[:, :, None]).sum(axis=1) / jnp.maximum(is_read.sum(axis=1), 1)[:, None]
        share = (rows != self.special.pad).mean(axis=1)
        counts = (share > 0).astype(jnp.float32)  # rows of padding fill the last batch of an evaluation
        errors = jnp.square((mean @ weights)[:, 0] - share)
        return loss.Sums((errors * counts).sum(), ((errors < 0.01).astype(jnp.float32) * counts).sum(), counts.sum())


def train(text, folder, monkeypatch, has_head: bool):
    def create(experiment, vocabulary_size, special, target=None, strategy=None):
        definition = maelm.create(experiment.model, vocabulary_size, special, target)
        return RowLength(experiment, vocabulary_size, special, definition, target, strategy, has_head)

    monkeypatch.setattr(objectives, "create", create)
    short = ("TRAIN_STEPS=12", "Run.eval_every=12", "Run.rank_every=0", "Run.checkpoint_every=12", "Dropout.hidden=0.0")
    return call("train", *training(text, folder, "--gin_file=mlm.gin", *(f"--gin.{setting}" for setting in short)))


def test_an_objective_trains_is_evaluated_exported_and_reported(text, tmp_path, monkeypatch):
    done = train(text, tmp_path / "run", monkeypatch, has_head=False)
    assert done.status == 0, done.stderr
    lines = steps_of(tmp_path / "run")
    logged = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert len(logged) == 1 and lines[-1]["loss"] < 0.9 * lines[0]["loss"]

    done = call("evaluate", f"--models={tmp_path / 'run'}", f"--output={tmp_path / 'scores.json'}")
    assert done.status == 0 and RowLength.description in done.stdout, done.stderr
    [score] = json.loads((tmp_path / "scores.json").read_text())["scores"]
    assert score["loss"] == pytest.approx(logged[-1], rel=1e-5)

    done = call("export", f"--workdir={tmp_path / 'run'}", f"--output={tmp_path / 'out'}", "--no-verify")
    assert done.status == 0 and (tmp_path / "out" / "model.safetensors").exists(), done.stderr

    done = call("analyze", f"--runs={tmp_path / 'run'}", f"--workdir={tmp_path / 'report'}", "--tokens=3000")
    assert done.status == 0, done.stderr
    [reported] = json.loads((tmp_path / "report" / "ranks.json").read_text())["runs"]
    assert reported["curve"]["losses"] == pytest.approx(logged, rel=1e-5)


def test_a_head_of_its_own_is_trained_and_refused_by_name(text, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    done = train(text, folder, monkeypatch, has_head=True)
    assert done.status == 1 and "head/share" in done.stderr, "it has no rule of sharding yet"
    shutil.rmtree(folder, ignore_errors=True)
    monkeypatch.setattr(sharding, "RULES", (*sharding.RULES, ("head/share", sharding.PartitionSpec())))
    done = train(text, folder, monkeypatch, has_head=True)
    assert done.status == 0, done.stderr
    lines = steps_of(folder)
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    for argv in (
        ("export", f"--workdir={folder}", f"--output={tmp_path / 'out'}", "--no-verify"),
        ("evaluate", f"--models={folder}"),
        ("analyze", f"--runs={folder}", f"--workdir={tmp_path / 'report'}", "--tokens=3000"),
    ):
        done = call(*argv)
        assert done.status == 2 and "head/share" in done.stderr, done.stderr
