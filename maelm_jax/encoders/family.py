"""What a family of stock encoders is: its settings and its tensors, in both directions.

A family is an object of a subclass of `Family`: `mpnet.MPNET`, `roberta.ROBERTA`. families.py lists
them.
"""

import abc
import typing

import numpy as np

from maelm_jax import config, json_files
from maelm_jax.encoders import fine_tuned_head
from maelm_jax.encoders import tensors as tables
from maelm_jax.encoders.tensors import TensorMapping


class Family(abc.ABC):
    """A family of stock encoders with post-LN blocks and a table of absolute positions.

    Attributes:
        model_type: The Hugging Face model_type.
        class_name: The start of the names of its stock classes.
        part_names: {part of a block here: its name in a stock layer}.
        sizes: {field of config.Model: entry of config.json}.
        defaults: The stock class's values of entries that a config.json leaves out.
        supported: {entry of config.json: the only value with which the stock class computes the
            encoder here}. It is the default of the stock class, too.
        not_encoder: Beginnings of the names of stock tensors that the encoder does not use.
    """

    model_type: str
    class_name: str
    part_names: dict[str, str]
    sizes: typing.ClassVar = {
        "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
        "feed_forward": "intermediate_size",
    }  # fmt: skip
    defaults: typing.ClassVar = {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "max_position_embeddings": 512, "layer_norm_eps": 1e-12,
        "pad_token_id": 1,
    }  # fmt: skip
    supported: typing.ClassVar = {"hidden_act": "gelu", "tie_word_embeddings": True}
    not_encoder: typing.ClassVar = ("pooler.", "embeddings.position_ids")
    token_table: typing.ClassVar = "embeddings.word_embeddings.weight"

    @property
    def prefix(self) -> str:
        """The start of the names of the encoder's tensors in a stock model with a head."""
        return f"{self.model_type}."

    # Settings

    @abc.abstractmethod
    def misfits(self, model: config.Model, special: config.SpecialIds) -> list[str]:
        """Returns the reasons why no stock model of the family computes the encoder of `model`."""

    @abc.abstractmethod
    def position_settings(self) -> dict[str, typing.Any]:
        """Returns the fields of config.Model that say how the family knows positions."""

    @abc.abstractmethod
    def position_entries(self) -> dict[str, typing.Any]:
        """Returns the entries of config.json that say how the family knows positions."""

    @abc.abstractmethod
    def unused_positions(self, pad: int) -> int:
        """Returns the number of unused rows at the start of the stock position table."""

    def config_entries(
        self, model: config.Model, special: config.SpecialIds, vocabulary_size: int
    ) -> dict[str, typing.Any]:
        """Returns the content of config.json, except for architecture and head."""
        offset = self.unused_positions(special.pad)
        return {
            "model_type": self.model_type,
            "vocab_size": vocabulary_size,
            **{name: getattr(model, field) for field, name in self.sizes.items()},
            "hidden_act": "gelu",
            "hidden_dropout_prob": model.dropout,
            "attention_probs_dropout_prob": model.attention_dropout,
            "max_position_embeddings": model.max_positions + offset,
            "layer_norm_eps": model.layer_norm_eps,
            "initializer_range": model.init_std,
            "bos_token_id": special.bos,
            "pad_token_id": special.pad,
            "eos_token_id": special.eos,
            "tie_word_embeddings": True,
            "dtype": "float32",
            **self.position_entries(),
        }

    def model_settings(self, content: dict) -> dict[str, typing.Any]:
        """Returns the fields of config.Model that the content of a config.json determines.

        Call `faults` first.
        """
        entries = self.defaults | content
        offset = self.unused_positions(entries["pad_token_id"])
        return {
            **{field: entries[name] for field, name in self.sizes.items()},
            "max_positions": entries["max_position_embeddings"] - offset,
            "layer_norm_eps": float(entries["layer_norm_eps"]),
            **self.position_settings(),
        }

    def faults(self, content: dict) -> list[str]:
        """Returns why the encoder of a config.json cannot be computed here; empty if it can."""
        entries = self.defaults | self.supported | content
        faults = [
            f"{name} {json_files.shown(entries[name])} (only {value!r})"
            for name, value in self.supported.items()
            if type(entries[name]) is not type(value) or entries[name] != value
        ]
        if "vocab_size" not in content:
            faults.append("no vocab_size")
        faults += _size_faults(entries, [*self.sizes.values(), "max_position_embeddings"])
        if not json_files.is_number(entries["layer_norm_eps"], 1e-30, 1.0):
            shown = json_files.shown(entries["layer_norm_eps"])
            faults.append(f"layer_norm_eps {shown} (a number from 1e-30 to 1)")
        if not faults:
            offset = self.unused_positions(entries["pad_token_id"])
            positions = entries["max_position_embeddings"]
            if positions <= offset:
                faults.append(f"max_position_embeddings {positions} (above {offset})")
        return faults

    # Tensors

    def encoder_mappings(self, model: config.Model, pad: int, prefix: str) -> list[TensorMapping]:
        """Returns the mappings of the encoder; the names of its stock tensors start with `prefix`.

        `pad` is the id of `<pad>`.
        """
        return [
            TensorMapping(prefix + self.token_table, "encoder/token_embedding"),
            TensorMapping(
                f"{prefix}embeddings.position_embeddings.weight",
                "encoder/position_embedding",
                offset=self.unused_positions(pad),
            ),
            *tables.norm(f"{prefix}embeddings.LayerNorm", "encoder/norm"),
            *tables.blocks(f"{prefix}encoder.layer.", "encoder", model.layers, self.part_names),
        ]

    def language_model_mappings(self) -> list[TensorMapping]:
        """Returns the mappings of the language-model head."""
        return [
            *tables.linear("lm_head.dense", "head/dense"),
            *tables.norm("lm_head.layer_norm", "head/norm"),
            TensorMapping("lm_head.bias", "head/bias"),
        ]

    def tied_tensors(self, prefix: str) -> dict[str, str]:
        """Returns {name of a tied copy in the language-model head: name of its original}."""
        return {
            "lm_head.decoder.weight": prefix + self.token_table,
            "lm_head.decoder.bias": "lm_head.bias",
        }

    def task_head_mappings(self, task_class: str) -> list[TensorMapping]:
        """Returns the mappings of the head of a fine-tuned model.

        The stock heads compute the same as `maelm_jax.finetuning.heads`: dense, tanh and out_proj
        on the first state, or one linear map of each state.
        """
        if task_class == fine_tuned_head.QUESTION_ANSWERING:
            return tables.linear("qa_outputs", "span")
        return [
            *tables.linear("classifier.dense", "classifier/dense"),
            *tables.linear("classifier.out_proj", "classifier/out"),
        ]

    def added_tensors(self, model: config.Model, prefix: str) -> dict[str, np.ndarray]:
        """Returns the stock tensors of the encoder that have no parameter here, with their values.

        Args:
            model: The settings of the model.
            prefix: The start of the names.
        """
        return {}

    def import_encoder(
        self,
        tensors: dict[str, np.ndarray],
        model: config.Model,
        pad: int,
        shapes: dict[str, tuple[int, ...]],
        folder: str,
    ) -> dict[str, np.ndarray]:
        """Reads the encoder, and the language-model head if there is one, from stock tensors.

        Heads of fine-tuned models and poolers are left out by name.

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
        left_out = (*(prefix + name for name in self.not_encoder), "classifier.", "qa_outputs.")
        tensors = {name: tensors[name] for name in tensors if not name.startswith(left_out)}
        mappings, tied = self.encoder_mappings(model, pad, prefix), {}
        if any(name.startswith("lm_head.") for name in tensors):
            mappings += self.language_model_mappings()
            tied = self.tied_tensors(prefix)
        return tables.import_tensors(tensors, mappings, shapes, folder, tied)


def _size_faults(entries: dict[str, typing.Any], sizes: list[str]) -> list[str]:
    """Returns the faults of the sizes and ids of a config.json."""
    faults = []
    for name, least in {**dict.fromkeys(sizes, 1), "vocab_size": 1, "pad_token_id": 0}.items():
        most = json_files.MOST_LAYERS if name.endswith("layers") else json_files.LARGEST
        if name in entries and not json_files.is_integer(entries[name], least, most):
            shown = json_files.shown(entries[name])
            faults.append(f"{name} {shown} (an integer from {least} to {most})")
    return faults
