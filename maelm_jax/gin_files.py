"""Reads gin files and bindings into an Experiment, and writes an Experiment as gin text."""

import ast
import collections.abc
import contextlib
import importlib
import pathlib
import re
import tokenize
import typing
import warnings

import gin
from gin import config_parser

from maelm_jax import config, config_files, config_finetune
from maelm_jax.config import ConfigError, Experiment
from maelm_jax.settings import closest, field_names, shown

SECTIONS = {cls.__name__: cls for cls in config.ALL_SECTIONS}
# Every pretraining config includes it, and so sets every macro.
PRESET = config_files.CONFIGS / "base.gin"
RECORD = "config.gin"  # in a workdir: every setting of the run
# Settings that records of older runs lack, with the values that those runs had.
UNRECORDED = {"Model.decoder_refills_mask": False}
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)

# The exceptions of the Python and gin parsers for text that is not a literal.
UNREADABLE = (
    SyntaxError, tokenize.TokenError, ValueError, TypeError, RecursionError, MemoryError,
    AttributeError, IndexError, KeyError, StopIteration,
)


class _Reader:
    """Binds the statements of gin files and of the command line. Records the use of macros."""

    def __init__(self):
        self.macros: set[str] = set()  # names of the defined macros
        self.uses: dict[str, set[str]] = {}  # macro -> names that were bound to a value with it
        self.bound_finetune = False
        self.named: list[str] = []  # the files that were named, not included, in their order

    def read_file(self, name: str, including: tuple[pathlib.Path, ...] = ()):
        """Binds the statements of a file. `including` has the files that include it."""
        path = config_files.find(name)
        if path.resolve() in including:
            raise ConfigError(f"{path} includes itself; remove one of the include lines")
        if not including:
            self.named.append(name)
        if len(self.named) > 1 and path.resolve() == PRESET.resolve():
            first = self.named[-1]
            raise ConfigError(
                f"--gin_file={first} replaces what {self.named[0]} sets, because it "
                f"{'is' if path.name == first else 'includes'} base.gin; give {first} first"
            )
        try:
            text = path.read_bytes().decode("utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; is it the right file?") from error
        except UnicodeDecodeError as error:
            position = f"{path}, byte {error.start}"
            raise ConfigError(f"{position}: not UTF-8 text; give a gin file") from error
        self.read_text(text, str(path), (*including, path.resolve()))

    def read_text(self, text: str, origin: str, including: tuple[pathlib.Path, ...] = ()):
        """Binds the statements of gin text. `origin` is the name of the text in messages."""
        delegate, parser, line = _MacroRecorder(), None, 1
        try:
            parser = config_parser.ConfigParser(text, delegate)
            while statement := parser.parse_statement():
                line = statement.location.line_num
                if isinstance(statement, config_parser.IncludeStatement):
                    self.read_file(statement.filename, including)
                elif isinstance(statement, config_parser.ImportStatement):
                    importlib.import_module(statement.module)
                elif isinstance(statement, config_parser.BindingStatement):
                    if statement.scope:
                        raise _Wrong(f"scope {statement.scope!r} is not used here; leave it out")
                    names = [part for part in (statement.selector, statement.arg_name) if part]
                    self.bind(".".join(names), statement.value, delegate.recorded_macros())
        except _Wrong as error:  # gin appends lines about the location
            raise ConfigError(f"{origin}, line {line}: {error}".split("\n")[0]) from error
        except _NoValue as error:
            line = parser.current_token.start[0] if parser else line
            raise ConfigError(f"{origin}, line {line}: {error}".split("\n")[0]) from error
        except ImportError as error:
            message = f"{origin}, line {line}: {error}; is the module installed?"
            raise ConfigError(message) from error
        except ConfigError:
            raise
        except UNREADABLE as error:
            raise ConfigError(_syntax_message(error, origin, line)) from error

    def bind(self, name: str, value, macros: collections.abc.Iterable[str] = ()):
        """Binds a macro or a field to a value. Raises _Wrong for an unknown name.

        Args:
            name: MACRO or Section.field.
            value: The value as gin parsed it.
            macros: Names of the macros in the value.
        """
        selector, _, field = name.rpartition(".")
        for macro in macros:
            self.uses.setdefault(macro, set()).add(name)
        if not selector:
            self.macros.add(name)
            gin.bind_parameter((name, "gin.macro", "value"), value)
            return
        name = f"{selector.rpartition('.')[2]}.{field}"
        section = SECTIONS.get(config_finetune.OLDER_NAMES.get(name, name).partition(".")[0])
        if section is None:
            hint = closest(selector, SECTIONS) or f"; there are {', '.join(SECTIONS)}"
            raise _Wrong(f"{name}: there is no section {shown(selector)}{hint}")
        fields = field_names(section)
        if field not in fields:
            known = f"{section.__name__}.{shown(field)[1:-1]}"
            raise _Wrong(f"{known}: there is no such setting{closest(field, fields)}")
        self.bound_finetune |= section in config_finetune.SECTIONS
        gin.bind_parameter(("", section.__name__, field), value)

    def bind_text(self, text: str, names: typing.Sequence[str]):
        """Binds `NAME=VALUE` from the command line.

        A value is a string if it is neither a Python literal nor a macro.

        Args:
            text: The binding.
            names: The gin files, for messages.
        """
        name, _, value = text.partition("=")
        origin = f"--gin.{shown(name)[1:-1]}"
        if not value or not NAME.fullmatch(name):
            raise ConfigError(f"--gin.{shown(text)[1:-1]}: expected --gin.NAME=VALUE")
        if "." not in name and name not in self.macros:
            hint = closest(name, self.macros) or f"; there are {', '.join(sorted(self.macros))}"
            if not self.macros:
                hint = "; it has settings only, as in --gin.Run.train_steps=500"
            raise ConfigError(f"{origin}: no macro of this name in {', '.join(names)}{hint}")
        if value.startswith(("%", "@")):
            if "\n" in value or "\r" in value:
                raise ConfigError(f"{origin}={shown(value)}: expected one value")
            self.read_text(f"{name} = {value}", f"{origin}={shown(value)[1:-1]}")
            return
        with contextlib.suppress(UNREADABLE):  # the value stays a string
            value = ast.literal_eval(value)
        try:
            self.bind(name, value)
        except _Wrong as error:
            raise ConfigError(f"--gin.{error}") from error


