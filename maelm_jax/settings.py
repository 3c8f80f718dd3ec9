"""What a settings dataclass is: fields whose types are checked as an instance is made, and the errors that a user's input can end in."""

import dataclasses
import types
import typing


class ConfigError(ValueError):
    """A wrong input of the user's. Its text is the one line that the command prints before it ends with exit status 2."""

    status = 2


class RunError(RuntimeError):
    """A run that cannot go on, through no fault of its settings' form. Its text is the one line printed; exit status 1 unless `status` differs."""

    status = 1


def _matches(value, annotation) -> bool:
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, (tuple, list)) and all(_matches(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_matches(k, arguments[0]) and _matches(v, arguments[1]) for k, v in value.items())
    return isinstance(value, annotation)


def _describe(annotation) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(repr(argument) for argument in typing.get_args(annotation))
    if annotation is type(None):
        return "None"
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(_describe(argument) for argument in typing.get_args(annotation))
    return getattr(annotation, "__name__", str(annotation)) if not typing.get_args(annotation) else str(annotation)


class Settings:
    """Base of the dataclasses below: checks the type of every field when an instance is made."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not _matches(value, field.type):
                raise ConfigError(f"{type(self).__name__}.{field.name} must be {_describe(field.type)}, got {value!r}")
            if isinstance(value, list):
                object.__setattr__(self, field.name, tuple(value))
        self.check()

    def check(self):
        """Raises ConfigError when values do not fit together."""

    def require(self, condition: bool, message: str):
        if not condition:
            raise ConfigError(f"{type(self).__name__}.{message}")
