"""Checks what a source states: settings of its model, shapes of its parameters, its vocabulary."""

import collections.abc
import dataclasses
import functools
import typing

import jax
from flax import traverse_util

from maelm_jax import config
from maelm_jax.data import vocabularies
from maelm_jax.encoders import fine_tuned_head, layouts
from maelm_jax.model import keys, maelm


def check_settings(settings: dict[str, typing.Any], path: str):
    """Raises a one-line ConfigError if no model can have the settings of a source."""
    try:
        unknown = {
            "heads": 1,
            "max_distance": max(config.Model().max_distance, settings.get("num_buckets") or 0),
        }
        dataclasses.replace(config.Model(), **(unknown | settings))
    except (config.ConfigError, TypeError) as error:  # gin appends lines to the message
        raise config.ConfigError(
            f"{path}: not an encoder that a run can start from: {str(error).splitlines()[0]}"
        ) from error


def check_shapes(
    params: dict[str, typing.Any], shapes: dict[str, tuple[int, ...]], checkpoint_name: str
):
    """Raises ConfigError if the parameters of a workdir contradict its config.gin or vocabulary.

    A fine-tuned run holds only the encoder and its own head, so only the encoder is compared.
    """
    heads = set(fine_tuned_head.MODULES)
    is_fine_tuned = bool(modules(params) & heads)
    expected = {"encoder"} if is_fine_tuned else modules(shapes)
    compared = (modules(params) | expected) - heads
    faults = []
    for path in sorted({*params, *shapes}):
        if path.split("/")[0] not in compared:
            continue
        stored = params[path].shape if path in params else "missing"
        configured = shapes.get(path, "no parameter")
        if stored != configured:
            faults.append(f"{path} is {stored} in the checkpoint, {configured} by the settings")
    if faults:
        raise config.ConfigError(
            f"{checkpoint_name}: config.gin or vocabulary/ contradicts the checkpoint: "
            f"{layouts.listed(faults)}"
        )


def check_vocabulary(vocabulary: vocabularies.Vocabulary, rows: int, pad: int | None, path: str):
    """Raises ConfigError if a vocabulary contradicts the weights beside it.

    Args:
        vocabulary: The vocabulary.
        rows: The number of rows of the token table.
        pad: The id of padding that config.json states, or None.
        path: The source, for error messages.
    """
    if pad not in (None, vocabulary.pad):
        raise config.ConfigError(
            f"{path}: config.json has pad_token_id {pad}, but its tokenizer pads with "
            f"{vocabulary.pad}. Correct the one that the weights were not trained with"
        )
    if rows < vocabulary.size:
        raise config.ConfigError(
            f"{path}: {rows} rows of tokens, but its vocabulary has {vocabulary.size} ids"
        )


def modules(params: collections.abc.Iterable[str]) -> set[str]:
    """Returns the top-level modules of parameter paths."""
    return {path.split("/")[0] for path in params}


@functools.lru_cache(maxsize=4)
def parameter_shapes(model: config.Model, vocabulary_size: int) -> dict[str, tuple[int, ...]]:
    """Returns {path: shape} of the parameters of a model."""
    special = config.SpecialIds(0, 1, 2, 3, vocabulary_size - 1)
    _, init = maelm.create(model, vocabulary_size, special)
    tree = jax.eval_shape(init, keys.make_key(0))
    return {path: leaf.shape for path, leaf in traverse_util.flatten_dict(tree, sep="/").items()}
