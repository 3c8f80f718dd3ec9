"""What a family of stock encoders is: its settings, its tensors, its heads and its sentence pairs.

A family is an object of a subclass of `Family`, such as `mpnet.MPNET`. Each table of it serves
export and import. families.py lists the families.
"""

import abc
import dataclasses
import typing

import numpy as np

from maelm_jax import config
from maelm_jax.encoders import layouts
from maelm_jax.encoders.layouts import TensorMapping

SEQUENCE_CLASSIFICATION = "ForSequenceClassification"
QUESTION_ANSWERING = "ForQuestionAnswering"
TOKEN_CLASSIFICATION = "ForTokenClassification"
HEADS = ("classifier", "span", "token")  # the top-level modules of the parameters of heads
POSITIONS = "max_position_embeddings"
FIXED_EPSILON = 1e-12  # of stock classes that have no setting for it
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


@dataclasses.dataclass(frozen=True)
class FineTunedHead:
    """The head of a fine-tuned run.

    The parameters are `classifier` (dense, out), `span` (one linear map to start and end) or
    `token` (out). Those of ModernBERT are dense, norm and out in every head.

    Attributes:
        task_class: The end of the name of the stock class.
        labels: The names of the classes in order; empty for regression and question answering.
        has_several_labels: Whether a text can have several of them, or none.
    """

    task_class: str
    labels: tuple[str, ...] = ()
    has_several_labels: bool = False

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


def find_head(
    params: dict[str, np.ndarray], results: dict[str, typing.Any]
) -> FineTunedHead | None:
    """Returns the head among the parameters {path: array}; None for a pretraining run.

    Args:
        params: The parameters.
        results: The results.json of the run, which has the names of the classes.

    Raises:
        ConfigError: `results` does not hold one name for each class.
    """
    if "span/kernel" in params or "span/out/kernel" in params:
        return FineTunedHead(QUESTION_ANSWERING)
    task_class, bias = SEQUENCE_CLASSIFICATION, params.get("classifier/out/bias")
    if "token/out/bias" in params:
        task_class, bias = TOKEN_CLASSIFICATION, params["token/out/bias"]
    if bias is None:
        return None
    classes, labels = len(bias), tuple(results.get("labels", ()))
    if classes == 1:
        return FineTunedHead(task_class)
    if len(labels) != classes:
        raise config.ConfigError(
            f"the fine-tuned head has {classes} classes, results.json names {len(labels)}: "
            f"{', '.join(labels) or 'none'}"
        )
    return FineTunedHead(task_class, labels, results.get("label_separator") is not None)


