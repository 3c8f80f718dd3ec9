"""The file of what a stock class has no place for: the decoder of MAE-LM, and its head.

It is beside the weights of the encoder. transformers does not read it.
"""

import dataclasses
import json
import pathlib
import typing

import numpy as np

from maelm_jax import config, storage
from maelm_jax.encoders import layouts, weight_files

if typing.TYPE_CHECKING:
    from maelm_jax.encoders.encoder import Encoder

FLOATS = ("F32", "BF16", "F16")  # safetensors' names of the types that weights may have
FILE = "decoder.safetensors"
MODULES = ("decoder/", "head/")  # of the parameters in the file


class DecoderSettings(typing.NamedTuple):
    """What the file says beside its tensors.

    Attributes:
        decoder: The decoder.
        objective: What the encoder read of the masked positions.
    """

    decoder: config.Decoder
    objective: config.Objective


def select(encoder: "Encoder") -> dict[str, np.ndarray]:
    """Returns the parameters {path: array} in FILE: {} if the encoder has no decoder."""
    if not encoder.model.decoder:
        return {}
    return {path: value for path, value in encoder.params.items() if path.startswith(MODULES)}


def write(folder: pathlib.Path, encoder: "Encoder", dtype: str):
    """Writes FILE if the encoder has a decoder.

    The tensors have the names and shapes that they have here, without padding of the vocabulary.
    """
    tensors = select(encoder)
    if not tensors:
        return
    content = json.dumps(
        {
            "decoder": dataclasses.asdict(encoder.model.decoder),
            "mask_fraction": encoder.objective.visible_mask_fraction,
            "renumber": encoder.objective.masking.renumber,
        }
    )
    weight_files.write_safetensors(folder / FILE, tensors, dtype, settings=content)


def read_settings(folder: pathlib.Path) -> DecoderSettings | None:
    """Reads the settings in FILE; None if there is no such file.

    Raises ConfigError if the file is damaged, or does not have exactly the settings of a decoder.
    """
    if not (folder / FILE).is_file():
        return None
    import safetensors

    with (
        storage.reading(folder / FILE),
        safetensors.safe_open(folder / FILE, framework="np") as file,
    ):
        content = json.loads(file.metadata()["settings"])
        decoder = content.get("decoder") or {  # exports until November 2026 have `model`
            name.removeprefix("decoder_"): value for name, value in content["model"].items()
        }
        fields = config.field_names(config.Decoder)
        if set(decoder) != set(fields):
            raise ValueError(f"its settings are {sorted(decoder)}, not {sorted(fields)}")
        masking = config.Masking(renumber=content["renumber"])
        objective = config.Objective.between(content["mask_fraction"], masking)
        return DecoderSettings(config.Decoder(**decoder), objective)


def check_tensors(folder: pathlib.Path, shapes: layouts.Shapes):
    """Compares the names, shapes and types in the header of FILE with those of the model.

    `shapes` are those of all parameters of the model. Raises ConfigError, which lists differences.
    """
    import safetensors

    expected = {path: shape for path, shape in shapes.items() if path.startswith(MODULES)}
    with (
        storage.reading(folder / FILE),
        safetensors.safe_open(folder / FILE, framework="np") as file,
    ):
        names = file.keys()
        tensors = {name: file.get_slice(name) for name in names}
        stored = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
        types = {name: tensor.get_dtype() for name, tensor in tensors.items()}
    faults = layouts.compare_shapes(stored, expected)
    faults += [f"{name} has type {kind}" for name, kind in types.items() if kind not in FLOATS]
    if faults:
        raise config.ConfigError(
            f"{folder / FILE} does not fit its own settings or config.json: "
            f"{layouts.list_faults(faults)}. Put a whole copy of it there, or remove it to use the "
            "encoder alone"
        )
