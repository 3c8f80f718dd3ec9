"""Describes the mask rate in words.

The rate is a share of all tokens, but only text tokens are masked. As a share of text tokens it is
therefore higher. Text tokens are all tokens but padding, `<s>` and `</s>`.
"""

import numpy as np

from maelm_jax import config
from maelm_jax.training import phases


def of_run(
    experiment: config.Experiment, rows: np.ndarray, special: config.SpecialIds
) -> list[str]:
    """Describes the mask rates of a run in the order of its steps, and that of its evaluations.

    Args:
        experiment: Settings of the run.
        rows: Held-out rows, int32 [R, L]. The share of text tokens is theirs.
        special: Ids of the special tokens.
    """
    trained = dict.fromkeys(phase.experiment.masking for phase in phases.of_run(experiment))
    lines = [of_rows(masking, rows, special) for masking in trained]
    heldout = experiment.evaluated.masking.rate
    if heldout not in {masking.rate for masking in trained}:
        lines.append(f"held-out losses and ranks: mask rate {heldout:g}")
    return lines


def of_rows(masking: config.Masking, rows: np.ndarray, special: config.SpecialIds) -> str:
    """Describes the mask rate of `rows` [R, L] in one line."""
    tokens = int((rows != special.pad).sum())
    text_tokens = int((~np.isin(rows, special.never_masked)).sum())
    return describe(masking, tokens, text_tokens, "in the held-out rows")


def of_length(masking: config.Masking, length: int) -> str:
    """Describes the mask rate of a row with one segment of one line, in one line."""
    return describe(masking, length, length - 2, f"at {length} tokens a segment of one line")


def describe(masking: config.Masking, tokens: int, text_tokens: int, scope: str) -> str:
    """Describes the mask rate as a share of all tokens and of text tokens.

    Args:
        masking: The rate, and whether special tokens are masked too.
        tokens: Number of all tokens but padding.
        text_tokens: Number of text tokens among them.
        scope: Which tokens are counted, as the end of a sentence.
    """
    if masking.mask_special_tokens:
        return f"mask rate {masking.rate:g} of all tokens, <s> and </s> among them"
    share = min(masking.rate * tokens / max(text_tokens, 1), 1.0)
    return (
        f"mask rate {masking.rate:g} of all tokens = {share:.4f} of text tokens {scope} "
        "(<s> and </s> count, but are not masked)"
    )
