"""Writes and reads the whole model for plain PyTorch.

The folder holds config.json, a safetensors state dict and maelm.py, a copy of maelm_torch.py, which
loads them.
"""

import json
import pathlib
import shutil
import typing

import numpy as np

from maelm_jax import config
from maelm_jax.encoders import layouts, weight_files
from maelm_jax.encoders.layouts import TensorMapping

if typing.TYPE_CHECKING:
    from maelm_jax.encoders.encoder import Encoder

MODULE = pathlib.Path(__file__).with_name("maelm_torch.py")
_PARTS = layouts.part_names(
    "query", "key", "value", "out", "attention_norm", "up", "down", "output_norm"
)
# The settings in config.json: what determines the function, and the dropout of further training.
FIELDS = (
    *config.field_names(config.Model, part="encoder"),
    *config.field_names(config.Model, part="decoder"),
    *("dropout", "attention_dropout"),
)
FIXED = layouts.BERT_LAYERS | config.PLAIN_DECODER  # of every model that maelm_torch.py computes
FORMAT = "maelm_jax"  # the value of `format` in config.json


def _mappings(settings: dict[str, typing.Any]) -> list[TensorMapping]:
    mappings = [
        TensorMapping("encoder.token_embedding.weight", "encoder/token_embedding"),
        *_stack("encoder", settings["layers"], settings["relative_buckets"] != "none"),
    ]
    if settings["token_types"]:
        name = "encoder.token_type_embedding.weight"
        mappings.append(TensorMapping(name, "encoder/token_type_embedding"))
    if settings["decoder_layers"]:
        mappings += _stack("decoder", settings["decoder_layers"], settings["decoder_relative_bias"])
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


def write(folder: pathlib.Path, encoder: "Encoder") -> int:
    """Writes config.json, model.safetensors and maelm.py. Returns the number of parameters."""
    settings = {name: getattr(encoder.model, name) for name in FIELDS}
    special, size = encoder.vocabulary.special, encoder.vocabulary.size
    content = {
        "format": FORMAT,
        "model": settings,
        "vocabulary_size": size,
        "special_ids": {
            name: getattr(special, name) for name in ("bos", "pad", "eos", "unk", "mask")
        },
        "encoder_mask_fraction": encoder.mask_fraction,
        "renumber": encoder.renumber,
    }
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    tensors = layouts.export_tensors(encoder.params, _mappings(settings), size)
    weight_files.write_safetensors(folder / weight_files.WEIGHTS, tensors)
    shutil.copyfile(MODULE, folder / "maelm.py")
    return sum(value.size for value in tensors.values())


def import_params(
    tensors: layouts.Tensors,
    settings: dict[str, typing.Any],
    shapes: dict[str, tuple[int, ...]],
    folder: str,
) -> dict[str, np.ndarray]:
    """Converts the tensors of a folder to {parameter path: float32 array}.

    `settings` are those in config.json, `shapes` is {parameter path: shape} of the model.

    Raises:
        ConfigError: As `layouts.import_tensors`. `folder` begins the message.
    """
    return layouts.import_tensors(tensors, _mappings(settings), shapes, folder)
