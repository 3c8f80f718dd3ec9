"""Pseudo-log-likelihoods: how likely a model with a prediction head finds sentences.

Each token is masked in turn, and the log-probabilities of the masked tokens are summed (Salazar et
al. 2020, arXiv 1910.14659). `<s>` and `</s>` are never masked. A token of a word of several tokens
is easy to guess from the later ones. So the sum "by word" also masks the later tokens of the same
word (PLL-word-l2r, Kauf and Ivanova 2023, arXiv 2305.10588).

An encoder that predicts next tokens gives the log-likelihood itself: the sum of log p of each token
after those before it. Nothing is masked.

Axis letters: B copies of sentences; T tokens.
"""

import math
import typing

import jax
import numpy as np
import optax

from maelm_jax import config, progress
from maelm_jax.data.vocabularies import Vocabulary
from maelm_jax.encoders.opened import OpenedModel
from maelm_jax.model import model_inputs

TOKENS = 4096  # of a batch, with padding
LENGTH_STEP = 4  # lengths of batches are multiples of it: little padding, few programs to compile
WORD_LENGTH_STEP = 16  # the same, of the fewer copies with several masked tokens
# A GPU takes minutes to compile and seconds to compute: two lengths, one number of masked tokens.
ACCELERATOR_TOKENS = 16_384
ACCELERATOR_LENGTH_STEP = 32
LOGIT_SHARE = 8  # a batch of left-to-right scores has so many fewer tokens: each has logits
MASKS = 8  # numbers of masked tokens above 1 are rounded up to it, or to the next power of two


class Text(typing.NamedTuple):
    """A sentence, or a continuation of a context, whose tokens alone are scored."""

    text: str  # all of it, with the context
    context: str = ""


class Sums(typing.NamedTuple):
    """Pseudo-log-likelihoods of texts, in nats."""

    plain: np.ndarray  # float64 [texts]
    by_word: np.ndarray | None  # PLL-word-l2r, float64 [texts]; None for next tokens


class _Row(typing.NamedTuple):
    """The ids of a text, with `<s>` and `</s>`."""

    ids: tuple[int, ...]
    first: int  # the first slot that is scored


class _Shape(typing.NamedTuple):
    """Static sizes of a batch."""

    length: int
    masks: int  # masked tokens in a row, at most


def measure(
    encoder: OpenedModel, texts: list[Text], name: str = "pairs", temperature: float = 1.0
) -> Sums:
    """Computes the pseudo-log-likelihoods of texts.

    Texts with the same ids have exactly the same value. `name` is the title of the progress bar.
    Logits are divided by `temperature`. Raises ConfigError if a text is longer than the model
    reads.
    """
    rows = _encode(encoder.vocabulary, texts, encoder.length)
    distinct = sorted(set(rows), key=lambda row: len(row.ids))
    number = {row: index for index, row in enumerate(distinct)}
    order = [number[row] for row in rows]
    if encoder.model.causal:
        return Sums(_sum_left_to_right(encoder, distinct, name, temperature)[order], None)
    # Of each scored token: its row, its slot, and how many tokens of its word begin there.
    owner, slot, rest = _list_tokens(distinct, encoder.vocabulary)
    is_long = rest > 1
    masks = np.concatenate([np.ones_like(rest), rest[is_long]])
    copies = np.concatenate([owner, owner[is_long]]), np.concatenate([slot, slot[is_long]]), masks
    values = _compute(encoder, distinct, *copies, name, temperature)
    plain = values[: len(owner)]
    by_word = plain.copy()
    by_word[is_long] = values[len(owner) :]
    sums = [np.bincount(owner, each, len(distinct))[order] for each in (plain, by_word)]
    return Sums(*sums)


def measure_unigram(vocabulary: Vocabulary, token_nll: np.ndarray, texts: list[Text]) -> np.ndarray:
    """Returns the log-likelihood of texts by the frequency of each id, float64 [texts]."""
    rows = _encode(vocabulary, texts)
    # The exact sum: the same tokens in another order are a tie.
    return np.array([-math.fsum(token_nll[list(row.ids[row.first : -1])]) for row in rows])


