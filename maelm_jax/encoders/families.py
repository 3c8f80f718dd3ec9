"""The families of stock encoders, and which of them an encoder belongs to."""

import typing

from maelm_jax import config
from maelm_jax.encoders.bert import BERT, DISTILBERT, ELECTRA
from maelm_jax.encoders.family import Family, PairFormat
from maelm_jax.encoders.modernbert import MODERNBERT
from maelm_jax.encoders.mpnet import MPNET
from maelm_jax.encoders.roberta import CAMEMBERT, ROBERTA, XLM_ROBERTA

MOST_LAYERS = 10_000  # of a stranger's config.json, for each of which some memory is taken
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (BERT, CAMEMBERT, DISTILBERT, ELECTRA, MODERNBERT, MPNET, ROBERTA, XLM_ROBERTA)
}

# The entry of config.json with Objective.causal_share, if that is above 0.
CAUSAL_SHARE = "causal_share"


def choose_family(encoder: config.Encoder) -> Family:
    """Returns the family whose sentence pairs and heads the encoder has.

    It is `Encoder.family`, or else the first family that computes the encoder. An encoder that no
    stock model computes (reference buckets) is treated as MPNet.
    """
    first = "bert" if encoder.token_types > 1 else "roberta"
    if encoder.relative_buckets != "none":
        first = "mpnet"
    if encoder.positions == "rotary":
        first = "modernbert"
    return FAMILIES[encoder.family or first]


def choose_pair_format(encoder: config.Encoder) -> PairFormat:
    """Returns how the encoder reads two sentences. Without a table of types, all is of type 0."""
    pair = choose_family(encoder).pair
    return pair._replace(has_types=pair.has_types and encoder.token_types > 1)


def require_stock_family(encoder: config.Encoder, special: config.SpecialIds) -> Family:
    """Returns the family whose stock models compute the encoder.

    Raises:
        ConfigError: There is none.
    """
    family = choose_family(encoder)
    if misfits := family.find_misfits(encoder, special):
        raise config.ConfigError(
            f"the stock {family.class_name} does not compute this encoder ({'; '.join(misfits)}). "
            "Train with the settings of a family in docs/encoders.md"
        )
    return family


def read_family(content: dict[str, typing.Any], folder: str) -> Family:
    """Returns the family of a stock folder from the content of its config.json.

    Raises:
        ConfigError: The encoder is of no family here, or of a kind that is not computed here.
            `folder` begins the message.
    """
    family = FAMILIES.get(content.get("model_type"))
    if family is None:
        unsupported = [f"model_type {content.get('model_type')!r} (only {', '.join(FAMILIES)})"]
    elif (layers := content.get(family.fields["layers"], 0)) > MOST_LAYERS:
        unsupported = [f"{family.fields['layers']} {layers} (only up to {MOST_LAYERS})"]
    else:
        unsupported = family.find_unsupported(content)
    if unsupported:
        raise config.ConfigError(
            f"{folder}: not an encoder that a run can start from: {'; '.join(unsupported)}"
        )
    return family
