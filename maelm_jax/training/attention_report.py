"""Describes how a model is compiled for a mesh: the attention backend of each part, and why."""

import collections
import collections.abc
import dataclasses

import jax

from maelm_jax import config
from maelm_jax.model import attention, masking, positions, stack


def describe(experiment: config.Experiment, mesh: jax.sharding.Mesh) -> str:
    """Returns one line: the backend of each part of the model in training, with the reason.

    It also says so if the layers are no loop (`stack.should_scan`). Raises ConfigError if
    `Model.attention_backend` cannot compute one of them.
    """
    return _describe_calls(_calls(experiment), experiment.model, mesh)


def describe_run(experiment: config.Experiment, mesh: jax.sharding.Mesh) -> list[str]:
    """Returns the line of `describe` of a run, and that of its evaluations if it differs."""
    lines = [describe(experiment, mesh)]
    without_dropout = dataclasses.replace(experiment.model, attention_dropout=0.0)
    evaluated = dataclasses.replace(experiment.evaluated, model=without_dropout)
    evaluations = describe(evaluated, mesh)
    return lines if evaluations in lines else [*lines, f"in evaluations: {evaluations}"]


def describe_encoder(
    experiment: config.Experiment, lengths: collections.abc.Sequence[int], mesh: jax.sharding.Mesh
) -> str:
    """Returns the line of `describe` for the training of an encoder alone, as in fine-tuning.

    `lengths` are the slots of the rows, one value for each compiled shape.
    """
    model = experiment.model
    calls = {}
    for slots in lengths:
        calls |= _encoder_calls(model, slots, f" of {slots} slots")
    return _describe_calls(calls, model, mesh)


def _describe_calls(
    calls: dict[str, attention.Call], model: config.Model, mesh: jax.sharding.Mesh
) -> str:
    target, parts_of = attention.mesh_target(mesh), collections.defaultdict(list)
    for part, call in calls.items():
        choice = attention.choose_backend(model.attention_backend, call, target)
        parts_of[choice].append(part)
    lines = [
        f"{choice.backend} in {', '.join(parts)} ({choice.reason})"
        for choice, parts in parts_of.items()
    ]
    if not stack.should_scan(model, target):
        lines.append("each layer compiled by itself")
    return f"attention: {'; '.join(lines)}"


def _calls(experiment: config.Experiment) -> dict[str, attention.Call]:
    """Returns the shapes of the attention of each part of the model in training."""
    model, length = experiment.model, experiment.corpus.sequence_length
    sizes = masking.budget(experiment.masking, length)
    calls = _encoder_calls(model, sizes.visible)
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


def _encoder_calls(model: config.Model, slots: int, of: str = "") -> dict[str, attention.Call]:
    calls = {f"encoder{of}": _encoder_call(model, slots)}
    if model.local_attention:
        block = positions.choose_block(model.local_attention, slots)
        calls[f"local layers{of}"] = _encoder_call(model, block)._replace(
            keys=min(3 * block, slots), has_dense_mask=True
        )
    return calls


def _encoder_call(model: config.Model, slots: int) -> attention.Call:
    has_bias = model.relative_buckets != "none"
    return attention.describe_call(model, slots, slots, model.attention_dropout, has_bias)
