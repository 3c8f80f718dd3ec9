"""Describes how a model is compiled for a mesh: the attention backend of each part, and why."""

import collections
import collections.abc
import dataclasses

import jax

from maelm_jax import config
from maelm_jax.model import masking, positions, stack
from maelm_jax.model.kernels import backends


def describe(experiment: config.Experiment, mesh: jax.sharding.Mesh) -> str:
    """Returns one line: the backend of each part of the model in training, with the reason.

    It also says so if the layers are no loop (`stack.should_scan`). Raises ConfigError if
    `Compute.attention_backend` cannot compute one of them.
    """
    return _describe_calls(_calls(experiment), experiment.compute, mesh)


def describe_run(experiment: config.Experiment, mesh: jax.sharding.Mesh) -> list[str]:
    """Returns the line of `describe` of a run, and that of its evaluations if it differs."""
    lines = [describe(experiment, mesh)]
    without_dropout = dataclasses.replace(experiment.dropout, attention=0.0)
    evaluated = dataclasses.replace(experiment.evaluated, dropout=without_dropout)
    evaluations = describe(evaluated, mesh)
    return lines if evaluations in lines else [*lines, f"in evaluations: {evaluations}"]


def describe_encoder(
    experiment: config.Experiment, lengths: collections.abc.Sequence[int], mesh: jax.sharding.Mesh
) -> str:
    """Returns the line of `describe` for the training of an encoder alone, as in fine-tuning.

    `lengths` are the slots of the rows, one value for each compiled shape.
    """
    calls = {}
    for slots in lengths:
        calls |= _encoder_calls(experiment.model, slots, f" of {slots} slots")
    return _describe_calls(calls, experiment.compute, mesh)


def _describe_calls(
    calls: dict[str, backends.Call], compute: config.Compute, mesh: jax.sharding.Mesh
) -> str:
    target, parts_of = backends.mesh_target(mesh), collections.defaultdict(list)
    for part, call in calls.items():
        choice = backends.choose_backend(compute.attention_backend, call, target)
        parts_of[choice].append(part)
    lines = [
        f"{choice.backend} in {', '.join(parts)} ({choice.reason})"
        for choice, parts in parts_of.items()
    ]
    if not stack.should_scan(compute, target):
        lines.append("each layer compiled by itself")
    return f"attention: {'; '.join(lines)}"


def _calls(experiment: config.Experiment) -> dict[str, backends.Call]:
    """Returns the shapes of the attention of each part of the model in training."""
    model, length = experiment.model, experiment.corpus.sequence_length
    sizes = masking.budget(experiment.objective, length)
    calls = _encoder_calls(model, sizes.visible)
    if decoder := model.decoder:
        settings, has_bias = model.decoder_settings, decoder.relative_bias
        slots = sizes.masked if decoder.slots == "masked" else length
        if "self" in decoder.attention:
            calls["decoder"] = backends.describe_call(settings, slots, slots, 0.0, has_bias)
        if "cross" in decoder.attention:
            calls["cross-attention"] = backends.describe_call(
                settings, slots, sizes.visible, 0.0, has_bias
            )
    if experiment.objective.causal_share:
        calls["encoder in causal rows"] = _encoder_call(model, length)
    return calls


def _encoder_calls(model: config.Model, slots: int, of: str = "") -> dict[str, backends.Call]:
    calls = {f"encoder{of}": _encoder_call(model, slots)}
    if model.encoder.local_attention:
        block = positions.choose_block(model.encoder.local_attention, slots)
        calls[f"local layers{of}"] = backends.describe_local_call(
            model.encoder_settings, slots, block, model.dropout.attention
        )
    return calls


def _encoder_call(model: config.Model, slots: int) -> backends.Call:
    has_bias = model.encoder.relative_buckets != "none"
    settings = model.encoder_settings
    return backends.describe_call(settings, slots, slots, model.dropout.attention, has_bias)
