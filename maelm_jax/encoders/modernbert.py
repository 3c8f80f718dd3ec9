"""ModernBERT (arXiv 2412.13663): pre-LN layers with rotary positions, GeGLU and no biases.

Layers 0, n, 2n, ... attend to the whole text, the others to a window. Without such others, n is 1.
The first layer has no norm before its attention. Its place in our parameters holds the norm after
the last layer.
"""

import dataclasses
import typing

from maelm_jax import config
from maelm_jax.encoders import family, layouts
from maelm_jax.encoders.layouts import TensorMapping

GLOBAL, LOCAL = "full_attention", "sliding_attention"
WINDOW, GLOBAL_EVERY = 128, 3  # of the stock class, if config.json has no such entry
OLDER_THETA = {GLOBAL: "global_rope_theta", LOCAL: "local_rope_theta"}  # of earlier transformers
DEFAULT_THETA = {GLOBAL: 160_000.0, LOCAL: 10_000.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModernBert(family.Family):
    """ModernBERT, with or without layers of local attention."""

    def find_unsupported(self, content: dict[str, typing.Any]) -> list[str]:
        unsupported, entries = super().find_unsupported(content), self.defaults | content
        types, layers = _layer_types(entries), entries["num_hidden_layers"]
        if types != _types(layers, _period(types)):
            order = f"{GLOBAL!r} at layers 0, n, 2n, ... of {layers}, and {LOCAL!r} at the others"
            unsupported.append(f"layer_types {types!r} (only {order})")
        if LOCAL in types:
            window = entries.get("local_attention", WINDOW)
            if not isinstance(window, int) or window < 1:
                unsupported.append(f"local_attention {window} (only above 0)")
            # transformers takes it for half of the window, and drops local_attention.
            elif entries.get("sliding_window") not in (None, window // 2):
                unsupported.append(f"sliding_window (only half of local_attention {window})")
        if entries.get("rope_scaling") is not None:
            unsupported.append(f"rope_scaling {entries['rope_scaling']!r} (only None)")
        kinds = (GLOBAL, LOCAL)
        for name in (entries.get("rope_parameters") or {}).keys() - kinds:
            unsupported.append(f"rope_parameters with {name!r} (only with {' and '.join(kinds)})")
        for kind in kinds:
            rotary = _rotary(entries, kind)
            others = {name: x for name, x in rotary.items() if name not in ("rope_theta", "type")}
            if kind in types and others not in ({}, {"rope_type": "default"}):
                unsupported.append(f"rope_parameters {others!r} (only rope_theta)")
        return unsupported

    def read_settings(self, content: dict[str, typing.Any]) -> dict[str, typing.Any]:
        settings, entries = super().read_settings(content), self.defaults | content
        settings |= {
            "rotary_theta": _rotary(entries, GLOBAL)["rope_theta"],
            "local_attention": 0,
        }
        types = _layer_types(entries)
        if LOCAL in types:
            settings["local_attention"] = entries.get("local_attention", WINDOW)
            settings["global_every"] = _period(types)
            settings["local_rotary_theta"] = _rotary(entries, LOCAL)["rope_theta"]
        return settings

    def make_entries(
        self, model: config.Model, special: config.SpecialIds, vocabulary_size: int
    ) -> dict[str, typing.Any]:
        """Returns the content of config.json, also as earlier versions of transformers spell it."""
        own = model.encoder
        thetas, period = {GLOBAL: own.rotary_theta, LOCAL: own.rotary_theta}, 1
        if own.local_attention:
            thetas[LOCAL], period = own.local_rotary_theta, own.global_every
        entries = super().make_entries(model, special, vocabulary_size) | {
            "cls_token_id": special.bos,
            "sep_token_id": special.eos,
            "classifier_pooling": "mean",  # as in the published checkpoints
            "embedding_dropout": model.dropout.hidden,
            "classifier_dropout": model.dropout.hidden,
            "global_attn_every_n_layers": period,
            "layer_types": _types(own.layers, period),
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta}
                for kind, theta in thetas.items()
            },
            **{OLDER_THETA[kind]: theta for kind, theta in thetas.items()},
        }
        window = {"local_attention": own.local_attention} if own.local_attention else {}
        return entries | window

    def encoder_mappings(
        self, encoder: config.Encoder, pad: int, prefix: str
    ) -> list[TensorMapping]:
        mappings = [
            TensorMapping(prefix + self.token_table, "encoder/token_embedding"),
            TensorMapping(f"{prefix}embeddings.norm.weight", "encoder/norm/scale"),
        ]
        for layer in range(encoder.layers):
            mappings += _layer_mappings(f"{prefix}{self.layers_name}{layer}.", layer)
        # A LayerNorm has the name of the part before it here, and of the part after it there.
        path = "encoder/blocks/feed_forward_norm/scale"
        names = [f"layers.{layer}.attn_norm" for layer in range(1, encoder.layers)] + ["final_norm"]
        for layer, name in enumerate(names):
            mappings.append(TensorMapping(f"{prefix}{name}.weight", path, layer))
        return mappings

    def language_model_mappings(self) -> list[TensorMapping]:
        return [*_transform_mappings("head"), TensorMapping("decoder.bias", "head/bias")]

    def task_head_mappings(self, task_class: str) -> list[TensorMapping]:
        module = family.HEADS[task_class]
        return [*_transform_mappings(module), *layouts.linear("classifier", f"{module}/out")]


