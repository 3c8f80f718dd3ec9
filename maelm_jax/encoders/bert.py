"""BERT (arXiv 1810.04805), and the families with the same encoder: ELECTRA and DistilBERT."""

import typing

from maelm_jax import config
from maelm_jax.encoders import layouts
from maelm_jax.encoders.family import (
    FIXED_EPSILON,
    ClassifierStyle,
    Family,
    LanguageHeadNames,
    PairFormat,
)
from maelm_jax.encoders.layouts import TensorMapping


class Bert(Family):
    """BERT: positions from 0, a table of token types, a pooler that classifiers start from."""

    model_type = "bert"
    class_name = "Bert"
    language_head = LanguageHeadNames(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
        ("cls.predictions.decoder.weight",),
        ("cls.predictions.decoder.bias",),
    )
    classifier_names: typing.ClassVar = {"dense": ".pooler.dense", "out": "classifier"}
    classifier = ClassifierStyle(has_input_dropout=False)
    pair = PairFormat(separators=1, has_types=True)
    defaults: typing.ClassVar = Family.defaults | {"pad_token_id": 0, "type_vocab_size": 2}
    supported: typing.ClassVar = Family.supported | {
        "is_decoder": False,
        "add_cross_attention": False,
    }
    left_out: typing.ClassVar = (
        ".embeddings.position_ids",
        "cls.seq_relationship.",
        "classifier.",
        "qa_outputs.",
    )

    def misfits(self, model: config.Model, special: config.SpecialIds) -> list[str]:
        misfits = self.relative_position_misfits(model)
        if not model.token_types:
            misfits.append(f"the stock {self.class_name} has token types, this model none")
        return misfits

    def own_settings(self, entries: dict[str, typing.Any]) -> dict[str, typing.Any]:
        return {"relative_buckets": "none", "token_types": entries["type_vocab_size"]}

    def own_entries(self, model: config.Model) -> dict[str, typing.Any]:
        return {"type_vocab_size": model.token_types}

    def pooler_mappings(self, prefix: str) -> list[TensorMapping]:
        return layouts.linear(f"{prefix}pooler.dense", "pooler")


class Electra(Bert):
    """The discriminator of ELECTRA (arXiv 2003.10555) whose embeddings have the encoder's width."""

    model_type = "electra"
    class_name = "Electra"
    language_head = LanguageHeadNames(
        "generator_predictions.dense",
        "generator_predictions.LayerNorm",
        "generator_lm_head.bias",
        ("generator_lm_head.weight",),
    )
    classifier_names = Family.classifier_names
    classifier = ClassifierStyle(activation="gelu")
    defaults: typing.ClassVar = Bert.defaults | {
        "embedding_size": 128,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    }
    left_out: typing.ClassVar = (
        ".embeddings.position_ids",
        "discriminator_predictions.",
        "classifier.",
        "qa_outputs.",
    )

    def unsupported(self, content: dict) -> list[str]:
        entries, unsupported = self.defaults | content, super().unsupported(content)
        size, width = entries["embedding_size"], entries["hidden_size"]
        if size != width:
            unsupported.append(f"embedding_size {size!r} (only hidden_size, {width})")
        return unsupported

    def own_entries(self, model: config.Model) -> dict[str, typing.Any]:
        return super().own_entries(model) | {"embedding_size": model.width}

    def pooler_mappings(self, prefix: str) -> list[TensorMapping]:
        return []


class DistilBert(Family):
    """DistilBERT (arXiv 1910.01108): BERT without token types, with other names."""

    model_type = "distilbert"
    class_name = "DistilBert"
    part_names: typing.ClassVar = layouts.part_names(
        "attention.q_lin",
        "attention.k_lin",
        "attention.v_lin",
        "attention.out_lin",
        "sa_layer_norm",
        "ffn.lin1",
        "ffn.lin2",
        "output_layer_norm",
    )
    layers_name = "transformer.layer."
    epsilon = None
    language_head = LanguageHeadNames(
        "vocab_transform", "vocab_layer_norm", "vocab_projector.bias", ("vocab_projector.weight",)
    )
    classifier_names: typing.ClassVar = {"dense": "pre_classifier", "out": "classifier"}
    classifier = ClassifierStyle(activation="relu", has_input_dropout=False)
    pair = PairFormat(separators=1)
    sizes: typing.ClassVar = {
        "layers": "n_layers",
        "width": "dim",
        "heads": "n_heads",
        "feed_forward": "hidden_dim",
    }
    dropouts: typing.ClassVar = {"dropout": "dropout", "attention_dropout": "attention_dropout"}
    defaults: typing.ClassVar = {
        "n_layers": 6,
        "dim": 768,
        "n_heads": 12,
        "hidden_dim": 3072,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
    }
    supported: typing.ClassVar = {
        "activation": "gelu",
        "tie_word_embeddings": True,
        "sinusoidal_pos_embds": False,
    }
    left_out: typing.ClassVar = (
        ".embeddings.position_ids",
        "pre_classifier.",
        "classifier.",
        "qa_outputs.",
    )

    def misfits(self, model: config.Model, special: config.SpecialIds) -> list[str]:
        misfits = self.relative_position_misfits(model)
        if model.token_types:
            misfits.append("the stock DistilBert has no token types, this model has some")
        if model.layer_norm_eps != FIXED_EPSILON:
            misfits.append(
                f"the stock DistilBert has an epsilon of {FIXED_EPSILON}, this model "
                f"{model.layer_norm_eps}"
            )
        return misfits


BERT = Bert()
ELECTRA = Electra()
DISTILBERT = DistilBert()
