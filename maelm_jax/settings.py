"""Declares and checks settings dataclasses, and defines the errors for wrong input.

config.py declares each field once: type, range, default, unit and meaning. pydantic checks every
new instance against the declaration. gin binds values to it. Error messages and
docs/configuration.md are generated from it.
"""

import collections.abc
import difflib
import functools
import types
import typing

import gin
import pydantic

LARGEST = 2**31 - 1  # the largest int32, for step numbers and array sizes
SHOWN = 80  # longest part of a wrong value in a message, in characters

Positive = typing.Annotated[int, pydantic.Field(ge=1, le=LARGEST)]
Count = typing.Annotated[int, pydantic.Field(ge=0, le=LARGEST)]
Rows = typing.Annotated[int, pydantic.Field(ge=1, le=2**24)]  # rows of one batch
Seed = typing.Annotated[int, pydantic.Field(ge=0, le=2**32 - 1)]
Axis = Positive | typing.Literal[-1]  # devices on one axis of the mesh
Width = typing.Annotated[int, pydantic.Field(ge=1, le=2**20)]
Rate = typing.Annotated[float, pydantic.Field(gt=0, le=1e9)]  # weight of a source in a mixture
LearningRate = typing.Annotated[float, pydantic.Field(gt=0, le=3e38)]
Share = typing.Annotated[float, pydantic.Field(ge=0, le=1)]
Minutes = typing.Annotated[float, pydantic.Field(gt=0, le=1e6)]
ShareBelowOne = typing.Annotated[float, pydantic.Field(ge=0, lt=1)]
ShareInside = typing.Annotated[float, pydantic.Field(gt=0, lt=1)]
# Text that can be a path: not empty, no NUL character. pydantic itself refuses lone surrogates.
Text = typing.Annotated[str, pydantic.Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]


class ConfigError(ValueError):
    """Wrong input. The command prints the message as one line."""

    status = 2  # exit status of the process


class RunError(RuntimeError):
    """The run cannot continue, for a reason other than wrong input. Printed as one line."""

    status = 1  # exit status of the process


def described(error: Exception) -> str:
    """Returns the type and the message of an error of somebody else's code, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class Settings:
    """Base class of the settings dataclasses in config.py."""

    def check(self):
        """Raises ConfigError if values do not fit together. Subclasses override it."""

    def require(self, condition: bool, message: str):
        """Raises ConfigError with `Section.message` unless `condition` is true."""
        if not condition:
            raise ConfigError(f"{type(self).__name__}.{message}")

    def listed(self, name: str) -> tuple:
        """Returns a field as a tuple. A single value gives a tuple of one."""
        value = getattr(self, name)
        return value if isinstance(value, tuple) else (value,)

    def require_distinct(self, name: str):
        """Raises ConfigError when the list in a field holds a value twice."""
        values = self.listed(name)
        self.require(len(set(values)) == len(values), f"{name} names a value twice: {values}")

    def sections(self) -> list["Settings"]:
        """Returns the sections in the fields of this one. See `section`."""
        values = (getattr(self, name) for name in type(self).__pydantic_fields__)
        return [value for value in values if isinstance(value, Settings)]


def setting(default, meaning: str, unit: str | None = None, **limits):
    """Declares a field of a settings dataclass.

    Args:
        default: The value if no gin file binds the field. A function without arguments is called
            for each new instance.
        meaning: One sentence.
        unit: What the value counts or measures, in the plural.
        **limits: Limits of pydantic.Field: ge, gt, le, lt, multiple_of, min_length.
    """
    limits |= {"default_factory" if callable(default) else "default": default}
    return pydantic.Field(description=meaning, json_schema_extra={"unit": unit or ""}, **limits)


def section(cls: type):
    """Declares a field that holds another section. gin binds that section by its own name."""
    return pydantic.Field(default_factory=cls)


def field_names(cls: type) -> list[str]:
    """Returns the names of a section's settings, without fields that hold other sections."""
    return [
        name
        for name, field in cls.__pydantic_fields__.items()
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, Settings))
    ]


def declare(cls: type) -> type:
    """Class decorator for a frozen dataclass that gin binds and that checks each new instance.

    Types are strict: text is not accepted for a number. Infinity and NaN are refused. Lists become
    tuples. A wrong value raises ConfigError.
    """
    rules = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    cls = pydantic.dataclasses.dataclass(frozen=True, config=rules)(cls)
    construct = cls.__init__

    @functools.wraps(construct)
    def checked_init(self, *args, **values):
        values = {name: _without_lists(value) for name, value in values.items()}
        try:
            construct(self, *args, **values)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            raise ConfigError(_message(cls, str(first["loc"][0]), values, first["type"])) from None
        self.check()

    cls.__init__ = checked_init
    cls = gin.configurable(cls)
    bound_init = cls.__init__

    @functools.wraps(bound_init)
    def one_line_init(self, *args, **values):
        try:
            bound_init(self, *args, **values)
        except ConfigError as error:  # gin appends a line about the constructor
            raise ConfigError(str(error).split("\n")[0]) from None

    cls.__init__ = one_line_init
    return cls


