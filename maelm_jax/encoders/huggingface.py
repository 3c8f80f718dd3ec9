"""Writes and reads encoders as stock transformers models.

The model is MPNet if the encoder has t5 relative buckets, and RoBERTa if it has no relative
positions. The stock class computes the same function without extra code. Three details differ:

- The stock position tables start with unused rows: position p is row p + pad + 1.
- RoBERTa adds a token-type row to every token. `write` sets it to 0. `read` adds it to the
  position table.
- The stock pooler is not part of the encoder. `write` leaves it out.
"""

import dataclasses
import json
import pathlib
import typing

import numpy as np

from maelm_jax import config, json_files
from maelm_jax.encoders import tensors as tables
from maelm_jax.encoders import torch_file
from maelm_jax.encoders.tensors import TensorMapping

_PARTS = {
    "mpnet": {
        "attention/query": "attention.attn.q", "attention/key": "attention.attn.k",
        "attention/value": "attention.attn.v", "attention/out": "attention.attn.o",
        "attention_norm": "attention.LayerNorm", "feed_forward/up": "intermediate.dense",
        "feed_forward/down": "output.dense", "feed_forward_norm": "output.LayerNorm",
    },
    "roberta": {
        "attention/query": "attention.self.query", "attention/key": "attention.self.key",
        "attention/value": "attention.self.value", "attention/out": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm", "feed_forward/up": "intermediate.dense",
        "feed_forward/down": "output.dense", "feed_forward_norm": "output.LayerNorm",
    },
}  # fmt: skip
CLASS = {"mpnet": "MPNet", "roberta": "Roberta"}
WORDS, TYPES = "embeddings.word_embeddings.weight", "embeddings.token_type_embeddings.weight"
UNTRAINED = ("pooler.", "embeddings.position_ids")  # the encoder does not use them
# The defaults of the stock classes, for values that a config.json leaves out.
_SIZES = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512,
}  # fmt: skip
_LAYER_NORM = {"layer_norm_eps": 1e-12}
# With any other value, the stock class computes another function than the encoder here.
_EXPECTED = {
    "hidden_act": "gelu", "tie_word_embeddings": True, "relative_attention_num_buckets": 32,
    "position_embedding_type": "absolute",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The head of a fine-tuned run.

    The parameters are `classifier` (dense, out) or `span` (one linear map to start and end).

    Attributes:
        head: The end of the name of the stock class.
        labels: The names of the classes in order; empty for regression and question answering.
    """

    head: str
    labels: tuple[str, ...] = ()

    @classmethod
    def of(cls, params: dict[str, np.ndarray], labels: typing.Sequence[str]) -> "Tuned | None":
        """Returns the head among the parameters {path: array}; None for a pretraining run.

        Raises:
            ConfigError: `labels` does not hold one name for each class.
        """
        if "span/kernel" in params:
            return cls("ForQuestionAnswering")
        if "classifier/out/bias" not in params:
            return None
        classes = len(params["classifier/out/bias"])
        if classes > 1 and len(labels) != classes:
            raise config.ConfigError(
                f"the fine-tuned head has {classes} classes, results.json names {len(labels)}: "
                f"{', '.join(labels) or 'none'}"
            )
        return cls("ForSequenceClassification", tuple(labels) if classes > 1 else ())

    def rows(self) -> list[TensorMapping]:
        """Returns the names of the head's tensors in the stock class.

        The stock heads compute the same as `maelm_jax.finetuning.heads`: dense, tanh and out_proj
        on the first state, or one linear map of each state.
        """
        if self.head == "ForQuestionAnswering":
            return tables.linear("qa_outputs", "span")
        return tables.linear("classifier.dense", "classifier/dense") + tables.linear(
            "classifier.out_proj", "classifier/out"
        )

    def settings(self) -> dict[str, typing.Any]:
        """Returns the entries of config.json that describe the head."""
        if self.head == "ForQuestionAnswering":
            return {}
        if not self.labels:
            return {
                "id2label": {"0": "score"},
                "label2id": {"score": 0},
                "problem_type": "regression",
            }
        names = {str(index): name for index, name in enumerate(self.labels)}
        return {
            "id2label": names,
            "label2id": {name: int(index) for index, name in names.items()},
            "problem_type": "single_label_classification",
        }


def hf_model_type(model: config.Model, special: config.SpecialIds) -> str:
    """Returns the Hugging Face model_type that computes the encoder of `model`.

    Raises:
        ConfigError: No stock model computes it. The message names an export format that does.
    """
    if model.relative_buckets == "none":
        return "roberta"
    wrong = []
    if (model.relative_buckets, model.num_buckets, model.max_distance) != ("t5", 32, 128):
        wrong.append(
            f"the stock MPNet has t5 buckets 32/128, this model {model.relative_buckets} buckets "
            f"{model.num_buckets}/{model.max_distance}"
        )
    if special.pad != 1:
        wrong.append(f"the stock MPNet has its <pad> at id 1, this vocabulary at {special.pad}")
    if wrong:
        raise config.ConfigError(
            f"no stock transformers model computes this encoder: {'; '.join(wrong)}. "
            "--format=pytorch holds any model"
        )
    return "mpnet"


def _encoder_rows(kind: str, layers: int, offset: int, prefix: str) -> list[TensorMapping]:
    rows = [TensorMapping(prefix + WORDS, "encoder/token_embedding")]
    rows.append(
        TensorMapping(
            f"{prefix}embeddings.position_embeddings.weight",
            "encoder/position_embedding",
            offset=offset,
        )
    )
    rows += tables.norm(f"{prefix}embeddings.LayerNorm", "encoder/norm")
    rows += tables.blocks(f"{prefix}encoder.layer.", "encoder", layers, _PARTS[kind])
    if kind == "mpnet":
        rows.append(
            TensorMapping(
                f"{prefix}encoder.relative_attention_bias.weight", "encoder/relative_bias/table"
            )
        )
    return rows


def _head_rows() -> list[TensorMapping]:
    return [
        *tables.linear("lm_head.dense", "head/dense"),
        *tables.norm("lm_head.layer_norm", "head/norm"),
        TensorMapping("lm_head.bias", "head/bias"),
    ]


def architecture(
    model: config.Model, special: config.SpecialIds, tuned: Tuned | None = None
) -> str:
    """Returns the name of the stock class that loads the export.

    The class has the head of a fine-tuned run, the language-model head of an MLM run, or no head.
    The prediction head of an MAE-LM run reads the decoder, so its class has no head.
    """
    return CLASS[hf_model_type(model, special)] + (
        tuned.head if tuned else "ForMaskedLM" if model.decoder_layers == 0 else "Model"
    )


def write(
    folder: pathlib.Path,
    params: dict[str, np.ndarray],
    model: config.Model,
    vocabulary_size: int,
    special: config.SpecialIds,
    tuned: Tuned | None = None,
) -> int:
    """Writes config.json and model.safetensors into `folder`.

    The files hold the encoder, and the head of `tuned` or of an MLM run.

    Returns:
        The number of parameters written.

    Raises:
        ConfigError: No stock model computes the encoder.
    """
    kind, stock = hf_model_type(model, special), architecture(model, special, tuned)
    offset = special.pad + 1
    settings = {
        "architectures": [stock],
        "model_type": kind,
        "vocab_size": vocabulary_size,
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "intermediate_size": model.feed_forward,
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
    }
    settings |= (
        {"relative_attention_num_buckets": 32} if kind == "mpnet" else {"type_vocab_size": 1}
    )
    settings |= tuned.settings() if tuned else {}
    prefix = "" if stock.endswith("Model") else f"{kind}."
    given = tables.give(params, _encoder_rows(kind, model.layers, offset, prefix), vocabulary_size)
    if kind == "roberta":
        given[prefix + TYPES] = np.zeros((1, model.width), np.float32)
    if tuned:
        given |= tables.give(params, tuned.rows(), vocabulary_size)
    elif stock.endswith("MaskedLM"):
        given |= tables.give(params, _head_rows(), vocabulary_size)
    (folder / "config.json").write_text(
        json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    tables.write_safetensors(folder / "model.safetensors", given)
    return sum(value.size for value in given.values())


def settings(content: dict, where: str) -> dict[str, typing.Any]:
    """Returns the fields of config.Model that the content of a stock config.json determines.

    Raises:
        ConfigError: The model computes another function, or a value is of the wrong type or out of
            range. `where` names the folder in the message.
    """
    wrong = _wrong_values(content)
    if wrong:
        raise config.ConfigError(
            f"{where}: not an encoder that a run can start from: {'; '.join(wrong)}"
        )
    said, kind = _SIZES | _LAYER_NORM | content, content["model_type"]
    pad = content.get("pad_token_id", 1)
    found = {
        "layers": said["num_hidden_layers"],
        "width": said["hidden_size"],
        "heads": said["num_attention_heads"],
        "feed_forward": said["intermediate_size"],
        "max_positions": said["max_position_embeddings"] - pad - 1,
        "layer_norm_eps": float(said["layer_norm_eps"]),
    }
    return found | (
        {"relative_buckets": "t5", "num_buckets": 32, "max_distance": 128}
        if kind == "mpnet"
        else {"relative_buckets": "none"}
    )


def _wrong_values(content: dict) -> list[str]:
    """Returns the reasons why a run cannot start from a config.json; empty if it can."""
    said, kind = _SIZES | _LAYER_NORM | _EXPECTED | content, content.get("model_type")
    pad = content.get("pad_token_id", 1)
    wrong = [
        f"{name} {json_files.shown(said[name])} (only {wanted!r})"
        for name, wanted in _EXPECTED.items()
        if type(said[name]) is not type(wanted) or said[name] != wanted
    ]
    if not isinstance(kind, str) or kind not in CLASS:
        wrong.append(
            f"model_type {json_files.shown(kind)} (only {' and '.join(map(repr, CLASS))})"
        )
    if kind == "mpnet" and pad != 1:
        wrong.append(f"pad_token_id {json_files.shown(pad)} (only 1)")
    if "vocab_size" not in content:
        wrong.append("no vocab_size")
    for name, least in {**dict.fromkeys(_SIZES, 1), "vocab_size": 1, "pad_token_id": 0}.items():
        most = json_files.MOST_LAYERS if name == "num_hidden_layers" else json_files.LARGEST
        if name in said and not json_files.is_integer(said[name], least, most):
            wrong.append(
                f"{name} {json_files.shown(said[name])} (an integer from {least} to {most})"
            )
    if not json_files.is_number(said["layer_norm_eps"], 1e-30, 1.0):
        wrong.append(
            f"layer_norm_eps {json_files.shown(said['layer_norm_eps'])} (a number from 1e-30 to "
            "1)"
        )
    if not wrong and said["max_position_embeddings"] <= pad + 1:
        wrong.append(
            f"max_position_embeddings {said['max_position_embeddings']} (above pad_token_id + 1 = "
            f"{pad + 1})"
        )
    return wrong


def read(
    content: dict, weights: tables.Tensors, shapes: dict[str, tuple[int, ...]], where: str
) -> dict[str, np.ndarray]:
    """Reads the encoder, and the language-model head if there is one, from the stock tensors.

    Heads of fine-tuned models and poolers are left out by name.

    Args:
        content: The content of config.json.
        weights: {stock name: array}.
        shapes: {parameter path: shape} of the model here.
        where: The folder, for error messages.

    Returns:
        {parameter path: float32 array}.

    Raises:
        ConfigError: As `tensors.take`.
    """
    kind, offset = content["model_type"], content.get("pad_token_id", 1) + 1
    prefix = f"{kind}." if any(name.startswith(f"{kind}.") for name in weights) else ""
    dropped = (*(prefix + name for name in UNTRAINED), "classifier.", "qa_outputs.")
    weights = {name: weights[name] for name in weights if not name.startswith(dropped)}
    types = weights.pop(prefix + TYPES, None) if kind == "roberta" else None
    rows = _encoder_rows(kind, shapes["encoder/blocks/attention/query/kernel"][0], offset, prefix)
    copies = {}
    if any(name.startswith("lm_head.") for name in weights):
        rows += _head_rows()
        copies = {"lm_head.decoder.weight": prefix + WORDS, "lm_head.decoder.bias": "lm_head.bias"}
    result = tables.take(weights, rows, shapes, where, copies)
    if types is not None:
        width = shapes["encoder/position_embedding"][1]
        if types.ndim != 2 or types.shape[1] != width or not len(types):
            raise config.ConfigError(
                f"{where}: {prefix + TYPES} has shape {types.shape}, expected (1, {width})"
            )
        if reason := tables.not_finite(types[0]):
            raise config.ConfigError(f"{where}: {prefix + TYPES} {reason}")
        result["encoder/position_embedding"] += types[0].astype(np.float32)
    return result


def _parts_of(index: pathlib.Path) -> list[str]:
    """Returns the file names that a model.safetensors.index.json lists."""
    names = json_files.read_object(index).get("weight_map")
    if not isinstance(names, dict) or not json_files.is_texts(list(names.values())):
        raise config.ConfigError(
            f"{index} has no weight_map of file names. Download or save the folder again"
        )
    for name in names.values():
        if not name or "\0" in name or pathlib.PurePath(name).name != name:
            raise config.ConfigError(
                f"{index} names {json_files.shown(name)}, which is no file of its folder"
            )
    return sorted(set(names.values()))


def weights_of(folder: pathlib.Path) -> tables.Tensors:
    """Opens the tensors of a folder that transformers saved.

    The folder holds one .safetensors file, several with an index, or an older pytorch_model.bin.

    Raises:
        ConfigError: There is no such file, or a file is damaged.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        parts = [tables.Safetensors(folder / name) for name in _parts_of(index)]
        return {name: part[name] for part in parts for name in part}
    if (folder / "model.safetensors").is_file():
        return tables.Safetensors(folder / "model.safetensors")
    if (folder / "pytorch_model.bin").is_file():
        content = torch_file.read(folder / "pytorch_model.bin")
        if not isinstance(content, dict) or not json_files.is_texts(list(content)):
            raise config.ConfigError(
                f"{folder / 'pytorch_model.bin'} holds no tensors by name: it is no model of "
                "transformers"
            )
        return {name: value for name, value in content.items() if isinstance(value, np.ndarray)}
    raise config.ConfigError(f"{folder} holds neither model.safetensors nor pytorch_model.bin")
