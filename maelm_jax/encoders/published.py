"""Writes and reads checkpoints of the reference implementation, github.com/yumeng5/MAE-LM.

`_mappings` lists the correspondence of all parameters. A tensor without a counterpart is an error.
"""

import json
import os
import typing

import numpy as np

from maelm_jax import config
from maelm_jax.encoders import layouts, torch_checkpoint
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
# {field of config.Model: name in the Namespace `args` of a reference checkpoint}.
_ARGUMENTS = {
    "layers": "encoder_layers",
    "width": "encoder_embed_dim",
    "heads": "encoder_attention_heads",
    "feed_forward": "encoder_ffn_embed_dim",
    "max_positions": "max_positions",
    "num_buckets": "rel_pos_bins",
    "max_distance": "max_rel_pos",
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "decoder_layers": "gen_decoder_layers",
}
# These settings, given after those of any run, make a model that the published code computes.
CONFIG = "ablations/reference_positions.gin"


class StoredModel(typing.NamedTuple):
    """A checkpoint or a test case of the reference implementation."""

    settings: dict[str, typing.Any]  # the fields of config.Model that it determines
    tensors: layouts.Tensors  # {reference name: array}


def _mappings(layers: int, decoder_layers: int, relative: bool) -> list[TensorMapping]:
    mappings = [
        TensorMapping(TOKENS, "encoder/token_embedding"),
        *_stack(_ENCODER, "encoder", layers),
    ]
    if decoder_layers:
        mappings += _stack(_DECODER, "decoder", decoder_layers)
    if relative:
        mappings.append(TensorMapping(BUCKETS, "encoder/relative_bias/table"))
    head = _head(decoder_layers)
    return [
        *mappings,
        *layouts.linear(head + "dense", "head/dense"),
        *layouts.norm(head + "layer_norm", "head/norm"),
        TensorMapping(head + "bias", "head/bias"),
    ]


def _stack(prefix: str, module: str, layers: int) -> list[TensorMapping]:
    """Returns the mappings of the encoder or the decoder, without the token table."""
    return [
        TensorMapping(prefix + "embed_positions.weight", f"{module}/position_embedding"),
        *layouts.norm(prefix + "emb_layer_norm", f"{module}/norm"),
        *layouts.blocks(f"{prefix}layers.", module, layers, _LAYER),
    ]


def _head(decoder_layers: int) -> str:
    return "gen_decoder.lm_head." if decoder_layers else "encoder.lm_head."


def _tied(decoder_layers: int) -> dict[str, str]:
    """Returns {name of a tied copy: name of its original}."""
    copies = [_head(decoder_layers) + "weight"]
    if decoder_layers:
        copies.append(_DECODER + "embed_tokens.weight")
    return dict.fromkeys(copies, TOKENS)


def to_reference(params: dict[str, np.ndarray], vocabulary_size: int) -> dict[str, np.ndarray]:
    """Converts parameters {path: array} to {reference name: array}.

    Tied copies and the padding rows of tables over the vocabulary are left out.
    """
    mappings = _mappings(
        layouts.depth(params, "encoder"),
        layouts.depth(params, "decoder"),
        "encoder/relative_bias/table" in params,
    )
    return layouts.export_tensors(params, mappings, vocabulary_size)


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
            f"{published} by its dict.txt; give a vocabulary with those ids"
        )


def check(model: config.Model):
    """Checks that the reference implementation computes `model`.

    Raises:
        ConfigError: It computes another function. The message lists the settings that differ.
    """
    wrong = []
    if not model.has_bert_blocks:
        wrong.append("the layers are not post-LN with biases and learned positions")
    if model.token_types:
        wrong.append(
            f"Model.token_types is {model.token_types}, and the published code has no token types"
        )
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
    other = "pytorch, which holds any model with BERT's layers"
    if not (model.has_bert_blocks and model.has_plain_decoder):
        other = "huggingface, which holds the encoder without the decoder"
    if wrong:
        raise config.ConfigError(
            "--format=reference: the published code does not compute this model "
            f"({'; '.join(wrong)}). Train a run with --gin_file={CONFIG} after its own --gin_file, "
            f"or use --format={other}"
        )


def write(
    path: os.PathLike, params: dict[str, np.ndarray], model: config.Model, vocabulary_size: int
) -> int:
    """Writes a .pt file in the checkpoint layout of the reference implementation. Needs PyTorch.

    `args` holds the architecture. `model` holds the state dict with its tied copies. There is no
    training state, so the reference can start from the file but cannot resume from it.

    Returns:
        The number of parameters written, without the tied copies.

    Raises:
        ConfigError: As `check`.
    """
    check(model)
    args = {name: getattr(model, field) for field, name in _ARGUMENTS.items()}
    args |= {
        "arch": "ae",
        "rel_pos": int(model.relative_buckets != "none"),
        "decoder_rel_pos": 0,
        "tokens_per_sample": model.max_positions,
    }
    for name in ("embed_dim", "ffn_embed_dim", "attention_heads"):
        args[f"decoder_{name}"] = args[f"encoder_{name}"]
    tensors = to_reference(params, vocabulary_size)
    torch_checkpoint.write(path, tensors, _tied(model.decoder_layers), args)
    return sum(value.size for value in tensors.values())


