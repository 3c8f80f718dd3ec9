"""Maps between an encoder here and an export account for every setting and every parameter, or refuse. No PyTorch needed."""

import ast
import dataclasses
import importlib.resources
import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies
from testing import SMALL_ENCODER, change_setting, in_memory, model_of, random_encoder

from maelm_jax import config
from maelm_jax.encoders import decoder_file, families, layouts, opened, read_back, weight_files
from maelm_jax.encoders import export as folders

BASES = {name: config.Encoder(**SMALL_ENCODER | family.fixed | {"family": name}) for name, family in families.FAMILIES.items()}
BASES["modernbert, local"] = dataclasses.replace(BASES["modernbert"], local_attention=8, global_every=3)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("field", config.field_names(config.Encoder))
def test_a_family_carries_a_setting_or_refuses_it(base, field):
    special = config.SpecialIds.of_size(600)
    try:
        changed = change_setting(BASES[base], field)
        family = families.require_stock_family(changed, special)
    except config.ConfigError:
        return
    stored = family.as_stored(changed)
    content = json.loads(json.dumps(family.make_entries(config.Model(stored), special, 600)))
    assert families.read_family(content, "folder") is family
    read = config.Encoder(**family.read_settings(content))
    assert read.canonical == stored
    if field != "family" and stored == family.as_stored(BASES[base]):
        assert field in config.idle_names(config.Encoder, dataclasses.asdict(changed)), "it was dropped"


