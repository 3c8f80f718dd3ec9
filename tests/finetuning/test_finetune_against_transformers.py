"""Without randomness, fine-tuning here and with the Trainer of transformers is the same computation."""

import argparse
import importlib.util
import pathlib
import sys

import pytest
from testing import STOCK_ENCODERS, stock_folder

pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")
pytest.importorskip("transformers", reason="transformers is not installed: pip install -r requirements-torch.txt")
BENCHMARK = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "finetune_vs_transformers.py"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # the benchmark adds its own folder
    spec = importlib.util.spec_from_file_location(BENCHMARK.stem, BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore::Warning")  # of transformers and PyTorch
@pytest.mark.parametrize("stock_name", STOCK_ENCODERS)
def test_both_programs_reach_the_same_logits(benchmark, stock_name, tmp_path, vocabulary, data_dir):
    """Optimizer, schedule, loss, padding and weight decay are those of the Trainer, over several updates."""
    stock = stock_folder(tmp_path / "stock", stock_name, "AutoModel", vocabulary)
    args = argparse.Namespace(
        encoder=str(stock), data_dir=str(data_dir / "glue"), workdir=str(tmp_path / "runs"), epochs=1, batch_size=8, examples=30, length=48,
        learning_rate=1e-2,
    )  # fmt: skip
    agreement = benchmark.agreement(args, "rte")
    assert agreement.steps == 4 and agreement.same_labels == 100
    assert agreement.difference < 5e-5 * agreement.deviation
