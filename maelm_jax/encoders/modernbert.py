"""ModernBERT (arXiv 2412.13663): pre-LN layers with rotary positions, GeGLU and no biases.

Only encoders in which every layer attends to the whole text are computed here. The first layer has
no norm before its attention. Its place in our parameters holds the norm after the last layer.
"""

import typing

from maelm_jax import config, json_files
from maelm_jax.encoders import fine_tuned_head
from maelm_jax.encoders import tensors as tables
from maelm_jax.encoders.family import POSITIONS, Family
from maelm_jax.encoders.task_formats import ClassifierStyle, LanguageHeadNames, PairFormat
from maelm_jax.encoders.tensors import TensorMapping

GLOBAL = "full_attention"
DEFAULT_THETA = 160_000.0
# The settings of config.Model that make its layers ModernBERT's.
LAYERS = {
    "normalization": "pre", "positions": "rotary", "feed_forward_gate": True, "biases": False,
    "relative_buckets": "none", "token_types": 0,
}  # fmt: skip


# {end of the name of a stock task class: top-level module of the parameters here}.
MODULES = {
    fine_tuned_head.SEQUENCE_CLASSIFICATION: "classifier",
    fine_tuned_head.QUESTION_ANSWERING: "span",
    fine_tuned_head.TOKEN_CLASSIFICATION: "token",
}


class ModernBert(Family):
    """ModernBERT with global attention in every layer."""

    model_type = "modernbert"
    class_name = "ModernBert"
    language_head = LanguageHeadNames(
        "head.dense", "head.norm", "decoder.bias", ("decoder.weight",)
    )
    classifier = ClassifierStyle(
        "gelu", has_input_dropout=False, has_norm=True, has_bias=False, transforms_tokens=True
    )
    pair = PairFormat(separators=1)
    dropouts: typing.ClassVar = {
        "dropout": "mlp_dropout", "attention_dropout": "attention_dropout",
    }  # fmt: skip
    epsilon = "norm_eps"
    defaults: typing.ClassVar = {
        "hidden_size": 768, "num_hidden_layers": 22, "num_attention_heads": 12,
        "intermediate_size": 1152, POSITIONS: 8192, "norm_eps": 1e-5, "pad_token_id": 50283,
    }  # fmt: skip
    supported: typing.ClassVar = {
        "hidden_activation": "gelu", "tie_word_embeddings": True, "norm_bias": False,
        "attention_bias": False, "mlp_bias": False, "decoder_bias": True, "classifier_bias": False,
        "classifier_activation": "gelu", "classifier_pooling": "cls",
    }  # fmt: skip
    left_out: typing.ClassVar = ("classifier.", "head.")
    token_table = "embeddings.tok_embeddings.weight"

    @property
    def prefix(self) -> str:
        """The stock task models call their encoder `model`."""
        return "model."

    def misfits(self, model: config.Model, special: config.SpecialIds) -> list[str]:
        """Returns the settings that differ from ModernBERT's."""
        return [
            f"the stock ModernBert has {name} {value!r}, this model {getattr(model, name)!r}"
            for name, value in LAYERS.items()
            if getattr(model, name) != value
        ]

    def own_settings(self, entries: dict[str, typing.Any]) -> dict[str, typing.Any]:
        """Returns the settings of the layers, and theta."""
        return LAYERS | {"rotary_theta": float(_rotary(entries)["rope_theta"])}

    def own_entries(self, model: config.Model) -> dict[str, typing.Any]:
        """Returns the entries of the layers, of present and of earlier versions of transformers."""
        rotary = {"rope_type": "default", "rope_theta": model.rotary_theta}
        return {
            "layer_types": [GLOBAL] * model.layers,
            "rope_parameters": {GLOBAL: rotary, "sliding_attention": rotary},
            "global_attn_every_n_layers": 1,
            "global_rope_theta": model.rotary_theta,
            "local_rope_theta": model.rotary_theta,
            "embedding_dropout": model.dropout,
            "classifier_dropout": model.dropout,
        }

    def config_entries(
        self, model: config.Model, special: config.SpecialIds, vocabulary_size: int
    ) -> dict[str, typing.Any]:
        """Returns the content of config.json, except for architecture and head."""
        ids = {"cls_token_id": special.bos, "sep_token_id": special.eos}
        return super().config_entries(model, special, vocabulary_size) | ids

    def faults(self, content: dict) -> list[str]:
        """Returns why the encoder of a config.json cannot be computed here; empty if it can."""
        faults = super().faults(content)
        types = content.get("layer_types")
        if types is None:
            every = content.get("global_attn_every_n_layers", 3)
            if every != 1:
                shown = json_files.shown(every)
                faults.append(f"global_attn_every_n_layers {shown} (only 1: no local attention)")
        elif not json_files.is_texts(types) or set(types) != {GLOBAL}:
            shown = json_files.shown(types)
            faults.append(f"layer_types {shown} (only {GLOBAL!r}: no local attention)")
        rotary = _rotary(content)
        if rotary.get("rope_type", "default") != "default":
            faults.append(f"rope_type {json_files.shown(rotary['rope_type'])} (only 'default')")
        if not json_files.is_number(rotary["rope_theta"], 1.0 + 1e-9, 1e9):
            shown = json_files.shown(rotary["rope_theta"])
            faults.append(f"rope_theta {shown} (a number above 1, up to 1e9)")
        return faults

    def encoder_mappings(self, model: config.Model, pad: int, prefix: str) -> list[TensorMapping]:
        """Returns the mappings of the encoder. `prefix` begins the names of its stock tensors."""
        mappings = [
            TensorMapping(prefix + self.token_table, "encoder/token_embedding"),
            TensorMapping(f"{prefix}embeddings.norm.weight", "encoder/norm/scale"),
        ]
        for layer in range(model.layers):
            mappings += _layer_mappings(f"{prefix}layers.{layer}.", layer)
        name, path = f"{prefix}final_norm.weight", "encoder/blocks/attention_norm/scale"
        return [*mappings, TensorMapping(name, path, layer=0)]

    def language_model_mappings(self) -> list[TensorMapping]:
        """Returns the mappings of the language-model head."""
        return [*_transform_mappings("head"), TensorMapping("decoder.bias", "head/bias")]

    def task_head_mappings(self, task_class: str) -> list[TensorMapping]:
        """Returns the mappings of the head of a fine-tuned model."""
        module = MODULES[task_class]
        return [*_transform_mappings(module), *tables.linear("classifier", f"{module}/out")]


