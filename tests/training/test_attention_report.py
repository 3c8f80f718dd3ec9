"""The line that says which attention backend each part of a model takes."""

import dataclasses

import pytest
from testing import experiment_of, mesh_of, model_of, objective_of

from maelm_jax import config
from maelm_jax.model.kernels import backends
from maelm_jax.training import attention_report


@pytest.fixture
def mesh():
    return mesh_of(1, 1, 1)


def experiment(**model) -> config.Experiment:
    return experiment_of(model=model_of(**model))


def test_parts_with_the_same_choice_are_named_together(mesh):
    assert attention_report.describe(experiment(), mesh) == "attention: xla in encoder, decoder (the platform is cpu)"
    line = attention_report.describe(experiment(decoder_attention="self+cross", attention_backend="pallas_tpu"), mesh)
    assert line == "attention: pallas_tpu in encoder, decoder, cross-attention (as set, in Pallas' interpreter: slow)"


def test_lengths_with_different_choices_are_named_apart(mesh, monkeypatch):
    assert attention_report.describe_encoder(experiment(), [36, 64], mesh).startswith("attention: xla in encoder of 36 slots, encoder of 64 slots (")
    monkeypatch.setattr(backends, "mesh_target", lambda mesh: backends.Target("tpu", "TPU v5 lite"))
    line = attention_report.describe_encoder(experiment(dtype="bfloat16"), [36, 64, 128], mesh)
    assert line.startswith("attention: xla in encoder of 36 slots (") and "; pallas_tpu in encoder of 64 slots, encoder of 128 slots (" in line


def test_local_layers_are_described_by_themselves(mesh, monkeypatch):
    monkeypatch.setattr(backends, "mesh_target", lambda mesh: backends.Target("tpu", "TPU v5 lite"))
    modern = experiment(positions="rotary", relative_buckets="none", local_attention=128, dtype="bfloat16")
    line = attention_report.describe(modern, mesh)
    assert line.startswith("attention: pallas_tpu in encoder, decoder (") and "; xla in local layers (" in line


def test_layers_that_are_no_loop_are_named(mesh, monkeypatch):
    assert attention_report.describe(experiment(scan_layers=False), mesh).endswith("; each layer compiled by itself")
    monkeypatch.setattr(backends, "mesh_target", lambda mesh: backends.Target("gpu", "NVIDIA H200", has_cudnn=True))
    assert attention_report.describe_encoder(experiment(), [64], mesh).endswith("; each layer compiled by itself")
    assert "compiled" not in attention_report.describe(experiment(scan_layers=True), mesh)


def test_evaluations_at_another_mask_rate_are_checked_and_described_too(mesh):
    """Masked slots only: 0.25 of 64 tokens are 16, and 0.15 are 10, which the kernel does not take."""
    model = {"decoder_attention": "cross", "decoder_slots": "masked", "attention_backend": "pallas_tpu", "width": 128, "heads": 4}
    whole = dataclasses.replace(experiment(**model), corpus=config.Corpus(sequence_length=64), objective=objective_of(rate=0.25))
    assert len(attention_report.describe_run(whole, mesh)) == 1
    other = dataclasses.replace(whole, objective=objective_of(rate=0.25, heldout_rate=0.15))
    with pytest.raises(config.ConfigError, match="10.*56"):
        attention_report.describe_run(other, mesh)
    by_choice = dataclasses.replace(other, compute=config.Compute())
    assert len(attention_report.describe_run(by_choice, mesh)) == 1


def test_evaluations_take_the_attention_of_no_dropout(mesh, monkeypatch):
    monkeypatch.setattr(backends, "mesh_target", lambda mesh: backends.Target("gpu", "NVIDIA H100 80GB HBM3", has_cudnn=True))
    training, evaluations = attention_report.describe_run(experiment(dtype="bfloat16", attention_dropout=0.1), mesh)
    assert "xla in encoder" in training and evaluations.startswith("in evaluations: ") and "cudnn in encoder" in evaluations
    assert len(attention_report.describe_run(experiment(dtype="bfloat16", attention_dropout=0.0), mesh)) == 1