def _encode(vocabulary: Vocabulary, texts: list[Text], length: int | None = None) -> list[_Row]:
    """Returns the rows of texts. Raises ConfigError if one has more than `length` tokens."""
    contexts = {text.context for text in texts}
    encoded = zip(contexts, vocabulary.encode_batch(list(contexts)), strict=True)
    ids_of = {context: ids if context else [] for context, ids in encoded}
    rows = []
    encoded_texts = vocabulary.encode_batch([text.text for text in texts])
    for text, ids in zip(texts, encoded_texts, strict=True):
        if length is not None and len(ids) + 2 > length:
            raise config.ConfigError(
                f"a sentence has {len(ids) + 2} tokens, and the model reads {length}: "
                f"{text.text!r:.60}. Leave it out"
            )
        first = 0
        for index, of_context in zip(ids, ids_of[text.context], strict=False):
            if index != of_context:  # the last token of the context is another with its neighbour
                break
            first += 1
        rows.append(_Row((vocabulary.bos, *ids, vocabulary.eos), first + 1))
    return rows


def _list_tokens(rows: list[_Row], vocabulary: Vocabulary) -> tuple[np.ndarray, ...]:
    """Returns for each scored token the number of its row, its slot, and the rest of its word.

    The rest of a word is the number of its tokens from this one on.
    """
    continues = np.asarray(vocabulary.special.continues_word)
    owner, slot, rest = [], [], []
    for number, row in enumerate(rows):
        ids = np.asarray(row.ids)
        lengths = np.ones(len(ids), int)
        for index in range(len(ids) - 3, row.first - 1, -1):
            if continues[ids[index + 1]]:
                lengths[index] += lengths[index + 1]
        slots = np.arange(row.first, len(ids) - 1)
        owner.append(np.full(len(slots), number))
        slot.append(slots)
        rest.append(lengths[slots])
    return tuple(np.concatenate([np.zeros(0, int), *part]) for part in (owner, slot, rest))


