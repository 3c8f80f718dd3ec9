"""Prints the page of all settings: `python docs/configuration.py > docs/configuration.md`."""

import pathlib
import sys

import pydantic

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from maelm_jax import config

PAGE = """# Configuration

Bind a setting in a gin file (`Encoder.layers = 6`) or on the command line
(`--gin.Encoder.layers=6`), which replaces what a file says. Macros are short names of some
settings: `TRAIN_STEPS`, `BATCH_SIZE`, `SEQUENCE_LENGTH`, `SEED` and `TEXT_FILES` in
`configs/base.gin`, and those of fine-tuning in `configs/finetune/base.gin`. Give a macro or its
setting, not both.

Parentheses hold the default, and what else is accepted: of `[0, 1)` the 0, but not the 1; without a
range, numbers from 0 or 1 on. A resumed run keeps its settings, except the *free* ones, which
change no past step.
"""


def render_page() -> str:
    """Returns the page: for each section, a list of its fields."""
    lines = [PAGE]
    for cls in config.ALL_SECTIONS:
        schema = pydantic.TypeAdapter(cls).json_schema()["properties"]
        lines += [f"## {cls.__name__}", "", " ".join(cls.__doc__.split()), ""]
        for name in config.field_names(cls):
            field = cls.__pydantic_fields__[name]
            extra = field.json_schema_extra
            label = f"`{name}`" + (", free" if extra["free"] else "")
            value = field.get_default(call_default_factory=True)
            default = f"`{value!r}`" + (f" {extra['unit']}" if value and extra["unit"] else "")
            accepted = describe_values(schema[name], extra["unit"] if value is None else "")
            others = [one for one in accepted if one not in ("", default)]
            values = "; ".join(filter(None, (default, ", ".join(others))))
            lines.append(f"- {label} ({values}): {field.description}")
        lines.append("")
    return "\n".join(lines)


def describe_values(schema: dict, unit: str) -> list[str]:
    """Returns the values that a JSON schema accepts, "" where the default shows them."""
    if choices := schema.get("anyOf"):
        return [value for choice in choices for value in describe_values(choice, unit)]
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else None):
        return [f"`{choice!r}`" for choice in choices]
    if schema["type"] in ("integer", "number"):
        return [f"{describe_range(schema)} {unit}".strip()]
    if "pattern" in schema:
        return ["`module:function`"]
    words = {"null": "`None`", "string": "text", "array": "a list"}
    return [words.get(schema["type"], "")]


def describe_range(schema: dict) -> str:
    """Returns the numbers that a JSON schema accepts, "" if that is nearly every one of its kind.

    A square bracket includes the bound.
    """
    low, high = (schema.get(key) for key in ("minimum", "maximum"))
    above, below = (schema.get(key) for key in ("exclusiveMinimum", "exclusiveMaximum"))
    step = f"{schema['multipleOf']}n " if "multipleOf" in schema else ""
    if high is None and below is None:
        is_plain = low in (0, 1) or above == 0
        sign, bound = ("≥", low) if above is None else (">", above)
        return "" if is_plain or bound is None else f"{step}{sign} {bound:g}"
    begin = f"({above:g}" if low is None else f"[{low:g}"
    end = f"{below:g})" if high is None else f"{high:g}]"
    return f"{begin}, {end}"


if __name__ == "__main__":
    sys.stdout.write(render_page())
