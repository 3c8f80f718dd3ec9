"""Writes and reads the whole model for plain PyTorch.

The folder holds config.json, a safetensors state dict and maelm.py, a copy of maelm_torch.py, which
loads them.
"""

import json
import pathlib
import shutil
import typing

from maelm_jax import config
from maelm_jax.encoders import layouts, weight_files
from maelm_jax.encoders.layouts import TensorMapping

if typing.TYPE_CHECKING:
    from maelm_jax.encoders.encoder import Encoder

MODULE = pathlib.Path(__file__).with_name("maelm_torch.py")
# The settings in config.json: what determines the function, and the dropout of further training.
FIELDS = (
    *config.field_names(config.Model, part="encoder"),
    *config.field_names(config.Model, part="decoder"),
    *("dropout", "attention_dropout"),
)
FIXED = layouts.BERT_LAYERS | config.PLAIN_DECODER  # of every model that maelm_torch.py computes
FORMAT = "maelm_jax"  # the value of `format` in config.json


def list_mappings(shapes: dict[str, tuple[int, ...]]) -> list[TensorMapping]:
    """Returns the mappings of the parameters {path: shape} of encoder, decoder and head.

    The name of a tensor is the path with dots. Its end is `weight` or `bias`, as in torch.nn.
    """
    mappings = []
    for path, shape in shapes.items():
        module, _, leaf = path.rpartition("/")
        if module.split("/")[0] not in ("encoder", "decoder", "head"):
            continue  # a pooler
        name = path if leaf == "bias" else f"{module}/weight"
        if leaf.endswith("embedding"):
            name = f"{path}/weight"
        name, transposed = name.replace("/", "."), leaf == "kernel"
        if "/blocks/" not in path:
            mappings.append(TensorMapping(name, path, transposed=transposed))
            continue
        for layer in range(shape[0]):
            name_of_layer = name.replace(".blocks.", f".blocks.{layer}.")
            mappings.append(TensorMapping(name_of_layer, path, layer, transposed))
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
    mappings = list_mappings({path: value.shape for path, value in encoder.params.items()})
    tensors = layouts.export_tensors(encoder.params, mappings, size)
    weight_files.write_safetensors(folder / weight_files.WEIGHTS, tensors)
    shutil.copyfile(MODULE, folder / "maelm.py")
    return sum(value.size for value in tensors.values())