def shown(value) -> str:
    """Returns the repr of a value for a message, cut after SHOWN characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more than 4300 digits, or a deeply nested list
        return f"{type(value).__name__} too large to show"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text):,} characters)"


def closest(name: str, known: collections.abc.Iterable[str]) -> str:
    """Returns `; did you mean X?` with the known name nearest to `name`, or "" if none is near."""
    near = difflib.get_close_matches(name[:SHOWN], list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _without_lists(value):
    """Returns the value with tuples for lists, also for the lists in a list or tuple."""
    return tuple(map(_without_lists, value)) if isinstance(value, (list, tuple)) else value


def _message(cls: type, name: str, values: dict, kind: str) -> str:
    """Returns the message for a wrong field. `kind` is pydantic's type of the error."""
    if kind == "unexpected_keyword_argument":
        hint = closest(name, field_names(cls))
        return f"{cls.__name__}.{name}: there is no such setting{hint}"
    if name not in values:  # only this package passes positional arguments
        return f"{cls.__name__}: wrong argument {name}"
    return f"{cls.__name__}.{name} must be {allowed(cls, name)}, got {shown(values[name])}"


def allowed(cls: type, name: str) -> str:
    """Returns the values that a field accepts, in words."""
    field = cls.__pydantic_fields__[name]
    return _describe(field.annotation, field.metadata)


def _describe(annotation, limits: collections.abc.Sequence = ()) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        field = pydantic.fields.FieldInfo.from_annotation(annotation)
        return _describe(field.annotation, field.metadata)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(item, limits) for item in arguments)
    if origin is typing.Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(repr, arguments))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"({'; '.join(map(_describe, arguments))})"
    if origin is tuple:
        item = _describe(arguments[0])
        example = "such as ('a', 'b') or ('a',), " if item.startswith("text") else ""
        return f"a list, {example}each item {item}"
    if origin is dict:
        return f"a dict, each key {_describe(arguments[0])}, each value {_describe(arguments[1])}"
    words = {bool: "True or False", type(None): "None", str: "text of 1 to 4096 characters"}
    if annotation in words:
        return words[annotation]
    return {int: "an integer", float: "a number"}[annotation] + _range(limits)


def _range(limits: collections.abc.Sequence) -> str:
    """Returns limits in words. `limits` are objects of annotated_types."""
    bounds = {}
    for limit in limits:
        for bound in ("ge", "gt", "le", "lt", "multiple_of"):
            if getattr(limit, bound, None) is not None:
                value = getattr(limit, bound)
                bounds[bound] = value if isinstance(value, int) else f"{value:g}"
    parts = []
    if "ge" in bounds and "le" in bounds:
        parts.append(f" from {bounds.pop('ge')} to {bounds.pop('le')}")
    else:
        words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
        limits_in_words = [f"{words[bound]} {bounds[bound]}" for bound in words if bound in bounds]
        parts.append(", " + " and ".join(limits_in_words) if limits_in_words else "")
    if "multiple_of" in bounds:
        parts.append(f", a multiple of {bounds['multiple_of']}")
    return "".join(parts)


def page(sections: collections.abc.Sequence[type]) -> str:
    """Returns docs/configuration.md: for each section, a table of its fields."""
    lines = [
        "# Configuration",
        "",
        "The declarations in `maelm_jax/config*.py` are printed as this page by",
        "`python -m maelm_jax.config > docs/configuration.md`.",
        "",
        "Bind a setting in a gin file (`Model.layers = 6`) or on the command line",
        "(`--gin.Model.layers=6`). The command line replaces what a file says. Macros are short",
        "names for the settings that change most often. `configs/base.gin` defines `TRAIN_STEPS`,",
        "`BATCH_SIZE`, `SEQUENCE_LENGTH`, `SEED` and `TEXT_FILES`. `configs/finetune/base.gin`",
        "defines those of fine-tuning. Give a macro or the setting that it stands for, not both.",
    ]
    for cls in sections:
        about = " ".join((cls.__doc__ or "").split())
        lines += ["", f"## {cls.__name__}", "", about, ""]
        lines += ["| setting | values | default | unit | meaning |", "|---|---|---|---|---|"]
        for name in field_names(cls):
            field = cls.__pydantic_fields__[name]
            default = field.get_default(call_default_factory=True)
            unit = field.json_schema_extra["unit"]
            cells = (f"`{name}`", allowed(cls, name), f"`{default!r}`", unit, field.description)
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "## What can go wrong",
        "",
        "- A wrong value ends the command with exit status 2. One line names the setting, the",
        "  values that it takes and the value given.",
        "- A wrong name ends it in the same way. The line names the nearest setting.",
        "- A resumed run keeps its settings, except those that change no past step",
        "  (`FREE_ON_RESUME` in `maelm_jax/setting_changes.py`). Other changes are refused.",
    ]
    return "\n".join(lines) + "\n"
