"""Writes and reads checkpoints of the reference implementation, github.com/yumeng5/MAE-LM.

`_mappings` lists the correspondence of all parameters. A tensor without a counterpart is an error.
"""

import os
import typing

import numpy as np

from maelm_jax import config, storage
from maelm_jax.encoders import layouts, weight_files
from maelm_jax.encoders.layouts import TensorMapping

_LAYER = layouts.part_names(
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.out_proj",
    "self_attn_layer_norm",
    "fc1",
    "fc2",
    "final_layer_norm",
)
_ENCODER, _DECODER = "encoder.sentence_encoder.", "gen_decoder.sentence_encoder."
TOKENS, BUCKETS = _ENCODER + "embed_tokens.weight", _ENCODER + "relative_attention_bias.weight"
# {field of config.Encoder: name in the Namespace `args` of a reference checkpoint}.
_ARGUMENTS = {
    "layers": "encoder_layers",
    "width": "encoder_embed_dim",
    "heads": "encoder_attention_heads",
    "feed_forward": "encoder_ffn_embed_dim",
    "max_positions": "max_positions",
    "num_buckets": "rel_pos_bins",
    "max_distance": "max_rel_pos",
}
# The settings of every encoder that the published code computes.
FIXED = layouts.BERT_LAYERS | {"token_types": 0, "layer_norm_eps": 1e-5, "hidden_act": "gelu"}
# These settings, given after those of any run, make a model that the published code computes.
CONFIG = "ablations/reference_positions.gin"


def _mappings(model: config.Model) -> list[TensorMapping]:
    encoder, decoder = model.encoder, model.decoder
    head = _head(decoder)
    mappings = [
        TensorMapping(TOKENS, "encoder/token_embedding"),
        *_stack(_ENCODER, "encoder", encoder.layers),
        *layouts.linear(head + "dense", "head/dense"),
        *layouts.norm(head + "layer_norm", "head/norm"),
        TensorMapping(head + "bias", "head/bias"),
    ]
    if decoder:
        mappings += _stack(_DECODER, "decoder", decoder.layers)
    if encoder.relative_buckets != "none":
        mappings.append(TensorMapping(BUCKETS, "encoder/relative_bias/table"))
    return mappings


def _stack(prefix: str, module: str, layers: int) -> list[TensorMapping]:
    """Returns the mappings of the encoder or the decoder, without the token table."""
    return [
        TensorMapping(prefix + "embed_positions.weight", f"{module}/position_embedding"),
        *layouts.norm(prefix + "emb_layer_norm", f"{module}/norm"),
        *layouts.blocks(f"{prefix}layers.", module, layers, _LAYER),
    ]


def _head(decoder: config.Decoder | None) -> str:
    return "gen_decoder.lm_head." if decoder else "encoder.lm_head."


def _tied(decoder: config.Decoder | None) -> dict[str, str]:
    """Returns {name of a tied copy: name of its original}."""
    copies = [_head(decoder) + "weight"]
    if decoder:
        copies.append(_DECODER + "embed_tokens.weight")
    return dict.fromkeys(copies, TOKENS)


def to_reference(
    params: dict[str, np.ndarray], model: config.Model, vocabulary_size: int
) -> dict[str, np.ndarray]:
    """Converts parameters {path: array} to {reference name: array}, without tied copies."""
    return layouts.export_tensors(params, _mappings(model), vocabulary_size)


def check_special_ids(special: config.SpecialIds, size: int, vocabulary: str):
    """Raises ConfigError if the published code gives other ids to a vocabulary of `size` ids.

    Its dictionary (fairseq) puts `<s> <pad> </s> <unk>` first and `<mask>` last, whatever ids the
    SentencePiece model itself has for them, and so moves the ids of all other pieces.
    """
    ids = (special.bos, special.pad, special.eos, special.unk, special.mask)
    published = (0, 1, 2, 3, size - 1)
    if ids != published:
        raise config.ConfigError(
            f"{vocabulary}: its special ids are {ids}, which the published code changes to "
            f"{published} by its dict.txt. Put that file beside the vocabulary, or give one with "
            "those ids"
        )


