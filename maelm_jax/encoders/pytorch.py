"""Writes and reads the whole model for plain PyTorch.

The folder holds config.json, a safetensors state dict and maelm.py, a copy of maelm_torch.py, which
loads them.
"""

import json
import pathlib
import shutil
import typing

import numpy as np

from maelm_jax import config, json_files
from maelm_jax.encoders import layouts, weight_files
from maelm_jax.encoders.layouts import TensorMapping

MODULE = pathlib.Path(__file__).with_name("maelm_torch.py")
_PARTS = layouts.part_names(
    "query", "key", "value", "out", "attention_norm", "up", "down", "output_norm"
)
# The fields of config.Model that maelm_torch.py needs, and the family. Others matter in training.
FIELDS = (
    "layers",
    "width",
    "heads",
    "feed_forward",
    "decoder_layers",
    "max_positions",
    "token_types",
    "relative_buckets",
    "num_buckets",
    "max_distance",
    "decoder_relative_bias",
    "layer_norm_eps",
    "dropout",
    "attention_dropout",
    "decoder_refills_mask",
    "family",
)
# Fields that a config.json may lack, with what that means.
LATER_FIELDS = {
    "token_types": 0,
    "family": None,
    "normalization": "post",
    "positions": "learned",
    "rotary_theta": 10_000.0,
    "local_attention": 0,
    "global_every": 3,
    "local_rotary_theta": 10_000.0,
    "feed_forward_gate": False,
    "biases": True,
    "decoder_refills_mask": False,
    "dropout": 0.1,
    "attention_dropout": 0.1,
}
FORMAT = "maelm_jax"  # the value of `format` in config.json


def _mappings(model: typing.Mapping[str, typing.Any]) -> list[TensorMapping]:
    mappings = [
        TensorMapping("encoder.token_embedding.weight", "encoder/token_embedding"),
        *_stack("encoder", model["layers"], model["relative_buckets"] != "none"),
    ]
    if model["token_types"]:
        name = "encoder.token_type_embedding.weight"
        mappings.append(TensorMapping(name, "encoder/token_type_embedding"))
    if model["decoder_layers"]:
        mappings += _stack("decoder", model["decoder_layers"], model["decoder_relative_bias"])
    return [
        *mappings,
        *layouts.linear("head.dense", "head/dense"),
        *layouts.norm("head.norm", "head/norm"),
        TensorMapping("head.bias", "head/bias"),
    ]


def _stack(module: str, layers: int, relative: bool) -> list[TensorMapping]:
    """Returns the mappings of the encoder or the decoder, without the token table."""
    mappings = [
        TensorMapping(f"{module}.position_embedding.weight", f"{module}/position_embedding"),
        *layouts.norm(f"{module}.norm", f"{module}/norm"),
        *layouts.blocks(f"{module}.blocks.", module, layers, _PARTS),
    ]
    if relative:
        name, path = f"{module}.relative_bias.weight", f"{module}/relative_bias/table"
        mappings.append(TensorMapping(name, path))
    return mappings


def state_dict(
    params: dict[str, np.ndarray], model: config.Model, vocabulary_size: int
) -> dict[str, np.ndarray]:
    """Returns the parameters {path: array} as the state dict of maelm_torch.MaeLm."""
    mappings = _mappings({name: getattr(model, name) for name in FIELDS})
    return layouts.export_tensors(params, mappings, vocabulary_size)


def check(model: config.Model):
    """Checks that maelm_torch.py computes `model`.

    Raises:
        ConfigError: The layers are not BERT's, or the decoder is one of the ablations.
    """
    if not model.has_bert_blocks:
        raise config.ConfigError(
            "--format=pytorch: maelm.py computes only post-LN layers with biases and learned "
            "positions, and this model has others. Use --format=huggingface, which holds the "
            "encoder without the decoder"
        )
    if not model.has_plain_decoder:
        raise config.ConfigError(
            "--format=pytorch: maelm.py computes only the paper's decoder, and this model has "
            "another one. Use --format=huggingface, which holds the encoder without the decoder"
        )


