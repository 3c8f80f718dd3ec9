"""Workdirs as training leaves them, made in a second: a vocabulary of real text, random weights in which nothing is 0 or 1 by chance."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from testing import english, stock_folder

from maelm_jax import config, export, gin_files
from maelm_jax.data import vocabularies, vocabulary_training
from maelm_jax.model import maelm
from maelm_jax.training import checkpoint
from maelm_jax.training.workdir import Workdir

SETTINGS = {
    "SEQUENCE_LENGTH": 48,
    "TRAIN_STEPS": 12,
    "Vocabulary.size": 600,
    "Encoder.width": 32,
    "Encoder.heads": 4,
    "Encoder.feed_forward": 48,
    "Encoder.max_positions": 160,
    "Dropout.hidden": 0.1,
}
# Named for what it is exported to.
KINDS = {
    "mpnet": {},
    "mpnet-mlm": {"Objective.name": "mlm"},
    "roberta": {"Encoder.relative_buckets": "none", "Decoder.relative_bias": False},
    "modernbert": {
        "Encoder.relative_buckets": "none",
        "Encoder.positions": "rotary",
        "Encoder.normalization": "pre",
        "Encoder.feed_forward_gate": True,
        "Encoder.biases": False,
        "Decoder.relative_bias": False,
    },
    "roberta-mlm": {
        "Encoder.relative_buckets": "none",
        "Objective.name": "mlm",
    },
    "reference": {"Encoder.relative_buckets": "reference", "Encoder.num_buckets": 64, "Decoder.relative_bias": False, "Decoder.layers": 2},
}


@pytest.fixture(scope="session")
def vocabulary() -> vocabularies.Vocabulary:
    return vocabulary_training.train(english(), config.Vocabulary(size=600))


def random_params(init, seed: int) -> dict:
    """Parameters of which every one, biases and scales too, has a value of its own."""
    draw = np.random.default_rng(seed)

    def leaf(keys, shape):
        scale = str(keys[-1]) == "['scale']"
        return (draw.normal(size=shape.shape) * 0.15 + scale).astype(np.float32)

    return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(init, jax.random.key(0)))


def write_workdir(folder: pathlib.Path, vocabulary: vocabularies.Vocabulary, settings: dict, params: dict | None = None, steps=(12,)) -> pathlib.Path:
    """A workdir of a run of 12 steps, with checkpoints of these."""
    experiment = gin_files.load(["tiny.gin"], [f"{name}={value}" for name, value in (SETTINGS | settings).items()])
    folder.mkdir(parents=True)
    (folder / "config.gin").write_text(gin_files.render(experiment))
    vocabulary.save(folder / "vocabulary")
    lines = [{"step": 6, "loss": 6.5}, {"step": 12, "loss": 6.25, "eval_loss": 6.125, "eval_accuracy": 0.25}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, init = maelm.create(experiment.model, vocabulary.size, vocabulary.special)
    checkpoints = checkpoint.Checkpoints(Workdir(folder))
    for step in steps:
        checkpoints.save(step, {"params": params or random_params(init, step), "step": np.asarray(step)})
    checkpoints.wait()
    checkpoints.close()
    return folder


@pytest.fixture(scope="session")
def workdirs(tmp_path_factory, vocabulary) -> dict[str, pathlib.Path]:
    """{name of KINDS: workdir}. That of mpnet has a checkpoint of step 6 too."""
    root = tmp_path_factory.mktemp("workdirs")
    return {name: write_workdir(root / name, vocabulary, settings, steps=(6, 12) if name == "mpnet" else (12,)) for name, settings in KINDS.items()}


@pytest.fixture(scope="session")
def copy_export(workdirs, tmp_path_factory):
    """(name of KINDS, folder) -> `folder`, with the export of that workdir, which is made once."""
    root = tmp_path_factory.mktemp("exports")

    def copy(name: str, folder: pathlib.Path) -> pathlib.Path:
        if not (root / name).exists():
            assert export.main([f"--workdir={workdirs[name]}", f"--output={root / name}", "--no-verify"]) == 0
        return shutil.copytree(root / name, folder)

    return copy


@pytest.fixture(scope="session")
def copy_stock(vocabulary, tmp_path_factory):
    """(stock encoder, class, folder) -> `folder`, with what `testing.stock_folder` makes of these, which is made once."""
    root = tmp_path_factory.mktemp("stock")

    def copy(name: str, auto: str, folder: pathlib.Path) -> pathlib.Path:
        if not (root / name / auto).exists():
            stock_folder(root / name / auto, name, auto, vocabulary)
        return shutil.copytree(root / name / auto, folder)

    return copy


@pytest.fixture(scope="session")
def make_workdir(vocabulary):
    """(folder, settings, parameters or None, another vocabulary) -> a workdir."""
    return lambda folder, settings, params=None, vocabulary=vocabulary: write_workdir(folder, vocabulary, settings, params)