def list_misfits(model: config.Model) -> list[str]:
    """Returns the settings with which the reference implementation does not compute `model`."""
    # The published code has one kind of sentence pairs and heads, whatever the family.
    carried = (*_ARGUMENTS, "relative_buckets", "family")
    misfits = layouts.list_misfits(model.encoder, FIXED, carried)
    if model.encoder.relative_buckets == "t5":
        misfits.append("Encoder.relative_buckets is 't5', not 'reference' or 'none'")
    if model.decoder and (not model.decoder.is_plain or model.decoder.relative_bias):
        misfits.append("the decoder is not the paper's, or has a relative bias")
    return misfits


def write(
    path: os.PathLike,
    params: dict[str, np.ndarray],
    model: config.Model,
    vocabulary_size: int,
    length: int,
) -> int:
    """Writes a .pt file in the checkpoint layout of the reference implementation. Needs PyTorch.

    `args` holds the architecture and the longest input, `length`. `model` holds the state dict
    with its tied copies. There is no training state, so the reference can start from the file but
    cannot resume from it.

    Returns:
        The number of parameters written, without the tied copies.
    """
    args = {name: getattr(model.encoder, field) for field, name in _ARGUMENTS.items()}
    args |= {
        "arch": "ae",
        "dropout": model.dropout.hidden,
        "attention_dropout": model.dropout.attention,
        "gen_decoder_layers": model.decoder.layers if model.decoder else 0,
        "rel_pos": int(model.encoder.relative_buckets != "none"),
        "decoder_rel_pos": 0,
        "tokens_per_sample": length,
    }
    for name in ("embed_dim", "ffn_embed_dim", "attention_heads"):
        args[f"decoder_{name}"] = args[f"encoder_{name}"]
    tensors = to_reference(params, model, vocabulary_size)
    weight_files.write_pytorch(path, tensors, _tied(model.decoder), args)
    return sum(value.size for value in tensors.values())


class Checkpoint(typing.NamedTuple):
    """The content of a checkpoint of the reference implementation."""

    settings: dict[str, typing.Any]  # the fields of config.Encoder that it determines
    decoder: config.Decoder | None
    tensors: dict[str, np.ndarray]
    length: int | None  # the longest input, if it is stated


def read(path: str | os.PathLike) -> Checkpoint:
    """Reads a .pt checkpoint. Needs PyTorch.

    If it has no `args`, the settings lack `max_distance`, and lack `heads` unless there is a table
    of relative biases.

    Raises:
        ConfigError: The file is not such a checkpoint, or PyTorch is missing.
    """
    content = weight_files.read_pytorch(path)
    with storage.reading(path, "is it a checkpoint of the reference implementation?"):
        tensors, args = content["model"], getattr(content.get("args"), "__dict__", {})
        names = {field: _ARGUMENTS[field] for field in ("heads", "max_distance")}
        stated = {field: args[name] for field, name in names.items() if name in args}
        layers = _count_layers(tensors, _DECODER)
        return Checkpoint(
            read_settings(tensors) | stated,
            config.Decoder(layers=layers) if layers else None,
            tensors,
            args.get("tokens_per_sample"),
        )


def read_settings(tensors: layouts.Tensors) -> dict[str, typing.Any]:
    """Returns the fields of config.Encoder that the names and shapes of the tensors determine."""
    settings = FIXED | {
        "layers": _count_layers(tensors, _ENCODER),
        "width": tensors[TOKENS].shape[1],
        "max_positions": tensors[_ENCODER + "embed_positions.weight"].shape[0],
        "feed_forward": tensors[_ENCODER + "layers.0.fc1.weight"].shape[0],
        "relative_buckets": "none",
    }
    if BUCKETS in tensors:
        buckets, heads = tensors[BUCKETS].shape
        settings |= {"relative_buckets": "reference", "num_buckets": buckets, "heads": heads}
    return settings


def _count_layers(tensors: layouts.Tensors, prefix: str) -> int:
    """Returns the number of layers of the encoder or the decoder."""
    start = f"{prefix}layers."
    return len({name.split(".")[3] for name in tensors if name.startswith(start)})


def import_params(
    tensors: layouts.Tensors, model: config.Model, shapes: layouts.Shapes, path: str
) -> dict[str, np.ndarray]:
    """Converts the tensors of a checkpoint to {parameter path: float32 array}.

    Raises:
        ConfigError: As `layouts.import_tensors`. `path` names the file in the message.
    """
    tied = _tied(model.decoder)
    return layouts.import_tensors(tensors, _mappings(model), shapes, path, tied)
