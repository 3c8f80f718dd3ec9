"""How a family of encoders reads two sentences, and what its heads compute."""

import typing


class PairFormat(typing.NamedTuple):
    """How a model of the family reads two sentences: `<s> A </s> B </s>`.

    Attributes:
        separators: The number of `</s>` between the sentences.
        has_types: Whether the tokens of B, and the `</s>` after it, have token type 1.
    """

    separators: int
    has_types: bool = False


REPEATED_SEPARATOR = PairFormat(separators=2)  # of RoBERTa, MPNet and the published code


class ClassifierStyle(typing.NamedTuple):
    """How a classifier of the family scores the first state: dense, activation, norm, out.

    A head for question answering is one linear map, unless `transforms_tokens`.

    Attributes:
        activation: "tanh", "relu" or "gelu", after the first linear map.
        has_input_dropout: Whether dropout comes before the first linear map too.
        has_norm: Whether a LayerNorm stands before the last linear map.
        has_bias: Whether the first linear map has a bias.
        transforms_tokens: Whether heads for single tokens have dense, activation and norm too.
    """

    activation: str = "tanh"
    has_input_dropout: bool = True
    has_norm: bool = False
    has_bias: bool = True
    transforms_tokens: bool = False


class LanguageHeadNames(typing.NamedTuple):
    """The names of the tensors of a stock language-model head.

    Attributes:
        dense, norm: The start of the names of a linear map and of a LayerNorm.
        bias: The bias of the logits.
        tied: Copies of the token table.
        tied_bias: Copies of `bias`.
    """

    dense: str
    norm: str
    bias: str
    tied: tuple[str, ...]
    tied_bias: tuple[str, ...] = ()
