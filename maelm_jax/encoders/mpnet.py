"""MPNet (arXiv 2004.09297): t5 relative buckets beside the position table, no token types."""

import typing

from maelm_jax import config
from maelm_jax.encoders import layouts
from maelm_jax.encoders.family import REPEATED_SEPARATOR, Family, LanguageHeadNames
from maelm_jax.encoders.layouts import TensorMapping

BUCKETS, MAX_DISTANCE = 32, 128  # of the stock class, which has no setting for the distance
PAD = 1  # the stock class numbers positions from the padding id 1, whatever config.json says


class Mpnet(Family):
    """MPNet of transformers."""

    model_type = "mpnet"
    class_name = "MPNet"
    part_names: typing.ClassVar = layouts.part_names(
        "attention.attn.q",
        "attention.attn.k",
        "attention.attn.v",
        "attention.attn.o",
        "attention.LayerNorm",
        "intermediate.dense",
        "output.dense",
        "output.LayerNorm",
    )
    language_head = LanguageHeadNames(
        "lm_head.dense",
        "lm_head.layer_norm",
        "lm_head.bias",
        ("lm_head.decoder.weight",),
        ("lm_head.decoder.bias",),
    )
    pair = REPEATED_SEPARATOR
    supported: typing.ClassVar = Family.supported | {
        "relative_attention_num_buckets": BUCKETS,
        "pad_token_id": PAD,
    }

    def misfits(self, model: config.Model, special: config.SpecialIds) -> list[str]:
        misfits = []
        buckets = (model.relative_buckets, model.num_buckets, model.max_distance)
        if buckets != ("t5", BUCKETS, MAX_DISTANCE):
            misfits.append(
                f"the stock MPNet has t5 buckets {BUCKETS}/{MAX_DISTANCE}, this model "
                f"{model.relative_buckets} buckets {model.num_buckets}/{model.max_distance}"
            )
        if model.token_types:
            misfits.append("the stock MPNet has no token types, this model has some")
        if special.pad != PAD:
            misfits.append(
                f"the stock MPNet has its <pad> at id {PAD}, this vocabulary at {special.pad}"
            )
        return misfits

    def own_settings(self, entries: dict[str, typing.Any]) -> dict[str, typing.Any]:
        return {
            "relative_buckets": "t5",
            "num_buckets": BUCKETS,
            "max_distance": MAX_DISTANCE,
            "token_types": 0,
        }

    def unused_positions(self, pad: int) -> int:
        return pad + 1

    def encoder_mappings(self, model: config.Model, pad: int, prefix: str) -> list[TensorMapping]:
        name = f"{prefix}encoder.relative_attention_bias.weight"
        return [
            *super().encoder_mappings(model, pad, prefix),
            TensorMapping(name, "encoder/relative_bias/table"),
        ]


MPNET = Mpnet()
