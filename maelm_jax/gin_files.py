"""gin files and bindings to an Experiment, and back: `load` builds each dataclass of config.py once, `render` writes every value in force."""

import ast
import dataclasses
import difflib
import importlib.util  # noqa: F401  (gin uses it for `include` and does not import it)
import logging
import pathlib
import typing

import gin

from maelm_jax import config
from maelm_jax.config import ConfigError, Experiment

PACKAGE = pathlib.Path(__file__).resolve().parent
INSTALLED_CONFIGS = PACKAGE / "configs"  # the wheel carries configs/ there; a checkout has it beside the package
CONFIGS = INSTALLED_CONFIGS if INSTALLED_CONFIGS.is_dir() else PACKAGE.parent / "configs"
gin.add_config_file_search_path(str(CONFIGS))  # for `include` in gin files


def find_gin_file(name: str) -> str:
    """The path of a gin file: as given, or else in configs/. Raises ConfigError that says where it looked."""
    candidates = [pathlib.Path(name), CONFIGS / name]
    for path in candidates:
        if path.is_file():
            return str(path)
    known = ", ".join(sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.gin")))
    raise ConfigError(f"no gin file {name!r}: looked for {' and '.join(map(str, candidates))}; configs/ holds {known}")


def _binding(text: str) -> str:
    """`NAME=VALUE` as gin reads it: a value that is no Python literal, macro or reference is taken as a string."""
    name, _, value = text.partition("=")
    if not value:
        raise ConfigError(f"--gin.{text}: expected --gin.NAME=VALUE")
    if value.startswith(("%", "@")):
        return f"{name} = {value}"
    try:
        ast.literal_eval(value)
        return f"{name} = {value}"
    except (ValueError, SyntaxError):
        return f"{name} = {value!r}"


def load(names: typing.Sequence[str], bindings: typing.Sequence[str] = ()) -> Experiment:
    """Reads gin files, then bindings (`NAME=VALUE`), and builds every dataclass.

    Raises ConfigError on a file that is not there, an unknown name, a macro that nothing uses, or a value of the wrong type.
    """
    gin.clear_config()
    logging.disable(logging.ERROR)  # gin logs an error for every folder in which an include is not
    try:
        for name in names:
            gin.parse_config_file(find_gin_file(name), skip_unknown=False)
        macros = _macros()
        for text in bindings:
            name = text.partition("=")[0]
            if "." not in name and name not in macros:
                hint = "".join(f"; did you mean {close}?" for close in difflib.get_close_matches(name, macros, n=1, cutoff=0.0))
                raise ConfigError(f"--gin.{name}: no macro of this name in {', '.join(names)}{hint}")
            gin.parse_config(_binding(text), skip_unknown=False)
        sections = [section() for section in config.SECTIONS]
        if any(selector.endswith(".Finetune") for _, selector in gin.config._CONFIG):
            sections.append(config.Finetune())
        unused = _macros() - _used_macros()
    except ConfigError as error:
        raise ConfigError(str(error).split("\n")[0]) from None  # gin appends a line on where the constructor was called
    except Exception as error:  # gin raises many types
        raise ConfigError(" ".join(str(error).split())) from error
    finally:
        gin.clear_config()  # what is built in Python afterwards has the defaults written above, not this file's values
        logging.disable(logging.NOTSET)
    if unused:
        raise ConfigError(f"{', '.join(sorted(unused))}: defined in a gin file but used by nothing; is the name right?")
    return Experiment(*sections)


def _macros() -> set[str]:
    return {scope for scope, selector in gin.config._CONFIG if selector == "gin.macro"}


def _used_macros() -> set[str]:
    return {scope for scope, selector in gin.config._OPERATIVE_CONFIG if selector == "gin.macro"}


def render(experiment: Experiment) -> str:
    """A gin file with every value in force: `load` of it gives the same Experiment."""
    blocks = []
    for field in dataclasses.fields(experiment):
        section = getattr(experiment, field.name)
        if section is None:
            continue
        name = type(section).__name__
        blocks.append("\n".join(f"{name}.{item.name} = {getattr(section, item.name)!r}" for item in dataclasses.fields(section)))
    return "\n\n".join(blocks) + "\n"
