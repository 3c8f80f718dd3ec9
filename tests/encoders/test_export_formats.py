"""What each format of an export refuses, with the format to use instead. No PyTorch needed."""

import dataclasses

import pytest

import maelm_jax
from maelm_jax import config, export, gin_files
from maelm_jax.encoders import export_formats, families, published


@pytest.mark.parametrize("format", ["pytorch", "reference"])
def test_the_modern_architecture_is_refused_with_the_format_to_use(format):
    model = gin_files.load(["modern_tiny.gin"]).model
    with pytest.raises(config.ConfigError, match="Use --format=huggingface|or use --format=huggingface") as error:
        export_formats.check(format, model, config.SpecialIds.of_size(1000))
    assert "\n" not in str(error.value)
    export_formats.check("huggingface", model, config.SpecialIds.of_size(1000))
    mixed = dataclasses.replace(model, biases=True)
    with pytest.raises(config.ConfigError, match="biases False, this model True. Use the settings of a family"):
        export_formats.check("huggingface", mixed, config.SpecialIds.of_size(1000))


def test_a_pair_has_types_only_where_the_encoder_has_a_table_of_them():
    counts = {count: families.pair_of(config.Model(family="bert", token_types=count)).has_types for count in (1, 2)}
    assert counts == {1: False, 2: True}
    assert not families.pair_of(config.Model(family="roberta", token_types=2)).has_types


@pytest.mark.parametrize("ids", [(1, 1000, 2, 0, 1001), (0, 1, 2, 3, 4)])
def test_special_ids_that_the_published_code_changes_are_refused(ids):
    published.check_special_ids(config.SpecialIds(0, 1, 2, 3, 1001, (True, False)), 1002, "vocabulary")
    with pytest.raises(config.ConfigError, match="vocabulary: its special ids are .*which the published code changes"):
        published.check_special_ids(config.SpecialIds(*ids), 1002, "vocabulary")


def test_token_types_are_refused_by_the_format_without_them():
    special = config.SpecialIds.of_size(1000)
    for count in (1, 2):
        model = config.Model(relative_buckets="reference", token_types=count)
        with pytest.raises(config.ConfigError, match=f"Model.token_types is {count}, and the published code has no token types"):
            export_formats.check("reference", model, special)
        export_formats.check("pytorch", model, special)


def test_an_encoder_without_a_language_model_head_is_refused_with_the_format_to_use(workdirs, tmp_path):
    """The huggingface folder of an MAE-LM run holds its encoder alone."""
    folder = tmp_path / "encoder"
    export.main([f"--workdir={workdirs['mpnet']}", f"--output={folder}", "--no-verify"])
    message = "encoder has no language-model head, which --format={} must hold. Use --format=huggingface"
    with pytest.raises(config.ConfigError, match=message.format("pytorch")):
        export.main([f"--workdir={folder}", f"--output={tmp_path / 'out'}", "--format=pytorch", "--no-verify"])
    assert [path.name for path in tmp_path.iterdir()] == ["encoder"]
    with pytest.raises(config.ConfigError, match=message.format("reference")):
        export_formats.check_heads("reference", maelm_jax.load_encoder(folder), str(folder))


@pytest.mark.parametrize("format,message", [("pytorch", "only the paper's decoder"), ("reference", "one of the ablations")])
def test_a_decoder_of_the_ablations_is_left_out_or_refused(format, message):
    special = config.SpecialIds.of_size(1000)
    usual = config.Model(relative_buckets="t5" if format == "pytorch" else "reference")
    export_formats.check(format, usual, special)
    for change in ({"decoder_causal": True}, {"decoder_attention": "self+cross"}, {"decoder_width": 512}):
        with pytest.raises(config.ConfigError, match=message):
            export_formats.check(format, dataclasses.replace(usual, **change), special)
    export_formats.check("huggingface", config.Model(decoder_causal=True), special)
