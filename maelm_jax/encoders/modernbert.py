"""ModernBERT (arXiv 2412.13663): pre-LN layers with rotary positions, GeGLU and no biases.

Layers 0, n, 2n, ... attend to the whole text, the others to a window. Without such others, n is 1.
The first layer has no norm before its attention. Its place in our parameters holds the norm after
the last layer.
"""

import typing

from maelm_jax import config, json_files
from maelm_jax.encoders import fine_tuned_head, layouts
from maelm_jax.encoders.family import POSITIONS, Family
from maelm_jax.encoders.layouts import TensorMapping
from maelm_jax.encoders.task_formats import ClassifierStyle, LanguageHeadNames, PairFormat

GLOBAL, LOCAL = "full_attention", "sliding_attention"
WINDOW, GLOBAL_EVERY = 128, 3  # of the stock class, if config.json has no such entry
OLDER_THETA = {GLOBAL: "global_rope_theta", LOCAL: "local_rope_theta"}  # of earlier transformers
DEFAULT_THETA = {GLOBAL: 160_000.0, LOCAL: 10_000.0}
# The settings of config.Model that make its layers ModernBERT's.
LAYERS = {
    "normalization": "pre",
    "positions": "rotary",
    "feed_forward_gate": True,
    "biases": False,
    "relative_buckets": "none",
    "token_types": 0,
}
# {end of the name of a stock task class: top-level module of the parameters here}.
MODULES = {
    fine_tuned_head.SEQUENCE_CLASSIFICATION: "classifier",
    fine_tuned_head.QUESTION_ANSWERING: "span",
    fine_tuned_head.TOKEN_CLASSIFICATION: "token",
}


class ModernBert(Family):
    """ModernBERT, with or without layers of local attention."""

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
        "dropout": "mlp_dropout",
        "attention_dropout": "attention_dropout",
    }
    epsilon = "norm_eps"
    defaults: typing.ClassVar = {
        "hidden_size": 768,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "intermediate_size": 1152,
        POSITIONS: 8192,
        "norm_eps": 1e-5,
        "pad_token_id": 50283,
    }
    supported: typing.ClassVar = {
        "hidden_activation": "gelu",
        "tie_word_embeddings": True,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "decoder_bias": True,
        "classifier_bias": False,
        "classifier_activation": "gelu",
    }
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
        """Returns the settings of the layers."""
        settings = LAYERS | {"rotary_theta": float(_rotary(entries, GLOBAL)["rope_theta"])}
        types = _layer_types(entries)
        if LOCAL in types:
            settings |= {
                "local_attention": entries.get("local_attention", WINDOW),
                "global_every": _period(types),
                "local_rotary_theta": float(_rotary(entries, LOCAL)["rope_theta"]),
            }
        return settings

    def own_entries(self, model: config.Model) -> dict[str, typing.Any]:
        """Returns the entries of the layers, of present and of earlier versions of transformers."""
        thetas, period = {GLOBAL: model.rotary_theta, LOCAL: model.rotary_theta}, 1
        entries = {
            "classifier_pooling": "cls",
            "embedding_dropout": model.dropout,
            "classifier_dropout": model.dropout,
        }
        if model.local_attention:
            thetas[LOCAL], period = model.local_rotary_theta, model.global_every
            entries["local_attention"] = model.local_attention
        rotary = {kind: {"rope_type": "default", "rope_theta": thetas[kind]} for kind in thetas}
        older = {OLDER_THETA[kind]: thetas[kind] for kind in thetas}
        entries |= {"global_attn_every_n_layers": period, "rope_parameters": rotary} | older
        return entries | {"layer_types": _types(model.layers, period)}

    def config_entries(
        self, model: config.Model, special: config.SpecialIds, vocabulary_size: int
    ) -> dict[str, typing.Any]:
        """Returns the content of config.json, except for architecture and head."""
        ids = {"cls_token_id": special.bos, "sep_token_id": special.eos}
        return super().config_entries(model, special, vocabulary_size) | ids

    def faults(self, content: dict) -> list[str]:
        """Returns why the encoder of a config.json cannot be computed here; empty if it can."""
        faults = super().faults(content)
        if faults:
            return faults
        entries = self.defaults | content
        faults = _layer_type_faults(entries)
        if faults:
            return faults
        kinds = sorted(set(_layer_types(entries)))
        if LOCAL in kinds:
            faults += _integer_faults(entries, "local_attention", WINDOW)
        if entries.get("rope_scaling") is not None:
            faults.append(f"rope_scaling {json_files.shown(entries['rope_scaling'])} (only None)")
        for kind in kinds:
            faults += _rotary_faults(entries, kind)
        return faults

    def encoder_mappings(self, model: config.Model, pad: int, prefix: str) -> list[TensorMapping]:
        """Returns the mappings of the encoder. `prefix` begins the names of its stock tensors."""
        mappings = [
            TensorMapping(prefix + self.token_table, "encoder/token_embedding"),
            TensorMapping(f"{prefix}embeddings.norm.weight", "encoder/norm/scale"),
        ]
        for layer in range(model.layers):
            mappings += _layer_mappings(f"{prefix}layers.{layer}.", layer)
        # A LayerNorm has the name of the part before it here, and of the part after it there.
        path = "encoder/blocks/feed_forward_norm/scale"
        names = [f"layers.{layer}.attn_norm" for layer in range(1, model.layers)] + ["final_norm"]
        for layer, name in enumerate(names):
            mappings.append(TensorMapping(f"{prefix}{name}.weight", path, layer))
        return mappings

    def language_model_mappings(self) -> list[TensorMapping]:
        """Returns the mappings of the language-model head."""
        return [*_transform_mappings("head"), TensorMapping("decoder.bias", "head/bias")]

    def task_head_mappings(self, task_class: str) -> list[TensorMapping]:
        """Returns the mappings of the head of a fine-tuned model."""
        module = MODULES[task_class]
        return [*_transform_mappings(module), *layouts.linear("classifier", f"{module}/out")]


