"""The peak that MFU is compared with, by the name of the device."""

import types

import jax
import pytest

from maelm_jax import gin_files
from maelm_jax.model import maelm, masking
from maelm_jax.training import flops


def pretend(monkeypatch, kind: str, count: int = 4):
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind=kind)] * count)
    monkeypatch.setattr(jax, "device_count", lambda: count)


@pytest.mark.parametrize(
    "kind,peak",
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU v4", 275e12),
    ],
)
def test_a_known_accelerator_has_its_data_sheet_figure(monkeypatch, kind, peak):
    pretend(monkeypatch, kind)
    assert flops.peak_flops() == 4 * peak


@pytest.mark.parametrize("kind", ["NVIDIA GeForce RTX 4090", "NVIDIA RTX A1000 Laptop GPU", "AMD Instinct MI300X", "cpu"])
def test_the_peak_of_another_device_is_unknown(monkeypatch, kind):
    pretend(monkeypatch, kind)
    assert flops.peak_flops() is None


def test_the_flops_of_a_step_are_those_of_its_matrices():
    """6 x parameters x tokens, and the head's product with the table. tiny.gin: 2 + 1 layers of 128, feed-forward 512."""
    experiment = gin_files.load(["tiny.gin"], ["Masking.rate=0.25", "BATCH_SIZE=10"])
    slots = masking.budget(experiment.objective, 64)
    assert (
        experiment.model.encoder.width,
        experiment.model.encoder.feed_forward,
        experiment.model.encoder.layers,
        experiment.model.decoder.layers,
    ) == (128, 512, 2, 1)
    layer = 4 * 128 * 128 + 2 * 128 * 512
    terms = flops.flops_terms(experiment, 4096)
    assert terms["encoder matrices"] == 6 * 10 * slots.visible * 2 * layer
    assert terms["decoder matrices"] == 6 * 10 * 64 * layer
    assert terms["head"] == 6 * 10 * slots.masked * (128 * 128 + 128 * maelm.table_rows(4096))
    assert terms["encoder attention"] == 12 * 10 * 2 * 128 * slots.visible**2


def test_local_layers_count_their_window():
    """Four layers, two of them local: 0 and 3 see all 96 slots, 1 and 2 a window of 24."""
    settings = ["Encoder.layers=4", "Encoder.local_attention=24", "Masking.rate=0.25", "SEQUENCE_LENGTH=128"]
    experiment = gin_files.load(["modern_tiny.gin"], settings)
    assert masking.budget(experiment.objective, 128).visible == 96
    terms = flops.flops_terms(experiment, 4096)
    pairs = 2 * 96 * 96 + 2 * 96 * 24
    assert terms["encoder attention"] == 12 * experiment.run.batch_size * experiment.model.encoder.width * pairs
