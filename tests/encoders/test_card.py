"""The model card of an export."""

import pytest

from maelm_jax.encoders import card


@pytest.mark.parametrize("form,said,unsaid", [
    ("huggingface", "Read back with transformers", "PyTorch's torch.load"), ("pytorch", "Read back with maelm.py", "transformers"),
    ("reference", "torch.load reads the same numbers", "compared with the JAX model"),
])  # fmt: skip
def test_a_card_says_read_back_of_what_was(form, said, unsaid):
    reports = [{"of": "hidden states", "largest_difference": 1e-7, "largest_value": 2.0}]
    text = card.verification(form, reports)
    assert said in text and unsaid not in text
    assert card.verification(form, None).startswith("Unverified") and "ead back" not in card.verification(form, None)