def _types(layers: int, period: int) -> list[str]:
    """Returns the kind of attention of each layer, if layers 0, `period`, ... are global."""
    return [LOCAL if layer % period else GLOBAL for layer in range(layers)]


def _layer_types(entries: dict[str, typing.Any]) -> typing.Any:
    """Returns the kind of attention of each layer that the entries of a config.json state."""
    stated = entries.get("layer_types")
    if stated is not None:
        return stated
    every = entries.get("global_attn_every_n_layers", GLOBAL_EVERY)
    return _types(entries["num_hidden_layers"], every)


def _layer_type_faults(entries: dict[str, typing.Any]) -> list[str]:
    """Returns why the order of global and local layers cannot be computed here."""
    faults = _integer_faults(entries, "global_attn_every_n_layers", GLOBAL_EVERY)
    if faults:
        return faults
    types, layers = _layer_types(entries), entries["num_hidden_layers"]
    if json_files.is_texts(types) and types == _types(layers, _period(types)):
        return []
    supported = f"{GLOBAL!r} at layers 0, n, 2n, ... of {layers}, and {LOCAL!r} at the others"
    return [f"layer_types {json_files.shown(types)} (only {supported})"]


def _integer_faults(entries: dict[str, typing.Any], name: str, default: int) -> list[str]:
    """Returns a fault if an entry is not a positive integer."""
    value = entries.get(name, default)
    if json_files.is_integer(value, 1, json_files.LARGEST):
        return []
    return [f"{name} {json_files.shown(value)} (an integer from 1 to {json_files.LARGEST})"]


def _period(types: list[str]) -> int:
    """Returns n if layers 0, n, 2n, ... are global. For other lists the number has no meaning."""
    after_first = types[1:]
    return after_first.index(GLOBAL) + 1 if GLOBAL in after_first else max(len(types), 1)


def _rotary(content: dict, kind: str) -> dict[str, typing.Any]:
    """Returns the rotary parameters of global or local layers, in the present form."""
    default = {"rope_theta": content.get(OLDER_THETA[kind], DEFAULT_THETA[kind])}
    by_type = content.get("rope_parameters")
    stated = by_type.get(kind) if isinstance(by_type, dict) else None
    return default | stated if isinstance(stated, dict) else default


def _rotary_faults(content: dict, kind: str) -> list[str]:
    """Returns why the rotary positions of a kind of layers cannot be computed here."""
    rotary, faults = _rotary(content, kind), []
    if rotary.get("rope_type", "default") != "default":
        faults.append(f"rope_type {json_files.shown(rotary['rope_type'])} (only 'default')")
    if not json_files.is_number(rotary["rope_theta"], 1.0 + 1e-9, 1e9):
        shown = json_files.shown(rotary["rope_theta"])
        faults.append(f"rope_theta {shown} (a number above 1, up to 1e9)")
    return faults


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
    path = f"{block}/attention_norm/scale"
    return [*mappings, TensorMapping(f"{prefix}mlp_norm.weight", path, layer)]


MODERNBERT = ModernBert()
