"""Takes over the settings and the weights of a pretrained encoder into a run."""

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

    The run takes the vocabulary of the source unless Vocabulary.file is set, the settings of the
    encoder, and those of the decoder if both have one, unless the run's is an ablation. Settings of
    RAISED that are larger in the run may stay (`keep_raised`). Learned positions are as many as the
    run's rows are long, if the encoder has fewer.

    Raises:
        ConfigError: The decoder's width does not fit the encoder's heads, or the encoder cannot
            read the run's rows: they are too long, or of another vocabulary.
    """
    own, decoder, settings = experiment.encoder, experiment.decoder, encoder_source.settings
    if decoder and decoder.is_plain and encoder_source.model.decoder:
        decoder = encoder_source.model.decoder
    adopted = dict(settings)
    length, is_rotary = experiment.corpus.sequence_length, adopted["positions"] == "rotary"
    if is_rotary:
        adopted = keep_raised(adopted, own)
        decoder = decoder and dataclasses.replace(decoder, relative_bias=False)
    else:
        adopted["max_positions"] = max(adopted["max_positions"], length)
        is_reference = adopted.get("relative_buckets") == "reference"
        if is_reference and settings["max_positions"] < min(length, settings["max_distance"]):
            raise config.ConfigError(
                f"Corpus.sequence_length {length}: the numbers of the relative buckets of "
                f"{encoder_source.path} depend on its {settings['max_positions']} positions. Lower "
                "it to that"
            )
    changes = [
        f"Encoder.{name}: {getattr(own, name)!r} -> {value!r}"
        for name, value in adopted.items()
        if getattr(own, name) != value
    ]
    changes += [
        f"Decoder.{name}: {value!r} -> {getattr(decoder, name)!r}"
        for name, value in (dataclasses.asdict(experiment.decoder) if decoder else {}).items()
        if getattr(decoder, name) != value
    ]
    changes += [
        f"Encoder.{name} stays {adopted[name]!r}, instead of {settings[name]!r}"
        for name in RAISED
        if is_rotary and adopted[name] != settings[name]
    ]
    if not is_rotary and length > settings["max_positions"]:
        changes.append(f"its {settings['max_positions']} learned positions repeat up to {length}")
    vocabulary = experiment.vocabulary
    if encoder_source.vocabulary_path and vocabulary.file is None:
        vocabulary = dataclasses.replace(vocabulary, file=encoder_source.vocabulary_path)
        changes.append(f"Vocabulary.file: None -> {encoder_source.vocabulary_path!r}")
    elif encoder_source.vocabulary_path:
        encoder_source.check_vocabulary(vocabularies.load(vocabulary.file))
    encoder = dataclasses.replace(own, **adopted)
    if decoder:
        decoder.check_fit(encoder)
    if length > encoder.max_positions:
        raise config.ConfigError(
            f"Corpus.sequence_length {length} is longer than the {encoder.max_positions} positions "
            f"of {encoder_source.path}: lower it, or set Encoder.max_positions={length}"
        )
    adapted = dataclasses.replace(
        experiment, encoder=encoder, decoder=decoder, vocabulary=vocabulary
    )
    return Adopted(adapted, changes)


def keep_raised(settings: dict[str, typing.Any], own: config.Encoder) -> dict[str, typing.Any]:
    """Returns the settings of an encoder with those that are larger in the run's own.

    `settings` is {field of config.Encoder: value} that a run takes over. RAISED of `own` count if
    the encoder has rotary positions.
    """
    names = RAISED if settings.get("positions") == "rotary" else ()
    return settings | {name: max(settings[name], getattr(own, name)) for name in names}


def repeat_positions(values: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Returns the weights of a source with `count` learned positions, if it has fewer.

    They are its positions again and again (Longformer, arXiv 2004.05150, section 5). `values` are
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
