"""Documents: sentences that join to the line, and a held-out share by text."""

import numpy as np
import pytest

from maelm_jax.data.documents import SENTENCE_CHARACTERS, is_heldout, sentences


def test_the_share_of_heldout_documents_is_the_fraction():
    share = np.mean([is_heldout(f"document {number}", 0.1) for number in range(10_000)])
    assert 0.09 < share < 0.11


@pytest.mark.parametrize("text", ["x" * 100_000, "ab " * 40_000 + "x" * 40_000 + " end. Next.", "." * 100_000, "\u3042" * 50_000, ""])
def test_sentences_are_bounded_and_join_to_the_line(text):
    parts = sentences(text)
    assert "".join(parts) == text
    assert max(map(len, parts)) <= SENTENCE_CHARACTERS
    assert max(len(part.encode()) for part in parts) <= 1 << 16, "what the trainer takes"
    if " " in text:
        assert all(part[0] == " " for part in parts[1:3]), "cut before white space where there is any"
