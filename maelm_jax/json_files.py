"""Reads and checks JSON: files of this program, of other programs, and of users."""

import json
import math
import os
import pathlib
import typing

from maelm_jax.settings import ConfigError
from maelm_jax.settings import shown as shown

# Limits of the sizes that a config.json of other programs states.
LARGEST = 1 << 24
MOST_LAYERS = 1000


def parse(content: str | bytes, location: str, remedy: str) -> typing.Any:
    """Parses JSON.

    Args:
        content: The JSON text. Bytes are UTF-8.
        location: The file, and the line if there is one, for the message.
        remedy: How the user can correct the problem, for the message.

    Raises:
        ConfigError: The text is not JSON, is nested too deeply, or holds too long an integer.
    """
    try:
        return json.loads(content.decode("utf-8") if isinstance(content, bytes) else content)
    except RecursionError as error:
        raise ConfigError(f"{location}: not JSON (nested too deeply); {remedy}") from error
    except ValueError as error:  # also raised for integers beyond sys.get_int_max_str_digits()
        reason = str(error).partition(";")[0]
        raise ConfigError(f"{location}: not JSON ({reason}); {remedy}") from error


def read(
    path: str | os.PathLike, is_valid: typing.Callable[[typing.Any], bool], remedy: str
) -> typing.Any:
    """Reads a JSON file that this program wrote.

    Args:
        path: The file.
        is_valid: Says whether the value has the expected form.
        remedy: How the user can correct the problem, for the message.

    Raises:
        ConfigError: The file cannot be read, is not JSON, or has another form.
    """
    value = parse(_content(path, remedy), f"{path}: damaged", remedy)
    if not is_valid(value):
        raise ConfigError(f"{path}: damaged: not what was written there; {remedy}")
    return value


def read_object(path: str | os.PathLike) -> dict[str, typing.Any]:
    """Reads the JSON object in a file that another program wrote.

    Raises:
        ConfigError: The file cannot be read, is not JSON, or does not hold an object.
    """
    value = parse(_content(path, "is the path right?"), str(path), "write the file again")
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds {shown(value)}, not a JSON object; write the file again")
    return value


def _content(path: str | os.PathLike, remedy: str) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error


def has_fields(value: typing.Any, fields: dict[str, typing.Any]) -> bool:
    """Returns whether `value` is a JSON object with `fields`, {name: type or union of types}."""
    return isinstance(value, dict) and all(
        name in value and isinstance(value[name], kind) for name, kind in fields.items()
    )


def is_text_map(value: typing.Any) -> bool:
    """Returns whether `value` is a JSON object whose values are strings."""
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def is_texts(value: typing.Any) -> bool:
    """Returns whether `value` is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def is_integer(value: typing.Any, least: int, most: float = math.inf) -> bool:
    """Returns whether `value` is an integer from `least` to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: typing.Any, least: float, most: float) -> bool:
    """Returns whether `value` is a finite number from `least` to `most`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return least <= value <= most and math.isfinite(value)
