"""Draws masks: which slots are masked, and what the encoder reads of them.

Source: paper section 3. Section 4.3 adds delta, the share of masked tokens that the encoder sees.

A `Strategy` says how likely each token is masked. Without one, all are equally likely.

Words and axis letters are those of model_inputs.py: B rows, L slots of a row.
"""

import collections.abc
import functools
import math
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from maelm_jax import config
from maelm_jax.model import keys, model_inputs
from maelm_jax.model.model_inputs import Budget, Inputs, segments_and_positions

# Tokens. A longer word or span is cut. Source: the longest span of SpanBERT (Joshi et al. 2020).
UNIT_LIMIT = 10
# Probability that a span ends after a token: lengths are geometric, as in SpanBERT.
SPAN_ENDS = 0.2

# (ids of a row [L], its segments [L]) -> a weight for each token [L]: how likely it is masked,
# relative to the others. A token of weight 0 is not masked.
Strategy = collections.abc.Callable[[Int[Array, " L"], Int[Array, " L"]], Float[Array, " L"]]
STRATEGY_ARGUMENTS = ("ids", "segments", "tokens")  # of the function of `Masking.strategy`


def bind_strategy(
    function: collections.abc.Callable, masking: config.Masking, tokens: list[str], length: int
) -> Strategy:
    """Returns the strategy of `Masking.strategy`, a function of the user's own.

    It is called as function(ids, segments, tokens, **Masking.strategy_parameters). `tokens` has the
    spelling of each id. Raises ConfigError if it does not give a number for each of `length` slots.
    """

    def strategy(ids, segments):
        # Implicit promotion is an error in this project's tests, not in the code of a user.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            weights = jnp.asarray(function(ids, segments, tokens, **masking.strategy_parameters))
        return weights.astype(jnp.float32)

    row = jax.ShapeDtypeStruct((length,), jnp.int32)
    problem = f"Masking.strategy={masking.strategy}"
    try:
        shape = jax.eval_shape(strategy, row, row).shape
    except Exception as error:
        message = " ".join(str(error).split())[:300]
        raise config.ConfigError(
            f"{problem} cannot be computed in jax.jit ({type(error).__name__}: {message}). Correct "
            "the function: ids and segments are arrays of JAX"
        ) from error
    if shape != (length,):
        raise config.ConfigError(
            f"{problem} returns an array of shape {shape} for a row of {length} ids. Return a "
            "weight for each id"
        )
    return strategy


def _longest_unit(unit: str, length: int) -> int:
    """Returns the largest number of tokens of a unit in a row of `length` slots."""
    return 1 if unit == "token" else min(UNIT_LIMIT, length)


