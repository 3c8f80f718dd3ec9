"""What fine-tuning starts from: the pretrained encoder, a copy each time."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import fresh_model

from maelm_jax import config, export
from maelm_jax.finetuning import grid, initial_encoder
from maelm_jax.model import maelm
from maelm_jax.training import checkpoint
from maelm_jax.training.workdir import Workdir

SPAN = grid.create_task("squad1", config.Finetune())


def test_the_encoder_is_the_pretrained_one(pretrained):
    begin = initial_encoder.load(str(pretrained))
    vocabulary = begin.vocabulary
    _, init = maelm.create(begin.source.experiment.model, vocabulary.size, vocabulary.special)
    saved = init(jax.random.key(5))["encoder"]  # as the fixture made it
    saved["token_embedding"] = saved["token_embedding"].at[vocabulary.size :].set(0.0)  # rows that only fill up the table are not kept
    fresh = fresh_model(pretrained, SPAN)[1]
    for _ in range(2):  # what is handed out is a copy each time
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), begin.load_into(fresh)["encoder"], saved)


def test_an_exported_folder_is_the_same_start(pretrained, tmp_path):
    export.main([f"--workdir={pretrained}", f"--output={tmp_path / 'stock'}", "--no-verify"])
    fresh = fresh_model(pretrained, SPAN)[1]
    here, there = initial_encoder.load(str(pretrained)), initial_encoder.load(str(tmp_path / "stock"))
    jax.tree.map(np.testing.assert_array_equal, *(one.load_into(fresh)["encoder"] for one in (here, there)))
    settings = [grid.settings_of("rte", one, [], []).model for one in (here, there)]
    assert [one.encoder.width for one in settings] == [32, 32] and settings[1].encoder.max_positions == 64


def test_the_pooler_of_a_fine_tuned_bert_is_kept(pretrained, tmp_path):
    """MNLI, then RTE: the first linear map of BERT's classifier is its pooler."""
    params = checkpoint.read_params(Workdir(pretrained), 3)
    dense = {"kernel": np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32), "bias": np.ones(32, np.float32)}
    encoder = fresh_model(pretrained, SPAN)[1]["encoder"]
    fresh = {"encoder": encoder, "classifier": {"dense": jax.tree.map(jnp.zeros_like, dense)}}
    for family, kept in (("bert", True), ("roberta", False)):
        folder = tmp_path / family
        shutil.copytree(pretrained, folder, ignore=shutil.ignore_patterns("checkpoints"))
        (folder / "config.gin").write_text((folder / "config.gin").read_text() + f"\nModel.family = {family!r}\n")
        saved = checkpoint.Checkpoints(Workdir(folder))
        saved.save(1, {"params": {"encoder": params["encoder"], "classifier": {"dense": dense}}})
        saved.close()
        pooler = initial_encoder.load(str(folder)).load_into(fresh)["classifier"]["dense"]
        jax.tree.map(np.testing.assert_array_equal, pooler, dense if kept else fresh["classifier"]["dense"])


def test_a_label_is_the_name_of_the_folder(tmp_path, monkeypatch):
    (tmp_path / "run" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run" / "x")
    for name, label in {".": "x", "..": "run", "random:.": "random-x", "runs/tiny/": "tiny"}.items():
        assert initial_encoder.InitialEncoder(name, None, name.startswith("random:")).label == label


def test_two_spellings_of_a_path_are_one_encoder(pretrained, monkeypatch):
    """A slash at the end comes from the shell's completion."""
    monkeypatch.chdir(pretrained.parent)
    monkeypatch.setenv("HOME", str(pretrained.parent))
    assert {initial_encoder.load(name).name for name in ("little", "./little/", ".//little")} == {"little"}
    assert {initial_encoder.load(name).name for name in ("random:little/", "random:./little")} == {"random:little"}
    assert initial_encoder.load("~/little/").name == str(pretrained)


def test_a_step_is_of_a_checkpoint_not_of_a_control(pretrained):
    assert initial_encoder.load(str(pretrained)).step == 3 and initial_encoder.load(f"random:{pretrained}", 4).step is None
    with pytest.raises(config.ConfigError, match="4"):
        initial_encoder.load(str(pretrained), 4)
