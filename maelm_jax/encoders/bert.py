"""BERT (arXiv 1810.04805), and the families with the same encoder: ELECTRA and DistilBERT."""

import dataclasses

from maelm_jax.encoders import family, layouts

FIELDS = family.BERT_FIELDS | {"token_types": "type_vocab_size"}
FIXED = layouts.BERT_LAYERS | {"relative_buckets": "none"}
SUPPORTED = family.BERT_SUPPORTED | {"add_cross_attention": False}

# Positions from 0, a table of token types, a pooler that classifiers start from. Its language head
# has the activation of the layers, where the head here has GELU.
BERT = family.Family(
    model_type="bert",
    class_name="Bert",
    prefix="bert.",
    pair=family.PairFormat(separators=1, has_types=True),
    language_head=family.LanguageHeadNames(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
        ("cls.predictions.decoder.weight",),
        ("cls.predictions.decoder.bias",),
    ),
    causal_class="LMHeadModel",
    pooler="pooler.dense",
    classifier_names={"dense": "bert.pooler.dense", "out": "classifier"},
    classifier=family.ClassifierStyle(has_input_dropout=False),
    fields={field: entry for field, entry in FIELDS.items() if field != "hidden_act"},
    fixed=FIXED | {"hidden_act": "gelu"},
    defaults=family.BERT_DEFAULTS | {"pad_token_id": 0, "type_vocab_size": 2},
    supported=SUPPORTED | {"hidden_act": "gelu"},
)

# The discriminator of ELECTRA (arXiv 2003.10555) whose embeddings have the encoder's width.
ELECTRA = dataclasses.replace(
    BERT,
    model_type="electra",
    class_name="Electra",
    prefix="electra.",
    language_head=family.LanguageHeadNames(
        "generator_predictions.dense",
        "generator_predictions.LayerNorm",
        "generator_lm_head.bias",
        ("generator_lm_head.weight",),
    ),
    causal_class="ForCausalLM",
    pooler=None,
    classifier_names={"dense": "classifier.dense", "out": "classifier.out_proj"},
    classifier=family.ClassifierStyle(activation="gelu"),
    fields=FIELDS,
    fixed=FIXED,
    supported=SUPPORTED,
    equal={"embedding_size": "hidden_size"},
)

# DistilBERT (arXiv 1910.01108): BERT without token types, with other names.
DISTILBERT = family.Family(
    model_type="distilbert",
    class_name="DistilBert",
    prefix="distilbert.",
    pair=family.PairFormat(separators=1),
    language_head=family.LanguageHeadNames(
        "vocab_transform", "vocab_layer_norm", "vocab_projector.bias", ("vocab_projector.weight",)
    ),
    layers_name="transformer.layer.",
    part_names=layouts.part_names(
        "attention.q_lin",
        "attention.k_lin",
        "attention.v_lin",
        "attention.out_lin",
        "sa_layer_norm",
        "ffn.lin1",
        "ffn.lin2",
        "output_layer_norm",
    ),
    classifier_names={"dense": "pre_classifier", "out": "classifier"},
    classifier=family.ClassifierStyle(activation="relu", has_input_dropout=False),
    fields={
        "layers": "n_layers",
        "width": "dim",
        "heads": "n_heads",
        "feed_forward": "hidden_dim",
        "max_positions": family.POSITIONS,
    },
    dropout={"hidden": "dropout", "attention": "attention_dropout"},
    fixed=FIXED | {"token_types": 0, "layer_norm_eps": 1e-12, "hidden_act": "gelu"},
    defaults={"pad_token_id": 0},
    aliases={
        "num_hidden_layers": "n_layers",
        "hidden_size": "dim",
        "num_attention_heads": "n_heads",
    },
    supported={"activation": "gelu", "tie_word_embeddings": True},
)