def read(path: str | os.PathLike) -> StoredModel:
    """Reads a .pt checkpoint (needs PyTorch) or a .npz test case of the reference implementation.

    If a .pt file has no `args`, the settings lack `max_distance`, and lack `heads` unless there is
    a table of relative biases.

    Raises:
        ConfigError: The file is not such a checkpoint, or PyTorch is missing.
    """
    stored = _read_case(path) if str(path).endswith(".npz") else _read_checkpoint(path)
    return stored._replace(settings=settings_of(stored.tensors, str(path)) | stored.settings)


def _read_checkpoint(path: str | os.PathLike) -> StoredModel:
    """Reads the number of heads, the largest distance and the tensors of a .pt file."""
    content = torch_checkpoint.read(path)
    tensors = content.get("model") if isinstance(content, dict) else None
    named = isinstance(tensors, dict) and all(isinstance(name, str) for name in tensors)
    if not named or not all(isinstance(value, np.ndarray) for value in tensors.values()):
        raise config.ConfigError(
            f"{path} holds no tensors under `model`: it is no checkpoint of the reference "
            "implementation"
        )
    args = getattr(content.get("args"), "__dict__", {})
    fields = ("heads", "max_distance")
    settings = {field: args[_ARGUMENTS[field]] for field in fields if _ARGUMENTS[field] in args}
    return StoredModel(settings, tensors)


def _read_case(path: str | os.PathLike) -> StoredModel:
    """Reads the number of heads, the largest distance and the tensors of a .npz file."""
    try:
        with open(path, "rb") as file, np.load(file) as data:
            case = json.loads(str(data["config"]))
            tensors = {
                key.removeprefix("weights/"): data[key]
                for key in data.files
                if key.startswith("weights/")
            }
        return StoredModel({"heads": case["heads"], "max_distance": case["max_rel_pos"]}, tensors)
    except Exception as error:  # numpy, zipfile, zlib and json raise different types
        reason = " ".join(str(error).split())[:200]
        raise config.ConfigError(
            f"{path} cannot be read as a case of the reference (config and weights/*): {reason}"
        ) from error


def settings_of(tensors: layouts.Tensors, path: str) -> dict[str, typing.Any]:
    """Returns the fields of config.Model that the names and shapes of the tensors determine.

    Raises:
        ConfigError: The embedding tables or the first layer are missing. `path` names the file in
            the message.
    """
    positions, feed_forward = _ENCODER + "embed_positions.weight", _ENCODER + "layers.0.fc1.weight"
    needed = (TOKENS, positions, feed_forward)
    absent = [name for name in needed if name not in tensors or tensors[name].ndim != 2]
    if absent:
        raise config.ConfigError(
            f"{path}: no checkpoint of the reference implementation: {', '.join(absent)} missing "
            f"or no matrix; it holds {summary(tensors)}"
        )
    settings = layouts.BERT_LAYERS | {
        "layers": _count_layers(tensors, _ENCODER),
        "decoder_layers": _count_layers(tensors, _DECODER),
        "decoder_relative_bias": False,
        "layer_norm_eps": 1e-5,
        "width": tensors[TOKENS].shape[1],
        "max_positions": tensors[positions].shape[0],
        "feed_forward": tensors[feed_forward].shape[0],
        "relative_buckets": "none",
    }
    if BUCKETS in tensors and tensors[BUCKETS].ndim == 2:
        buckets, heads = tensors[BUCKETS].shape
        settings |= {"relative_buckets": "reference", "num_buckets": buckets, "heads": heads}
    return settings


def _count_layers(tensors: layouts.Tensors, prefix: str) -> int:
    """Returns the number of different layers among names such as PREFIX.layers.0.fc1.weight."""
    names = [name for name in tensors if name.startswith(prefix + "layers.")]
    return len({name.split(".")[3] for name in names})


def summary(tensors: layouts.Tensors) -> str:
    """Returns the first names of the tensors, for an error message."""
    names = sorted(tensors)
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more or "nothing"


def import_params(
    tensors: layouts.Tensors, shapes: dict[str, tuple[int, ...]], path: str
) -> dict[str, np.ndarray]:
    """Converts the tensors of a checkpoint to {parameter path: float32 array}.

    Tables over the vocabulary keep the number of rows of the checkpoint. `shapes` is
    {parameter path: shape} of the model.

    Raises:
        ConfigError: As `tensors.import_tensors`. `path` names the file in the message.
    """
    decoder_layers = shapes.get("decoder/blocks/attention/query/kernel", (0,))[0]
    mappings = _mappings(
        shapes["encoder/blocks/attention/query/kernel"][0],
        decoder_layers,
        "encoder/relative_bias/table" in shapes,
    )
    return layouts.import_tensors(tensors, mappings, shapes, path, _tied(decoder_layers))
