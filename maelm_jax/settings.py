"""Old names of maelm_jax.config. Import from there."""

import collections.abc
import difflib

from maelm_jax.config import ConfigError as ConfigError
from maelm_jax.config import RunError as RunError
from maelm_jax.config import field_names as field_names


def described(error: Exception) -> str:
    """Returns the type and the message of an error of somebody else's code, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def shown(value) -> str:
    """Returns the repr of a value for a message, cut after 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def closest(name: str, known: collections.abc.Iterable[str]) -> str:
    """Returns `; did you mean X?` with the known name nearest to `name`, or "" if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
