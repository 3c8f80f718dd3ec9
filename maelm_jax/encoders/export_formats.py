"""The formats of `maelm_jax.export`: what each can hold, its files, and its comparison with JAX."""

import dataclasses
import json
import pathlib
import typing

from flax import traverse_util

from maelm_jax import config
from maelm_jax.encoders import (
    families,
    huggingface,
    published,
    pytorch,
    sentence_modules,
    tokenizer_files,
    verify,
)
from maelm_jax.encoders.layouts import Weights

if typing.TYPE_CHECKING:
    from maelm_jax.encoders.encoder import Encoder

VERIFICATION = "verification.json"


class Written(typing.NamedTuple):
    """What an export wrote."""

    architecture: str  # the class or layout that loads the folder
    parameters: int


def check(format: str, model: config.Model, special: config.SpecialIds):
    """Raises ConfigError if the format cannot hold the model. Call it before reading weights."""
    if format == "huggingface":
        families.of_model(model, special)
    elif format == "pytorch":
        pytorch.check(model)
    else:
        published.check(model)
        published.check_special_ids(special, len(special.continues_word), "the vocabulary")


def check_heads(format: str, encoder: "Encoder", path: str):
    """Raises ConfigError if the format cannot hold the heads of the encoder at `path`.

    All formats but huggingface hold the language-model head, and no head of a fine-tuned run.
    """
    if format == "huggingface":
        return
    if encoder.head:
        raise config.ConfigError(
            f"{path} is a fine-tuned run, which --format=huggingface holds; --format={format} "
            "does not"
        )
    if "head/bias" not in encoder.params:
        raise config.ConfigError(
            f"{path} has no language-model head, which --format={format} must hold. Use "
            "--format=huggingface, which holds the encoder"
        )


def write(format: str, folder: pathlib.Path, encoder: "Encoder") -> Written:
    """Writes every file of the export except the model card."""
    params, model, vocabulary = encoder.params, encoder.model, encoder.vocabulary
    weights = Weights(params, model, vocabulary.size, vocabulary.special)
    if format == "huggingface":
        try:
            tokenizer_files.write(folder, vocabulary, encoder.length, families.pair_of(model))
        except tokenizer_files.NoEqual as error:
            raise config.ConfigError(
                f"{error}. `export --format=pytorch` goes without tokenizer.json"
            ) from error
        parameters = huggingface.write(folder, weights, encoder.head)
        sentence_modules.write(folder, encoder.sentence_files)
        return Written(huggingface.architecture(weights, encoder.head), parameters)
    if format == "pytorch":
        try:
            tokenizer_files.write(folder, vocabulary, encoder.length, families.pair_of(model))
        except tokenizer_files.NoEqual as error:  # the format goes without tokenizer.json
            print(f"no tokenizer.json: {error}")
            vocabulary.save(folder)
        parameters = pytorch.write(folder, weights, encoder.mask_fraction, encoder.renumber)
        return Written("maelm.MaeLm", parameters)
    vocabulary.save(folder)
    parameters = published.write(folder / "model.pt", params, model, vocabulary.size)
    return Written("the reference's layout", parameters)


def verify_folder(format: str, folder: pathlib.Path, encoder: "Encoder") -> list[verify.Report]:
    """Reads the folder back, compares it with JAX and writes the reports into the folder.

    Raises:
        RunError: The folder does not compute what JAX computes.
    """
    params, model, vocabulary = encoder.params, encoder.model, encoder.vocabulary
    if format == "reference":
        reports = verify.reference(folder, params, vocabulary.size)
    else:
        compare = verify.huggingface if format == "huggingface" else verify.pytorch
        tree = traverse_util.unflatten_dict(params, sep="/")
        reports = compare(folder, tree, dataclasses.replace(model, dtype="float32"), vocabulary)
    content = json.dumps(reports, indent=2, ensure_ascii=False)
    (folder / VERIFICATION).write_text(content + "\n", encoding="utf-8")
    return reports