def _compute(
    encoder: OpenedModel,
    rows: list[_Row],
    owner: np.ndarray,
    slot: np.ndarray,
    masks: np.ndarray,
    name: str,
    temperature: float,
) -> np.ndarray:
    """Returns log p of the token in one slot of copies of rows, float64 [copies].

    In copy i of row `owner[i]`, `masks[i]` tokens from `slot[i]` on are masked.
    """
    lengths = np.array([len(row.ids) for row in rows])
    on_accelerator = jax.default_backend() != "cpu"
    shapes = _choose_shapes(lengths[owner], masks, encoder.length, on_accelerator)
    tokens = ACCELERATOR_TOKENS if on_accelerator else TOKENS
    values = np.zeros(len(owner))
    with progress.Bar(total=len(owner), unit="token", desc=name) as bar:
        for shape in map(_Shape._make, np.unique(shapes, axis=0).tolist()):
            group = np.flatnonzero((shapes == shape).all(1))
            padding = (encoder.vocabulary.pad,) * shape.length
            used, row = np.unique(owner[group], return_inverse=True)
            ids = np.array(
                [(*rows[number].ids, *padding)[: shape.length] for number in used], np.int32
            )
            # Many masked tokens have many logits.
            most = max(tokens // (shape.length * max(shape.masks // MASKS, 1)), 1)
            size = min(most, 1 << max(len(group) - 1, 0).bit_length())
            for start in range(0, len(group), size):
                batch = np.arange(start, start + size) % len(group)  # the last one is filled up
                chosen = group[batch]
                result = _log_probabilities(
                    encoder, ids[row[batch]], slot[chosen], masks[chosen], shape.masks, temperature
                )
                count = min(size, len(group) - start)
                values[chosen[:count]] = result[:count]
                bar.update(count)
    return values


def _sum_left_to_right(
    encoder: OpenedModel, rows: list[_Row], name: str, temperature: float
) -> np.ndarray:
    """Returns the sum of log p of each scored token after those before it, float64 [rows]."""
    sizes = np.array([len(row.ids) for row in rows])
    on_accelerator = jax.default_backend() != "cpu"
    shapes = _choose_shapes(sizes, np.ones_like(sizes), encoder.length, on_accelerator)
    tokens = ACCELERATOR_TOKENS if on_accelerator else TOKENS
    sums = np.zeros(len(rows))
    with progress.Bar(total=len(rows), unit="sentence", desc=name) as bar:
        for length in np.unique(shapes[:, 0]).tolist():
            group, slots = np.flatnonzero(shapes[:, 0] == length), np.arange(length, dtype=np.int32)
            size = max(tokens // length // LOGIT_SHARE, 1)
            for start in range(0, len(group), size):
                chosen = group[np.arange(start, start + size) % len(group)]
                padding = (encoder.vocabulary.pad,) * length
                ids = np.array([(*rows[one].ids, *padding)[:length] for one in chosen], np.int32)
                first = np.array([rows[one].first for one in chosen])[:, None]
                scored = (slots >= first) & (slots < sizes[chosen][:, None] - 1)
                positions = np.broadcast_to(slots, ids.shape)
                segments = (ids != encoder.vocabulary.pad).astype(np.int32)
                budget = model_inputs.Budget(length, length)
                logits = encoder.compute_logits(ids, positions, segments, scored, budget)
                # The scored slots follow each other: number m of a row is slot first + m.
                labels = np.take_along_axis(ids, np.minimum(first + slots, length - 1), axis=1)
                values = _log_probabilities_of(logits, labels, np.float32(temperature))
                is_scored = slots < scored.sum(1)[:, None]
                totals = np.where(is_scored, np.asarray(values, np.float64), 0.0).sum(1)
                count = min(size, len(group) - start)
                sums[chosen[:count]] = totals[:count]
                bar.update(count)
    return sums


def _choose_shapes(
    lengths: np.ndarray, masks: np.ndarray, longest: int, on_accelerator: bool
) -> np.ndarray:
    """Returns the _Shape of the batch that each copy is computed in, int [copies, 2].

    On an accelerator there are two at most: for the copies that fit into ACCELERATOR_LENGTH_STEP
    tokens, and for the others.
    """
    if on_accelerator and len(masks):
        step = ACCELERATOR_LENGTH_STEP
        lengths = np.where(lengths > step, lengths.max(), step)
        masks = np.full_like(masks, masks.max())
    else:
        step = np.where(masks == 1, LENGTH_STEP, WORD_LENGTH_STEP)
    powers = 2 ** np.ceil(np.log2(masks)).astype(int)
    rounded = np.where(masks == 1, 1, np.maximum(powers, MASKS))
    return np.stack([np.minimum(-(-lengths // step) * step, longest), rounded], axis=1)


def _log_probabilities(
    encoder: OpenedModel,
    ids: np.ndarray,
    slot: np.ndarray,
    masks: np.ndarray,
    most_masks: int,
    temperature: float,
) -> np.ndarray:
    """Returns log p of the token in one slot of each copy of ids [B, T], float32 [B].

    The encoder reads [MASK] at the masked tokens if it did in pretraining (MLM). Otherwise it reads
    the other tokens.
    """
    length = ids.shape[1]
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
    segments = (ids != encoder.vocabulary.pad).astype(np.int32)
    masked = (positions >= slot[:, None]) & (positions < (slot + masks)[:, None])
    budget = model_inputs.Budget(length if encoder.reads_masks else length - 1, most_masks)
    logits = encoder.compute_logits(ids, positions, segments, masked, budget)
    labels = ids[np.arange(len(ids)), slot]
    return np.asarray(_first_log_probability(logits, labels, np.float32(temperature)))


@jax.jit  # one program: the logits are large
def _log_probabilities_of(logits: jax.Array, labels: jax.Array, temperature: jax.Array):
    """Returns log p of labels [...] by logits [..., vocabulary]."""
    return -optax.softmax_cross_entropy_with_integer_labels(logits / temperature, labels)


@jax.jit
def _first_log_probability(logits: jax.Array, labels: jax.Array, temperature: jax.Array):
    """Returns log p of labels [B] at the first masked token of logits [B, M, vocabulary]."""
    return _log_probabilities_of(logits[:, 0], labels, temperature)
