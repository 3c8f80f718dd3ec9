"""The mask rate in words. It counts all tokens but selects among text tokens, so of those it is higher."""

import numpy as np

from maelm_jax import config


def of_rows(masking: config.Masking, rows: np.ndarray, special: config.SpecialIds) -> str:
    """The rate of rows int32 [R, L], as a line."""
    tokens = int((rows != special.pad).sum())
    text_tokens = int((~np.isin(rows, special.never_masked)).sum())
    return describe(masking, tokens, text_tokens, "in the held-out rows")


def of_length(masking: config.Masking, length: int) -> str:
    """The rate of a row that holds one segment of one line, as a line."""
    return describe(masking, length, length - 2, f"at {length} tokens a segment of one line")


def describe(masking: config.Masking, tokens: int, text_tokens: int, where: str) -> str:
    """The rate as a share of all tokens and of text tokens, which are those without `<s>` and `</s>`."""
    if masking.mask_special_tokens:
        return f"mask rate {masking.rate:g} of all tokens, <s> and </s> among them"
    share = masking.rate * tokens / max(text_tokens, 1)
    return (
        f"mask rate {masking.rate:g} of all tokens = {share:.4f} of text tokens {where} "
        "(<s> and </s> count, but are not masked)"
    )
