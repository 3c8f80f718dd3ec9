"""MPNet (arXiv 2004.09297): t5 relative buckets beside the position table, no token types."""

from maelm_jax.encoders import family, layouts

MPNET = family.Family(
    model_type="mpnet",
    class_name="MPNet",
    prefix="mpnet.",
    pair=family.REPEATED_SEPARATOR,
    language_head=family.ROBERTA_HEAD,
    part_names=layouts.part_names(
        "attention.attn.q",
        "attention.attn.k",
        "attention.attn.v",
        "attention.attn.o",
        "attention.LayerNorm",
        "intermediate.dense",
        "output.dense",
        "output.LayerNorm",
    ),
    # The stock class has no setting for the largest distance.
    fixed=layouts.BERT_LAYERS
    | {"relative_buckets": "t5", "num_buckets": 32, "max_distance": 128, "token_types": 0},
    # It numbers positions from the padding id 1, whatever config.json says.
    supported=family.BERT_SUPPORTED | {"relative_attention_num_buckets": 32, "pad_token_id": 1},
    skips_positions=True,
)
