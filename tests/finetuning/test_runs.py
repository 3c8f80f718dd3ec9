"""The runs of a command, and grids that earlier versions began."""

import dataclasses

import pytest

from maelm_jax import gin_files
from maelm_jax.finetuning import experiments, runs


def planned(**model) -> experiments.Planned:
    experiment = gin_files.load(["tiny.gin"], ["Model.relative_buckets=none", "Model.decoder_relative_bias=False"])
    changed = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, **model))
    return experiments.Planned("rte", None, "stock", changed)


@pytest.mark.parametrize("place", ["stock/rte/b16/seed1", "."])
def test_a_grid_of_an_earlier_version_goes_on_with_the_model_it_began_with(tmp_path, place):
    """Its config.gin has no family, and no setting for what the decoder reads. RoBERTa's token types are in its positions."""
    lines = gin_files.render(planned(token_types=0).experiment).splitlines()
    later = ("Model.family", "Model.token_types", "Model.decoder_refills_mask")
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    (tmp_path / place / "config.gin").write_text("\n".join(line for line in lines if not line.startswith(later)))
    model = runs._as_begun(planned(family="roberta", token_types=1), tmp_path).experiment.model
    assert (model.family, model.token_types, model.decoder_refills_mask) == (None, 0, False)


def test_other_grids_have_the_model_of_their_encoder(tmp_path):
    now = planned(family="roberta", token_types=1)
    assert runs._as_begun(now, tmp_path) is now
    (tmp_path / "config.gin").write_text(gin_files.render(now.experiment))
    assert runs._as_begun(now, tmp_path) is now
