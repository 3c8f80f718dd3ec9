"""Copies the modules that sentence-transformers applies to an encoder: pooling, normalization, ...

`modules.json` lists the encoder and the modules after it. Each module has a folder, which may be
missing if the module has no settings.
"""

import collections.abc
import os
import pathlib
import typing

from maelm_jax import config, json_files

MODULES = "modules.json"
# Settings of the encoder in sentence-transformers (longest input, prompts), beside modules.json.
SETTINGS = ("sentence_bert_config.json", "config_sentence_transformers.json")


def read(folder: str | os.PathLike) -> dict[str, bytes]:
    """Reads the modules beside an encoder, without the encoder itself.

    Args:
        folder: The folder of the encoder, or anything else that holds an encoder.

    Returns:
        {path in the folder: content}; {} if `folder` has no modules.json.

    Raises:
        ConfigError: modules.json is damaged, or names a folder elsewhere.
    """
    listing = pathlib.Path(folder) / MODULES
    if not listing.is_file():
        return {}
    modules = json_files.read(listing, _is_listing, "download or save the folder again")
    files = [listing, *(listing.with_name(name) for name in SETTINGS)]
    for module in modules:
        name = module["path"]
        if not name:
            continue
        if name == ".." or "\0" in name or pathlib.PurePath(name).name != name:
            shown = json_files.shown(name)
            raise config.ConfigError(f"{listing} names {shown}, which is no folder beside it")
        files += sorted((listing.parent / name).glob("*"))
    return {
        str(path.relative_to(listing.parent)): path.read_bytes() for path in files if path.is_file()
    }


def _is_listing(value: typing.Any) -> bool:
    """Returns whether the content of modules.json is a list of modules with paths."""
    return isinstance(value, list) and all(
        isinstance(module, dict) and isinstance(module.get("path"), str) for module in value
    )


def write(folder: pathlib.Path, files: collections.abc.Mapping[str, bytes]):
    """Writes the result of `read` into `folder`."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
