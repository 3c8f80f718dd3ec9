"""config.json of ModernBERT: global and local layers, in the present and in the older spelling."""

import pytest

from maelm_jax import config
from maelm_jax.encoders.modernbert import GLOBAL, LOCAL, MODERNBERT

SIZES = {"vocab_size": 600, "num_hidden_layers": 5, "pad_token_id": 1}
EACH = {GLOBAL: {"rope_theta": 2000.0}, LOCAL: {"rope_theta": 100.0}}


def local_settings(settings: dict) -> tuple:
    return tuple(settings.get(name) for name in ("local_attention", "global_every", "rotary_theta", "local_rotary_theta"))


@pytest.mark.parametrize(
    "entries,expected",
    [
        ({"layer_types": [GLOBAL] * 5}, (0, None, 160_000.0, None)),
        ({"global_attn_every_n_layers": 1, "global_rope_theta": 3000}, (0, None, 3000.0, None)),
        ({}, (128, 3, 160_000.0, 10_000.0)),
        ({"global_attn_every_n_layers": 2, "local_attention": 64, "local_rope_theta": 500}, (64, 2, 160_000.0, 500.0)),
        ({"layer_types": [GLOBAL, LOCAL, GLOBAL, LOCAL, GLOBAL], "rope_parameters": EACH}, (128, 2, 2000.0, 100.0)),
        ({"layer_types": [GLOBAL, LOCAL, LOCAL, LOCAL, LOCAL]}, (128, 5, 160_000.0, 10_000.0)),
    ],
    ids=str,
)
def test_layers_are_global_or_local_as_config_json_says(entries, expected):
    assert MODERNBERT.faults(SIZES | entries) == []
    settings = MODERNBERT.model_settings(SIZES | entries)
    assert local_settings(settings) == expected
    model = config.Model(**settings, decoder_layers=0)
    written = MODERNBERT.config_entries(model, config.SpecialIds.of_size(600), 600)
    assert settings.items() <= MODERNBERT.model_settings(written).items(), "it is written as it was read"
    layers = {name: value for name, value in written.items() if name not in ("layer_types", "rope_parameters")}
    assert local_settings(MODERNBERT.model_settings(layers)) == expected, "older versions of transformers read the same"


def test_the_config_of_modernbert_base_is_accepted():
    """The entries that matter of the file that its authors publish."""
    published = {
        "attention_bias": False,
        "classifier_activation": "gelu",
        "classifier_bias": False,
        "classifier_pooling": "mean",
        "decoder_bias": True,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "hidden_activation": "gelu",
        "hidden_size": 768,
        "intermediate_size": 1152,
        "local_attention": 128,
        "local_rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "norm_bias": False,
        "norm_eps": 1e-05,
        "num_attention_heads": 12,
        "num_hidden_layers": 22,
        "pad_token_id": 50283,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        "vocab_size": 50368,
    }
    assert MODERNBERT.faults(published) == []
    assert local_settings(MODERNBERT.model_settings(published)) == (128, 3, 160_000.0, 10_000.0)


@pytest.mark.parametrize(
    "entries,fault",
    [
        ({"layer_types": [LOCAL, GLOBAL, LOCAL, GLOBAL, LOCAL]}, "layer_types ['sliding_attention'"),
        ({"layer_types": [GLOBAL, LOCAL, GLOBAL, GLOBAL, GLOBAL]}, "(only 'full_attention' at layers 0, n, 2n, ... of 5,"),
        ({"layer_types": [GLOBAL] * 4}, "layer_types ['full_attention'"),
        ({"layer_types": []}, "layer_types []"),
        ({"layer_types": 3}, "layer_types 3"),
        ({"global_attn_every_n_layers": 0}, "global_attn_every_n_layers 0 (an integer from 1"),
        ({"local_attention": 0}, "local_attention 0 (an"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling {'type': 'linear'"),
        ({"local_rope_theta": 1}, "rope_theta 1 (a number"),
        ({"rope_parameters": {LOCAL: {"rope_type": "yarn"}}}, "rope_type 'yarn' (only 'default')"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000"),
    ],
    ids=str,
)
def test_layers_of_another_function_are_named(entries, fault):
    faults = MODERNBERT.faults(SIZES | entries)
    assert len(faults) == 1 and fault in faults[0]
