"""Computes the outputs of an encoder in memory: hidden states, logits of [MASK] and of task heads.

It is used to compare an export with JAX. Axes: lines, length (tokens of a line), width.
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np

from maelm_jax import config
from maelm_jax.data import vocabulary as vocabularies
from maelm_jax.encoders import families
from maelm_jax.model import maelm, model_inputs, ops

LINES_AT_A_TIME = 8
LENGTH_STEP = 64  # batches are cut to a multiple of this length, so that JAX compiles few shapes


def pad(rows: list[list[int]], pad_id: int, length: int | None = None) -> np.ndarray:
    """Returns lists of ids as int32 [lines, length]. `length` is by default that of the longest."""
    ids = np.full((len(rows), length or max(map(len, rows))), pad_id, np.int32)
    for padded, row in zip(ids, rows, strict=True):
        padded[: len(row)] = row
    return ids


def batch(texts: list[str], vocabulary: vocabularies.Vocabulary, length: int) -> np.ndarray:
    """Encodes texts as `<s>` ids `</s>`, cut to `length` ids and padded on the right.

    Returns:
        int32 [lines, ids of the longest line].
    """
    encoded = vocabulary.encode_batch(texts)
    rows = [[vocabulary.bos, *ids[: length - 2], vocabulary.eos] for ids in encoded]
    return pad(rows, vocabulary.pad)


def in_parts(
    states: typing.Callable[[np.ndarray], np.ndarray], ids: np.ndarray, pad_id: int, width: int
) -> np.ndarray:
    """Computes hidden states of a few lines at a time, so that little memory is needed.

    Each part is cut to its longest line, rounded up to a multiple of LENGTH_STEP.

    Args:
        states: Maps ids [lines, length] to hidden states [lines, length, width].
        ids: int32 [lines, length], padded with `pad_id`.
        pad_id: The id of `<pad>`.
        width: The width of the states.

    Returns:
        float32 [lines, length, width], 0 after the cut.
    """
    result = np.zeros((*ids.shape, width), np.float32)
    for start in range(0, len(ids), LINES_AT_A_TIME):
        part = ids[start : start + LINES_AT_A_TIME]
        longest = int((part != pad_id).sum(1).max())
        length = -(-longest // LENGTH_STEP) * LENGTH_STEP
        result[start : start + LINES_AT_A_TIME, :length] = states(part[:, :length])
    return result


def hidden_states(
    params: dict, model: config.Model, vocabulary: vocabularies.Vocabulary, ids: np.ndarray
) -> np.ndarray:
    """Computes the last hidden states of the encoder with JAX.

    Returns:
        float32 [lines, length, width], meaningless at padding.
    """
    graph = maelm.encoder_graph(model, vocabulary.size, vocabulary.pad)

    @jax.jit
    def states(parameters, ids):
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        return maelm.apply(graph, parameters)(
            ids, positions, (ids != vocabulary.pad).astype(jnp.int32)
        )

    return in_parts(
        lambda part: np.asarray(states(params["encoder"], part)), ids, vocabulary.pad, model.width
    )


def logits(
    params: dict,
    model: config.Model,
    vocabulary: vocabularies.Vocabulary,
    ids: np.ndarray,
    masked: np.ndarray,
) -> np.ndarray:
    """Computes the logits at the masked positions with JAX.

    The encoder reads `<mask>` at these positions only if the model has no decoder.

    Args:
        params: The parameter tree.
        model: The settings of the model.
        vocabulary: The vocabulary of the run.
        ids: int32 [lines, length].
        masked: bool [lines, length].

    Returns:
        float32 [masked positions, vocabulary].
    """
    graph, _ = maelm.create(model, vocabulary.size, vocabulary.special)
    segments = (ids != vocabulary.pad).astype(np.int32)
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    visible_to_encoder = masked if model.decoder_layers == 0 else np.zeros_like(masked)
    sizes = model_inputs.Budget(ids.shape[1], int(masked.sum(1).max()))
    arrays = map(jnp.asarray, (ids, segments, positions, masked, visible_to_encoder))
    inputs = model_inputs.split(*arrays, sizes, vocabulary.mask)
    by_line = np.asarray(jax.jit(lambda p, i: maelm.apply(graph, p)(i))(params, inputs))
    return np.concatenate(
        [line[: mask.sum(), : vocabulary.size] for line, mask in zip(by_line, masked, strict=True)]
    )


def task_logits(
    params: dict, states: np.ndarray, real: np.ndarray, model: config.Model
) -> np.ndarray:
    """Computes the logits of a fine-tuned head (finetuning/heads.py).

    Args:
        params: The parameter tree, with `classifier`, `span` or `token`.
        states: float32 [lines, length, width], the last hidden states.
        real: bool [lines, length], False at padding.
        model: The settings of the model.

    Returns:
        [lines, classes] of a classifier; [positions that are not padding, 2 or classes] of the
        heads `span` and `token`.
    """
    if "classifier" in params:
        return _scores(params["classifier"], states[:, 0], model)
    head = params["span"] if "span" in params else params["token"]
    if "dense" in head:
        return _scores(head, states[real], model)
    return _linear(head.get("out", head), states[real])


def _scores(head: dict, states: np.ndarray, model: config.Model) -> np.ndarray:
    """Computes dense, activation, norm and out on states [n, width]."""
    style = families.closest(model).classifier
    hidden = ops.ACTIVATIONS[style.activation](jnp.asarray(_linear(head["dense"], states)))
    if style.has_norm:
        hidden = ops.layer_norm(
            hidden[None], jnp.asarray(head["norm"]["scale"]), None, model.layer_norm_eps
        )[0]
    return _linear(head["out"], np.asarray(hidden))


def _linear(params: dict, x: np.ndarray) -> np.ndarray:
    return x @ params["kernel"] + params.get("bias", np.float32(0))