def test_a_setting_that_a_family_neither_carries_nor_fixes_is_refused():
    family = dataclasses.replace(families.FAMILIES["bert"], fields={"layers": "num_hidden_layers"})
    misfits = family.find_misfits(BASES["bert"], config.SpecialIds.of_size(600))
    assert any("Encoder.width" in misfit for misfit in misfits)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_an_export_with_a_decoder_names_a_class_that_travels_with_it(vocabulary, name):
    """transformers finds it by its name in the code of the folder."""
    encoder = random_encoder(config.Model(BASES[name], config.Decoder(layers=1)), vocabulary)
    reference = decoder_file.make_entries(encoder)["auto_map"]["AutoModelForMaskedLM"]
    module, class_name = reference.split(".")
    code = importlib.resources.files("maelm_jax.encoders").joinpath(f"{module}.py").read_text()
    assert class_name in {node.name for node in ast.parse(code).body if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize("field", config.field_names(config.Dropout))
@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_family_carries_dropout(name, field):
    model = config.Model(BASES[name], dropout=config.Dropout(**{field: 0.25}))
    content = families.FAMILIES[name].make_entries(model, config.SpecialIds.of_size(600), 600)
    assert families.FAMILIES[name].read_dropout(content) == model.dropout


# Any model.

ENCODERS = strategies.fixed_dictionaries(
    {
        "layers": strategies.integers(1, 4),
        "heads": strategies.sampled_from((1, 2, 4)),
        "feed_forward": strategies.integers(1, 9),
        "rotary_theta": strategies.floats(2, 1e6),
        "max_positions": strategies.integers(1, 20),
        "layer_norm_eps": strategies.floats(1e-12, 1e-3),
        "global_every": strategies.integers(1, 5),
        "local_rotary_theta": strategies.floats(2, 1e6),
    },
    optional={
        "num_buckets": strategies.sampled_from((8, 32, 64)),
        "max_distance": strategies.integers(33, 200),
        "local_attention": strategies.integers(0, 9),
        "token_types": strategies.integers(0, 3),
        "relative_buckets": strategies.sampled_from(("t5", "reference", "none")),
        "biases": strategies.booleans(),
        "hidden_act": strategies.sampled_from(("gelu", "gelu_new")),
    },
)
DECODERS = strategies.builds(
    config.Decoder,
    layers=strategies.integers(1, 2),
    width=strategies.sampled_from((None, 8)),
    attention=strategies.sampled_from(("self", "self+cross", "cross")),
    refills_mask=strategies.booleans(),
    relative_bias=strategies.booleans(),
)


@hypothesis.given(
    family=strategies.sampled_from(list(families.FAMILIES.values())),
    is_named=strategies.booleans(),
    values=ENCODERS,
    head_size=strategies.sampled_from((2, 4)),
    decoder=strategies.none() | DECODERS,
    delta=strategies.floats(0, 1),
    is_renumbered=strategies.booleans(),
    is_of_family=strategies.sampled_from((True, True, True, False)),
)
def test_an_import_of_an_export_is_the_identity_or_the_export_is_refused(
    vocabulary, tmp_path_factory, family, is_named, values, head_size, decoder, delta, is_renumbered, is_of_family
):
    values = {"relative_buckets": "none", "width": values["heads"] * head_size, **family.fixed, **values}
    if is_of_family:
        values |= family.fixed
        if decoder and values["positions"] == "rotary":
            decoder = dataclasses.replace(decoder, relative_bias=False)
    try:
        model = config.Model(config.Encoder(**values, family=family.model_type if is_named else None), decoder)
        objective = config.Objective.between(delta, config.Masking(renumber=is_renumbered)) if decoder else config.Objective(name="mlm")
        ours = random_encoder(model, vocabulary).replace(objective=objective)
        folders.check_format("huggingface", ours)
        stock = folders.make_stock_model(ours)
    except config.ConfigError:
        hypothesis.event("refused")
        return
    hypothesis.event(stock.class_name)
    content = json.loads(json.dumps(stock.content))
    read_family = families.read_family(content, "folder")
    own = config.Encoder(**read_family.read_settings(content))
    assert own.canonical == read_family.as_stored(model.encoder)
    shapes = {path: value.shape for path, value in random_encoder(config.Model(own), vocabulary).params.items()}
    params = read_family.import_params(stock.tensors, own, vocabulary.pad, shapes, "folder")
    if decoder:
        folder = tmp_path_factory.mktemp("decoder")
        decoder_file.write(folder, ours, "float32")
        read = decoder_file.read_settings(folder, content, own.width)
        assert read.decoder == decoder.canonical(own) and read.decoder.stack(own).canonical == decoder.stack(model.encoder).canonical
        assert read.objective.visible_mask_fraction == delta and read.objective.masking.renumber == is_renumbered
        params |= weight_files.read_safetensors(folder / decoder_file.FILE)
    types = params.get(layouts.TYPE_TABLE)
    if layouts.TYPE_TABLE not in ours.params and types is not None:
        assert not params.pop(layouts.TYPE_TABLE).any()
    assert params.keys() == ours.params.keys()
    assert all(np.array_equal(params[path], value) for path, value in ours.params.items())


# A parameter that a format does not have.


def with_parameter(model: config.Model, vocabulary, path: str) -> opened.OpenedModel:
    """An encoder with a parameter that no layer has."""
    usual = random_encoder(model, vocabulary)
    shape = (model.encoder.layers, 16) if "/blocks/" in path else (16,)
    return usual.replace(params=usual.params | {path: np.full(shape, 0.5, np.float32)})


@pytest.mark.parametrize("path", ["encoder/blocks/attention/gain", "encoder/gain", "decoder/blocks/attention/gain", "head/gain", "pooler/bias"])
@pytest.mark.parametrize("base", ["mpnet", "modernbert", "bert"])
def test_a_parameter_without_a_tensor_is_refused_by_name(vocabulary, tmp_path, base, path):
    """Also by what saves without a verification."""
    for decoder in (config.Decoder(layers=1), None):
        encoder = with_parameter(config.Model(BASES[base], decoder), vocabulary, path)
        with pytest.raises(config.ConfigError) as error:
            encoder.save_pretrained(tmp_path / "out")
        assert path in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_of_a_layer_that_has_no_tensor_is_refused(vocabulary):
    family, ours = families.FAMILIES["mpnet"], random_encoder(config.Model(BASES["mpnet"]), vocabulary)
    params = {path: value for path, value in ours.params.items() if path.startswith("encoder/")}
    mappings = family.encoder_mappings(ours.model.encoder, vocabulary.pad, "")
    tensors = layouts.export_tensors(params, mappings, vocabulary.size)
    shapes = {path: value.shape for path, value in params.items()}
    lost = next(mapping for mapping in mappings if mapping.layer == 2)
    fewer = [mapping for mapping in mappings if mapping != lost]
    for convert in (
        lambda: layouts.export_tensors(params, fewer, vocabulary.size),
        lambda: layouts.import_tensors({name: x for name, x in tensors.items() if name != lost.name}, fewer, shapes, "folder", {}),
    ):
        with pytest.raises(config.ConfigError) as error:
            convert()
        assert lost.path in str(error.value) and "layer 2" in str(error.value)


def test_an_import_refuses_a_model_with_a_parameter_that_the_format_does_not_have(vocabulary):
    family, ours = families.FAMILIES["bert"], random_encoder(config.Model(BASES["bert"]), vocabulary)
    stock = folders.make_stock_model(ours)
    shapes = {path: value.shape for path, value in ours.params.items()} | {"encoder/blocks/attention/gain": (4, 16), layouts.TYPE_TABLE: (1, 16)}
    own = family.as_stored(ours.model.encoder)
    with pytest.raises(config.ConfigError) as error:
        family.import_params(stock.tensors, own, vocabulary.pad, shapes, "folder")
    assert "encoder/blocks/attention/gain" in str(error.value)


def test_a_head_of_the_objective_is_beside_the_model(vocabulary, tmp_path, capsys):
    """It changes no vector and no prediction, and exports leave it out by its name."""
    ours = random_encoder(config.Model(BASES["roberta"], config.Decoder(layers=1)), vocabulary)
    with_head = ours.replace(params=ours.params | {"own_head/kernel": np.ones((16, 1), np.float32)})
    assert with_head.fill_mask(["A [MASK]."]) == ours.fill_mask(["A [MASK]."])
    np.testing.assert_array_equal(with_head.encode(["A class."]), ours.encode(["A class."]))
    with_head.save_pretrained(tmp_path / "out")
    assert "own_head/kernel" in capsys.readouterr().out
    assert opened.load_model(tmp_path / "out").fill_mask(["A [MASK]."]) == ours.fill_mask(["A [MASK]."])


def test_a_token_head_that_predicts_no_tokens_is_left_out(vocabulary, tmp_path, monkeypatch):
    """Whoever scores the export would get predictions of a head that was not trained."""
    monkeypatch.setitem(config.OBJECTIVES, "mlm", config.ObjectiveKind("row lengths", "", predicts_tokens=False))
    ours = random_encoder(config.Model(BASES["roberta"]), vocabulary).replace(objective=config.Objective(name="mlm"))
    assert any(path.startswith("head/") for path in ours.params)
    ours.save_pretrained(tmp_path / "out")
    monkeypatch.undo()
    found = opened.load_model(tmp_path / "out")
    assert not any(path.startswith("head/") for path in found.params)
    with pytest.raises(config.ConfigError, match="head"):
        found.fill_mask(["A [MASK]."])


# What is written is read back.


@pytest.fixture
def written(vocabulary, tmp_path):
    """An encoder with a decoder, and its export."""
    ours = random_encoder(config.Model(BASES["roberta"], config.Decoder(layers=1)), vocabulary)
    ours.save_pretrained(tmp_path / "out")
    return ours, tmp_path / "out"


def refuse_read_back(ours: opened.OpenedModel, folder) -> str:
    with pytest.raises((config.RunError, config.ConfigError)) as error:
        read_back.check("huggingface", opened.find_model(folder), ours, "float32")
    return str(error.value)


def test_a_folder_that_does_not_hold_the_encoder_is_refused_by_name(written):
    ours, folder = written
    read_back.check("huggingface", opened.find_model(folder), ours, "float32")
    changed = {path: value + (path == "head/dense/bias") for path, value in ours.params.items()}
    assert "head/dense/bias" in refuse_read_back(ours.replace(params=changed), folder)
    more = ours.params | {"encoder/gain": np.ones(3, np.float32)}
    assert "encoder/gain" in refuse_read_back(ours.replace(params=more), folder)
    objective = config.Objective.between(0.5)
    assert "mask_fraction" in refuse_read_back(ours.replace(objective=objective), folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"layer_norm_eps": 1e-3}))
    assert "layer_norm_eps" in refuse_read_back(ours, folder)


def test_a_decoder_whose_buckets_config_json_does_not_state_is_refused(vocabulary):
    model = model_of(**SMALL_ENCODER, relative_buckets="none", max_distance=200, decoder_layers=1, decoder_relative_bias=True)
    with pytest.raises(config.ConfigError) as error:
        folders.check_format("huggingface", in_memory({}, model, vocabulary, 12))
    assert "max_distance" in str(error.value)
    folders.check_format("huggingface", in_memory({}, model_of(model, max_distance=128), vocabulary, 12))
