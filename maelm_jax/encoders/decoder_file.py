"""What a stock class has no place for: the decoder of MAE-LM, and its head.

FILE holds their weights, beside those of the encoder. ENTRY in config.json holds their settings.
transformers reads both with the code in CODE, if the user trusts it. Nothing here runs the code of
a folder, or copies it: each export writes the file of this package.
"""

import importlib.resources
import pathlib
import typing

import numpy as np

from maelm_jax import config, storage
from maelm_jax.encoders import families, layouts, weight_files

if typing.TYPE_CHECKING:
    from maelm_jax.encoders.opened import OpenedModel

FLOATS = ("F32", "BF16", "F16")  # safetensors' names of the types that weights may have
FILE = "decoder.safetensors"
CODE = "modeling_mae_lm.py"
ENTRY = "mae_lm"
MODULES = ("decoder/", "head/")  # of the parameters in the file


class DecoderSettings(typing.NamedTuple):
    """What ENTRY says beside the weights.

    Attributes:
        decoder: The decoder.
        objective: What the encoder read of the masked positions.
    """

    decoder: config.Decoder
    objective: config.Objective


def is_in(encoder: "OpenedModel") -> bool:
    """Returns whether the encoder has a decoder with weights."""
    return encoder.model.decoder is not None and any(
        path.startswith("decoder/") for path in encoder.params
    )


def class_name(encoder: "OpenedModel") -> str:
    """Returns the name of the class in CODE that predicts as the encoder with its decoder."""
    return f"MaeLm{families.choose_family(encoder.model.encoder).class_name}ForMaskedLM"


def make_entries(encoder: "OpenedModel") -> dict[str, typing.Any]:
    """Returns the entries of config.json for an encoder with a decoder; {} without."""
    if not is_in(encoder):
        return {}
    entry = {
        "mask_token_id": encoder.vocabulary.mask,
        "encoder_mask_fraction": encoder.objective.visible_mask_fraction,
        "encoder_reads_mask": encoder.reads_masks,
        "encoder_renumbers": encoder.objective.masking.renumber,
        "decoder_refills_mask": encoder.model.decoder.refills_mask,
        "decoder": _describe(encoder.model),
    }
    reference = f"{CODE.removesuffix('.py')}.{class_name(encoder)}"
    return {"auto_map": {"AutoModelForMaskedLM": reference}, ENTRY: entry}


def _describe(model: config.Model) -> dict[str, typing.Any]:
    """Returns the settings of a decoder in the words of CODE, which knows no other settings."""
    own, sizes = model.decoder, model.decoder_settings.stack
    # Exports from before this setting do not state the default.
    activation = {} if sizes.hidden_act == "gelu" else {"hidden_act": sizes.hidden_act}
    return activation | {
        "layers": sizes.layers,
        "width": sizes.width,
        "heads": sizes.heads,
        "feed_forward": sizes.feed_forward,
        "attention": own.attention,
        "slots": own.slots,
        "causal": own.causal,
        "normalization": sizes.normalization,
        "gate": sizes.feed_forward_gate,
        "biases": sizes.biases,
        "layer_norm_eps": sizes.layer_norm_eps,
        "position_rows": sizes.max_positions if sizes.positions == "learned" else 0,
        "rotary_theta": sizes.rotary_theta if sizes.positions == "rotary" else None,
        "relative_buckets": sizes.num_buckets if own.relative_bias else 0,
        "max_distance": sizes.max_distance,
    }


def select(encoder: "OpenedModel") -> dict[str, np.ndarray]:
    """Returns the parameters {path: array} in FILE: {} if the encoder has no decoder."""
    if not is_in(encoder):
        return {}
    return {path: value for path, value in encoder.params.items() if path.startswith(MODULES)}


def count(encoder: "OpenedModel") -> int:
    """Returns the number of parameters in FILE."""
    return sum(value.size for value in select(encoder).values())


def write(folder: pathlib.Path, encoder: "OpenedModel", dtype: str):
    """Writes FILE and CODE if the encoder has a decoder.

    The tensors have the names and shapes that they have here, without padding of the vocabulary.
    """
    tensors = select(encoder)
    if not tensors:
        return
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
    own = config.Decoder(
        layers=decoder["layers"],
        width=None if decoder["width"] == width else decoder["width"],
        attention=decoder["attention"],
        causal=decoder["causal"],
        slots=decoder["slots"],
        refills_mask=entry["decoder_refills_mask"],
        relative_bias=decoder["relative_buckets"] > 0,
    )
    masking = config.Masking(renumber=entry["encoder_renumbers"])
    return DecoderSettings(own, config.Objective.between(entry["encoder_mask_fraction"], masking))


def check(
    folder: pathlib.Path,
    content: dict[str, typing.Any],
    model: config.Model,
    shapes: layouts.Shapes,
):
    """Compares ENTRY, and the header of FILE, with a model.

    `shapes` are those of all parameters of the model, without padding of the vocabulary. Raises
    ConfigError, which lists differences of settings, names, shapes and types.
    """
    import safetensors

    described, entry = _describe(model), content[ENTRY]["decoder"]
    faults = [
        f"{ENTRY}.decoder.{name} is {entry.get(name)!r}, expected {described.get(name)!r}"
        for name in sorted({*described, *entry})
        if entry.get(name) != described.get(name)
    ]
    expected = {path: shape for path, shape in shapes.items() if path.startswith(MODULES)}
    with (
        storage.reading(folder / FILE, errors=safetensors.SafetensorError),
        safetensors.safe_open(folder / FILE, framework="np") as file,
    ):
        names = file.keys()
        tensors = {name: file.get_slice(name) for name in names}
        stored = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
        types = {name: tensor.get_dtype() for name, tensor in tensors.items()}
    faults += layouts.compare_shapes(stored, expected)
    faults += [f"{name} has type {kind}" for name, kind in types.items() if kind not in FLOATS]
    if faults:
        raise config.ConfigError(
            f"{folder / FILE} does not fit config.json: {layouts.list_faults(faults)}. Use the "
            f"files of one export, or remove {FILE} to use the encoder alone"
        )
