"""Computes the outputs of an encoder in memory: hidden states, logits of [MASK] and of task heads.

`Encoder.fill_mask` uses it, and the comparison of an export with JAX. Axes: lines, length (tokens
of a line), width.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from maelm_jax import config
from maelm_jax.data import vocabularies
from maelm_jax.encoders import families
from maelm_jax.model import maelm, model_inputs, ops

LINES_AT_A_TIME = 8
LENGTH_STEP = 16  # the length of a batch is a multiple of it, so that JAX compiles few shapes


def rounded_length(longest: int) -> int:
    """Returns the length of a batch whose longest line has `longest` tokens."""
    return -(-longest // LENGTH_STEP) * LENGTH_STEP


def pad(rows: list[list[int]], pad_id: int, length: int | None = None) -> np.ndarray:
    """Returns lists of ids as int32 [lines, length]. `length` is by default that of the longest."""
    ids = np.full((len(rows), length or max(map(len, rows))), pad_id, np.int32)
    for padded, row in zip(ids, rows, strict=True):
        padded[: len(row)] = row
    return ids


def with_ends(
    encoded: list[list[int]], vocabulary: vocabularies.Vocabulary, length: int
) -> list[list[int]]:
    """Returns `<s>` ids `</s>` for the ids of each text, cut to `length` ids."""
    return [[vocabulary.bos, *ids[: length - 2], vocabulary.eos] for ids in encoded]


def batch(texts: list[str], vocabulary: vocabularies.Vocabulary, length: int) -> np.ndarray:
    """Encodes texts as `<s>` ids `</s>`, cut to `length` ids and padded on the right.

    Returns:
        int32 [lines, ids of the longest line].
    """
    return pad(with_ends(vocabulary.encode_batch(texts), vocabulary, length), vocabulary.pad)


def in_parts(
    states: typing.Callable[[np.ndarray], np.ndarray], ids: np.ndarray, pad_id: int, width: int
) -> np.ndarray:
    """Computes hidden states of a few lines at a time, so that little memory is needed.

    Each part is cut to the `rounded_length` of its longest line.

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
        length = rounded_length(int((part != pad_id).sum(1).max()))
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
    encoder_reads_masks: bool,
    renumber: bool = False,
) -> np.ndarray:
    """Computes the logits at the masked positions with JAX.

    Args:
        params: The parameter tree.
        model: The settings of the model.
        vocabulary: The vocabulary of the run.
        ids: int32 [lines, length].
        masked: bool [lines, length].
        encoder_reads_masks: As in `logits_function`.
        renumber: As in `logits_function`.

    Returns:
        float32 [masked positions, vocabulary].
    """
    function = logits_function(model, vocabulary, encoder_reads_masks, renumber)
    by_line = np.asarray(function(params, ids, masked))
    return np.concatenate(
        [line[: mask.sum(), : vocabulary.size] for line, mask in zip(by_line, masked, strict=True)]
    )


def logits_function(
    model: config.Model,
    vocabulary: vocabularies.Vocabulary,
    encoder_reads_masks: bool,
    renumber: bool = False,
) -> typing.Callable[[dict, np.ndarray, np.ndarray], jax.Array]:
    """Returns a function that computes the logits at masked positions. Each shape is compiled once.

    Args:
        model: The settings of the model.
        vocabulary: The vocabulary of the model.
        encoder_reads_masks: Whether the encoder reads `<mask>` at these positions (MLM) or skips
            them (MAE-LM). Without a decoder it must be True.
        renumber: Whether the encoder's positions count only the tokens that it reads.

    Returns:
        A function of the parameter tree, ids [lines, length] and masked [lines, length]. It returns
        float32 [lines, masked positions, rows of the token table]. The positions of a line are in
        order, those beyond its last have no meaning. There are as many as in the line with the most
        of them, rounded up to a power of two.
    """
    graph, _ = maelm.create(model, vocabulary.size, vocabulary.special)

    @functools.partial(jax.jit, static_argnames="positions")
    def compute(params, ids, masked, positions):
        segments = (ids != vocabulary.pad).astype(jnp.int32)
        order = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        visible_to_encoder = masked if encoder_reads_masks else jnp.zeros_like(masked)
        inputs = model_inputs.split(
            ids,
            segments,
            order,
            masked,
            visible_to_encoder,
            model_inputs.Budget(ids.shape[1], positions),
            vocabulary.mask,
            renumber,
        )
        return maelm.apply(graph, params)(inputs)

    def logits_of(params, ids, masked):
        most = int(masked.sum(1).max())
        return compute(params, ids, masked, min(1 << (most - 1).bit_length(), ids.shape[1]))

    return logits_of


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
