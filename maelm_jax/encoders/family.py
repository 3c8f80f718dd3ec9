"""What a family of stock encoders is: its settings, its tensors, its heads and its sentence pairs.

A family is an object of `Family`, such as `mpnet.MPNET`: tables that serve export and import.
families.py lists the families.
"""

import dataclasses
import typing

import numpy as np

from maelm_jax import config
from maelm_jax.encoders import layouts
from maelm_jax.encoders.layouts import TensorMapping
from maelm_jax.encoders.results import Results

SEQUENCE_CLASSIFICATION = "ForSequenceClassification"
QUESTION_ANSWERING = "ForQuestionAnswering"
TOKEN_CLASSIFICATION = "ForTokenClassification"
# {end of the name of a stock task class: top-level module of the parameters here}.
HEADS = {
    SEQUENCE_CLASSIFICATION: "classifier",
    QUESTION_ANSWERING: "span",
    TOKEN_CLASSIFICATION: "token",
}
POSITIONS = "max_position_embeddings"
TYPES = "embeddings.token_type_embeddings.weight"
# Beginnings of the names of tensors of stock encoders that an import leaves out.
UNREAD = ("pooler.", "embeddings.position_ids", "embeddings.token_type_ids")
# The names in a stock layer of BERT, ELECTRA and RoBERTa.
BERT_PARTS = layouts.part_names(
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)


# {field of config.Encoder: entry of config.json}.
BERT_FIELDS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "max_positions": POSITIONS,
    "layer_norm_eps": "layer_norm_eps",
    "hidden_act": "hidden_act",
}
# {field of config.Dropout: entry of config.json}.
BERT_DROPOUT = {"hidden": "hidden_dropout_prob", "attention": "attention_probs_dropout_prob"}
BERT_DEFAULTS = {"layer_norm_eps": 1e-12, "pad_token_id": 1, "hidden_act": "gelu"}
BERT_SUPPORTED = {
    "tie_word_embeddings": True,
    "position_embedding_type": "absolute",
}


class PairFormat(typing.NamedTuple):
    """How a model of the family reads two sentences: `<s> A </s> B </s>`.

    Attributes:
        separators: The number of `</s>` between the sentences.
        has_types: Whether the tokens of B, and the `</s>` after it, have token type 1.
    """

    separators: int
    has_types: bool = False


REPEATED_SEPARATOR = PairFormat(separators=2)  # of RoBERTa, MPNet and the published code


class TokenizerOption(typing.NamedTuple):
    """An entry of tokenizer_config.json, and where tokenizer.json states the same.

    It may be an entry that no file has: then the tokenizer's class always uses the default.
    """

    name: str
    default: bool | int | str | None  # of the tokenizer's class, for a file without the entry
    part: str
    option: str
    is_always_stated: bool = True  # if not, tokenizer.json without it means the default


WORDPIECE_OPTIONS = (
    TokenizerOption("do_lower_case", True, "normalizer", "lowercase"),
    TokenizerOption("strip_accents", None, "normalizer", "strip_accents"),
    TokenizerOption("tokenize_chinese_chars", True, "normalizer", "handle_chinese_chars"),
    TokenizerOption("clean_text", True, "normalizer", "clean_text"),
    TokenizerOption("pre_tokenizer", "BertPreTokenizer", "pre_tokenizer", "type"),
    TokenizerOption("unk_token", "[UNK]", "model", "unk_token"),
    TokenizerOption("continuing_subword_prefix", "##", "model", "continuing_subword_prefix"),
    TokenizerOption(
        "max_input_chars_per_word", 100, "model", "max_input_chars_per_word", is_always_stated=False
    ),
)


class ClassifierStyle(typing.NamedTuple):
    """How a classifier of the family scores a text: pooling, dense, activation, norm, out.

    A head for question answering is one linear map, unless `transforms_tokens`.

    Attributes:
        activation: "tanh", "relu" or "gelu", after the first linear map.
        has_input_dropout: Whether dropout comes before the first linear map too.
        has_norm: Whether a LayerNorm stands before the last linear map.
        has_bias: Whether the first linear map has a bias.
        transforms_tokens: Whether heads for single tokens have dense, activation and norm too.
        pools_mean: Whether the mean of the text's states is scored. If not, the first state is.
    """

    activation: str = "tanh"
    has_input_dropout: bool = True
    has_norm: bool = False
    has_bias: bool = True
    transforms_tokens: bool = False
    pools_mean: bool = False


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


ROBERTA_HEAD = LanguageHeadNames(  # of RoBERTa and MPNet
    "lm_head.dense",
    "lm_head.layer_norm",
    "lm_head.bias",
    ("lm_head.decoder.weight",),
    ("lm_head.decoder.bias",),
)


