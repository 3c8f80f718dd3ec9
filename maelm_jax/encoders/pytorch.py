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
from maelm_jax.encoders import tensors as tables
from maelm_jax.encoders.tensors import TensorMapping

MODULE = pathlib.Path(__file__).with_name("maelm_torch.py")
_PARTS = {
    "attention/query": "query", "attention/key": "key", "attention/value": "value",
    "attention/out": "out", "attention_norm": "attention_norm", "feed_forward/up": "up",
    "feed_forward/down": "down", "feed_forward_norm": "output_norm",
}  # fmt: skip
# The fields of config.Model that maelm_torch.py needs. The other fields only matter in training.
FIELDS = (
    "layers", "width", "heads", "feed_forward", "decoder_layers", "max_positions",
    "relative_buckets", "num_buckets", "max_distance", "decoder_relative_bias", "layer_norm_eps",
    "dropout", "attention_dropout",
)  # fmt: skip


def _rows(model: typing.Mapping[str, typing.Any]) -> list[TensorMapping]:
    rows = [TensorMapping("encoder.token_embedding.weight", "encoder/token_embedding")]
    relative = {
        "encoder": model["relative_buckets"] != "none",
        "decoder": model["decoder_relative_bias"],
    }
    for room, depth in (("encoder", model["layers"]), ("decoder", model["decoder_layers"])):
        if depth:
            rows.append(
                TensorMapping(f"{room}.position_embedding.weight", f"{room}/position_embedding")
            )
            rows += tables.norm(f"{room}.norm", f"{room}/norm")
            rows += (
                [TensorMapping(f"{room}.relative_bias.weight", f"{room}/relative_bias/table")]
                if relative[room]
                else []
            )
            rows += tables.blocks(f"{room}.blocks.", room, depth, _PARTS)
    return [
        *rows,
        *tables.linear("head.dense", "head/dense"),
        *tables.norm("head.norm", "head/norm"),
        TensorMapping("head.bias", "head/bias"),
    ]


def give(
    params: dict[str, np.ndarray], model: config.Model, vocabulary_size: int
) -> dict[str, np.ndarray]:
    """Returns the parameters {path: array} as the state dict of maelm_torch.MaeLm."""
    return tables.give(
        params, _rows({name: getattr(model, name) for name in FIELDS}), vocabulary_size
    )


def check(model: config.Model):
    """Checks that maelm_torch.py computes `model`.

    Raises:
        ConfigError: The decoder is one of the ablations, which maelm_torch.py does not implement.
    """
    if not model.has_plain_decoder:
        raise config.ConfigError(
            "maelm.py has only the paper's decoder, this run another one; --format=huggingface "
            "leaves the decoder out"
        )


def write(
    folder: pathlib.Path,
    params: dict[str, np.ndarray],
    model: config.Model,
    vocabulary_size: int,
    special: config.SpecialIds,
) -> int:
    """Writes config.json, model.safetensors and maelm.py into `folder`.

    Returns:
        The number of parameters written.

    Raises:
        ConfigError: As `check`.
    """
    check(model)
    settings = {name: getattr(model, name) for name in FIELDS}
    ids = {name: getattr(special, name) for name in ("bos", "pad", "eos", "unk", "mask")}
    content = {
        "format": "maelm_jax",
        "model": settings,
        "vocabulary_size": vocabulary_size,
        "special_ids": ids,
    }
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    given = give(params, model, vocabulary_size)
    tables.write_safetensors(folder / "model.safetensors", given)
    shutil.copyfile(MODULE, folder / "maelm.py")
    return sum(value.size for value in given.values())


def settings(content: dict, names: typing.Iterable[str], where: str) -> dict[str, typing.Any]:
    """Returns the fields `names` of config.Model from the content of a config.json.

    Raises:
        ConfigError: A field is missing, or the vocabulary size is wrong. `where` names the file in
            the message.
    """
    model, size = content.get("model"), content.get("vocabulary_size")
    if not isinstance(model, dict):
        raise config.ConfigError(f"{where} has no settings under `model`. Export the run again")
    wrong = [f"{name} is missing" for name in names if name not in model]
    if not json_files.is_integer(size, 1, json_files.LARGEST):
        wrong.append(
            f"vocabulary_size is {json_files.shown(size)}, not an integer from 1 to "
            f"{json_files.LARGEST}"
        )
    if wrong:
        raise config.ConfigError(f"{where}: {'; '.join(wrong)}. Export the run again")
    return {name: model[name] for name in names}


def read(
    content: dict, weights: tables.Tensors, shapes: dict[str, tuple[int, ...]], where: str
) -> dict[str, np.ndarray]:
    """Converts the tensors of a folder to {parameter path: float32 array}.

    Args:
        content: The content of config.json.
        weights: {state dict name: array}.
        shapes: {parameter path: shape} of the model.
        where: The folder, for error messages.

    Raises:
        ConfigError: As `tensors.take`.
    """
    return tables.take(weights, _rows(content["model"]), shapes, where)