def _rotary(content: dict) -> dict[str, typing.Any]:
    """Returns the rotary parameters of global layers, in the present form of transformers."""
    default = {"rope_theta": content.get("global_rope_theta", DEFAULT_THETA)}
    by_type = content.get("rope_parameters")
    stated = by_type.get(GLOBAL) if isinstance(by_type, dict) else None
    return default | stated if isinstance(stated, dict) else default


def _transform_mappings(module: str) -> list[TensorMapping]:
    """Returns the mappings of the linear map and the norm before an output map."""
    return [
        TensorMapping("head.dense.weight", f"{module}/dense/kernel", transposed=True),
        TensorMapping("head.norm.weight", f"{module}/norm/scale"),
    ]


def _layer_mappings(prefix: str, layer: int) -> list[TensorMapping]:
    """Returns the mappings of one layer. `prefix` begins the names of its stock tensors."""
    block = "encoder/blocks"
    mappings = []
    if layer:
        path = f"{block}/attention_norm/scale"
        mappings.append(TensorMapping(f"{prefix}attn_norm.weight", path, layer))
    for name, module, parts in (
        ("attn.Wqkv", "attention", ("query", "key", "value")),
        ("attn.Wo", "attention", ("out",)),
        ("mlp.Wi", "feed_forward", ("up", "gate")),
        ("mlp.Wo", "feed_forward", ("down",)),
    ):
        for number, part in enumerate(parts):
            path = f"{block}/{module}/{part}/kernel"
            mapping = TensorMapping(f"{prefix}{name}.weight", path, layer, transposed=True)
            mappings.append(mapping._replace(part=number, parts=len(parts)))
    path = f"{block}/feed_forward_norm/scale"
    return [*mappings, TensorMapping(f"{prefix}mlp_norm.weight", path, layer)]


MODERNBERT = ModernBert()
