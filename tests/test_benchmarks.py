"""benchmarks/all.py reads its figures from what the benchmarks print; benchmarks/accelerator.py checks and times attention backends."""

import importlib.util
import json
import sys

import jax
import pytest
from testing import ROOT, experiment_of, model_of

from maelm_jax import config, gin_files

HERE = ROOT / "benchmarks"
STEP = """device                      1 x cpu, float32
step                        2296.1 ms (median of 6; 2201.0 to 2395.1); first 7.1 s
tokens/s                    1,784
share                       53.5%
peak memory                 1.38 GiB
"""
TORCH = """step          tokens/s     slowest     fastest   ours is
ours             1,921       1,900       1,950     1.00x
gathered         1,795       1,700       1,800     1.07x
hidden           1,887       1,800       1,900     1.02x
"""


def load(name: str):
    """The module of a benchmark."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_makes_one_table_of_what_was_printed_and_says_what_was_not_measured():
    module = load("all")
    commands, measures = module.plan(("tiny", "base"), "books/*.txt", with_torch=True)
    for command in commands.values():
        assert (HERE / command[0]).is_file()
        names = [flag.removeprefix("--gin_file=") for flag in command[1:] if flag.startswith("--gin_file=")]
        if names:
            gin_files.load(names)
    outputs = {"step-tiny": STEP, "torch-tiny-0.0": TORCH, "startup": "cold cache: 31.2 s to\nwarm cache: 12.5 s to\n"}
    text = module.table(commands, measures, outputs)
    figures = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| ")}
    assert figures["tiny: tokens/s"] == "1,784" and figures["tiny: peak memory"] == "1.38 GiB"
    assert figures["tiny: against the same step in PyTorch, attention dropout 0.0"] == "1.07x"
    assert figures["tiny: against RobertaModel and a mask, attention dropout 0.0"] == "1.02x"
    assert figures["tiny: against the same step in PyTorch, attention dropout 0.1"] == "not measured"
    assert "- torch-tiny-0.1: `benchmarks/against_torch.py --gin_file=benchmarks/shapes/tiny.gin --gin.Dropout.attention=0.1 " in text
    assert figures["the same, warm cache"] == "12.5" and figures["base: tokens/s"] == "not measured"
    assert "1 x cpu, float32" in text.splitlines()[0]
    without, _ = module.plan(("tiny",), None, with_torch=False)
    assert not any(name.startswith("torch") for name in without)
    assert "needs PyTorch" in module.table(without, measures, {})


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # the benchmark adds its own folder
    return load("accelerator")


@pytest.mark.usefixtures("one_device")
def test_accelerator_checks_every_backend_in_the_interpreter(accelerator, monkeypatch):
    monkeypatch.setattr(accelerator, "CASES", accelerator.CASES[2:])  # that with everything
    checks = accelerator.check_all(accelerator.Shape(1, 8, 2, 64), interpret=True)
    assert [(check.backend, check.agrees) for check in checks] == [("xla", True), ("pallas_tpu", True)]
    for check in checks:
        assert check.errors.keys() == set(accelerator.NAMES) and all(0.0 < error < 0.02 for error in check.errors.values())


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_accelerator_times_every_backend_in_the_interpreter(accelerator, tmp_path):
    model = model_of(layers=1, width=128, heads=2, feed_forward=64, decoder_layers=1, max_positions=16, dtype="bfloat16")
    tiny = experiment_of(
        corpus=config.Corpus(sequence_length=16),
        vocabulary=config.Vocabulary(size=300),
        model=model,
        run=config.Run(batch_size=2),
    )
    measurements = accelerator.measure_all({"tiny": tiny}, steps=1, end=float("inf"), interpret=True)
    assert [(one.model, one.backend, one.problem) for one in measurements] == [("tiny", name, "") for name in ("xla", "pallas_tpu")]
    late = accelerator.measure_all({"tiny": tiny}, steps=1, end=0.0, interpret=False)
    text = accelerator.write(tmp_path, [], measurements + late, accelerator.against_torch(1, 0.0))
    assert "| pallas_tpu |" in text and "not started: out of time" in text
    assert json.loads((tmp_path / "accelerator.json").read_text())["device"] == f"1 x {jax.devices()[0].device_kind}"


@pytest.mark.parametrize("name,layers", [("base", 12), ("large", 24)])
def test_accelerator_measures_the_sizes_of_the_paper(accelerator, name, layers):
    experiment = accelerator.experiment_of(name, rows=32)
    assert experiment.model.encoder.layers == layers and experiment.run.batch_size == {"base": 32, "large": 16}[name] * jax.device_count()
