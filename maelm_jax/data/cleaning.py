"""Says which documents of a source are left out: short ones, and those that a filter refuses."""

import functools
import hashlib
import importlib
import inspect
import typing

from maelm_jax import config
from maelm_jax.data.documents import Unavailable
from maelm_jax.settings import described

# Why a document is left out.
SHORT, REFUSED, DUPLICATE = "short", "refused", "duplicate"
REASONS = (SHORT, REFUSED, DUPLICATE)
SETTINGS = ("minimum_characters", "document_filter", "deduplicate", "skip_bad_files")


def changed_settings(corpus: config.Corpus) -> dict[str, typing.Any]:
    """Returns the settings of cleaning that differ from their defaults.

    They are a part of the names of what is prepared.
    """
    default = config.Corpus.__pydantic_fields__
    values = {name: getattr(corpus, name) for name in SETTINGS}
    return {name: value for name, value in values.items() if value != default[name].default}


def request(corpus: config.Corpus) -> list:
    """Returns `changed_settings` for the names of folders. It is [] if all are defaults."""
    settings = changed_settings(corpus)
    return [settings] if settings else []


def identity(corpus: config.Corpus) -> str:
    """Returns a hash of the source code of the module of `Corpus.document_filter`.

    It is "" without a filter, and the filter's name if the module is not written in Python. Modules
    that it imports are not covered.

    Raises:
        Unavailable: The function cannot be imported on this machine.
    """
    if corpus.document_filter is None:
        return ""
    try:
        code = inspect.getsource(inspect.getmodule(load_filter(corpus.document_filter)))
    except (OSError, TypeError):  # not written in Python
        return corpus.document_filter
    return hashlib.sha256(code.encode()).hexdigest()


@functools.cache
def load_filter(name: str) -> typing.Callable[[str], bool]:
    """Imports the function of `Corpus.document_filter`.

    Args:
        name: `module:function`.

    Raises:
        Unavailable: The module cannot be imported, or has no such function.
        ConfigError: The module is there and fails.
    """
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise Unavailable(
            f"Corpus.document_filter: {name!r} cannot be imported ({error}); "
            "install its module or set PYTHONPATH"
        ) from error
    except Exception as error:
        raise config.ConfigError(
            f"Corpus.document_filter: {name!r} cannot be imported ({described(error)}); "
            "correct its module"
        ) from error


def reason_to_drop(text: str, corpus: config.Corpus) -> str | None:
    """Returns why a document is left out, or None if it is not.

    Raises:
        ConfigError: The user's function fails.
    """
    if len(text) < corpus.minimum_characters:
        return SHORT
    if corpus.document_filter is None:
        return None
    accepts = load_filter(corpus.document_filter)
    try:
        return None if accepts(text) else REFUSED
    except Exception as error:
        raise config.ConfigError(
            f"Corpus.document_filter: {corpus.document_filter} raised {described(error)} on the "
            f"document {text[:60]!r}; correct it"
        ) from error
