"""Writes an encoder as a folder: for stock transformers, or as published.

A folder is written beside its place under another name, and renamed when it is whole.
"""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import tempfile
import typing

import numpy as np

from maelm_jax import config, storage
from maelm_jax.encoders import (
    decoder_file,
    families,
    layouts,
    published,
    tokenizer,
    weight_files,
)

if typing.TYPE_CHECKING:
    from maelm_jax.encoders.opened import OpenedModel

CARD = "README.md"


class Written(typing.NamedTuple):
    """What an export wrote."""

    architecture: str  # the class or layout that loads the folder
    parameters: int


def check_format(format: str, encoder: "OpenedModel"):
    """Raises ConfigError if the format cannot hold the encoder."""
    if format == "huggingface":
        _check_stock_settings(encoder)
        return
    weight_files.require_torch("--format=reference")
    size = encoder.vocabulary.size
    published.check_special_ids(encoder.vocabulary.special, size, "the vocabulary")
    misfits = published.list_misfits(encoder.model)
    if encoder.model.causal:
        misfits.append("Objective.name is 'causal'")
    if encoder.model.decoder and encoder.objective.visible_mask_fraction:
        misfits.append(f"Objective.name is {encoder.objective.name!r}")
    if encoder.objective.masking.renumber:
        misfits.append("Masking.renumber is True")
    if encoder.head:
        misfits.append("it has the head of a fine-tuned run")
    elif "head/bias" not in encoder.params:
        misfits.append("it has no language-model head")
    if misfits:
        raise config.ConfigError(
            f"--format={format} does not hold the model of {encoder.name} "
            f"({'; '.join(misfits)}). Use --format=huggingface, or train a run with "
            f"--gin_file={published.CONFIG} after its own --gin_file"
        )


def _check_stock_settings(encoder: "OpenedModel"):
    """Raises ConfigError if config.json and decoder_file.FILE do not state all settings."""
    own, decoder = encoder.model.encoder, encoder.model.decoder
    if encoder.head and not encoder.head.has_stock_class:
        raise config.ConfigError(
            f"{encoder.name}: no class of transformers predicts labels of its kind "
            "(maelm_jax/finetuning/labels.py). Predict with maelm_jax.finetune --predict"
        )
    family = families.require_stock_family(own, encoder.vocabulary.special)
    if encoder.model.causal and not family.causal_class:
        names = [name for name, one in families.FAMILIES.items() if one.causal_class]
        raise config.ConfigError(
            f"{encoder.name} predicts next tokens, and the stock {family.class_name} has no causal "
            f"mask (only {', '.join(names)} have). Score it with maelm_jax.evaluate, or train it "
            "further as MLM (Run.continue_from) or MAE-LM (Run.init_from)"
        )
    stored = family.as_stored(own)
    if decoder and decoder.stack(stored).canonical != decoder.stack(own).canonical:
        raise config.ConfigError(
            f"the config.json of a {family.class_name} does not state the decoder's "
            f"Encoder.num_buckets={own.num_buckets} and Encoder.max_distance={own.max_distance}. "
            "Train with their defaults, or with Decoder.relative_bias=False"
        )


def find_causal_class(encoder: "OpenedModel") -> str | None:
    """Returns the stock class that reads an encoder of both objectives left to right, or None."""
    family = families.choose_family(encoder.model.encoder)
    if decoder_file.is_in(encoder) or not (encoder.objective.causal_share and family.causal_class):
        return None
    return family.class_name + family.causal_class


def write(
    format: str, folder: pathlib.Path, encoder: "OpenedModel", dtype: str = "float32"
) -> Written:
    """Writes every file of the export except the model card.

    `dtype` is that of .safetensors. Raises ConfigError if the format has no tensor for a parameter.
    """
    if format == "reference":
        encoder.vocabulary.save(folder)
        size = encoder.vocabulary.size
        parameters = published.write(
            folder / "model.pt", encoder.params, encoder.model, size, encoder.length
        )
        return Written("the reference's layout", parameters)
    pair = families.choose_pair_format(encoder.model.encoder)
    try:
        tokenizer.write(folder, encoder.vocabulary, encoder.length, pair)
    except tokenizer.NoEqual as error:
        print(f"no tokenizer.json: {error}")
        encoder.vocabulary.save(folder)
        tokenizer.write_longest_input(folder, encoder.length)
    written = _write_stock_model(folder, encoder, dtype)
    decoder_file.write(folder, encoder, dtype)
    _write_modules(folder, encoder.module_files)
    return written._replace(parameters=written.parameters + decoder_file.count(encoder))


