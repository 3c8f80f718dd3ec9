"""Describes how a model is compiled for a mesh: the attention backend of each part, and why."""

import collections
import collections.abc
import dataclasses

import jax

from maelm_jax import config
from maelm_jax.model import attention, masking, positions, stack


def describe(experiment: config.Experiment, mesh: jax.sharding.Mesh) -> str:
    """Returns one line: the backend of the encoder and of the decoder, with the reason.

    It also says so if the layers are no loop (`stack.should_scan`).

    Raises:
        ConfigError: `Model.attention_backend` cannot compute one of them.
    """
    target, backend = attention.mesh_target(mesh), experiment.model.attention_backend
    choices = {
        part: attention.choose_backend(backend, call, target)
        for part, call in _calls(experiment).items()
    }
    if len(set(choices.values())) == 1:
        choices = {", ".join(choices): next(iter(choices.values()))}
    return _line(choices, experiment.model, target)


def describe_run(experiment: config.Experiment, mesh: jax.sharding.Mesh) -> list[str]:
    """Returns the line of `describe` of a run, and that of its evaluations if it differs.

    Raises:
        ConfigError: `Model.attention_backend` cannot compute one of them.
    """
    lines = [describe(experiment, mesh)]
    without_dropout = dataclasses.replace(experiment.model, attention_dropout=0.0)
    evaluated = dataclasses.replace(experiment.evaluated, model=without_dropout)
    evaluations = describe(evaluated, mesh)
    return lines if evaluations in lines else [*lines, f"in evaluations: {evaluations}"]


def describe_encoder(
    experiment: config.Experiment, lengths: collections.abc.Sequence[int], mesh: jax.sharding.Mesh
) -> str:
    """Returns the line of `describe` for the training of an encoder alone, as in fine-tuning.

    Args:
        experiment: The settings.
        lengths: Slots of the rows, one value for each compiled shape.
        mesh: The devices.

    Raises:
        ConfigError: `Model.attention_backend` cannot compute one of the lengths.
    """
    target, backend = attention.mesh_target(mesh), experiment.model.attention_backend
    lengths_of = collections.defaultdict(list)
    for length in lengths:
        call = _encoder_call(experiment.model, length)
        lengths_of[attention.choose_backend(backend, call, target)].append(str(length))
    if len(lengths_of) == 1:
        choices = {"encoder": next(iter(lengths_of))}
    else:
        choices = {
            f"encoder of {', '.join(slots)} slots": choice for choice, slots in lengths_of.items()
        }
    return _line(choices, experiment.model, target)


def _line(
    choices: dict[str, attention.Choice],
    model: config.Model,
    target: attention.Target,
) -> str:
    parts = [f"{choice.backend} in {part} ({choice.reason})" for part, choice in choices.items()]
    if not stack.should_scan(model, target.platform):
        parts.append("each layer compiled by itself")
    return f"attention: {'; '.join(parts)}"


def _calls(experiment: config.Experiment) -> dict[str, attention.Call]:
    """Returns the shapes of the attention of each part of the model in training."""
    model, length = experiment.model, experiment.corpus.sequence_length
    sizes = masking.budget(experiment.masking, length)
    calls = {"encoder": _encoder_call(model, sizes.visible)}
    if model.local_attention:
        block = positions.choose_block(model.local_attention, sizes.visible)
        calls["local layers"] = _encoder_call(model, block)._replace(
            keys=min(3 * block, sizes.visible), has_dense_mask=True
        )
    if model.decoder_layers:
        decoder, has_bias = model.decoder, model.decoder_relative_bias
        slots = sizes.masked if model.decoder_slots == "masked" else length
        if "self" in model.decoder_attention:
            calls["decoder"] = attention.describe_call(decoder, slots, slots, 0.0, has_bias)
        if "cross" in model.decoder_attention:
            calls["cross-attention"] = attention.describe_call(
                decoder, slots, sizes.visible, 0.0, has_bias
            )
    return calls


def _encoder_call(model: config.Model, slots: int) -> attention.Call:
    has_bias = model.relative_buckets != "none"
    return attention.describe_call(model, slots, slots, model.attention_dropout, has_bias)
