"""Functions of the user's own, which a gin file names as `module:function` (docs/own_parts.md).

Only a command that trains imports them, and only those that the user names: gin_files.py takes none
from the record of a run.
"""

import collections.abc
import difflib
import importlib
import inspect
import types
import typing

from maelm_jax.config import ConfigError


def import_module(setting: str, module: str) -> types.ModuleType:
    """Imports a module that a setting names. Raises ConfigError if that fails."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ConfigError(
            f"{setting}: {module!r} cannot be imported "
            f"({type(error).__name__}: {error}); correct it, install it or set PYTHONPATH"
        ) from error


def load_function(
    setting: str,
    name: str,
    arguments: tuple[str, ...],
    parameters: dict[str, typing.Any] | None = None,
) -> collections.abc.Callable:
    """Imports the function `module:function` of a setting.

    Args:
        setting: The setting, for messages.
        name: The value of the setting.
        arguments: Names of the positional arguments that it is called with.
        parameters: Its further arguments, by name.

    Raises:
        ConfigError: The module cannot be imported, or has no such function, or the function has
            other arguments.
    """
    module_name, _, function_name = name.partition(":")
    module = import_module(setting, module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        near = difflib.get_close_matches(function_name, dir(module), n=1)
        hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
        raise ConfigError(f"{setting}={name}: {module_name} has no function {function_name}{hint}")
    try:
        inspect.signature(function).bind(*arguments, **(parameters or {}))
    except TypeError as error:
        named = [f"{key}={value!r}" for key, value in (parameters or {}).items()]
        raise ConfigError(
            f"{setting}={name} is called as {function_name}({', '.join([*arguments, *named])}): "
            f"{error}. Change the function, or its parameters in the gin file"
        ) from None
    return function
