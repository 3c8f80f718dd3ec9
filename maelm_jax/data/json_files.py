"""Reads JSON files that this program wrote, and JSON that a user gives."""

import json
import os
import pathlib
import typing

from maelm_jax import config


def parse(text: str | bytes, where: str, remedy: str) -> typing.Any:
    """The value that a JSON text holds.

    Args:
        text: The JSON text. Bytes are UTF-8.
        where: The file, and the line where it has one, for the message.
        remedy: What the user can do, for the message.

    Raises:
        ConfigError: The text is not JSON, is nested too deeply, or holds an integer that is too long.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise config.ConfigError(f"{where}: not JSON (nested too deeply); {remedy}") from error
    except ValueError as error:  # also of integers beyond sys.get_int_max_str_digits()
        reason = str(error).partition(";")[0]
        raise config.ConfigError(f"{where}: not JSON ({reason}); {remedy}") from error


def read(path: str | os.PathLike, valid: typing.Callable[[typing.Any], bool], remedy: str) -> typing.Any:
    """The value that a JSON file holds, if it has the form that `valid` asks for.

    Raises:
        ConfigError: The file cannot be read, or holds anything else.
    """
    try:
        content = pathlib.Path(path).read_bytes()
    except OSError as error:
        raise config.ConfigError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    value = parse(content, f"{path}: damaged", remedy)
    if not valid(value):
        raise config.ConfigError(f"{path}: damaged: not what was written there; {remedy}")
    return value


def is_text_map(value: typing.Any) -> bool:
    """Whether it is a JSON object whose values are strings."""
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
