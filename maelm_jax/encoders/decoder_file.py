"""What a stock class has no place for: the decoder of MAE-LM, and its head.

FILE holds their weights, beside those of the encoder. ENTRY in config.json holds their settings.
transformers reads both with the code in CODE, if the user trusts it. Nothing here runs the code of
a folder, or copies it: each export writes the file of this package.
"""

import importlib.resources
import pathlib
import typing

import numpy as np

from maelm_jax import config
from maelm_jax.encoders import families, layouts, weight_files

if typing.TYPE_CHECKING:
    from maelm_jax.encoders.encoder import Encoder

FILE = "decoder.safetensors"
CODE = "modeling_mae_lm.py"
ENTRY = "mae_lm"
MODULES = ("decoder/", "head/")  # of the parameters in the file


class DecoderSettings(typing.NamedTuple):
    """What ENTRY says beside the weights.

    Attributes:
        model: {field of config.Model: value} of the decoder.
        mask_fraction: The share of the masked positions at which the encoder read `<mask>`.
        renumber: `Masking.renumber` of the pretraining.
    """

    model: dict[str, typing.Any]
    mask_fraction: float
    renumber: bool


def is_in(encoder: "Encoder") -> bool:
    """Returns whether the encoder has a decoder with weights."""
    return any(path.startswith("decoder/") for path in encoder.params)


def class_name(encoder: "Encoder") -> str:
    """Returns the name of the class in CODE that predicts as the encoder with its decoder."""
    return f"MaeLm{families.choose_family(encoder.model).class_name}ForMaskedLM"


def make_entries(encoder: "Encoder") -> dict[str, typing.Any]:
    """Returns the entries of config.json for an encoder with a decoder; {} without."""
    if not is_in(encoder):
        return {}
    entry = {
        "mask_token_id": encoder.vocabulary.mask,
        "encoder_mask_fraction": encoder.mask_fraction,
        "encoder_reads_mask": encoder.reads_masks,
        "encoder_renumbers": encoder.renumber,
        "decoder_refills_mask": encoder.model.decoder_refills_mask,
        "decoder": _describe(encoder.model),
    }
    reference = f"{CODE.removesuffix('.py')}.{class_name(encoder)}"
    return {"auto_map": {"AutoModelForMaskedLM": reference}, ENTRY: entry}


def _describe(model: config.Model) -> dict[str, typing.Any]:
    """Returns the settings of a decoder in the words of CODE, which knows no other settings."""
    sizes = model.decoder
    return {
        "layers": sizes.layers,
        "width": sizes.width,
        "heads": sizes.heads,
        "feed_forward": sizes.feed_forward,
        "attention": model.decoder_attention,
        "slots": model.decoder_slots,
        "causal": model.decoder_causal,
        "normalization": model.normalization,
        "gate": model.feed_forward_gate,
        "biases": model.biases,
        "layer_norm_eps": model.layer_norm_eps,
        "position_rows": model.max_positions if model.positions == "learned" else 0,
        "rotary_theta": model.rotary_theta if model.positions == "rotary" else None,
        "relative_buckets": model.num_buckets if model.decoder_relative_bias else 0,
        "max_distance": model.max_distance,
    }


def write(folder: pathlib.Path, encoder: "Encoder", dtype: str):
    """Writes FILE and CODE if the encoder has a decoder.

    The tensors have the names and shapes that they have here, without padding of the vocabulary.
    """
    if not is_in(encoder):
        return
    tensors = {path: value for path, value in encoder.params.items() if path.startswith(MODULES)}
    weight_files.write_safetensors(folder / FILE, tensors, dtype)
    code = importlib.resources.files("maelm_jax.encoders").joinpath(CODE)
    (folder / CODE).write_bytes(code.read_bytes())


def read_settings(
    folder: pathlib.Path, content: dict[str, typing.Any], width: int
) -> DecoderSettings | None:
    """Reads the settings of the decoder from the content of config.json; None without FILE.

    A folder that a stock class has saved still has ENTRY, but no FILE. `width` is the encoder's.

    Raises:
        ConfigError: There is no ENTRY.
    """
    if not (folder / FILE).is_file():
        return None
    if ENTRY not in content:
        raise config.ConfigError(
            f"{folder}: config.json has no {ENTRY!r}, which describes {FILE}. Export the run again"
        )
    entry, decoder = content[ENTRY], content[ENTRY]["decoder"]
    model = {
        "decoder_layers": decoder["layers"],
        "decoder_width": None if decoder["width"] == width else decoder["width"],
        "decoder_attention": decoder["attention"],
        "decoder_causal": decoder["causal"],
        "decoder_slots": decoder["slots"],
        "decoder_refills_mask": entry["decoder_refills_mask"],
        "decoder_relative_bias": decoder["relative_buckets"] > 0,
    }
    return DecoderSettings(model, entry["encoder_mask_fraction"], entry["encoder_renumbers"])


def check(
    folder: pathlib.Path,
    content: dict[str, typing.Any],
    model: config.Model,
    params: dict[str, np.ndarray],
    shapes: layouts.Shapes,
):
    """Raises ConfigError if the decoder that was read is not that of `model`.

    `shapes` are those of the parameters of `model`, without padding of the vocabulary.
    """
    described, entry = _describe(model), content[ENTRY]["decoder"]
    faults = [
        f"{ENTRY}.decoder.{name} is {entry.get(name)!r}, expected {described.get(name)!r}"
        for name in sorted({*described, *entry})
        if entry.get(name) != described.get(name)
    ]
    stored, expected = (
        {path: tuple(shape) for path, shape in values.items() if path.startswith(MODULES)}
        for values in ({path: value.shape for path, value in params.items()}, shapes)
    )
    faults += layouts.compare_shapes(stored, expected)
    if faults:
        raise config.ConfigError(
            f"{folder / FILE} does not fit config.json: {layouts.list_faults(faults)}. Use the "
            "files of one export"
        )