def _write_modules(folder: pathlib.Path, files: dict[str, bytes]):
    """Writes {plain relative name: content}. Raises ConfigError over what the export writes."""
    own = {name.casefold() for name in (CARD, *os.listdir(folder))}  # disks may fold case
    for name, content in files.items():
        if pathlib.PurePosixPath(name).parts[0].casefold() in own:
            raise config.ConfigError(
                f"modules.json has a module in {name}, where the export writes a file of its own. "
                "Rename the module there"
            )
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


class StockModel(typing.NamedTuple):
    """What an export holds of an encoder: a model of a stock class."""

    class_name: str
    content: dict[str, typing.Any]  # of config.json
    tensors: dict[str, np.ndarray]


def make_stock_model(encoder: "OpenedModel") -> StockModel:
    """Returns the stock model of an encoder, without the parameters in decoder_file.FILE.

    The class has the head of a fine-tuned run, the language-model head of an MLM run or of a causal
    one, or no head. The prediction head of an MAE-LM run reads the decoder, so its class has no
    head. A pooler is not part of the encoder: one that came in with a BERT goes out with it again.

    Raises:
        ConfigError: No stock class computes the encoder, or has a tensor for each parameter.
    """
    head, special, size = encoder.head, encoder.vocabulary.special, encoder.vocabulary.size
    family = families.require_stock_family(encoder.model.encoder, special)
    own = family.as_stored(encoder.model.encoder)
    model = dataclasses.replace(encoder.model.without_decoder, encoder=own)
    beside = decoder_file.select(encoder)
    params = {path: value for path, value in encoder.params.items() if path not in beside}
    if own.token_types and not encoder.model.encoder.token_types:
        params[layouts.TYPE_TABLE] = np.zeros((own.token_types, own.width), np.float32)
    language_model = family.causal_class if encoder.model.causal else "ForMaskedLM"
    ending = head.task_class if head else language_model if "head/bias" in params else "Model"
    prefix = "" if ending == "Model" else family.prefix
    mappings = family.encoder_mappings(own, special.pad, prefix)
    if head:
        mappings += family.task_head_mappings(head.task_class)
    elif "head/bias" in params:
        mappings += family.language_model_mappings()
    if "pooler/kernel" in params and not head:
        mappings += family.pooler_mappings(prefix)
    content = {
        "architectures": [family.class_name + ending],
        **family.make_entries(model, special, size),
        **(head.config_entries() if head else {}),
        **decoder_file.make_entries(encoder),
    }
    if encoder.objective.causal_share:
        content[families.CAUSAL_SHARE] = encoder.objective.causal_share
    tensors = layouts.export_tensors(params, mappings, size)
    return StockModel(family.class_name + ending, content, tensors)


def _write_stock_model(folder: pathlib.Path, encoder: "OpenedModel", dtype: str) -> Written:
    """Writes config.json and model.safetensors."""
    stock = make_stock_model(encoder)
    (folder / "config.json").write_text(
        json.dumps(stock.content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    weight_files.write_safetensors(folder / weight_files.WEIGHTS, stock.tensors, dtype)
    return Written(stock.class_name, sum(value.size for value in stock.tensors.values()))


def check_output(output: str | os.PathLike):
    """Raises ConfigError if no folder can be written at `output`."""
    storage.require_local(os.fspath(output))
    target = pathlib.Path(output).expanduser()
    is_empty_folder = target.is_dir() and not any(target.iterdir())
    if target.exists() and not is_empty_folder:
        raise config.ConfigError(f"{output} exists. Remove it, or give another folder")
    if target.resolve() == pathlib.Path.cwd():  # a rename would leave the shell in a deleted folder
        raise config.ConfigError(f"{output} is the present folder: name a new folder in it")


@contextlib.contextmanager
def write_atomically(output: str | os.PathLike) -> typing.Iterator[pathlib.Path]:
    """Context manager that yields a temporary folder and renames it to `output` at the end.

    If the block raises, `output` is unchanged. A killed process leaves a folder `.NAME.*` beside
    it, which may be removed.

    Raises:
        ConfigError: `check_output` fails.
        OSError: The disk is full, or `output` is no empty folder any more.
    """
    check_output(output)
    target = pathlib.Path(output).expanduser().resolve()  # a link stays a link
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
        folder = pathlib.Path(temporary, target.name)  # with the permissions of a new folder
        folder.mkdir()
        try:
            yield folder
            for path in (*folder.rglob("*"), folder):
                storage.flush_folder(path)
        except Exception as error:
            if "No space left" in str(error):  # libraries do not say where
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(output)) from error
            raise
        folder.rename(target)
