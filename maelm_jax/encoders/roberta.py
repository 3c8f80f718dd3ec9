"""RoBERTa (arXiv 1907.11692): BERT without a pooler, with one token type that all tokens have."""

from maelm_jax.encoders import layouts
from maelm_jax.encoders.family import (
    BERT_DEFAULTS,
    BERT_FIELDS,
    BERT_SUPPORTED,
    REPEATED_SEPARATOR,
    ROBERTA_HEAD,
    Family,
    TokenizerOption,
)

ROBERTA = Family(
    model_type="roberta",
    class_name="Roberta",
    prefix="roberta.",
    pair=REPEATED_SEPARATOR,
    language_head=ROBERTA_HEAD,
    fields=BERT_FIELDS | {"token_types": "type_vocab_size"},
    fixed=layouts.BERT_LAYERS | {"relative_buckets": "none"},
    defaults=BERT_DEFAULTS | {"type_vocab_size": 2},
    supported=BERT_SUPPORTED | {"is_decoder": False, "add_cross_attention": False},
    tokenizer_options=(
        TokenizerOption("add_prefix_space", False, "pre_tokenizer", "add_prefix_space"),
    ),
    skips_positions=True,
)
