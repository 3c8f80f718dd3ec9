"""Writes an encoder as a folder: for stock transformers, or as published.

A folder is written beside its place under another name, and renamed when it is whole.
"""

import contextlib
import errno
import json
import os
import pathlib
import tempfile
import typing

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
    from maelm_jax.encoders.encoder import Encoder

CARD = "README.md"


class Written(typing.NamedTuple):
    """What an export wrote."""

    architecture: str  # the class or layout that loads the folder
    parameters: int


def check_format(format: str, encoder: "Encoder", path: str):
    """Raises ConfigError if the format cannot hold the encoder that was read from `path`."""
    if format == "huggingface":
        families.require_stock_family(encoder.model.encoder, encoder.vocabulary.special)
        return
    weight_files.require_torch("--format=reference")
    size = encoder.vocabulary.size
    published.check_special_ids(encoder.vocabulary.special, size, "the vocabulary")
    misfits = published.list_misfits(encoder.model)
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
            f"--format={format} does not hold the model of {path} ({'; '.join(misfits)}). Use "
            "--format=huggingface, or train a run with "
            f"--gin_file={published.CONFIG} after its own --gin_file"
        )


def write(format: str, folder: pathlib.Path, encoder: "Encoder", dtype: str = "float32") -> Written:
    """Writes every file of the export except the model card. `dtype` is that of .safetensors."""
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
    return written


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


def _write_stock_model(folder: pathlib.Path, encoder: "Encoder", dtype: str) -> Written:
    """Writes config.json and model.safetensors of the stock class.

    The class has the head of a fine-tuned run, the language-model head of an MLM run, or no head.
    The prediction head of an MAE-LM run reads the decoder, so its class has no head. A pooler is
    not part of the encoder: one that came in with a BERT goes out with it again.
    """
    params, model, head = encoder.params, encoder.model, encoder.head
    special, size = encoder.vocabulary.special, encoder.vocabulary.size
    family = families.require_stock_family(model.encoder, special)
    reads_encoder = not model.decoder and "head/bias" in params
    ending = head.task_class if head else "ForMaskedLM" if reads_encoder else "Model"
    prefix = "" if ending == "Model" else family.prefix
    mappings = family.encoder_mappings(model.encoder, special.pad, prefix)
    if head:
        mappings += family.task_head_mappings(head.task_class)
    elif reads_encoder:
        mappings += family.language_model_mappings()
    if "pooler/kernel" in params and not head:
        mappings += family.pooler_mappings(prefix)
    tensors = layouts.export_tensors(params, mappings, size)
    tensors |= family.added_tensors(model.encoder, prefix)
    content = {
        "architectures": [family.class_name + ending],
        **family.make_entries(model, special, size),
        **(head.config_entries() if head else {}),
        **decoder_file.make_entries(encoder),
    }
    (folder / "config.json").write_text(
        json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    weight_files.write_safetensors(folder / weight_files.WEIGHTS, tensors, dtype)
    return Written(family.class_name + ending, sum(value.size for value in tensors.values()))


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
