"""Reads JSON files that this program wrote, and JSON that a user gives."""

import json
import os
import pathlib
import typing

from maelm_jax import config


def parse(text: str | bytes, where: str, remedy: str) -> typing.Any:
    """The value of a JSON text.

    Args:
        text: The JSON text. Bytes are UTF-8.
        where: The file, and the line if there is one, for the message.
        remedy: How the user can correct the problem, for the message.

    Raises:
        ConfigError: The text is not JSON, is nested too deeply, or holds too long an integer.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise config.ConfigError(f"{where}: not JSON (nested too deeply); {remedy}") from error
    except ValueError as error:  # also raised for integers beyond sys.get_int_max_str_digits()
        reason = str(error).partition(";")[0]
        raise config.ConfigError(f"{where}: not JSON ({reason}); {remedy}") from error


def read(
    path: str | os.PathLike, valid: typing.Callable[[typing.Any], bool], remedy: str
) -> typing.Any:
    """The value of a JSON file, if it has the expected form.

    Args:
        path: The file.
        valid: Says whether the value has the expected form.
        remedy: How the user can correct the problem, for the message.

    Raises:
        ConfigError: The file cannot be read, is not JSON, or has another form.
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
    """Whether the value is a JSON object whose values are strings."""
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
