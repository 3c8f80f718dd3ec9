"""Writes and reads checkpoints of the reference implementation, github.com/yumeng5/MAE-LM.

`_rows` lists the correspondence of all parameters. A tensor without a counterpart is an error.
"""

import json
import os
import typing

import numpy as np

from maelm_jax import config
from maelm_jax.encoders import tensors as tables
from maelm_jax.encoders import torch_file
from maelm_jax.encoders.tensors import TensorMapping

_LAYER = {
    "attention/query": "self_attn.q_proj", "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj", "attention/out": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "feed_forward/up": "fc1", "feed_forward/down": "fc2",
    "feed_forward_norm": "final_layer_norm",
}  # fmt: skip
_ENCODER, _DECODER = "encoder.sentence_encoder.", "gen_decoder.sentence_encoder."
TOKENS, BUCKETS = _ENCODER + "embed_tokens.weight", _ENCODER + "relative_attention_bias.weight"
# {field of config.Model: name in the Namespace `args` of a reference checkpoint}.
_ARGUMENTS = {
    "layers": "encoder_layers", "width": "encoder_embed_dim", "heads": "encoder_attention_heads",
    "feed_forward": "encoder_ffn_embed_dim", "max_positions": "max_positions",
    "num_buckets": "rel_pos_bins", "max_distance": "max_rel_pos", "dropout": "dropout",
    "attention_dropout": "attention_dropout", "decoder_layers": "gen_decoder_layers",
}  # fmt: skip


# These settings, given after those of any run, make a model that the published code computes.
CONFIG = "ablations/reference_positions.gin"


def _rows(layers: int, decoder_layers: int, relative: bool) -> list[TensorMapping]:
    rows = [TensorMapping(TOKENS, "encoder/token_embedding")]
    for prefix, room, depth in (
        (_ENCODER, "encoder", layers),
        (_DECODER, "decoder", decoder_layers),
    ):
        if depth:
            rows.append(
                TensorMapping(prefix + "embed_positions.weight", f"{room}/position_embedding")
            )
            rows += tables.norm(prefix + "emb_layer_norm", f"{room}/norm") + tables.blocks(
                f"{prefix}layers.", room, depth, _LAYER
            )
    if relative:
        rows.append(TensorMapping(BUCKETS, "encoder/relative_bias/table"))
    head = _head(decoder_layers)
    return [
        *rows,
        *tables.linear(head + "dense", "head/dense"),
        *tables.norm(head + "layer_norm", "head/norm"),
        TensorMapping(head + "bias", "head/bias"),
    ]


def _head(decoder_layers: int) -> str:
    return "gen_decoder.lm_head." if decoder_layers else "encoder.lm_head."


def _tied(decoder_layers: int) -> dict[str, str]:
    """Returns {name of a tied copy: name of its original}."""
    copies = [_head(decoder_layers) + "weight"] + (
        [_DECODER + "embed_tokens.weight"] if decoder_layers else []
    )
    return {name: TOKENS for name in copies}


def to_reference(ours: dict[str, np.ndarray], vocabulary_size: int) -> dict[str, np.ndarray]:
    """Converts parameters {path: array} to {reference name: array}.

    Tied copies and the padding rows of tables over the vocabulary are left out.
    """
    rows = _rows(
        tables.depth(ours, "encoder"),
        tables.depth(ours, "decoder"),
        "encoder/relative_bias/table" in ours,
    )
    return tables.give(
        {path: np.asarray(value) for path, value in ours.items()}, rows, vocabulary_size
    )


def check(model: config.Model):
    """Checks that the reference implementation computes `model`.

    Raises:
        ConfigError: It computes another function. The message lists the settings that differ.
    """
    wrong = []
    if model.relative_buckets == "t5":
        wrong.append("Model.relative_buckets is 't5', not 'reference' or 'none'")
    if model.decoder_relative_bias:
        wrong.append(
            "Model.decoder_relative_bias is on, and the reference's decoder has no such table"
        )
    if not model.has_plain_decoder:
        wrong.append("the decoder is one of the ablations that the reference's code does not have")
    if model.layer_norm_eps != 1e-5:
        wrong.append(f"Model.layer_norm_eps is {model.layer_norm_eps}, the reference's 1e-5")
    if wrong:
        raise config.ConfigError(
            "--format=reference: the published code does not compute this model "
            f"({'; '.join(wrong)}). Train a run with --gin_file={CONFIG} after its own --gin_file, "
            "or use --format=pytorch, which holds any model"
        )