class _Wrong(ValueError):
    """An error in a statement. The message has no location."""


class _NoValue(ValueError):
    """An error in a value, found before the whole statement is read."""


class _MacroRecorder(gin.config.ParserDelegate):
    """Parser delegate that records the macros of one statement."""

    def __init__(self):
        super().__init__()
        self._names: set[str] = set()

    def macro(self, macro_name):
        self._names.add(macro_name)
        return super().macro(macro_name)

    def configurable_reference(self, scoped_configurable_name, evaluate):
        raise _NoValue(f"@{scoped_configurable_name}: a value is a Python literal or a %MACRO")

    def recorded_macros(self) -> set[str]:
        """Returns the macros recorded since the last call."""
        names, self._names = self._names, set()
        return names


def _syntax_message(error: Exception, origin: str, line: int) -> str:
    """Returns the message for text that is not gin, with the line of the error."""
    if isinstance(error, SyntaxError):
        line, text = error.lineno or line, error.msg
    elif isinstance(error, tokenize.TokenError):
        text, (line, _) = error.args
    elif isinstance(error, (RecursionError, MemoryError)):
        text = "a value is nested too deeply"
    else:
        text = str(error)
    return f"{origin}, line {line}: {' '.join(text.split())[:200]}; is it gin (NAME = VALUE)?"


def values_of_older_run(record: pathlib.Path) -> list[str]:
    """Returns what a workdir's config.gin does not record, as `NAME=VALUE`.

    The values are those that the run had. The list is empty if the file does not exist.
    """
    if not record.is_file():
        return []
    text = record.read_text(errors="replace")
    return [f"{name}={value}" for name, value in UNRECORDED.items() if f"{name} = " not in text]


def load(
    names: typing.Sequence[str],
    bindings: typing.Sequence[str] = (),
    base: Experiment | None = None,
) -> Experiment:
    """Reads gin files, then bindings, and builds the settings.

    Args:
        names: The gin files. A later file replaces values of an earlier one.
        bindings: `NAME=VALUE` from the command line. They replace values of the files.
        base: Values of the settings that no file and no binding names. Macros of the files do not
            change them. None: the defaults of config.py.

    Raises:
        ConfigError: A file does not exist or is not gin, a name is unknown, a value is wrong, a
            macro is not used, or a macro in `bindings` has no effect because its settings are
            bound directly.
    """
    gin.clear_config()
    reader = _Reader()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python, about unusual literals
            if base is not None:
                reader.read_text(render(base), "the settings to start from")
            for name in names:
                reader.read_file(name)
                if pathlib.Path(name).name == RECORD:
                    for text in values_of_older_run(pathlib.Path(name)):
                        reader.bind_text(text, names)
            _check_size(reader)
            for text in bindings:
                reader.bind_text(text, names)
        _check_macros(reader)
        sections = [section() for section in config.SECTIONS]
        if reader.bound_finetune:
            sections.append(config.Finetune())
        _check_given_macros(reader, bindings)
    except RecursionError as error:
        raise ConfigError("macros refer to each other in a circle; bind one to a value") from error
    finally:
        gin.clear_config()  # so that later instances have the defaults of config.py
    return Experiment(*sections)


def _check_size(reader: _Reader):
    """Raises ConfigError where only files of configs/ are named that do not make a whole config."""
    configs = config_files.CONFIGS
    partial = [name for name in reader.named if config_files.find(name).is_relative_to(configs)]
    if partial and partial == reader.named and not reader.macros:
        files = " ".join(f"--gin_file={name}" for name in ["tiny.gin", *partial])
        raise ConfigError(f"{partial[0]} sets no model size; name a size first: {files}")


def _check_macros(reader: _Reader):
    """Raises ConfigError for a macro that is used but not defined, or defined but not used."""
    undefined = sorted(set(reader.uses) - reader.macros)
    if undefined:
        hint = closest(undefined[0], reader.macros)
        raise ConfigError(f"%{undefined[0]}: no macro of this name is defined{hint}")
    unused = ", ".join(sorted(reader.macros - set(reader.uses)))
    if unused:
        what = "defined in a gin file but used by nothing"
        raise ConfigError(f"{unused}: {what}; is the name right?")


def _check_given_macros(reader: _Reader, bindings: typing.Sequence[str]):
    """Raises ConfigError for a command-line macro whose settings are all bound directly."""
    called = gin.config._OPERATIVE_CONFIG  # keys: (scope, configurable); a macro is a configurable
    in_force = {scope for scope, selector in called if selector == "gin.macro"}
    for text in bindings:
        name = text.partition("=")[0]
        if name in reader.macros - in_force:
            replaced = ", ".join(sorted(reader.uses[name]))
            raise ConfigError(
                f"--gin.{name} has no effect, because {replaced} is bound directly; "
                "give one of the two"
            )


def render(experiment: Experiment) -> str:
    """Returns gin text with every value of `experiment`. `load` of it gives an equal Experiment."""
    blocks = []
    for section in config.sections(experiment):
        name = type(section).__name__
        lines = [f"{name}.{f} = {getattr(section, f)!r}" for f in field_names(type(section))]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"
