"""Takes over the settings and the weights of a pretrained encoder into a run."""

import collections.abc
import dataclasses
import typing

import jax
import numpy as np
from flax import traverse_util

from maelm_jax import config
from maelm_jax.data import vocabularies
from maelm_jax.encoders import layouts
from maelm_jax.encoders.opened import OpenedModel

# Settings of a rotary encoder that a run may raise, to read longer rows. No weight depends on them.
RAISED = ("max_positions", "rotary_theta")


class Adopted(typing.NamedTuple):
    """The settings of a run after those of a source were taken over."""

    experiment: config.Experiment
    changes: list[str]  # each change in words


class LoadedParams(typing.NamedTuple):
    """The parameters of a run after those of a source were loaded."""

    params: dict
    fresh: list[str]  # the top-level modules that keep the values of the run
    unused: list[str]  # the top-level modules of the source that the run does not have


def adopt_settings(experiment: config.Experiment, encoder_source: OpenedModel) -> Adopted:
    """Adapts the settings of a run to the source that it starts from.

    The run takes the settings of the encoder. It takes the vocabulary, unless Vocabulary.file is
    set. It takes the settings of the decoder if both have one, unless the run's is an ablation.
    Settings of RAISED that are larger in the run may stay (`keep_raised`). If the encoder has fewer
    learned positions than a row of the run has tokens, the run gets one for each token.

    Raises:
        ConfigError: The decoder's width does not fit the encoder's heads, or the encoder cannot
            read the run's rows: they are too long, or of another vocabulary.
    """
    length = experiment.corpus.sequence_length
    adopted = _adopt_encoder(experiment.encoder, encoder_source, length)
    vocabulary = _adopt_vocabulary(experiment.vocabulary, encoder_source)
    encoder = dataclasses.replace(experiment.encoder, **adopted)
    decoder = _adopt_decoder(experiment.decoder, encoder_source)
    if decoder:
        decoder.check_fit(encoder)
    if length > encoder.max_positions:
        raise config.ConfigError(
            f"Corpus.sequence_length {length} is longer than the {encoder.max_positions} positions "
            f"of {encoder_source.path}: lower it, or set Encoder.max_positions={length}"
        )
    changes = _list_changes("Encoder", experiment.encoder, encoder, adopted)
    if decoder:
        fields = config.field_names(config.Decoder)
        changes += _list_changes("Decoder", experiment.decoder, decoder, fields)
    changes += _describe_positions(adopted, encoder_source.settings, length)
    changes += _list_changes("Vocabulary", experiment.vocabulary, vocabulary, ("file",))
    adapted = dataclasses.replace(
        experiment, encoder=encoder, decoder=decoder, vocabulary=vocabulary
    )
    return Adopted(adapted, changes)


def _adopt_encoder(
    own: config.Encoder, encoder_source: OpenedModel, length: int
) -> dict[str, typing.Any]:
    """Returns {field: value} of the encoder that a run with rows of `length` tokens takes over."""
    settings = encoder_source.settings
    if settings["positions"] == "rotary":
        return keep_raised(settings, own)
    is_reference = settings.get("relative_buckets") == "reference"
    if is_reference and settings["max_positions"] < min(length, settings["max_distance"]):
        raise config.ConfigError(
            f"Corpus.sequence_length {length}: the numbers of the relative buckets of "
            f"{encoder_source.path} depend on its {settings['max_positions']} positions. Lower "
            "it to that"
        )
    return settings | {"max_positions": max(settings["max_positions"], length)}


def _adopt_decoder(
    own: config.Decoder | None, encoder_source: OpenedModel
) -> config.Decoder | None:
    """Returns the decoder of the run, or that of the source in place of a plain one."""
    theirs = encoder_source.model.decoder
    decoder = theirs if own and own.is_plain and theirs else own
    if decoder and encoder_source.settings["positions"] == "rotary":
        return dataclasses.replace(decoder, relative_bias=False)
    return decoder


def _adopt_vocabulary(own: config.Vocabulary, encoder_source: OpenedModel) -> config.Vocabulary:
    """Returns the settings with the file of the source. One that is set must have the same ids."""
    if own.file is None:
        return dataclasses.replace(own, file=encoder_source.vocabulary_path)
    if encoder_source.vocabulary_path:
        encoder_source.check_vocabulary(vocabularies.load(own.file))
    return own