@dataclasses.dataclass(frozen=True)
class FineTunedHead:
    """The head of a fine-tuned run.

    The parameters are `classifier` (dense, out), `span` (one linear map to start and end) or
    `token` (out). Those of ModernBERT are dense, norm and out in every head.

    Attributes:
        task_class: The end of the name of the stock class.
        labels: The names of the classes in order; empty for regression and question answering.
        has_several_labels: Whether a text can have several of them, or none.
        has_stock_class: Whether a class of transformers predicts what the run predicts.
    """

    task_class: str
    labels: tuple[str, ...] = ()
    has_several_labels: bool = False
    has_stock_class: bool = True

    def config_entries(self) -> dict[str, typing.Any]:
        """Returns the entries of config.json that describe the head."""
        if self.task_class == QUESTION_ANSWERING:
            return {}
        if not self.labels:
            return {
                "id2label": {"0": "score"},
                "label2id": {"score": 0},
                "problem_type": "regression",
            }
        entries = {
            "id2label": {str(index): label for index, label in enumerate(self.labels)},
            "label2id": {label: index for index, label in enumerate(self.labels)},
        }
        if self.task_class == SEQUENCE_CLASSIFICATION:
            number = "multi" if self.has_several_labels else "single"
            entries["problem_type"] = f"{number}_label_classification"
        return entries


def is_headless(class_name: str) -> bool:
    """Returns whether a stock class is the encoder alone: BertModel, but not BertLMHeadModel."""
    return class_name.endswith("Model") and not class_name.endswith("LMHeadModel")


