"""Writes an encoder as a folder: for stock transformers, for plain PyTorch, or as published.

A folder is written beside its place under another name, and renamed when it is whole.
"""

import contextlib
import errno
import json
import os
import pathlib
import re
import shutil
import typing

from maelm_jax import config, storage
from maelm_jax.encoders import families, layouts, published, pytorch, tokenizer, weight_files

if typing.TYPE_CHECKING:
    from maelm_jax.encoders.encoder import Encoder

CARD = "README.md"
# The names in an export, modules of sentence-transformers included. Only a folder with no others
# is replaced. Python makes __pycache__ where maelm.py is imported.
FILES = re.compile(
    r"README\.md|config\.json|model\.safetensors|model\.pt|maelm\.py|tokenizer\.json|"
    r"tokenizer_config\.json|sentencepiece\.model|__pycache__|modules\.json|"
    r"sentence_bert_config\.json|config_sentence_transformers\.json|\d+_\w+"
)


class Written(typing.NamedTuple):
    """What an export wrote."""

    architecture: str  # the class or layout that loads the folder
    parameters: int


def check_format(format: str, encoder: "Encoder", path: str):
    """Raises ConfigError if the format cannot hold the encoder that was read from `path`."""
    if format == "huggingface":
        families.require_stock_family(encoder.model, encoder.vocabulary.special)
        return
    if format == "pytorch":
        pytorch.check(encoder.model)
    else:
        weight_files.require_torch("--format=reference")
        published.check(encoder.model)
        size = encoder.vocabulary.size
        published.check_special_ids(encoder.vocabulary.special, size, "the vocabulary")
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
    if format == "reference":
        encoder.vocabulary.save(folder)
        size = encoder.vocabulary.size
        parameters = published.write(folder / "model.pt", encoder.params, encoder.model, size)
        return Written("the reference's layout", parameters)
    pair = families.choose_pair_format(encoder.model)
    try:
        tokenizer.write(folder, encoder.vocabulary, encoder.length, pair)
    except tokenizer.NoEqual as error:
        if format == "huggingface":
            raise config.ConfigError(
                f"{error}. `export --format=pytorch` goes without tokenizer.json"
            ) from error
        print(f"no tokenizer.json: {error}")
        encoder.vocabulary.save(folder)
    if format == "pytorch":
        return Written("maelm.MaeLm", pytorch.write(folder, encoder))
    for name, content in encoder.module_files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return _write_stock_model(folder, encoder)


def _write_stock_model(folder: pathlib.Path, encoder: "Encoder") -> Written:
    """Writes config.json and model.safetensors of the stock class.

    The class has the head of a fine-tuned run, the language-model head of an MLM run, or no head.
    The prediction head of an MAE-LM run reads the decoder, so its class has no head. A pooler is
    not part of the encoder: one that came in with a BERT goes out with it again.
    """
    params, model, head = encoder.params, encoder.model, encoder.head
    special, size = encoder.vocabulary.special, encoder.vocabulary.size
    family = families.require_stock_family(model, special)
    reads_encoder = model.decoder_layers == 0 and "head/bias" in params
    ending = head.task_class if head else "ForMaskedLM" if reads_encoder else "Model"
    prefix = "" if ending == "Model" else family.prefix
    mappings = family.encoder_mappings(model, special.pad, prefix)
    if head:
        mappings += family.task_head_mappings(head.task_class)
    elif reads_encoder:
        mappings += family.language_model_mappings()
    if "pooler/kernel" in params and not head:
        mappings += family.pooler_mappings(prefix)
    tensors = layouts.export_tensors(params, mappings, size)
    tensors |= family.added_tensors(model, prefix)
    content = {
        "architectures": [family.class_name + ending],
        **family.make_entries(model, special, size),
        **(head.config_entries() if head else {}),
    }
    (folder / "config.json").write_text(
        json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    weight_files.write_safetensors(folder / weight_files.WEIGHTS, tensors)
    return Written(family.class_name + ending, sum(value.size for value in tensors.values()))


def check_output(
    output: str | os.PathLike, source: str | os.PathLike | None = None, overwrite: bool = False
):
    """Checks that an export may write the folder `output`, before long work is done.

    Args:
        output: The folder to write. It is absent or empty, or holds an export and `overwrite` is
            set.
        source: The encoder that is exported. It is never replaced.
        overwrite: Whether to replace an export.

    Raises:
        ConfigError: The export may not write `output`.
    """
    if pathlib.PurePath(output).parts[:1] in (("gs:",), ("s3:",)):
        raise config.ConfigError(f"{output} is in a bucket. Give a folder of this machine")
    target = _resolve(output)
    if source is not None and _resolve(source).is_relative_to(target):
        raise config.ConfigError(
            f"{output} is or holds the encoder that is exported, {source}. Give another folder"
        )
    present = os.listdir(target) if target.exists() else []
    if present and not overwrite:
        raise config.ConfigError(
            f"{output} exists. Give another folder (`export --overwrite` replaces an export)"
        )
    unknown = sorted(name for name in present if not FILES.fullmatch(name))
    if unknown or (present and CARD not in present):
        raise config.ConfigError(
            f"{output} is not replaced, because it holds {unknown[0] if unknown else 'no ' + CARD} "
            "and no export does. Give another folder"
        )


def _resolve(path: str | os.PathLike) -> pathlib.Path:
    """Returns the absolute path with links followed, so that a link stays a link."""
    return pathlib.Path(path).expanduser().resolve()


@contextlib.contextmanager
def write_atomically(
    output: str | os.PathLike, source: str | os.PathLike | None = None, overwrite: bool = False
) -> typing.Iterator[pathlib.Path]:
    """Context manager that yields a temporary folder and renames it to `output` at the end.

    If the block raises, `output` is unchanged. The arguments are those of `check_output`.

    Raises:
        ConfigError: `check_output` fails, at the start or at the end, or another process writes
            the same folder.
    """
    target = _resolve(output)
    temporary, replaced = (target.with_name(f".{target.name}.{end}") for end in ("new", "replaced"))
    if replaced.exists() and not target.exists():  # an export was killed between the two renames
        replaced.rename(target)
    check_output(output, source, overwrite)
    temporary.mkdir(parents=True, exist_ok=True)
    lock = os.open(temporary, os.O_RDONLY)
    try:
        if not storage.try_lock(lock):
            raise config.ConfigError(f"another process writes {output}")
        try:
            for name in os.listdir(temporary):  # of an export that was killed
                _remove(temporary / name)
            yield temporary
            _remove(temporary / "__pycache__")
            for path in (*temporary.rglob("*"), temporary):
                storage.flush_folder(path)
            check_output(output, source, overwrite)
            _remove(replaced)
            if target.exists():
                target.rename(replaced)
            temporary.rename(target)
            _remove(replaced)
        except BaseException as error:
            _remove(temporary)
            if "No space left" in str(error):  # libraries do not say where
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(output)) from error
            raise
    finally:
        os.close(lock)


def _remove(path: pathlib.Path):
    """Removes a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
