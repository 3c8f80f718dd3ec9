"""RoBERTa (arXiv 1907.11692): a position table, and one token-type row that all tokens get."""

import typing

import numpy as np

from maelm_jax import config
from maelm_jax.encoders import family
from maelm_jax.encoders import tensors as tables

TYPES = "embeddings.token_type_embeddings.weight"


class Roberta(family.Family):
    """The encoder here has no token types.

    An export sets the row to 0. An import adds the row to the position table.
    """

    model_type = "roberta"
    class_name = "Roberta"
    part_names: typing.ClassVar = {
        "attention/query": "attention.self.query", "attention/key": "attention.self.key",
        "attention/value": "attention.self.value", "attention/out": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm", "feed_forward/up": "intermediate.dense",
        "feed_forward/down": "output.dense", "feed_forward_norm": "output.LayerNorm",
    }  # fmt: skip
    supported: typing.ClassVar = {
        **family.Family.supported,
        "position_embedding_type": "absolute",
    }

    def misfits(self, model: config.Model, special: config.SpecialIds) -> list[str]:
        if model.relative_buckets == "none":
            return []
        return [f"the stock RoBERTa has no relative positions, this model {model.relative_buckets}"]

    def position_settings(self) -> dict[str, typing.Any]:
        return {"relative_buckets": "none"}

    def position_entries(self) -> dict[str, typing.Any]:
        return {"type_vocab_size": 1}

    def unused_positions(self, pad: int) -> int:
        return pad + 1

    def added_tensors(self, model: config.Model, prefix: str) -> dict[str, np.ndarray]:
        return {prefix + TYPES: np.zeros((1, model.width), np.float32)}

    def import_encoder(self, tensors, model, pad, shapes, folder) -> dict[str, np.ndarray]:
        [name] = [name for name in tensors if name.endswith(TYPES)] or [""]
        others = {other: tensors[other] for other in tensors if other != name}
        params = super().import_encoder(others, model, pad, shapes, folder)
        if name:
            row = _first_row(tensors[name], model.width, f"{folder}: {name}")
            params["encoder/position_embedding"] += row
        return params


def _first_row(table: np.ndarray, width: int, name: str) -> np.ndarray:
    """Returns the first row of a table of token types. `name` begins the error messages."""
    if table.ndim != 2 or table.shape[1] != width or not len(table):
        raise config.ConfigError(f"{name} has shape {table.shape}, expected (1, {width})")
    if reason := tables.not_finite(table[0]):
        raise config.ConfigError(f"{name} {reason}")
    return table[0].astype(np.float32)


ROBERTA = Roberta()
