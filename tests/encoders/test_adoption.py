"""What a run takes over from an encoder: settings that do not fit, rows that it cannot read, and a head that is left out."""

import dataclasses
import json
import pathlib

import jax
import pytest

from maelm_jax import config, export, gin_files
from maelm_jax.encoders import adoption, source
from maelm_jax.model import maelm

ROOT = pathlib.Path(__file__).parents[2]


def test_a_workdir_of_another_shape_is_refused(workdirs):
    encoder_source = source.find(str(workdirs["mpnet"]))
    with pytest.raises(config.ConfigError, match="does not fit this model: Model.width is 32 there, 128 here"):
        adoption.adopt(gin_files.load(["tiny.gin"]), encoder_source)


@pytest.mark.parametrize(
    "setting,message",
    [
        ("decoder_attention='cross'", "Model.decoder_attention is 'self' there, 'cross' here"),
        ("decoder_causal=True", "Model.decoder_causal is False there, True here"),
    ],
)
def test_a_workdir_with_a_decoder_of_another_kind_is_refused(workdirs, setting, message):
    experiment = gin_files.load([str(workdirs["mpnet"] / "config.gin")], [f"Model.{setting}"])
    with pytest.raises(config.ConfigError, match=message):
        adoption.adopt(experiment, source.find(str(workdirs["mpnet"])))


def test_rows_that_the_encoder_cannot_read_are_refused_before_they_are_made():
    pretrained = str(ROOT / "pretrained")
    settings = ["TEXT_FILES='*.txt'", f"Run.init_from='{pretrained}'"]
    with pytest.raises(config.ConfigError, match="sequence_length 600 is longer than the 128 positions of .*pretrained: lower it"):
        adoption.adopt(gin_files.load(["continue.gin"], [*settings, "SEQUENCE_LENGTH=600"]), source.find(pretrained))
    other = next((ROOT / "tests/data").glob("workdir_of_*/run/vocabulary"))
    with pytest.raises(config.ConfigError, match="Vocabulary.file is another file than the vocabulary of"):
        adoption.adopt(gin_files.load(["continue.gin"], [*settings, f"Vocabulary.file='{other}'"]), source.find(pretrained))


def test_the_width_of_a_decoder_is_that_of_heads_of_the_encoder_that_is_taken_over():
    """Its heads have 32 values, those of base.gin 64."""
    pretrained = str(ROOT / "pretrained")
    settings = ["TEXT_FILES='*.txt'", f"Run.init_from='{pretrained}'"]
    fitting, other = (gin_files.load(["continue.gin"], [*settings, f"Model.decoder_width={width}"]) for width in (96, 80))
    assert adoption.adopt(fitting, source.find(pretrained)).experiment.model.decoder_width == 96
    with pytest.raises(config.ConfigError, match="decoder_width 80 is not a multiple of the encoder's head size 32"):
        adoption.adopt(other, source.find(pretrained))


def test_a_head_that_reads_another_width_is_left_out(workdirs):
    values = source.find(str(workdirs["mpnet-mlm"])).read(config.Model())
    model = gin_files.load([str(workdirs["mpnet-mlm"] / "config.gin")]).model
    for width, fresh in ((None, ["decoder"]), (64, ["decoder", "head"])):
        settings = dataclasses.replace(model, decoder_layers=1, decoder_width=width)
        _, init = maelm.create(settings, 600, config.SpecialIds.of_size(600))
        params = jax.jit(init)(jax.random.key(0))
        assert adoption.load_params(values, params, 600, "source").fresh == fresh


def test_an_export_for_pytorch_keeps_its_dropout_and_changes_none_of_a_run(make_workdir, tmp_path):
    rates = {"Model.dropout": 0.25, "Model.attention_dropout": 0.2, "Model.decoder_refills_mask": False}
    run = make_workdir(tmp_path / "run", rates)
    assert export.main([f"--workdir={run}", f"--output={tmp_path / 'out'}", "--format=pytorch", "--no-verify"]) == 0
    encoder_source = source.find(str(tmp_path / "out"))
    model = encoder_source.model(encoder_source.base)
    assert (model.dropout, model.attention_dropout, model.decoder_refills_mask) == (0.25, 0.2, False)
    before = gin_files.load(["tiny.gin"])
    after = adoption.adopt(before, encoder_source).experiment
    for name in ("dropout", "attention_dropout", "decoder_refills_mask"):
        assert getattr(after.model, name) == getattr(before.model, name) != getattr(model, name), name
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    for name in ("dropout", "attention_dropout", "decoder_refills_mask"):
        del content["model"][name]
    (tmp_path / "out" / "config.json").write_text(json.dumps(content))
    older = source.find(str(tmp_path / "out")).settings
    assert (older["dropout"], older["attention_dropout"], older["decoder_refills_mask"]) == (0.1, 0.1, False)
