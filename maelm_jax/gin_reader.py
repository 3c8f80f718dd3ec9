"""Reads the statements of gin files and of the command line, and binds their values."""

import ast
import collections.abc
import contextlib
import importlib
import pathlib
import re
import tokenize
import typing

import gin
from gin import config_parser

from maelm_jax import config, config_files, config_finetune
from maelm_jax.config import ConfigError
from maelm_jax.settings import closest, described, field_names, shown

SECTIONS = {cls.__name__: cls for cls in config.ALL_SECTIONS}
# Every pretraining config includes it, and so sets every macro.
PRESET = config_files.CONFIGS / "base.gin"
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)

# The exceptions of the Python and gin parsers for text that is not a literal.
UNREADABLE = (
    SyntaxError,
    tokenize.TokenError,
    ValueError,
    TypeError,
    RecursionError,
    MemoryError,
    AttributeError,
    IndexError,
    KeyError,
    StopIteration,
)


class Reader:
    """Binds the statements of gin files and of the command line. Records the use of macros."""

    def __init__(self):
        self.macros: set[str] = set()  # names of the defined macros
        self.uses: dict[str, set[str]] = {}  # macro -> names that were bound to a value with it
        self.bound_finetune = False
        self.named: list[str] = []  # the files that were named, not included, in their order
        self.whole_config: str | None = None  # the one of them that includes base.gin

    def read_file(self, name: str, including: tuple[pathlib.Path, ...] = ()):
        """Binds the statements of a file. `including` has the files that include it."""
        path = config_files.find(name, including)
        if path.resolve() in including:
            raise ConfigError(f"{path} includes itself; remove one of the include lines")
        if not including:
            self.named.append(name)
        if path.resolve() == PRESET.resolve():
            self.check_preset(path)
        try:
            text = path.read_bytes().decode("utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; is it the right file?") from error
        except UnicodeDecodeError as error:
            position = f"{path}, byte {error.start}"
            raise ConfigError(f"{position}: not UTF-8 text; give a gin file") from error
        self.read_text(text, str(path), (*including, path.resolve()))

    def check_preset(self, path: pathlib.Path):
        """Raises ConfigError if the values of base.gin would replace those of other files."""
        last = self.named[-1]
        if self.whole_config is not None:
            raise ConfigError(
                f"{self.whole_config} and {last} both include base.gin, so each is a whole config; "
                "give one of them"
            )
        if len(self.named) > 1:
            raise ConfigError(
                f"--gin_file={last} replaces what {self.named[0]} sets, because it "
                f"{'is' if path.name == last else 'includes'} base.gin; give {last} first"
            )
        self.whole_config = last

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
                    _import(statement.module)
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


def _import(module: str):
    """Imports a module. Raises _Wrong if it is there and fails."""
    try:
        importlib.import_module(module)
    except ImportError:
        raise
    except Exception as error:
        raise _Wrong(f"import {module}: {described(error)}; correct the module") from error


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
