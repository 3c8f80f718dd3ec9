"""benchmarks/all.py reads its figures from what the benchmarks print; benchmarks/accelerator.py checks and times attention backends.
benchmarks/device_window.sh does what is missing, within its time."""

import argparse
import hashlib
import importlib.util
import json
import subprocess
import sys
import tarfile
import time

import jax
import pytest
from testing import ROOT, english, environment, experiment_of, model_of, write_text

import maelm_jax
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


@pytest.fixture
def window(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    return load("device_window")


def test_a_stage_measures_only_what_has_no_figure_yet(window, tmp_path):
    made = []

    def maker(name, start):
        def make():
            made.append(name)
            return window.Arm(start, {"tokens": 8})

        return make

    def fail():
        raise MemoryError("too large")

    arms = {"a": maker("a", lambda: lambda: None), "b": maker("b", fail), "c": maker("c", lambda: lambda: None)}
    args = argparse.Namespace(output=tmp_path, toy=True, end=time.monotonic() + 100)
    window.measure_arms(args, "steps", {"a": arms["a"], "b": arms["b"]}, together=2)
    window.measure_arms(argparse.Namespace(**vars(args) | {"end": 0.0}), "peers", arms, together=1)
    results = window.read_results(tmp_path)
    assert results["steps"]["complete"] and not results["peers"]["complete"], "no time was left for the peers"
    first = results["steps"]["arms"]
    assert len(first["a"]["seconds"]) == window.TURNS and first["a"]["tokens_per_second"] > 0.0
    assert "median" not in first["b"] and first["b"]["problem"]
    window.measure_arms(args, "steps", arms, together=2)
    assert made == ["a", "b", "b", "c"] and window.read_results(tmp_path)["steps"]["arms"]["a"] == first["a"]


@pytest.mark.parametrize("left,passes", [(1e6, 10.0), (85.0 + 80.0 / 0.9, 8.0), (85.0 + 40.0 / 0.9, None)])
def test_an_encoder_trains_for_ten_passes_or_for_those_that_fit(window, tmp_path, left, passes):
    args = argparse.Namespace(output=tmp_path, toy=False, end=time.monotonic() + left)
    speed = {"steps_a_pass": 100.0, "step_seconds": 0.1, "compile_seconds": 15.0}
    steps = window.choose_steps(args, "mae_lm", speed)
    assert steps == (0 if passes is None else pytest.approx(100 * passes, abs=2))


def test_the_second_encoder_trains_as_many_steps_as_the_first(window, tmp_path):
    args = argparse.Namespace(output=tmp_path, toy=False, end=time.monotonic() + 1e6)
    speed = {"steps_a_pass": 100.0, "step_seconds": 0.1, "compile_seconds": 15.0}
    window.write_result(tmp_path, "mae_lm", {"steps": 730, "complete": True})
    assert window.choose_steps(args, "mlm", speed) == 730
    args.end = time.monotonic() + 130.0
    assert window.choose_steps(args, "mlm", speed) == 0, "fewer steps would not compare"


@pytest.mark.slow
def test_the_device_window_runs_every_stage_once(tmp_path):
    write_text(tmp_path / "text" / "a.txt.xz", "\n\n".join(english()[::2]))

    def run(number: int, *flags) -> subprocess.CompletedProcess:
        command = [ROOT / "benchmarks" / "device_window.sh", "--text=text/*.txt.xz", f"--output=out{number}"]
        command += [f"--work=work{number}", "--toy", "--minutes=60", *flags]
        variables = environment() | {"PYTHON": sys.executable}
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)

    done = run(1, "--encoders=1")
    assert done.returncode == 3, done.stdout  # the second encoder is for another call
    out = tmp_path / "out1"
    results = json.loads((out / "results.json").read_text())
    assert {name for name, entry in results.items() if entry["complete"]} == {"ceiling", "attention", "steps", "mae_lm", "peers"}
    assert all("median" in arm for arm in results["steps"]["arms"].values()), results["steps"]
    assert run(2, "--done=out1").returncode == 0
    results = json.loads((tmp_path / "out2" / "results.json").read_text()) | results
    assert results["mlm"]["complete"] and results["mlm"]["steps"] == results["mae_lm"]["steps"]
    for name in ("mae_lm", "mlm"):
        folder = tmp_path / ("out1" if name == "mae_lm" else "out2")
        archive = b"".join((folder / part).read_bytes() for part in results[name]["parts"])
        assert hashlib.sha256(archive).hexdigest() == results[name]["archive_sha256"]
        (tmp_path / "joined.tar.gz").write_bytes(archive)
        with tarfile.open(tmp_path / "joined.tar.gz") as file:
            file.extractall(tmp_path / name, filter="data")
        assert maelm_jax.load_encoder(str(tmp_path / name)).encode(["A sentence."]).shape[0] == 1
        assert (tmp_path / name / "run" / "metrics.jsonl").stat().st_size
    assert run(3, "--done=out2").returncode == 0
    assert json.loads((tmp_path / "out3" / "results.json").read_text()) == json.loads((tmp_path / "out2" / "results.json").read_text())
    assert not list((tmp_path / "work3").iterdir()), "nothing is done again"