def write(
    folder: pathlib.Path,
    weights: layouts.Weights,
    mask_fraction: float | None = None,
    renumber: bool = False,
) -> int:
    """Writes config.json, model.safetensors and maelm.py into `folder`.

    Args:
        folder: An empty folder.
        weights: The parameters and what determines their layout.
        mask_fraction: `EncoderSource.mask_fraction`.
        renumber: `EncoderSource.renumber`.

    Returns:
        The number of parameters written.

    Raises:
        ConfigError: As `check`.
    """
    params, model, vocabulary_size, special = weights
    check(model)
    settings = {name: getattr(model, name) for name in FIELDS}
    ids = {name: getattr(special, name) for name in ("bos", "pad", "eos", "unk", "mask")}
    content = {
        "format": FORMAT,
        "model": settings,
        "vocabulary_size": vocabulary_size,
        "special_ids": ids,
        "renumber": renumber,
    }
    if mask_fraction is not None:
        content["encoder_mask_fraction"] = mask_fraction
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    tensors = state_dict(params, model, vocabulary_size)
    weight_files.write_safetensors(folder / weight_files.WEIGHTS, tensors)
    shutil.copyfile(MODULE, folder / "maelm.py")
    return sum(value.size for value in tensors.values())


def settings(content: dict, names: typing.Iterable[str], path: str) -> dict[str, typing.Any]:
    """Returns the fields `names` of config.Model from the content of a config.json.

    Raises:
        ConfigError: A field is missing, or the vocabulary size is wrong. `path` names the file in
            the message.
    """
    model, size = content.get("model"), content.get("vocabulary_size")
    if not isinstance(model, dict):
        raise config.ConfigError(f"{path} has no settings under `model`. Export the run again")
    model = LATER_FIELDS | model
    faults = [f"{name} is missing" for name in names if name not in model]
    if not json_files.is_integer(size, 1, json_files.LARGEST):
        faults.append(
            f"vocabulary_size is {json_files.shown(size)}, not an integer from 1 to "
            f"{json_files.LARGEST}"
        )
    if faults:
        raise config.ConfigError(f"{path}: {'; '.join(faults)}. Export the run again")
    return {name: model[name] for name in names}


def mask_fraction(content: dict, path: str) -> float | None:
    """Returns `EncoderSource.mask_fraction` from the content of a config.json. None if absent.

    Raises:
        ConfigError: It is no number from 0 to 1. `path` names the file in the message.
    """
    value = content.get("encoder_mask_fraction")
    if value is not None and (type(value) not in (int, float) or not 0 <= value <= 1):
        raise config.ConfigError(
            f"{path}: encoder_mask_fraction is {json_files.shown(value)}, no number from 0 to 1. "
            "Export the run again"
        )
    return value


def renumber(content: dict, path: str) -> bool:
    """Returns `EncoderSource.renumber` from the content of a config.json. False if absent.

    Raises:
        ConfigError: It is neither true nor false. `path` names the file in the message.
    """
    value = content.get("renumber", False)
    if not isinstance(value, bool):
        raise config.ConfigError(
            f"{path}: renumber is {json_files.shown(value)}, neither true nor false. "
            "Export the run again"
        )
    return value


def read(
    content: dict, tensors: layouts.Tensors, shapes: dict[str, tuple[int, ...]], folder: str
) -> dict[str, np.ndarray]:
    """Converts the tensors of a folder to {parameter path: float32 array}.

    Args:
        content: The content of config.json.
        tensors: {state dict name: array}.
        shapes: {parameter path: shape} of the model.
        folder: The folder, for error messages.

    Raises:
        ConfigError: As `tensors.import_tensors`.
    """
    mappings = _mappings(LATER_FIELDS | content["model"])
    return layouts.import_tensors(tensors, mappings, shapes, folder)