def write(
    path: os.PathLike, params: dict[str, np.ndarray], model: config.Model, vocabulary_size: int
) -> int:
    """Writes a .pt file in the checkpoint layout of the reference implementation.

    `args` holds the architecture. `model` holds the state dict with its tied copies. There is no
    training state, so the reference can start from the file but cannot resume from it.

    Returns:
        The number of parameters written, without the tied copies.

    Raises:
        ConfigError: As `check`.
    """
    check(model)
    given = {name: getattr(model, ours) for ours, name in _ARGUMENTS.items()}
    given |= {
        "arch": "ae",
        "rel_pos": int(model.relative_buckets != "none"),
        "decoder_rel_pos": 0,
        "tokens_per_sample": model.max_positions,
    }
    given |= {
        f"decoder_{name}": given[f"encoder_{name}"]
        for name in ("embed_dim", "ffn_embed_dim", "attention_heads")
    }
    tensors = to_reference(params, vocabulary_size)
    torch_file.write(path, tensors, _tied(model.decoder_layers), given)
    return sum(value.size for value in tensors.values())


def read(path: str | os.PathLike) -> tuple[dict[str, typing.Any], tables.Tensors]:
    """Reads a .pt checkpoint, or a .npz test case, of the reference implementation.

    Returns:
        The fields of config.Model that the file determines, and {reference name: array}. If a .pt
        file has no `args`, the fields lack `max_distance`, and lack `heads` unless there is a
        table of relative biases.

    Raises:
        ConfigError: The file is not such a checkpoint.
    """
    if str(path).endswith(".npz"):
        said, weights = _read_case(path)
    else:
        content = torch_file.read(path)
        weights = content.get("model") if isinstance(content, dict) else None
        named = isinstance(weights, dict) and all(isinstance(name, str) for name in weights)
        if not named or not all(isinstance(value, np.ndarray) for value in weights.values()):
            raise config.ConfigError(
                f"{path} holds no tensors under `model`: it is no checkpoint of the reference "
                "implementation"
            )
        given = getattr(content.get("args"), "__dict__", {})
        said = {
            ours: given[name]
            for ours, name in _ARGUMENTS.items()
            if ours in ("heads", "max_distance") and name in given
        }
    return settings(weights, str(path)) | said, weights


def _read_case(path: str | os.PathLike) -> tuple[dict[str, typing.Any], tables.Tensors]:
    """Reads the number of heads, the largest distance and the tensors of a .npz file."""
    try:
        with open(path, "rb") as file, np.load(file) as data:
            case = json.loads(str(data["config"]))
            weights = {
                key.removeprefix("weights/"): data[key]
                for key in data.files
                if key.startswith("weights/")
            }
        return {"heads": case["heads"], "max_distance": case["max_rel_pos"]}, weights
    except Exception as error:  # numpy, zipfile, zlib and json raise different types
        reason = " ".join(str(error).split())[:200]
        raise config.ConfigError(
            f"{path} cannot be read as a case of the reference (config and weights/*): {reason}"
        ) from error


def settings(weights: tables.Tensors, where: str) -> dict[str, typing.Any]:
    """Returns the fields of config.Model that the names and shapes of the tensors determine.

    Raises:
        ConfigError: The embedding tables or the first layer are missing. `where` names the file in
            the message.
    """
    needed = (TOKENS, _ENCODER + "embed_positions.weight", _ENCODER + "layers.0.fc1.weight")
    absent = [name for name in needed if name not in weights or weights[name].ndim != 2]
    if absent:
        listed = ", ".join(absent)
        raise config.ConfigError(
            f"{where}: no checkpoint of the reference implementation: {listed} missing or no "
            f"matrix; it holds {summary(weights)}"
        )
    layers = {
        prefix: len({name.split(".")[3] for name in weights if name.startswith(prefix + "layers.")})
        for prefix in (_ENCODER, _DECODER)
    }
    found: dict[str, typing.Any] = {"layers": layers[_ENCODER], "decoder_layers": layers[_DECODER]}
    found |= {"decoder_relative_bias": False, "layer_norm_eps": 1e-5}
    found |= {
        "width": weights[TOKENS].shape[1],
        "max_positions": weights[needed[1]].shape[0],
        "feed_forward": weights[needed[2]].shape[0],
    }
    if BUCKETS in weights and weights[BUCKETS].ndim == 2:
        buckets, heads = weights[BUCKETS].shape
        return found | {"relative_buckets": "reference", "num_buckets": buckets, "heads": heads}
    return found | {"relative_buckets": "none"}


def summary(weights: tables.Tensors) -> str:
    """Returns the first names of the tensors, for an error message."""
    names = sorted(weights)
    return (
        ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        if names
        else "nothing"
    )


def take(
    weights: tables.Tensors, shapes: dict[str, tuple[int, ...]], where: str
) -> dict[str, np.ndarray]:
    """Converts the tensors of a checkpoint to {parameter path: float32 array}.

    Tables over the vocabulary keep the number of rows of the checkpoint. `shapes` is
    {parameter path: shape} of the model.

    Raises:
        ConfigError: As `tensors.take`. `where` names the file in the message.
    """
    decoder_kernel = shapes.get("decoder/blocks/attention/query/kernel")
    decoder_layers = decoder_kernel[0] if decoder_kernel else 0
    rows = _rows(
        shapes["encoder/blocks/attention/query/kernel"][0],
        decoder_layers,
        "encoder/relative_bias/table" in shapes,
    )
    return tables.take(weights, rows, shapes, where, _tied(decoder_layers))
