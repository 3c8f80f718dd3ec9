"""RoBERTa (arXiv 1907.11692): BERT without a pooler, with one token type that all tokens have."""

import typing

import numpy as np

from maelm_jax import config
from maelm_jax.encoders.family import REPEATED_SEPARATOR, Family, LanguageHeadNames

TYPES = "embeddings.token_type_embeddings.weight"


class Roberta(Family):
    """RoBERTa. An encoder without token types gets a type row of 0."""

    model_type = "roberta"
    class_name = "Roberta"
    language_head = LanguageHeadNames(
        "lm_head.dense",
        "lm_head.layer_norm",
        "lm_head.bias",
        ("lm_head.decoder.weight",),
        ("lm_head.decoder.bias",),
    )
    pair = REPEATED_SEPARATOR
    defaults: typing.ClassVar = Family.defaults | {"type_vocab_size": 2}
    supported: typing.ClassVar = Family.supported | {
        "is_decoder": False,
        "add_cross_attention": False,
    }

    def misfits(self, model: config.Model, special: config.SpecialIds) -> list[str]:
        return self.relative_position_misfits(model)

    def own_settings(self, entries: dict[str, typing.Any]) -> dict[str, typing.Any]:
        return {"relative_buckets": "none", "token_types": entries["type_vocab_size"]}

    def own_entries(self, model: config.Model) -> dict[str, typing.Any]:
        return {"type_vocab_size": max(model.token_types, 1)}

    def unused_positions(self, pad: int) -> int:
        return pad + 1

    def added_tensors(self, model: config.Model, prefix: str) -> dict[str, np.ndarray]:
        if model.token_types:
            return {}
        return {prefix + TYPES: np.zeros((1, model.width), np.float32)}


ROBERTA = Roberta()
