"""The whole model for plain PyTorch: a safetensors state dict beside the one module file that loads it (maelm_torch.py, written as maelm.py)."""

import json
import pathlib
import shutil
import typing

import numpy as np

from maelm_jax import config
from maelm_jax.encoders import json_objects
from maelm_jax.encoders import tensors as tables
from maelm_jax.encoders.tensors import TensorMapping

MODULE = pathlib.Path(__file__).with_name("maelm_torch.py")
_PARTS = {name: name for name in ("query", "key", "value", "out", "attention_norm", "up", "down", "output_norm")}
# The fields of config.Model that say which function is computed; the others belong to training.
FIELDS = (
    "layers", "width", "heads", "feed_forward", "decoder_layers", "max_positions", "relative_buckets", "num_buckets", "max_distance",
    "decoder_relative_bias", "layer_norm_eps", "dropout", "attention_dropout",
)  # fmt: skip


def _rows(model: typing.Mapping[str, typing.Any]) -> list[TensorMapping]:
    rows = [TensorMapping("encoder.token_embedding.weight", "encoder/token_embedding")]
    relative = {"encoder": model["relative_buckets"] != "none", "decoder": model["decoder_relative_bias"]}
    for room, depth in (("encoder", model["layers"]), ("decoder", model["decoder_layers"])):
        if depth:
            rows.append(TensorMapping(f"{room}.position_embedding.weight", f"{room}/position_embedding"))
            rows += tables.norm(f"{room}.norm", f"{room}/norm")
            rows += [TensorMapping(f"{room}.relative_bias.weight", f"{room}/relative_bias/table")] if relative[room] else []
            rows += tables.blocks(f"{room}.blocks.", room, depth, _PARTS)
    return [*rows, *tables.linear("head.dense", "head/dense"), *tables.norm("head.norm", "head/norm"), TensorMapping("head.bias", "head/bias")]


def give(params: dict[str, np.ndarray], model: config.Model, vocabulary_size: int) -> dict[str, np.ndarray]:
    """The state dict of maelm_torch.MaeLm."""
    return tables.give(params, _rows({name: getattr(model, name) for name in FIELDS}), vocabulary_size)


def check(model: config.Model):
    """Raises ConfigError for a decoder of the ablations, which maelm_torch.py does not have. Any other model of ours fits."""
    if not model.has_plain_decoder:
        raise config.ConfigError("maelm.py has only the paper's decoder, this run another one; --format=huggingface leaves the decoder out")


def write(folder: pathlib.Path, params: dict[str, np.ndarray], model: config.Model, vocabulary_size: int, special: config.SpecialIds) -> int:
    """Writes config.json, model.safetensors and maelm.py into `folder`; returns how many numbers. Raises as `check` does."""
    check(model)
    settings = {name: getattr(model, name) for name in FIELDS}
    ids = {name: getattr(special, name) for name in ("bos", "pad", "eos", "unk", "mask")}
    content = {"format": "maelm_jax", "model": settings, "vocabulary_size": vocabulary_size, "special_ids": ids}
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    given = give(params, model, vocabulary_size)
    tables.write_safetensors(folder / "model.safetensors", given)
    shutil.copyfile(MODULE, folder / "maelm.py")
    return sum(value.size for value in given.values())


def settings(content: dict, names: typing.Iterable[str], where: str) -> dict[str, typing.Any]:
    """The fields `names` of config.Model that a config.json tells. Raises ConfigError when one is missing."""
    model, size = content.get("model"), content.get("vocabulary_size")
    if not isinstance(model, dict):
        raise config.ConfigError(f"{where} has no settings under `model`. Export the run again")
    wrong = [f"{name} is missing" for name in names if name not in model]
    if not json_objects.is_integer(size, 1, json_objects.LARGEST):
        wrong.append(f"vocabulary_size is {json_objects.shown(size)}, not an integer from 1 to {json_objects.LARGEST}")
    if wrong:
        raise config.ConfigError(f"{where}: {'; '.join(wrong)}. Export the run again")
    return {name: model[name] for name in names}


def read(content: dict, weights: tables.Tensors, shapes: dict[str, tuple[int, ...]], where: str) -> dict[str, np.ndarray]:
    """{our path: array} of a folder's tensors; `content` is its config.json. Errors as in tensors.take."""
    return tables.take(weights, _rows(content["model"]), shapes, where)
