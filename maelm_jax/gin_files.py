"""Reads gin files into an `Experiment`, and writes an `Experiment` as gin text."""

import ast
import contextlib
import dataclasses
import difflib
import io
import itertools
import logging
import os
import pathlib
import re
import tokenize
import typing

import gin

from maelm_jax import config, storage
from maelm_jax.config import ConfigError, Experiment

RECORD = "config.gin"  # in a workdir: every setting of the run
# Macros of configs/base.gin and configs/finetune/base.gin. A file may bind what they stand for.
MACROS = (
    *("TRAIN_STEPS", "BATCH_SIZE", "SEQUENCE_LENGTH", "SEED", "TEXT_FILES"),
    *("DATA_DIR", "SEEDS", "LEARNING_RATE", "EPOCHS", "WARMUP", "MAX_LENGTH"),
    *("TRAIN_EXAMPLES", "DEV_EXAMPLES", "TRAIN_FILE", "DEV_FILE"),
)

# {field of the former section Model: its name now}, for those that did not keep their own name.
OLDER_NAMES = {
    "dropout": "Dropout.hidden",
    "attention_dropout": "Dropout.attention",
    "init_std": "Init.std",
    "relative_bias_init": "Init.relative_bias",
    "unigram_bias": "Init.unigram_bias",
}

# The settings that can name Python code of the user.
CODE = tuple(
    f"{cls.__name__}.{name}"
    for cls in config.ALL_SECTIONS
    for name in config.field_names(cls, names_code=True)
)
HELD_BACK = "<named by a record>"  # the value of such a setting until somebody else names it

PACKAGE = pathlib.Path(__file__).resolve().parent
# An installed package has configs/ inside. In a checkout it is beside the package.
INSTALLED_CONFIGS = PACKAGE / "configs"
CONFIGS = INSTALLED_CONFIGS if INSTALLED_CONFIGS.is_dir() else PACKAGE.parent / "configs"

gin.add_config_file_search_path(str(CONFIGS))  # after the working directory
for cls in config.ALL_SECTIONS:
    gin.external_configurable(cls, cls.__name__)


def load(
    names: typing.Sequence[str],
    bindings: typing.Sequence[str] = (),
    base: Experiment | None = None,
    runs_modules: bool | tuple[str, ...] = False,
) -> Experiment:
    """Reads gin files, then bindings, and builds the settings.

    Args:
        names: The gin files, found in the working directory, then in configs/. A later file
            replaces values of an earlier one.
        bindings: `NAME=VALUE` from the command line. They replace values of the files. A value
            that is no Python literal and no %MACRO is text.
        base: Values of the settings that no file and no binding names. None: the defaults.
        runs_modules: Whether the caller imports what the settings of CODE name. A tuple holds the
            settings whose values it imports. The record of a run may be a stranger's: a value there
            is refused, unless a file or binding names it too.

    Raises:
        ConfigError: A file does not exist or is not gin, a name is unknown, a value is wrong, or a
            macro has no effect.
    """
    held_back: dict[str, _HeldBack] = {}  # by setting
    gin.clear_config()
    if base is not None:
        gin.parse_config(render(base))
    for number, name in enumerate(names):
        before = {setting: _bound(setting) for setting in CODE}
        with _naming(f"--gin_file={name}"):
            parsed = _parse_file(name)
        if parsed is None:
            held_back |= _hold_back_code(name, before)
        if number and parsed and "base.gin" in _files_of(parsed):
            raise ConfigError(
                f"--gin_file={name} is a whole config (it includes base.gin) and would replace "
                f"what {names[0]} sets. Give it first, or leave it out"
            )
    macros = set(re.findall(r"^(\w+) =", gin.config_str(), re.MULTILINE))
    unused = macros - _find_macro_uses(gin.config_str()) - set(MACROS)
    for name in unused:
        raise ConfigError(f"{name}: no setting uses a macro of this name{_hint(name, MACROS)}")
    for binding in bindings:
        _bind(binding, macros)
    for name in _find_macro_uses(gin.config_str()) - macros:
        raise ConfigError(f"%{name}: no macro of this name is defined{_hint(name, macros)}")
    _restore_code(held_back, runs_modules)
    values = {cls: gin.get_bindings(cls.__name__) for cls in config.ALL_SECTIONS}
    _check_macros(bindings, macros)
    finetunes = any(values[cls] for cls in config.FINETUNE_SECTIONS)
    experiment = Experiment(
        **{
            field.name: _build_section(field.type, values)
            for field in dataclasses.fields(Experiment)
            if field.type in config.ALL_SECTIONS
        },
        decoder=config.Decoder(**values[config.Decoder]),
        finetune=_build_section(config.Finetune, values) if finetunes else None,
    )
    if experiment.decoder is None and any(name.startswith("Decoder.") for name in bindings):
        raise ConfigError(
            f"--gin.Decoder has no effect: Objective.name = {experiment.objective.name!r} and "
            "fine-tuning have no decoder"
        )
    given = {binding.partition("=")[0] for binding in bindings}
    if "Objective.mask_fraction" in given and experiment.objective.name != "between":
        raise ConfigError(
            "--gin.Objective.mask_fraction has no effect without --gin.Objective.name=between"
        )
    if "Corpus.sources" in given and experiment.corpus.text_files:
        raise ConfigError(
            f"--gin.Corpus.sources has no effect beside Corpus.text_files="
            f"{experiment.corpus.text_files!r}: give --gin.Corpus.text_files=None as well"
        )
    return experiment