def budget(objective: config.Objective, length: int) -> Budget:
    """Returns V and M, the number of slots that `draw` needs for rows of `length` tokens.

    Of a full row, floor(rate L) or ceil(rate L) tokens are masked if so many are eligible. A drawn
    word or span is masked whole, so V and M each have slots for one unit more. A row with fewer
    eligible tokens masks fewer. V may then be too small, and its last visible tokens are left out.
    At rate 0.4 this happens if each document is one word, because `<s>` and `</s>` are not masked.

    V is rounded up to a multiple of 8, at most L. With `Masking.strategy` it is L, because a row
    may have few tokens that the strategy masks. Next tokens need all L slots of both.
    """
    if objective.name == "causal":
        return Budget(length, length)
    masking = objective.masking
    slack = _longest_unit(masking.unit, length) - 1  # of the last unit, beyond the count
    masked = min(length, math.ceil(masking.rate * length) + slack)
    visible = (
        length
        - math.floor(masking.rate * length)
        + slack
        + math.ceil(objective.encoder_mask_fraction * masked)
    )
    if masking.strategy:
        visible = length
    return Budget(min(length, -(-visible // 8) * 8), masked)


def _find_unit_starts(
    key: Key[Array, ""],
    ids: Int[Array, " L"],
    eligible: Bool[Array, " L"],
    unit: str,
    special: config.SpecialIds,
) -> Int[Array, " L"]:
    """Returns the slot at which each slot's unit begins. Slots of one unit are masked together."""
    slots = jnp.arange(ids.size, dtype=jnp.int32)
    if unit == "token":
        return slots
    if unit == "word":
        begins = ~jnp.take(_continues_word(special), ids)
    elif unit == "span":
        begins = jax.random.bernoulli(key, SPAN_ENDS, ids.shape)
    else:
        raise ValueError(f"Masking.unit={unit!r} has no case in maelm_jax/model/masking.py")
    begins |= ~eligible | ~jnp.roll(eligible, 1)
    begins = begins.at[0].set(True)
    offset = slots - jax.lax.cummax(jnp.where(begins, slots, 0))
    return slots - offset % _longest_unit(unit, ids.size)


def _continues_word(special: config.SpecialIds) -> Bool[Array, " W"]:
    """`SpecialIds.continues_word` as an array. Raises ValueError where it is empty."""
    if not special.continues_word:
        raise ValueError(
            "SpecialIds.continues_word is empty, but word masking and random tokens need it. "
            "Use the `special` of a loaded Vocabulary."
        )
    return jnp.asarray(special.continues_word)


def _replacement_ids(
    key: Key[Array, ""], ids: Int[Array, " L"], masking: config.Masking, special: config.SpecialIds
) -> Int[Array, " L"]:
    """Returns each slot's replacement id: <mask>, a uniformly random text token, or its token."""
    mask = jnp.full_like(ids, special.mask)
    if not (masking.random_fraction or masking.keep_fraction):
        return mask
    reserved = sorted({special.bos, special.pad, special.eos, special.unk, special.mask})
    text_ids = _continues_word(special).size - len(reserved)
    token_key = jax.random.fold_in(key, keys.TOKEN_STREAM)
    token = jax.random.randint(token_key, ids.shape, 0, text_ids, dtype=ids.dtype)
    # `token` is n; the n-th id that is text is found by stepping over each smaller special id.
    for reserved_id in reserved:
        token = token + (token >= reserved_id).astype(ids.dtype)
    kind = jax.random.uniform(jax.random.fold_in(key, keys.KIND_STREAM), ids.shape)
    return jnp.where(
        kind < masking.random_fraction,
        token,
        jnp.where(kind < masking.random_fraction + masking.keep_fraction, ids, mask),
    )


class RowMask(typing.NamedTuple):
    """The mask of one row, or of all rows with a leading axis B."""

    masked: Bool[Array, "*B L"]
    masked_visible: Bool[Array, "*B L"]  # masked slots that the encoder reads
    replacement_ids: Int[Array, "*B L"]


def _order_randomly(
    key: Key[Array, ""],
    eligible: Bool[Array, " L"],
    first: Int[Array, " L"],
    weights: Float[Array, " L"] | None,
) -> Int[Array, " L"]:
    """Returns each slot's index in a random order of units. Ineligible slots come last.

    `first` is the slot at which the unit begins, and `weights` are those of the units. Each next
    unit is drawn with a probability in proportion to its weight (Efraimidis and Spirakis 2006).
    """
    # 31 random bits. The top bit is set at ineligible slots, so they sort last.
    if weights is None:
        noise = jax.random.bits(key, first.shape)[first] >> 1
    else:
        waiting = jax.random.exponential(key, first.shape)[first] / jnp.maximum(weights, 1e-30)
        # The bits of positive floats have the order of the floats, and their top bit is 0.
        noise = jax.lax.bitcast_convert_type(waiting, jnp.uint32)
    # argsort is stable, so a unit's slots stay together.
    order = jnp.argsort(jnp.where(eligible, noise, noise | jnp.uint32(1 << 31)))
    indices = jnp.arange(order.size, dtype=order.dtype)
    return jnp.zeros_like(order).at[order].set(indices, unique_indices=True)


def _draw_row(
    key: Key[Array, ""],
    ids: Int[Array, " L"],
    tokens: Bool[Array, " L"],
    eligible: Bool[Array, " L"],
    segments: Int[Array, " L"],
    objective: config.Objective,
    largest_count: int,
    special: config.SpecialIds,
    strategy: Strategy | None,
) -> RowMask:
    """Draws the mask of one row. `tokens` are the slots that are not padding."""
    masking = objective.masking

    def stream(number: int) -> Key[Array, ""]:
        return jax.random.fold_in(key, number)

    # Uniform numbers that round the two counts up or down, so that their means are exact.
    u, v = jax.random.uniform(stream(keys.COUNT_STREAM), (2,))
    count = jnp.floor(masking.rate * tokens.sum(dtype=jnp.float32) + u).astype(jnp.int32)
    count = jnp.minimum(count, largest_count)
    first = _find_unit_starts(stream(keys.SPANS_STREAM), ids, eligible, masking.unit, special)
    weights = None
    if strategy:
        # A unit is masked whole, with the largest weight of its tokens.
        of_slots = jnp.where(eligible, strategy(ids, segments), 0.0)
        weights = jnp.zeros_like(of_slots).at[first].max(of_slots)[first]
        eligible &= weights > 0
    index = _order_randomly(stream(keys.ORDER_STREAM), eligible, first, weights)
    unit_size = jnp.zeros_like(first).at[first].add(1)[first]
    remaining = count - index[first]  # tokens still to be masked when the unit's turn comes
    chance = jax.random.uniform(stream(keys.LAST_UNIT_STREAM))
    masked = eligible & (chance * unit_size.astype(jnp.float32) < remaining.astype(jnp.float32))
    visible_masked_count = jnp.floor(
        objective.encoder_mask_fraction * masked.sum(dtype=jnp.float32) + v
    ).astype(jnp.int32)
    replacement_ids = _replacement_ids(stream(keys.REPLACEMENT_STREAM), ids, masking, special)
    return RowMask(masked, masked & (index < visible_masked_count), replacement_ids)


def draw(
    row_keys: Key[Array, " B"],
    ids: Int[Array, "B L"],
    objective: config.Objective,
    sizes: Budget,
    special: config.SpecialIds,
    strategy: Strategy | None = None,
) -> Inputs:
    """Draws the masks of a batch of rows.

    Of a row's n tokens, floor(rate n + u) are masked, u uniform in [0, 1). Of the k masked ones the
    encoder sees floor(delta k + v), v uniform in [0, 1).

    Units (words, spans) are taken in random order. Where the next unit has s tokens and only r < s
    may still be masked, it is masked with probability r / s. So the expected number is exact.

    A row's mask depends on its key and its tokens alone, so it is the same on every mesh.

    For next tokens (`causal`), nothing is drawn. The encoder reads all tokens. Every token that may
    be masked is predicted, except the first of a segment.

    Source: selection as in github.com/yumeng5/MAE-LM; random and unchanged replacement ids as in
    BERT (Devlin et al. 2019).

    Args:
        row_keys: One key for each row.
        ids: Tokens of packed rows.
        objective: It says what is masked, and what the encoder sees of it.
        sizes: Result of `budget` for this objective and L. With a larger V of L, the encoder reads
            whole rows with empty slots, and computes the same function.
        special: Ids of special tokens.
        strategy: How likely each token is masked. None: all are equally likely. Commands that read
            a run give None, whatever its `Masking.strategy` is.

    Returns:
        What the model reads.
    """
    masking = objective.masking
    segments, positions = segments_and_positions(ids, special.bos, special.pad)
    tokens = segments > 0
    eligible = tokens
    if not masking.mask_special_tokens:
        eligible = tokens & ~jnp.isin(ids, jnp.asarray(special.never_masked, dtype=ids.dtype))
    if objective.name == "causal":
        predicted = eligible & (positions > 0)
        return model_inputs.split(ids, segments, positions, predicted, predicted, sizes, ids)
    largest_count = math.ceil(masking.rate * ids.shape[1])
    draw_row = functools.partial(
        _draw_row,
        objective=objective,
        largest_count=largest_count,
        special=special,
        strategy=strategy,
    )
    mask: RowMask = jax.vmap(draw_row)(row_keys, ids, tokens, eligible, segments)
    return model_inputs.split(
        ids,
        segments,
        positions,
        mask.masked,
        mask.masked_visible,
        sizes,
        mask.replacement_ids,
        masking.renumber,
    )