def _types(layers: int, period: int) -> list[str]:
    """Returns the kind of attention of each layer, if layers 0, `period`, ... are global."""
    return [LOCAL if layer % period else GLOBAL for layer in range(layers)]


def _layer_types(entries: dict[str, typing.Any]) -> list[str]:
    """Returns the kind of attention of each layer that the entries of a config.json state."""
    every = entries.get("global_attn_every_n_layers", GLOBAL_EVERY)
    return entries.get("layer_types") or _types(entries["num_hidden_layers"], every)


def _period(types: list[str]) -> int:
    """Returns n if layers 0, n, 2n, ... are global. For other lists the number has no meaning."""
    after_first = types[1:]
    return after_first.index(GLOBAL) + 1 if GLOBAL in after_first else max(len(types), 1)


def _rotary(content: dict, kind: str) -> dict[str, typing.Any]:
    """Returns the rotary parameters of global or local layers, in the present form."""
    default = {"rope_theta": content.get(OLDER_THETA[kind], DEFAULT_THETA[kind])}
    return default | (content.get("rope_parameters") or {}).get(kind, {})


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


MODERNBERT = ModernBert(
    model_type="modernbert",
    class_name="ModernBert",
    prefix="model.",  # as the stock task models call their encoder
    token_table="embeddings.tok_embeddings.weight",
    layers_name="layers.",
    pair=family.PairFormat(separators=1),
    has_tokenizer_class=False,
    language_head=family.LanguageHeadNames(
        "head.dense", "head.norm", "decoder.bias", ("decoder.weight",)
    ),
    classifier=family.ClassifierStyle(
        "gelu",
        has_input_dropout=False,
        has_norm=True,
        has_bias=False,
        transforms_tokens=True,
        pools_mean=True,
    ),
    fields={
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "feed_forward": "intermediate_size",
        "max_positions": family.POSITIONS,
        "layer_norm_eps": "norm_eps",
        "hidden_act": "hidden_activation",
    },
    structured=("rotary_theta", "local_attention", "global_every", "local_rotary_theta"),
    dropout={"hidden": "mlp_dropout", "attention": "attention_dropout"},
    fixed={
        "normalization": "pre",
        "positions": "rotary",
        "feed_forward_gate": True,
        "biases": False,
        "relative_buckets": "none",
        "token_types": 0,
    },
    defaults={"norm_eps": 1e-5, "pad_token_id": 50283, "hidden_activation": "gelu"},
    supported={
        "tie_word_embeddings": True,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "decoder_bias": True,
        "classifier_bias": False,
        "classifier_activation": "gelu",
    },
)