def _find_macro_uses(text: str) -> set[str]:
    """Returns the names of the macros in gin text. A %NAME within a string is none."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {name.string for sign, name in itertools.pairwise(tokens) if sign.string == "%"}


def _check_macros(bindings: typing.Sequence[str], macros: set[str]):
    """Raises ConfigError for a macro of the command line that no setting uses."""
    operative = set(re.findall(r"^(\w+) =", gin.operative_config_str(), re.MULTILINE))
    for name in (binding.partition("=")[0] for binding in bindings):
        if name in macros - operative:
            raise ConfigError(
                f"--gin.{name} has no effect, because its setting is bound directly. "
                "Give one of the two"
            )


class _HeldBack(typing.NamedTuple):
    """A value of a setting of CODE that the record of a run has."""

    value: typing.Any
    record: str


def _bound(setting: str):
    section, _, name = setting.partition(".")
    return gin.get_bindings(section).get(name)


def _hold_back_code(record: str, before: dict[str, typing.Any]) -> dict[str, _HeldBack]:
    """Takes the code that a parsed record names out of gin's bindings. Returns it by setting.

    `before` has the values before the record was parsed, which the user named.
    """
    held_back = {}
    for setting in CODE:
        value = _bound(setting)
        if config.names_own_code(value) and value != before[setting]:
            held_back[setting] = _HeldBack(value, record)
            gin.parse_config(f"{setting} = {HELD_BACK!r}")
    return held_back


def _restore_code(held_back: dict[str, _HeldBack], runs_modules: bool | tuple[str, ...]):
    """Binds what `_hold_back_code` took out and nobody else has bound.

    Raises ConfigError instead where the caller imports it.
    """
    for setting, (value, record) in held_back.items():
        if _bound(setting) != HELD_BACK:
            continue
        if runs_modules is True or (runs_modules and setting in runs_modules):
            raise ConfigError(
                f"{record} is the record of a run with {setting}={value}, which runs Python code. "
                "To run it, give the gin file that names it as well (--gin_file=YOURS), or "
                f'--gin.{setting}="{value}"'
            )
        gin.parse_config(f"{setting} = {value!r}")


def _build_section(cls: type[config.Settings], values: dict) -> config.Settings:
    """Returns a section with the sections that lie in it."""
    inner = {
        name: _build_section(field.annotation, values)
        for name, field in cls.__pydantic_fields__.items()
        if field.annotation in config.ALL_SECTIONS
    }
    return cls(**values[cls], **inner)


def render(experiment: Experiment) -> str:
    """Returns gin text with every value of `experiment`. `load` of it gives an equal Experiment."""
    blocks = [
        "\n".join(
            f"{type(section).__name__}.{name} = {getattr(section, name)!r}"
            for name in config.field_names(type(section))
        )
        for section in config.sections(experiment)
    ]
    return "\n\n".join(blocks) + "\n"


def _parse_file(name: str):
    """Parses a gin file. Returns what gin says of its includes, or None for a run's record.

    The record of a run is data, maybe somebody else's, so it may not import or include.
    """
    name = os.path.expanduser(name)
    if _is_record(name):
        text = storage.read_bytes(name).decode()
        if re.search(r"^\s*(import|from|include)\b", text, re.MULTILINE):
            raise ConfigError(f"{name}: the record of a run neither imports nor includes")
        is_cut = not text.endswith("\n")  # `render` writes all sections, and whole lines
        text = read_older_names(text)
        sections = {"Decoder", *re.findall(r"^(\w+)\.", text, re.MULTILINE)}
        missing = [cls.__name__ for cls in config.SECTIONS if cls.__name__ not in sections]
        if missing or is_cut:
            raise ConfigError(
                f"{name} is not the whole record of a run: {', '.join(missing) or 'its end'} is "
                "missing. Put a whole copy there. Give a gin file of your own another name"
            )
        gin.parse_config(text)
        return None
    _require_no_record(name)
    _refuse_older_names(_read_text(name))
    logging.disable(logging.ERROR)  # gin logs each place where a file is not, before it finds it
    try:
        return gin.parse_config_file(name)
    except RecursionError:
        raise ConfigError(
            f"--gin_file={name} includes itself, perhaps through another file: take out one include"
        ) from None
    finally:
        logging.disable(logging.NOTSET)


def read_older_names(text: str) -> str:
    """Returns the record of a run with the names that settings have now.

    Until November 2026, the section Model had the settings of all parts, and the objective was what
    followed from them. This is for runs and exports of that time.
    """
    if not re.search(r"^Model\.", text, re.MULTILINE):
        return text
    older = dict(re.findall(r"^([A-Z]\w+\.\w+) = (.*)$", text, re.MULTILINE))
    fraction = float(older.pop("Masking.encoder_mask_fraction", 0.0))
    if older.pop("Model.causal", "False") == "True":
        name = "causal"
    elif older.get("Model.decoder_layers") == "0":
        name = "mlm"
    else:
        name = "between" if fraction else "mae_lm"
    lines = [f"Objective.name = {name!r}"]
    if name == "between":
        lines.append(f"Objective.mask_fraction = {fraction}")
    has_decoder = name in ("mae_lm", "between")
    for setting, value in older.items():
        new = find_newer_name(setting)
        if has_decoder or not new.startswith("Decoder."):
            lines.append(f"{new} = {value}")
    return "\n".join(lines) + "\n"


def find_newer_name(setting: str) -> str:
    """Returns what a setting of the former section Model is called now."""
    section, _, name = setting.partition(".")
    if section != "Model":
        return setting
    if name in OLDER_NAMES:
        return OLDER_NAMES[name]
    if name.startswith("decoder_"):
        return f"Decoder.{name.removeprefix('decoder_')}"
    compute = config.field_names(config.Compute)
    return f"Compute.{name}" if name in compute else f"Encoder.{name}"


def _refuse_older_names(text: str):
    """Raises ConfigError if gin text binds a setting of the former section Model."""
    if older := re.search(r"^\s*(Model\.\w+)", text, re.MULTILINE):
        newer = find_newer_name(older.group(1))
        raise ConfigError(f"{older.group(1)}: this setting is {newer} now")


def _is_record(name: str) -> bool:
    """Returns whether a gin file is the record of a run: by its name, or because it is complete.

    A copy of a record or a link to one has another name. A file that a person writes does not set
    ten fields of Corpus.
    """
    path = pathlib.Path(name)
    if RECORD in (path.name.lower(), path.resolve().name.lower()):
        return True
    names = re.findall(r"^\s*Corpus\.(\w+)\s*=", _read_text(name), re.MULTILINE)
    return len(set(names)) >= 10


def _require_no_record(name: str, parents: tuple[str, ...] = ()):
    """Raises ConfigError if a gin file includes the record of a run, which gin would execute."""
    for included in re.findall(r"^\s*include\s+['\"](.+)['\"]", _read_text(name), re.MULTILINE):
        if _is_record(included):
            raise ConfigError(
                f"{name} includes {included}, the record of a run. Leave that line out, and give "
                f"--gin_file={included} before this file"
            )
        if included not in (*parents, name):
            _require_no_record(included, (*parents, name))


def _read_text(name: str) -> str:
    """Returns the text of a gin file as gin finds it, "" if it is no regular file."""
    places = [pathlib.Path(name), CONFIGS / name]
    file = next((place for place in places if place.is_file()), None)
    return file.read_text(encoding="utf-8", errors="replace") if file else ""


def _files_of(parsed) -> set[str]:
    """Returns the names of a parsed gin file and of all files that it includes."""
    return {parsed.filename}.union(*map(_files_of, parsed.includes))


def _bind(binding: str, macros: set[str]):
    """Binds NAME=VALUE of the command line."""
    name, _, value = binding.partition("=")
    with _naming(f"--gin.{binding}"):
        if not value or not re.fullmatch(r"\w+(\.\w+)?", name):
            raise ConfigError(f"--gin.{binding}: expected --gin.NAME=VALUE")
        if "." not in name and name not in macros:
            hint = _hint(name, macros)
            if name in MACROS:
                hint = "; give --gin_file too, or the name of the setting (a run records no macros)"
            raise ConfigError(f"--gin.{name}: the gin files have no such macro{hint}")
        _refuse_older_names(binding)
        if not value.startswith("%"):
            with contextlib.suppress(ValueError, SyntaxError):
                value = ast.literal_eval(value)
            value = repr(value)
        gin.parse_config(f"{name} = {value}")


@contextlib.contextmanager
def _naming(origin: str):
    """Context manager that turns an error of gin into one line that begins with `origin`."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # gin raises many types, and appends lines about the place
        reason = " ".join(str(error).split())
        hint = ""
        if isinstance(error, OSError):
            known = [str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.gin")]
            hint = _hint(origin.removeprefix("--gin_file="), known)
        raise ConfigError(f"{origin}: {reason}{hint}") from error


def _hint(name: str, known: typing.Iterable[str]) -> str:
    """Returns `; did you mean X?` with the known name nearest to `name`, or "" if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near and near[0] != name else ""
