"""Reads and checks JSON files that other programs write beside their weights."""

import json
import math
import os
import pathlib
import typing

from maelm_jax.config import ConfigError

LARGEST = 1 << 24  # upper bound of every size in a config.json, except the number of layers
MOST_LAYERS = 1000


def read(path: str | os.PathLike) -> dict[str, typing.Any]:
    """Reads the JSON object of a file.

    Raises:
        ConfigError: The file cannot be read, is not JSON, or does not hold an object.
    """
    try:
        content = json.loads(pathlib.Path(path).read_bytes().decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Is the path right?") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is not JSON: nested too deeply. Write the file again") from error
    except ValueError as error:  # also for bytes that are not UTF-8 and for very long integers
        reason = str(error).partition(";")[0]
        raise ConfigError(f"{path} is not JSON: {reason}. Write the file again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {shown(content)}, not a JSON object. Write it again")
    return content


def is_integer(value: typing.Any, least: int, most: int) -> bool:
    """Returns whether `value` is an integer from `least` to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: typing.Any, least: float, most: float) -> bool:
    """Returns whether `value` is a finite number from `least` to `most`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return least <= value <= most and math.isfinite(value)


def is_texts(value: typing.Any) -> bool:
    """Returns whether `value` is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def shown(value: typing.Any) -> str:
    """Returns `value` as at most 60 ASCII characters, for an error message."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer of more than 4300 digits; deep nesting
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
