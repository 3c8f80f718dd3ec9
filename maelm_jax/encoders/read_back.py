"""Compares an export, read back as any command reads it, with the encoder it was written from.

This needs no PyTorch for --format=huggingface. Nothing is computed: a parameter under a wrong name
is found by verify.py, which runs the code that the format is for.
"""

import contextlib
import dataclasses
import io
import operator
import pathlib
import typing

import numpy as np

from maelm_jax import config
from maelm_jax.encoders import decoder_file, families, layouts, weight_files

if typing.TYPE_CHECKING:
    from maelm_jax.encoders.opened import OpenedModel


def check(format: str, found: "OpenedModel", encoder: "OpenedModel", dtype: str):
    """Compares every setting and every parameter of an export with those of the encoder.

    `found` is the export. `dtype` is that of .safetensors.

    Raises:
        RunError: The folder lacks one, has one more, or another value. The message lists them.
    """
    # The reader says that it leaves out the head of a fine-tuned run, which is compared here.
    with contextlib.redirect_stdout(io.StringIO()):
        params = found.read_params()
    if encoder.head:  # of which BERT's pooler is a part
        params = {path: value for path, value in params.items() if not path.startswith("pooler/")}
        params |= _read_task_head(pathlib.Path(found.path), encoder)
    faults = _list_other_settings(format, found, encoder)
    faults += _list_other_params(
        params, encoder.params, dtype if format == "huggingface" else "float32"
    )
    if faults:
        raise config.RunError(
            f"the export does not hold what it was made from ({layouts.list_faults(faults)}); "
            "nothing was written"
        )


def _read_task_head(folder: pathlib.Path, encoder: "OpenedModel") -> dict[str, np.ndarray]:
    """Returns the parameters of the head of a fine-tuned run."""
    family = families.choose_family(encoder.model.encoder)
    mappings = family.task_head_mappings(encoder.head.task_class)
    module = mappings[0].path.split("/")[0]
    shapes = {
        path: value.shape for path, value in encoder.params.items() if path.split("/")[0] == module
    }
    stored, names = weight_files.read_folder(folder), {mapping.name for mapping in mappings}
    tensors = {name: value for name, value in stored.items() if name in names}
    return layouts.import_tensors(tensors, mappings, shapes, str(folder), {})


def _list_other_settings(format: str, found: "OpenedModel", encoder: "OpenedModel") -> list[str]:
    """Returns the settings that have another effect in what was read, in words."""
    own, decoder = encoder.model.encoder, encoder.model.decoder
    if format == "huggingface":
        own = families.choose_family(own).as_stored(own)
    else:  # which has no families, and lets no [MASK] into the encoder
        own = dataclasses.replace(own, family=None)
        decoder = decoder and dataclasses.replace(decoder, refills_mask=True)
    faults = _compare("Encoder", own.canonical, found.model.encoder.canonical)
    causal = (encoder.model.causal, encoder.objective.causal_share)
    if format == "huggingface" and causal != (found.model.causal, found.objective.causal_share):
        faults.append("it does not say whether next tokens are predicted")
    if not decoder_file.select(encoder):
        return faults
    if found.model.decoder is None:
        return [*faults, "there is no decoder"]
    theirs = found.model.decoder.stack(found.model.encoder)
    faults += _compare("Decoder", decoder.canonical(own), found.model.decoder)
    faults += _compare("the decoder's layers:", decoder.stack(own).canonical, theirs.canonical)
    for name in ("visible_mask_fraction", "masking.renumber"):
        read = operator.attrgetter(name)
        if read(encoder.objective) != read(found.objective):
            faults.append(
                f"Objective.{name} is {read(found.objective)!r}, not {read(encoder.objective)!r}"
            )
    return faults


def _compare(name: str, ours: config.Settings, theirs: config.Settings) -> list[str]:
    """Returns the fields of two sections that differ, in words. `name` begins each."""
    return [
        f"{name}.{field} is {getattr(theirs, field)!r}, not {getattr(ours, field)!r}"
        for field in config.field_names(type(ours))
        if getattr(ours, field) != getattr(theirs, field)
    ]


def _list_other_params(
    theirs: dict[str, np.ndarray], ours: dict[str, np.ndarray], dtype: str
) -> list[str]:
    """Returns the parameters that differ from those of the encoder, in words.

    A table of one type of zeros does not change the encoder's function.
    """
    faults = [f"{path} is missing" for path in ours if path not in theirs]
    for path, value in theirs.items():
        if path in ours:
            is_equal = np.array_equal(value, ours[path].astype(dtype).astype(np.float32))
        else:
            is_equal = path == layouts.TYPE_TABLE and len(value) == 1 and not value.any()
        if not is_equal:
            faults.append(f"{path} has other values")
    return faults
