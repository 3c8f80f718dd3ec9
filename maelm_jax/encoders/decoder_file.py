"""The file of what a stock class has no place for: the decoder of MAE-LM, and its head.

It is beside the weights of the encoder. transformers does not read it.
"""

import dataclasses
import json
import pathlib
import typing

from maelm_jax import config, storage
from maelm_jax.encoders import weight_files

if typing.TYPE_CHECKING:
    from maelm_jax.encoders.encoder import Encoder

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


def write(folder: pathlib.Path, encoder: "Encoder", dtype: str):
    """Writes FILE if the encoder has a decoder.

    The tensors have the names and shapes that they have here, without padding of the vocabulary.
    """
    tensors = {path: value for path, value in encoder.params.items() if path.startswith(MODULES)}
    if not any(path.startswith("decoder/") for path in tensors):
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

    Raises ConfigError if the file is damaged.
    """
    if not (folder / FILE).is_file():
        return None
    import safetensors

    with (
        storage.reading(folder / FILE),
        safetensors.safe_open(folder / FILE, framework="np") as file,
    ):
        content = json.loads(file.metadata()["settings"])
        if older := content.get("model"):  # of exports until November 2026
            content["decoder"] = {
                name.removeprefix("decoder_"): value for name, value in older.items()
            }
        masking = config.Masking(renumber=content["renumber"])
        objective = config.Objective.between(content["mask_fraction"], masking)
        return DecoderSettings(config.Decoder(**content["decoder"]), objective)