class Family(abc.ABC):
    """A family of stock encoders.

    Attributes:
        model_type: The Hugging Face model_type.
        class_name: The start of the names of its stock classes.
        part_names: {part of a block here: its name in a stock layer}.
        layers_name: The name of the stack of layers.
        language_head: The names of its language-model head.
        classifier_names: {linear map of a classifier here: its name in the stock classifier}. A
            name that starts with "." stands inside the encoder.
        classifier: What its classifiers compute.
        pair: How it reads two sentences.
        sizes: {field of config.Model: entry of config.json}.
        dropouts: The same for rates of dropout.
        defaults: The stock class's values of entries that a config.json leaves out.
        supported: {entry of config.json: the only value with which the stock class computes the
            encoder here}. It is the default of the stock class, too.
        epsilon: The entry of config.json for the epsilon of LayerNorm; None if it is fixed.
        left_out: Beginnings of the names of stock tensors that an import leaves out. A name that
            starts with "." stands inside the encoder.
    """

    model_type: str
    class_name: str
    part_names: typing.ClassVar[dict[str, str]] = BERT_PARTS
    layers_name: typing.ClassVar[str] = "encoder.layer."
    language_head: LanguageHeadNames
    classifier_names: typing.ClassVar[dict[str, str]] = {
        "dense": "classifier.dense",
        "out": "classifier.out_proj",
    }
    classifier: typing.ClassVar[ClassifierStyle] = ClassifierStyle()
    pair: PairFormat
    sizes: typing.ClassVar[dict[str, str]] = {
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "feed_forward": "intermediate_size",
    }
    dropouts: typing.ClassVar[dict[str, str]] = {
        "dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
    }
    defaults: typing.ClassVar[dict[str, typing.Any]] = {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        POSITIONS: 512,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 1,
    }
    supported: typing.ClassVar[dict[str, typing.Any]] = {
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
        "position_embedding_type": "absolute",
    }
    epsilon: typing.ClassVar[str | None] = "layer_norm_eps"
    left_out: typing.ClassVar[tuple[str, ...]] = (
        ".pooler.",
        ".embeddings.position_ids",
        ".embeddings.token_type_ids",
        "classifier.",
        "qa_outputs.",
    )
    token_table: typing.ClassVar[str] = "embeddings.word_embeddings.weight"

    @property
    def prefix(self) -> str:
        """The start of the names of the encoder's tensors in a stock model with a head."""
        return f"{self.model_type}."

    # Settings

    @abc.abstractmethod
    def misfits(self, model: config.Model, special: config.SpecialIds) -> list[str]:
        """Returns the reasons why no stock model of the family computes the encoder of `model`."""

    def relative_position_misfits(self, model: config.Model) -> list[str]:
        """Returns a reason if `model` has relative positions, for families without them."""
        if model.relative_buckets == "none":
            return []
        buckets = f"{model.relative_buckets} buckets"
        return [f"the stock {self.class_name} has no relative positions, this model {buckets}"]

    def own_settings(self, entries: dict[str, typing.Any]) -> dict[str, typing.Any]:
        """Returns the fields of config.Model that only this family or its config.json determine.

        `entries` are those of config.json with defaults. The result replaces what BERT_LAYERS says.
        """
        return {"relative_buckets": "none", "token_types": 0}

    def own_entries(self, model: config.Model) -> dict[str, typing.Any]:
        """Returns the entries of config.json that only this family has."""
        return {}

    def unused_positions(self, pad: int) -> int:
        """Returns the number of unused rows at the start of the stock position table."""
        return 0

    def config_entries(
        self, model: config.Model, special: config.SpecialIds, vocabulary_size: int
    ) -> dict[str, typing.Any]:
        """Returns the content of config.json, except for architecture and head."""
        fields = self.sizes | self.dropouts
        entries = {
            **self.supported,
            "model_type": self.model_type,
            "vocab_size": vocabulary_size,
            **{entry: getattr(model, field) for field, entry in fields.items()},
            POSITIONS: model.max_positions + self.unused_positions(special.pad),
            "initializer_range": model.init_std,
            "bos_token_id": special.bos,
            "pad_token_id": special.pad,
            "eos_token_id": special.eos,
            "dtype": "float32",
        }
        if self.epsilon:
            entries[self.epsilon] = model.layer_norm_eps
        return entries | self.own_entries(model)

    def model_settings(self, content: dict) -> dict[str, typing.Any]:
        """Returns the fields of config.Model that the content of a config.json determines."""
        entries = self.defaults | content
        offset = self.unused_positions(entries["pad_token_id"])
        return {
            "family": self.model_type,
            **layouts.BERT_LAYERS,
            **{field: entries[entry] for field, entry in self.sizes.items()},
            **{field: entries[name] for field, name in self.dropouts.items() if name in entries},
            "max_positions": entries[POSITIONS] - offset,
            "layer_norm_eps": float(entries[self.epsilon]) if self.epsilon else FIXED_EPSILON,
            **self.own_settings(entries),
        }

    def unsupported(self, content: dict) -> list[str]:
        """Returns the entries of a config.json with which the encoder is not computed here."""
        entries = self.defaults | self.supported | content
        if str((content.get("architectures") or [""])[0]).endswith("Model"):
            entries["tie_word_embeddings"] = True  # there is no head
        return [
            f"{name} {entries[name]!r} (only {value!r})"
            for name, value in self.supported.items()
            if entries[name] != value
        ]

    # Tensors

    def encoder_mappings(self, model: config.Model, pad: int, prefix: str) -> list[TensorMapping]:
        """Returns the mappings of the encoder; the names of its stock tensors start with `prefix`.

        `pad` is the id of `<pad>`.
        """
        embeddings = f"{prefix}embeddings."
        mappings = [
            TensorMapping(prefix + self.token_table, "encoder/token_embedding"),
            TensorMapping(
                f"{embeddings}position_embeddings.weight",
                "encoder/position_embedding",
                offset=self.unused_positions(pad),
            ),
            *layouts.norm(f"{embeddings}LayerNorm", "encoder/norm"),
            *layouts.blocks(prefix + self.layers_name, "encoder", model.layers, self.part_names),
        ]
        if model.token_types:
            name = f"{embeddings}token_type_embeddings.weight"
            mappings.append(TensorMapping(name, "encoder/token_type_embedding"))
        return mappings

    def pooler_mappings(self, prefix: str) -> list[TensorMapping]:
        """Returns the mappings of a pooler that is kept beside the encoder."""
        return []

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
            for mapping in layouts.linear(self._full_name(name, self.prefix), f"classifier/{part}")
        ]

    def added_tensors(self, model: config.Model, prefix: str) -> dict[str, np.ndarray]:
        """Returns the stock tensors of the encoder that have no parameter here, with their values.

        Args:
            model: The settings of the model.
            prefix: The start of the names.
        """
        return {}

    def import_params(
        self,
        tensors: layouts.Tensors,
        model: config.Model,
        pad: int,
        shapes: dict[str, tuple[int, ...]],
        folder: str,
    ) -> dict[str, np.ndarray]:
        """Reads the encoder, and the language-model head and pooler if they are there.

        Heads of fine-tuned models are left out by name.

        Args:
            tensors: {stock name: array}.
            model: The settings of the model.
            pad: The id of `<pad>`.
            shapes: {parameter path: shape} of the model.
            folder: The folder, for error messages.

        Returns:
            {parameter path: float32 array}.

        Raises:
            ConfigError: As `tensors.import_tensors`.
        """
        prefix = self.prefix if any(name.startswith(self.prefix) for name in tensors) else ""
        left_out = tuple(self._full_name(name, prefix) for name in self.left_out)
        mappings, tied = self.encoder_mappings(model, pad, prefix), {}
        pooler, head = self.pooler_mappings(prefix), self.language_model_mappings()
        if any(mapping.name in tensors for mapping in pooler):
            mappings += pooler
            shapes = shapes | {
                "pooler/kernel": (model.width, model.width),
                "pooler/bias": (model.width,),
            }
        if _has_language_head(tensors, head, left_out):
            mappings += head
            tied = dict.fromkeys(self.language_head.tied, prefix + self.token_table)
            tied |= dict.fromkeys(self.language_head.tied_bias, self.language_head.bias)
        tensors = _without_left_out(tensors, mappings, left_out)
        return layouts.import_tensors(tensors, mappings, shapes, folder, tied)

    @staticmethod
    def _full_name(name: str, prefix: str) -> str:
        """Returns a name of the tables above; one that starts with "." gets `prefix`."""
        return prefix + name[1:] if name.startswith(".") else name


def _has_language_head(
    tensors: layouts.Tensors, head: list[TensorMapping], left_out: tuple[str, ...]
) -> bool:
    """Returns whether tensors of a language-model head are there that no other head has."""
    return any(mapping.name in tensors for mapping in head if not mapping.name.startswith(left_out))


def _without_left_out(
    tensors: layouts.Tensors, mappings: list[TensorMapping], left_out: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Returns the tensors without those that start with `left_out` and have no mapping."""
    mapped = {mapping.name for mapping in mappings}
    return {
        name: tensors[name] for name in tensors if name in mapped or not name.startswith(left_out)
    }
