"""Apart from random draws, fine-tuning here and with the Trainer of transformers is the same computation."""

import argparse
import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import ROOT, stock_folder

from maelm_jax import export
from maelm_jax.finetuning import heads
from maelm_jax.model import keys, layers, maelm, ops
from maelm_jax.training import checkpoint
from maelm_jax.training.workdir import Workdir

pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")
pytest.importorskip("transformers", reason="transformers is not installed: pip install -r requirements-torch.txt")
BENCHMARK = ROOT / "benchmarks" / "finetune_vs_transformers.py"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # the benchmark adds its own folder
    spec = importlib.util.spec_from_file_location(BENCHMARK.stem, BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def args(data_dir, tmp_path) -> argparse.Namespace:
    """Settings of the benchmark for 4 steps of 8 examples."""
    return argparse.Namespace(
        encoder=str(tmp_path / "stock"),
        data_dir=str(data_dir / "glue"),
        workdir=str(tmp_path / "runs"),
        epochs=1,
        seeds=1,
        batch_size=8,
        examples=30,
        length=48,
        learning_rate=1e-2,
    )


@pytest.mark.filterwarnings("ignore::Warning")  # of transformers and PyTorch
def test_both_programs_reach_the_same_logits(benchmark, args, tmp_path, vocabulary):
    """Optimizer, schedule, loss, padding and weight decay are those of the Trainer, over several updates."""
    stock_folder(tmp_path / "stock", "bert", "AutoModel", vocabulary)
    agreement = benchmark.agreement(args, "rte")
    assert agreement.steps == 4 and agreement.same_labels == 100
    assert agreement.difference < 5e-5 * agreement.deviation


@pytest.mark.filterwarnings("ignore::Warning")  # of transformers and PyTorch
@pytest.mark.parametrize("stock_name", ["bert", "electra"])
def test_both_programs_drop_at_the_same_places(benchmark, args, stock_name, tmp_path, vocabulary, monkeypatch):
    """PyTorch gets the masks that were drawn here, in the order in which it calls dropout."""
    import torch
    import transformers

    stock_folder(tmp_path / "stock", stock_name, "AutoModel", vocabulary)
    args.examples, args.learning_rate = 8, 1e-30
    benchmark.finetuned(args, "rte", tmp_path / "run", ["SEEDS=(1,)"])
    (results,) = (tmp_path / "run").rglob("results.json")
    export.main([f"--workdir={results.parent}", f"--output={tmp_path / 'exported'}", "--no-verify"])
    task = benchmark.load(args, "rte")
    model = task.planned.experiment.model
    batch = task.train_batches(1)[0]
    rows = len(batch.ids)

    restored = checkpoint.restore_params(Workdir(results.parent), task.session.model.shapes)
    params = jax.tree.map(jnp.asarray, jax.device_get(restored))
    vocabulary = task.planned.encoder.vocabulary
    graph, _ = heads.define(model, vocabulary.size, vocabulary.pad, task.session.task)
    scales, dropout = [], ops.dropout

    def recorded(x, rate, keys):
        if keys is not None:
            scales.append((rate, np.asarray(dropout(jnp.ones_like(x), rate, keys))))
        return dropout(x, rate, keys)

    row_keys = keys.make_row_keys(keys.make_key(0), jnp.arange(rows, dtype=jnp.uint32))
    with monkeypatch.context() as patch, jax.disable_jit():
        patch.setattr(ops, "dropout", recorded)
        patch.setattr(layers, "dropout", recorded)
        patch.setattr(jax, "checkpoint", lambda body, **options: body)  # it traces even without jit
        ours = maelm.apply(graph, params)(jax.tree.map(jnp.asarray, batch), row_keys)

    def replayed(x, p, training, inplace=False):
        if not training or not p:
            return x
        rate, scale = scales.pop(0)
        assert (p, tuple(x.shape)) == (rate, scale.shape)
        return x * torch.from_numpy(scale)

    stock_model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported", attn_implementation="eager")
    inputs = benchmark.transformers_trainer.inputs_of(model.encoder.token_types > 1, [batch])
    del inputs["labels"]
    monkeypatch.setattr(torch.nn.functional, "dropout", replayed)
    theirs = stock_model.train()(**inputs).logits.detach().numpy()
    assert not scales
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * theirs.std())