def find_head(params: dict[str, np.ndarray], results: Results | None) -> FineTunedHead | None:
    """Returns the head among the parameters {path: array}; None for a pretraining run.

    `results` are those of the run. Raises ConfigError unless they name each class.
    """
    if "span/kernel" in params or "span/out/kernel" in params:
        return FineTunedHead(QUESTION_ANSWERING)
    task_class, bias = SEQUENCE_CLASSIFICATION, params.get("classifier/out/bias")
    if "token/out/bias" in params:
        task_class, bias = TOKEN_CLASSIFICATION, params["token/out/bias"]
    if bias is None:
        return None
    classes, labels = len(bias), tuple(results.labels if results else ())
    if results and not results.has_stock_class:
        return FineTunedHead(task_class, labels, has_stock_class=False)
    if classes == 1 and not labels:
        return FineTunedHead(task_class)
    if len(labels) != classes:
        raise config.ConfigError(
            f"the fine-tuned head has {classes} classes, results.json names {len(labels)}: "
            f"{', '.join(labels) or 'none'}"
        )
    return FineTunedHead(task_class, labels, results.label_separator is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of stock encoders.

    A field of config.Encoder is carried by config.json, fixed at a value, or without effect beside
    the fixed ones (`idle_with`). An encoder is refused if any other field is not the default.

    Attributes:
        model_type: The Hugging Face model_type.
        class_name: The start of the names of its stock classes.
        pair: How it reads two sentences.
        language_head: The names of its language-model head.
        causal_class: The end of the name of its class of next tokens, or None. It computes the
            encoder with a causal mask if config.json has `is_decoder`.
        prefix: The start of the names of the encoder's tensors in a stock model with a head.
        token_table: The name of the token table.
        layers_name: The name of the stack of layers.
        part_names: {part of a block here: its name in a stock layer}.
        pooler: The name of the linear map of a pooler that is kept beside the encoder, or None.
        classifier_names: {linear map of a classifier here: its name in the stock classifier}.
        classifier: What its classifiers compute.
        fields: {field of config.Encoder: entry of config.json}.
        structured: Further fields that `make_entries` and `read_settings` of a subclass carry.
        dropout: {field of config.Dropout: entry of config.json}.
        fixed: {field of config.Encoder: the only value with which the stock class computes it}.
        equal: {entry of config.json: the entry that it must equal}.
        defaults: The stock class's values of entries that an old config.json leaves out.
        supported: {entry of config.json: the only value with which the stock class computes the
            encoder here}. It is the default of the stock class, too.
        aliases: {other spelling of an entry of config.json, which wins: the entry}.
        tokenizer_options: Entries in which its two tokenizer files must agree.
        has_metaspace: Whether its tokenizer's class splits a text as SentencePiece does, whatever
            tokenizer.json states.
        has_tokenizer_class: Whether transformers has a tokenizer class for it, which adds `<s>` and
            `</s>` if tokenizer.json has no post_processor. If not, tokenizer.json alone counts.
        skips_positions: Whether positions start after the id of padding. Rows before are unused.
    """

    model_type: str
    class_name: str
    pair: PairFormat
    language_head: LanguageHeadNames
    causal_class: str | None = None
    prefix: str
    token_table: str = "embeddings.word_embeddings.weight"
    layers_name: str = "encoder.layer."
    part_names: dict[str, str] = dataclasses.field(default_factory=lambda: BERT_PARTS)
    pooler: str | None = None
    classifier_names: dict[str, str] = dataclasses.field(
        default_factory=lambda: {"dense": "classifier.dense", "out": "classifier.out_proj"}
    )
    classifier: ClassifierStyle = dataclasses.field(default_factory=ClassifierStyle)
    fields: dict[str, str] = dataclasses.field(default_factory=lambda: BERT_FIELDS)
    structured: tuple[str, ...] = ()
    dropout: dict[str, str] = dataclasses.field(default_factory=lambda: BERT_DROPOUT)
    fixed: dict[str, typing.Any]
    equal: dict[str, str] = dataclasses.field(default_factory=dict)
    defaults: dict[str, typing.Any] = dataclasses.field(default_factory=lambda: BERT_DEFAULTS)
    supported: dict[str, typing.Any] = dataclasses.field(default_factory=lambda: BERT_SUPPORTED)
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    tokenizer_options: tuple[TokenizerOption, ...] = WORDPIECE_OPTIONS
    has_metaspace: bool = False
    has_tokenizer_class: bool = True
    skips_positions: bool = False

    # Settings

    def as_stored(self, encoder: config.Encoder) -> config.Encoder:
        """Returns the encoder as the stock class has it: with its family and a table of types.

        A table of one type whose row is 0 does not change the states.
        """
        types = encoder.token_types
        if "token_types" in self.fields:
            types = max(types, 1)
        return dataclasses.replace(encoder, family=self.model_type, token_types=types).canonical

    def find_misfits(self, encoder: config.Encoder, special: config.SpecialIds) -> list[str]:
        """Returns the reasons why no stock model of the family computes the encoder."""
        pad = self.supported.get("pad_token_id", special.pad)
        carried = (*self.fields, *self.structured, "family")
        misfits = layouts.list_misfits(encoder, self.fixed, carried)
        if special.pad != pad:
            misfits.append(
                f"the id of <pad> in the vocabulary is {special.pad}, and {self.class_name} needs "
                f"{pad}: name a vocabulary with it (Vocabulary.file), or train with "
                "Encoder.relative_buckets='none'"
            )
        return misfits

    def find_unsupported(self, content: dict[str, typing.Any]) -> list[str]:
        """Returns the entries of a config.json with which the encoder is not computed here."""
        entries = {"is_causal": False} | self.defaults | self.supported | content
        if is_headless((content.get("architectures") or [""])[0]):
            entries["tie_word_embeddings"] = True
        supported = self.supported | {name: entries[other] for name, other in self.equal.items()}
        supported |= {"quantization_config": None, "is_causal": False}
        unsupported = [
            f"{alias} {content[alias]!r} (only that of {name}, {content.get(name)!r})"
            for alias, name in self.aliases.items()
            if alias in content and content[alias] != content.get(name)
        ]
        return unsupported + [
            f"{name} {entries[name]!r} (only {value!r})"
            for name, value in supported.items()
            if entries.get(name) != value
        ]

    def read_settings(self, content: dict[str, typing.Any]) -> dict[str, typing.Any]:
        """Returns the fields of config.Encoder that the content of a config.json determines."""
        entries = self.defaults | content
        stated = {field: entries[name] for field, name in self.fields.items()}
        stated["max_positions"] -= self.count_unused_positions(entries["pad_token_id"])
        return {"family": self.model_type, **self.fixed, **stated}

    def read_dropout(self, content: dict[str, typing.Any]) -> config.Dropout:
        """Returns the dropout that the content of a config.json states, else the default here."""
        entries = self.defaults | content
        stated = {field: name for field, name in self.dropout.items() if name in entries}
        return config.Dropout(**{field: float(entries[name]) for field, name in stated.items()})

    def make_entries(
        self, model: config.Model, special: config.SpecialIds, vocabulary_size: int
    ) -> dict[str, typing.Any]:
        """Returns the content of config.json, except for architecture and head.

        The encoder is one of `as_stored`.
        """
        entries = {
            **self.supported,
            **({"is_decoder": model.causal} if self.causal_class else {}),
            "model_type": self.model_type,
            "vocab_size": vocabulary_size,
            **{entry: getattr(model.encoder, field) for field, entry in self.fields.items()},
            **{entry: getattr(model.dropout, field) for field, entry in self.dropout.items()},
            POSITIONS: model.encoder.max_positions + self.count_unused_positions(special.pad),
            "initializer_range": model.init.std,
            "bos_token_id": special.bos,
            "pad_token_id": special.pad,
            "eos_token_id": special.eos,
            "dtype": "float32",
        }
        return entries | {name: entries[other] for name, other in self.equal.items()}

    def count_unused_positions(self, pad: int) -> int:
        """Returns the number of unused rows at the start of the stock position table."""
        return pad + 1 if self.skips_positions else 0

    # Tensors

    def encoder_mappings(
        self, encoder: config.Encoder, pad: int, prefix: str
    ) -> list[TensorMapping]:
        """Returns the mappings of the encoder. `prefix` begins the names of its stock tensors."""
        embeddings = f"{prefix}embeddings."
        mappings = [
            TensorMapping(prefix + self.token_table, "encoder/token_embedding"),
            TensorMapping(
                f"{embeddings}position_embeddings.weight",
                "encoder/position_embedding",
                offset=self.count_unused_positions(pad),
            ),
            *layouts.norm(f"{embeddings}LayerNorm", "encoder/norm"),
            *layouts.blocks(prefix + self.layers_name, "encoder", encoder.layers, self.part_names),
        ]
        if encoder.token_types:
            mappings.append(TensorMapping(prefix + TYPES, layouts.TYPE_TABLE))
        if encoder.relative_buckets != "none":
            name = f"{prefix}encoder.relative_attention_bias.weight"
            mappings.append(TensorMapping(name, "encoder/relative_bias/table"))
        return mappings

    def pooler_mappings(self, prefix: str) -> list[TensorMapping]:
        """Returns the mappings of a pooler that is kept beside the encoder."""
        return layouts.linear(prefix + self.pooler, "pooler") if self.pooler else []

    def language_model_mappings(self) -> list[TensorMapping]:
        """Returns the mappings of the language-model head."""
        return [
            *layouts.linear(self.language_head.dense, "head/dense"),
            *layouts.norm(self.language_head.norm, "head/norm"),
            TensorMapping(self.language_head.bias, "head/bias"),
        ]

    def task_head_mappings(self, task_class: str) -> list[TensorMapping]:
        """Returns the mappings of the head of a fine-tuned model."""
        if task_class == QUESTION_ANSWERING:
            return layouts.linear("qa_outputs", "span")
        if task_class == TOKEN_CLASSIFICATION:
            return layouts.linear("classifier", "token/out")
        return [
            mapping
            for part, name in self.classifier_names.items()
            for mapping in layouts.linear(name, f"classifier/{part}")
        ]

    def import_params(
        self,
        tensors: layouts.Tensors,
        encoder: config.Encoder,
        pad: int,
        shapes: layouts.Shapes,
        folder: str,
    ) -> dict[str, np.ndarray]:
        """Reads the encoder, and the language-model head and pooler if they are there.

        Other tensors outside the encoder, such as heads of fine-tuned models, are left out, and so
        is a language-model head without its bias. `shapes` are those of the model's parameters.

        Returns:
            {parameter path: float32 array}.

        Raises:
            ConfigError: As `layouts.import_tensors`. `folder` begins the message.
        """
        prefix = self.prefix if any(name.startswith(self.prefix) for name in tensors) else ""
        mappings, tied = self.encoder_mappings(encoder, pad, prefix), {}
        pooler = self.pooler_mappings(prefix)
        if any(mapping.name in tensors for mapping in pooler):
            mappings += pooler
            size = encoder.width
            shapes = shapes | {"pooler/kernel": (size, size), "pooler/bias": (size,)}
        if self.language_head.bias in tensors:  # other heads have some of its other names, too
            mappings += self.language_model_mappings()
            tied = dict.fromkeys(self.language_head.tied, prefix + self.token_table)
            tied |= dict.fromkeys(self.language_head.tied_bias, self.language_head.bias)
            table = prefix + self.token_table
            for name in self.language_head.tied:  # safetensors may keep this name of the table only
                if name in tensors and table not in tensors:
                    tensors = {**tensors, table: tensors[name]}
        known = {*tied, *(mapping.name for mapping in mappings)}
        unread = tuple(prefix + name for name in UNREAD)
        later = self._find_later_layers(tensors, encoder.layers, prefix)
        if later:
            print(
                f"{folder}: config.json has {encoder.layers} layers, the file of weights "
                f"{max(later.values()) + 1}: the first {encoder.layers} are taken, as transformers "
                "does"
            )
        kept = {
            name: value
            for name, value in tensors.items()
            if name in known
            or (name.startswith(prefix) and not name.startswith(unread) and name not in later)
        }
        return layouts.import_tensors(kept, mappings, shapes, folder, tied)

    def _find_later_layers(
        self, tensors: layouts.Tensors, layers: int, prefix: str
    ) -> dict[str, int]:
        """Returns {name: number of its layer} of the tensors of layers after the first `layers`."""
        start = prefix + self.layers_name
        numbers = {
            name: name.removeprefix(start).partition(".")[0]
            for name in tensors
            if name.startswith(start)
        }
        return {
            name: int(number)
            for name, number in numbers.items()
            if number.isdecimal() and int(number) >= layers
        }
