"""RoBERTa (arXiv 1907.11692): BERT without a pooler, with one token type that all tokens have.

XLM-RoBERTa (arXiv 1911.02116) and CamemBERT (arXiv 1911.03894) are RoBERTa with another tokenizer.
"""

import dataclasses

from maelm_jax.encoders import family, layouts

ROBERTA = family.Family(
    model_type="roberta",
    class_name="Roberta",
    prefix="roberta.",
    pair=family.REPEATED_SEPARATOR,
    language_head=family.ROBERTA_HEAD,
    causal_class="ForCausalLM",
    fields=family.BERT_FIELDS | {"token_types": "type_vocab_size"},
    fixed=layouts.BERT_LAYERS | {"relative_buckets": "none"},
    defaults=family.BERT_DEFAULTS | {"type_vocab_size": 2},
    supported=family.BERT_SUPPORTED | {"add_cross_attention": False},
    tokenizer_options=(
        family.TokenizerOption("add_prefix_space", False, "pre_tokenizer", "add_prefix_space"),
        family.TokenizerOption("normalizer", None, "normalizer", "type"),
        family.TokenizerOption(
            "use_regex", True, "pre_tokenizer", "use_regex", is_always_stated=False
        ),
        family.TokenizerOption(
            "ignore_merges", False, "model", "ignore_merges", is_always_stated=False
        ),
    ),
    skips_positions=True,
)

XLM_ROBERTA = dataclasses.replace(
    ROBERTA,
    model_type="xlm-roberta",
    class_name="XLMRoberta",
    tokenizer_options=(),
    has_metaspace=True,
)
CAMEMBERT = dataclasses.replace(XLM_ROBERTA, model_type="camembert", class_name="Camembert")
