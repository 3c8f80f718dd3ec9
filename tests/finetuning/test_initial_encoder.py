"""What fine-tuning starts from: the pretrained encoder, a copy each time."""

import functools
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from testing import fresh_model

from maelm_jax import config, gin_files
from maelm_jax.finetuning import initial_encoder
from maelm_jax.finetuning.task_data import SPAN
from maelm_jax.model import maelm


def test_the_encoder_is_the_pretrained_one(pretrained):
    begin = initial_encoder.load(str(pretrained))
    vocabulary = begin.vocabulary
    special = config.SpecialIds(vocabulary.bos, vocabulary.pad, vocabulary.eos, vocabulary.unk, vocabulary.mask)
    saved = maelm.create(gin_files.load([begin.gin_file]).model, vocabulary.size, special)[1](jax.random.key(5))["encoder"]  # as the fixture made it
    saved["token_embedding"] = saved["token_embedding"].at[vocabulary.size :].set(0.0)  # rows that only fill up the table are not kept
    fresh = fresh_model(pretrained, SPAN)[1]["encoder"]
    for _ in range(2):  # what is handed out is a copy each time
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), begin.load_encoder(fresh), saved)
    jax.tree.map(np.testing.assert_array_equal, initial_encoder.load(f"random:{pretrained}").load_encoder(fresh), fresh)


def test_an_exported_folder_is_the_same_start(pretrained, tmp_path):
    from maelm_jax import export
    from maelm_jax.finetuning import experiments

    export.main([f"--workdir={pretrained}", f"--output={tmp_path / 'stock'}", "--no-verify"])
    fresh = fresh_model(pretrained, SPAN)[1]["encoder"]
    here, there = initial_encoder.load(str(pretrained)), initial_encoder.load(str(tmp_path / "stock"))
    jax.tree.map(np.testing.assert_array_equal, here.load_encoder(fresh), there.load_encoder(fresh))
    files = ["finetune/rte.gin"]
    settings = [experiments.of_encoder(one, files, [])["rte"].model for one in (here, there)]
    assert [one.width for one in settings] == [32, 32] and settings[1].max_positions == 64
    with pytest.raises(config.ConfigError, match="is a checkpoint without a vocabulary. Make a folder"):
        initial_encoder.load(str(next((pathlib.Path(__file__).parents[1] / "data/reference").glob("*.npz"))))


def test_a_row_of_token_types_is_added_to_the_positions_of_a_model_without_them():
    draw = np.random.default_rng(0)
    params = {
        "encoder/position_embedding": draw.normal(size=(4, 3)),
        "encoder/token_type_embedding": draw.normal(size=(1, 3)),
        "head/bias": np.ones(2),
    }
    changed = initial_encoder.without_token_types(params)
    expected = params["encoder/position_embedding"] + params["encoder/token_type_embedding"]
    assert changed.keys() == {"encoder/position_embedding", "head/bias"} and np.array_equal(changed["encoder/position_embedding"], expected)
    two = params | {"encoder/token_type_embedding": np.ones((2, 3))}
    assert initial_encoder.without_token_types(two) is two, "two types are another function"


def test_the_pooler_of_a_fine_tuned_bert_is_kept(pretrained, tmp_path):
    """MNLI, then RTE: the first linear map of BERT's classifier is its pooler."""
    from maelm_jax.training import checkpoint, checkpoint_params

    params = checkpoint_params.read_params(str(pretrained), 3)
    dense = {"kernel": np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32), "bias": np.ones(32, np.float32)}
    fresh = jax.tree.map(jnp.zeros_like, dense)
    for family, kept in (("bert", True), ("roberta", False)):
        folder = tmp_path / family
        shutil.copytree(pretrained, folder, ignore=shutil.ignore_patterns("checkpoints"))
        (folder / "config.gin").write_text((folder / "config.gin").read_text() + f"\nModel.family = {family!r}\n")
        saved = checkpoint.Checkpoints(str(folder))
        saved.save(1, {"params": {"encoder": params["encoder"], "classifier": {"dense": dense}}})
        saved.close()
        pooler = initial_encoder.load(str(folder)).load_pooler(fresh)
        jax.tree.map(np.testing.assert_array_equal, pooler, dense if kept else fresh)


def test_a_label_is_the_name_of_the_folder(tmp_path, monkeypatch):
    (tmp_path / "run" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run" / "x")
    names = {".": "x", "..": "run", "random:.": "random-x", "runs/tiny/": "tiny"}
    assert {name: initial_encoder.label_of(name) for name in names} == names


def test_a_workdir_without_an_encoder(pretrained, tmp_path):
    from maelm_jax.training import checkpoint

    shutil.copytree(pretrained, tmp_path / "other", ignore=shutil.ignore_patterns("checkpoints"))
    fresh = fresh_model(pretrained, SPAN)[1]["encoder"]
    with pytest.raises(config.ConfigError, match="no checkpoint"):
        initial_encoder.load(str(tmp_path / "other"))
    saved = checkpoint.Checkpoints(str(tmp_path / "other"))
    saved.save(1, {"params": {"decoder": {"x": jnp.zeros(3)}}})
    saved.close()
    with pytest.raises(config.ConfigError, match="contradicts the checkpoint: .* is missing in the checkpoint"):
        initial_encoder.load(str(tmp_path / "other")).load_encoder(fresh)
    with pytest.raises(config.ConfigError, match="neither a workdir"):
        initial_encoder.load(str(tmp_path))