def _list_changes(
    section: str,
    before: config.Settings,
    after: config.Settings,
    names: collections.abc.Iterable[str],
) -> list[str]:
    """Returns the fields `names` that differ, in words."""
    return [
        f"{section}.{name}: {getattr(before, name)!r} -> {getattr(after, name)!r}"
        for name in names
        if getattr(before, name) != getattr(after, name)
    ]


def _describe_positions(
    adopted: dict[str, typing.Any], settings: dict[str, typing.Any], length: int
) -> list[str]:
    """Says how positions differ from those of the source, whose settings are `settings`."""
    if settings["positions"] == "rotary":
        return [
            f"Encoder.{name} stays {adopted[name]!r}, instead of {settings[name]!r}"
            for name in RAISED
            if adopted[name] != settings[name]
        ]
    if length > settings["max_positions"]:
        return [f"its {settings['max_positions']} learned positions repeat up to {length}"]
    return []


def keep_raised(settings: dict[str, typing.Any], own: config.Encoder) -> dict[str, typing.Any]:
    """Returns the settings of an encoder with those that are larger in the run's own.

    `settings` is {field of config.Encoder: value} that a run takes over. RAISED of `own` count if
    the encoder has rotary positions, but no theta that is the default: nobody asked for it.
    """
    if settings.get("positions") != "rotary":
        return settings
    raised = {name: max(settings[name], getattr(own, name)) for name in RAISED}
    if own.rotary_theta == config.Encoder().rotary_theta:
        del raised["rotary_theta"]
    return settings | raised


def repeat_positions(values: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Returns the weights of a source with `count` learned positions, if it has fewer.

    The positions of the source are repeated (Longformer, arXiv 2004.05150, section 5). `values` are
    {parameter path: array}. Tables of positions are [positions, width].
    """
    repeated = dict(values)
    for path, value in values.items():
        if path.endswith("/position_embedding") and len(value) < count:
            repeated[path] = value[np.arange(count) % len(value)]
    return repeated


def load_params(
    values: dict[str, np.ndarray], params: dict, vocabulary_size: int, source_path: str
) -> LoadedParams:
    """Loads the weights of a source into the parameters of a run.

    A top-level module (encoder, decoder or head) is loaded completely or not at all. The encoder is
    always loaded.

    Args:
        values: {parameter path: array} of the source, from `OpenedModel.read_params`.
        params: The parameter tree of the run; its arrays give the shapes and the shardings.
        vocabulary_size: The number of ids. Tables over the vocabulary are padded with zero rows.
        source_path: The source, for error messages.

    Raises:
        ConfigError: Weights are missing, unknown or of the wrong shape. The message lists them.
    """
    fresh_params = traverse_util.flatten_dict(params, sep="/")
    modules = {path.split("/")[0] for path in fresh_params}
    stored = {path.split("/")[0] for path in values}
    loaded = modules & stored | {"encoder"}
    resize = "head/resize/kernel"
    if np.shape(values.get(resize)) != np.shape(fresh_params.get(resize)):
        loaded.discard("head")  # the source's head reads states of another width
    values = {path: value for path, value in values.items() if path.split("/")[0] in loaded}
    shapes = {path: value.shape for path, value in values.items()}
    expected = {
        path: parameter.shape
        for path, parameter in fresh_params.items()
        if path.split("/")[0] in loaded
    }
    expected = layouts.unpad_shapes(expected, vocabulary_size)
    if faults := layouts.compare_shapes(shapes, expected):
        raise config.ConfigError(
            f"{source_path} does not fit this model: {layouts.list_faults(faults)}"
        )
    sharded = {path: shard_like(fresh_params[path], value) for path, value in values.items()}
    tree = traverse_util.unflatten_dict(fresh_params | sharded, sep="/")
    return LoadedParams(tree, sorted(modules - loaded), sorted(stored - modules))


def shard_like(parameter: jax.Array, value: np.ndarray) -> jax.Array:
    """Returns `value`, padded with zero rows, with the shape and the sharding of `parameter`."""
    missing_rows = len(parameter) - len(value)
    if missing_rows:
        zeros = np.zeros((missing_rows, *parameter.shape[1:]), np.float32)
        value = np.concatenate([value, zeros])
    return jax.make_array_from_callback(
        parameter.shape, parameter.sharding, lambda index: value[index]
    )
