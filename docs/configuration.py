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

A resumed run keeps its settings, except those marked *free*, which change no past step.
"""


def render_page() -> str:
    """Returns the page: for each section, a table of its fields."""
    lines = [PAGE]
    for cls in config.ALL_SECTIONS:
        schema = pydantic.TypeAdapter(cls).json_schema()["properties"]
        lines += [f"## {cls.__name__}", "", " ".join(cls.__doc__.split()), ""]
        lines += ["| setting | values | default | unit | meaning |", "|---|---|---|---|---|"]
        for name in config.field_names(cls):
            field = cls.__pydantic_fields__[name]
            extra = field.json_schema_extra
            default = f"`{field.get_default(call_default_factory=True)!r}`"
            label = f"`{name}`" + (" (free)" if extra["free"] else "")
            cells = (
                label,
                describe_values(schema[name]),
                default,
                extra["unit"],
                field.description,
            )
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def describe_values(schema: dict) -> str:
    """Returns the values that a JSON schema accepts, in words."""
    if choices := schema.get("anyOf"):
        return " or ".join(map(describe_values, choices))
    if choices := schema.get("enum", [schema["const"]] if "const" in schema else None):
        return ", ".join(f"`{choice!r}`" for choice in choices)
    if "pattern" in schema:
        return "`module:function`"
    words = {"null": "None", "string": "text", "object": "a dict", "array": "a list"}
    bounds = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
        "multipleOf": "a multiple of",
    }
    limits = [f"{word} {schema[key]:g}" for key, word in bounds.items() if key in schema]
    kind = schema["type"]
    return " ".join([words.get(kind, kind), " and ".join(limits)]).strip()


if __name__ == "__main__":
    sys.stdout.write(render_page())
