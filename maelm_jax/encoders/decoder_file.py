"""The file of what a stock class has no place for: the decoder of MAE-LM, and its head.

It is beside the weights of the encoder. transformers does not read it.
"""

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
        model: {field of config.Model: value} of the decoder.
        mask_fraction: The share of the masked positions at which the encoder read `<mask>`.
        renumber: `Masking.renumber` of the pretraining.
    """

    model: dict[str, typing.Any]
    mask_fraction: float
    renumber: bool


def write(folder: pathlib.Path, encoder: "Encoder", dtype: str):
    """Writes FILE if the encoder has a decoder.

    The tensors have the names and shapes that they have here, without padding of the vocabulary.
    """
    tensors = {path: value for path, value in encoder.params.items() if path.startswith(MODULES)}
    if not any(path.startswith("decoder/") for path in tensors):
        return
    fields = config.field_names(config.Model, part="decoder")
    model = {name: getattr(encoder.model, name) for name in fields}
    settings = DecoderSettings(model, encoder.mask_fraction, encoder.renumber)
    content = json.dumps(settings._asdict())
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
        return DecoderSettings(**json.loads(file.metadata()["settings"]))
