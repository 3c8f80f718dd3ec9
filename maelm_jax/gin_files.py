"""Reads gin files into an `Experiment`, and writes an `Experiment` as gin text."""

import ast
import contextlib
import difflib
import logging
import os
import pathlib
import re
import typing

import gin

from maelm_jax import config
from maelm_jax.config import ConfigError, Experiment

MACRO_USE = r"(?<=[ (\[{])%(\w+)"  # not in a path, as my%20books
RECORD = "config.gin"  # in a workdir: every setting of the run
# Macros of configs/base.gin and configs/finetune/base.gin. A file may bind what they stand for.
MACROS = (
    *("TRAIN_STEPS", "BATCH_SIZE", "SEQUENCE_LENGTH", "SEED", "TEXT_FILES"),
    *("DATA_DIR", "SEEDS", "LEARNING_RATE", "EPOCHS", "WARMUP", "MAX_LENGTH"),
    *("TRAIN_EXAMPLES", "DEV_EXAMPLES", "TRAIN_FILE", "DEV_FILE"),
)

PACKAGE = pathlib.Path(__file__).resolve().parent
# An installed package has configs/ inside. In a checkout it is beside the package.
INSTALLED_CONFIGS = PACKAGE / "configs"
CONFIGS = INSTALLED_CONFIGS if INSTALLED_CONFIGS.is_dir() else PACKAGE.parent / "configs"

gin.add_config_file_search_path(str(CONFIGS))  # after the working directory
for cls in config.ALL_SECTIONS:
    gin.external_configurable(cls, cls.__name__)


def load(
    names: typing.Sequence[str],
    bindings: typing.Sequence[str] = (),
    base: Experiment | None = None,
) -> Experiment:
    """Reads gin files, then bindings, and builds the settings.

    Args:
        names: The gin files, found in the working directory, then in configs/. A later file
            replaces values of an earlier one.
        bindings: `NAME=VALUE` from the command line. They replace values of the files. A value
            that is no Python literal and no %MACRO is text.
        base: Values of the settings that no file and no binding names. None: the defaults.

    Raises:
        ConfigError: A file does not exist or is not gin, a name is unknown, a value is wrong, or a
            macro has no effect.
    """
    gin.clear_config()
    if base is not None:
        gin.parse_config(render(base))
    for number, name in enumerate(names):
        with _naming(f"--gin_file={name}"):
            parsed = _parse_file(name)
        if number and parsed and "base.gin" in _files_of(parsed):
            raise ConfigError(
                f"--gin_file={name} is a whole config (it includes base.gin) and would replace "
                f"what {names[0]} sets. Give it first, or leave it out"
            )
    macros = set(re.findall(r"^(\w+) =", gin.config_str(), re.MULTILINE))
    unused = macros - set(re.findall(MACRO_USE, gin.config_str())) - set(MACROS)
    for name in unused:
        raise ConfigError(f"{name}: no setting uses a macro of this name{_hint(name, MACROS)}")
    for binding in bindings:
        _bind(binding, macros)
    for name in set(re.findall(MACRO_USE, gin.config_str())) - macros:
        raise ConfigError(f"%{name}: no macro of this name is defined{_hint(name, macros)}")
    values = {cls: gin.get_bindings(cls.__name__) for cls in config.ALL_SECTIONS}
    operative = set(re.findall(r"^(\w+) =", gin.operative_config_str(), re.MULTILINE))
    for binding in bindings:
        name = binding.partition("=")[0]
        if name in macros - operative:
            raise ConfigError(
                f"--gin.{name} has no effect, because its setting is bound directly. "
                "Give one of the two"
            )
    sections = [cls(**values[cls]) for cls in config.SECTIONS]
    if any(values[cls] for cls in config.FINETUNE_SECTIONS):
        inner = {
            name: field.annotation(**values[field.annotation])
            for name, field in config.Finetune.__pydantic_fields__.items()
            if field.annotation in config.FINETUNE_SECTIONS
        }
        sections.append(config.Finetune(**values[config.Finetune], **inner))
    return Experiment(*sections)


def render(experiment: Experiment) -> str:
    """Returns gin text with every value of `experiment`. `load` of it gives an equal Experiment."""
    blocks = [
        "\n".join(
            f"{type(section).__name__}.{name} = {getattr(section, name)!r}"
            for name in config.field_names(type(section))
        )
        for section in config.sections(experiment)
    ]
    return "\n\n".join(blocks) + "\n"


def _parse_file(name: str):
    """Parses a gin file. Returns what gin says of its includes, or None for a run's record.

    The record of a run is data. It may be somebody else's, so it may not import or include.
    """
    name = os.path.expanduser(name)
    if pathlib.Path(name).name == RECORD:
        text = pathlib.Path(name).read_text(encoding="utf-8")
        if re.search(r"^\s*(import|from|include)\b", text, re.MULTILINE):
            raise ConfigError(f"{name}: the record of a run neither imports nor includes")
        sections = re.findall(r"^(\w+)\.", text, re.MULTILINE)
        missing = [cls.__name__ for cls in config.SECTIONS if cls.__name__ not in sections]
        if missing or not text.endswith("\n"):  # `render` writes all sections, and whole lines
            raise ConfigError(
                f"{name} is not the whole record of a run: {', '.join(missing) or 'its end'} is "
                "missing. Put a whole copy there. Give a gin file of your own another name"
            )
        gin.parse_config(text)
        return None
    logging.disable(logging.ERROR)  # gin logs each place where a file is not, before it finds it
    try:
        return gin.parse_config_file(name)
    except RecursionError:
        raise ConfigError(
            f"--gin_file={name} includes itself, perhaps through another file: take out one include"
        ) from None
    finally:
        logging.disable(logging.NOTSET)


def _files_of(parsed) -> set[str]:
    """Returns the names of a parsed gin file and of all files that it includes."""
    return {parsed.filename}.union(*map(_files_of, parsed.includes))


def _bind(binding: str, macros: set[str]):
    """Binds NAME=VALUE of the command line."""
    name, _, value = binding.partition("=")
    with _naming(f"--gin.{binding}"):
        if not value or not re.fullmatch(r"\w+(\.\w+)?", name):
            raise ConfigError(f"--gin.{binding}: expected --gin.NAME=VALUE")
        if "." not in name and name not in macros:
            hint = _hint(name, macros)
            raise ConfigError(f"--gin.{name}: the gin files have no such macro{hint}")
        if not value.startswith("%"):
            with contextlib.suppress(ValueError, SyntaxError):
                value = ast.literal_eval(value)
            value = repr(value)
        gin.parse_config(f"{name} = {value}")


@contextlib.contextmanager
def _naming(origin: str):
    """Context manager that turns an error of gin into one line that begins with `origin`."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # gin raises many types, and appends lines about the place
        reason = " ".join(str(error).split())
        hint = ""
        if isinstance(error, OSError):
            known = [str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.gin")]
            hint = _hint(origin.removeprefix("--gin_file="), known)
        raise ConfigError(f"{origin}: {reason}{hint}") from error


def _hint(name: str, known: typing.Iterable[str]) -> str:
    """Returns `; did you mean X?` with the known name nearest to `name`, or "" if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near and near[0] != name else ""
