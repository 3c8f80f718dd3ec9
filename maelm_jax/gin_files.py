"""Builds an Experiment from gin files and bindings, and writes an Experiment as gin text."""

import pathlib
import re
import typing
import warnings

import gin

from maelm_jax import config, config_files, gin_reader
from maelm_jax.config import ConfigError, Experiment
from maelm_jax.settings import closest, field_names

RECORD = "config.gin"  # in a workdir: every setting of the run
# Settings that records of older runs lack, with the values that those runs had.
UNRECORDED = {"Model.decoder_refills_mask": False}


def values_of_older_run(record: pathlib.Path) -> list[str]:
    """Returns what a workdir's config.gin does not record, as `NAME=VALUE`.

    The values are those that the run had. The list is empty if the file does not exist.
    """
    if not record.is_file():
        return []
    text = record.read_text(errors="replace")
    if re.search(r"^\s*include\b", text, re.MULTILINE) or "Run.train_steps = " not in text:
        return []  # a user's file of this name
    return [f"{name}={value}" for name, value in UNRECORDED.items() if f"{name} = " not in text]


def load(
    names: typing.Sequence[str],
    bindings: typing.Sequence[str] = (),
    base: Experiment | None = None,
) -> Experiment:
    """Reads gin files, then bindings, and builds the settings.

    Args:
        names: The gin files. A later file replaces values of an earlier one.
        bindings: `NAME=VALUE` from the command line. They replace values of the files.
        base: Values of the settings that no file and no binding names. Macros of the files do not
            change them. None: the defaults of config.py.

    Raises:
        ConfigError: A file does not exist or is not gin, a name is unknown, a value is wrong, a
            macro is not used, or a macro in `bindings` has no effect because its settings are
            bound directly.
    """
    gin.clear_config()
    reader = gin_reader.Reader()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python, about unusual literals
            if base is not None:
                reader.read_text(render(base), "the settings to start from")
            for name in names:
                reader.read_file(name)
                if pathlib.Path(name).name == RECORD:
                    for text in values_of_older_run(pathlib.Path(name)):
                        reader.bind_text(text, names)
            _check_size(reader)
            for text in bindings:
                reader.bind_text(text, names)
        _check_macros(reader)
        sections = [section() for section in config.SECTIONS]
        if reader.bound_finetune:
            sections.append(config.Finetune())
        _check_given_macros(reader, bindings)
    except RecursionError as error:
        raise ConfigError("macros refer to each other in a circle; bind one to a value") from error
    finally:
        gin.clear_config()  # so that later instances have the defaults of config.py
    return Experiment(*sections)


def _check_size(reader: gin_reader.Reader):
    """Raises ConfigError where only files of configs/ are named that do not make a whole config."""
    configs = config_files.CONFIGS
    partial = [name for name in reader.named if config_files.find(name).is_relative_to(configs)]
    if partial and partial == reader.named and not reader.macros:
        files = " ".join(f"--gin_file={name}" for name in ["tiny.gin", *partial])
        raise ConfigError(f"{partial[0]} sets no model size; name a size first: {files}")


def _check_macros(reader: gin_reader.Reader):
    """Raises ConfigError for a macro that is used but not defined, or defined but not used."""
    undefined = sorted(set(reader.uses) - reader.macros)
    if undefined:
        hint = closest(undefined[0], reader.macros)
        raise ConfigError(f"%{undefined[0]}: no macro of this name is defined{hint}")
    unused = ", ".join(sorted(reader.macros - set(reader.uses)))
    if unused:
        what = "defined in a gin file but used by nothing"
        raise ConfigError(f"{unused}: {what}; is the name right?")


def _check_given_macros(reader: gin_reader.Reader, bindings: typing.Sequence[str]):
    """Raises ConfigError for a command-line macro whose settings are all bound directly."""
    called = gin.config._OPERATIVE_CONFIG  # keys: (scope, configurable); a macro is a configurable
    in_force = {scope for scope, selector in called if selector == "gin.macro"}
    for text in bindings:
        name = text.partition("=")[0]
        if name in reader.macros - in_force:
            replaced = ", ".join(sorted(reader.uses[name]))
            raise ConfigError(
                f"--gin.{name} has no effect, because {replaced} is bound directly; "
                "give one of the two"
            )


def render(experiment: Experiment) -> str:
    """Returns gin text with every value of `experiment`. `load` of it gives an equal Experiment."""
    blocks = []
    for section in config.sections(experiment):
        name = type(section).__name__
        lines = [f"{name}.{f} = {getattr(section, f)!r}" for f in field_names(type(section))]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"
