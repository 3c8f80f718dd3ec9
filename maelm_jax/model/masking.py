"""Draws masks: which slots the encoder reads and which are predicted, in static shapes.

Source: paper section 3. Section 4.3 adds delta, the share of masked tokens that the encoder sees.

Axis letters, here and in the rest of model/: B rows, L slots of a row, V visible slots (the
encoder's budget), M masked slots (the head's budget). A slot index equal to the axis's length
means "empty".
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from maelm_jax import config

# Tokens. A longer word or span is cut. Source: the longest span of SpanBERT (Joshi et al. 2020).
UNIT_LIMIT = 10
# Probability that a span ends after a token: lengths are geometric, as in SpanBERT.
SPAN_ENDS = 0.2


class Inputs(typing.NamedTuple):
    """All that the model reads.

    `split` makes it from any mask pattern, also one from outside.
    """

    ids: Int[Array, "B L"]  # the original tokens
    # 1, 2, ... within a row; 0 at padding. Attention stays within a segment.
    segments: Int[Array, "B L"]
    positions: Int[Array, "B L"]  # from 0 in each segment
    encoder_slots: Int[Array, "B V"]  # the row's slot that the encoder reads at v; L where empty
    encoder_index: Int[Array, "B L"]  # inverse of encoder_slots: v of a slot; V where not read
    # The token at v. At a selected slot that the encoder sees, the id that replaces the token.
    encoder_ids: Int[Array, "B V"]
    # The position of the slot, unless `Masking.renumber` counts visible tokens only.
    encoder_positions: Int[Array, "B V"]
    masked_slots: Int[Array, "B M"]  # slots to predict, ascending; L where empty
    masked_index: Int[Array, "B L"]  # inverse of masked_slots: m of a slot; M where not predicted


@dataclasses.dataclass(frozen=True)
class Budget:
    """Static sizes: V visible and M masked slots of a row."""

    visible: int
    masked: int


def budget(masking: config.Masking, length: int) -> Budget:
    """Returns the number of slots that `draw` needs.

    At most ceil(rate L) tokens of a row are selected, and at least floor(rate L) of a full row.
    Words and spans are selected whole, so these numbers may be off by one unit.

    Args:
        masking: The settings of masking.
        length: L, tokens.

    Returns:
        V, rounded up to a multiple of 8 but at most L, and M. V is L unless `masking.compact`.
    """
    slack = 0 if masking.unit == "token" else UNIT_LIMIT - 1
    masked = min(length, math.ceil(masking.rate * length) + slack)
    if not masking.compact:
        return Budget(length, masked)
    visible = (
        length
        - math.floor(masking.rate * length)
        + slack
        + math.ceil(masking.encoder_mask_fraction * masked)
    )
    return Budget(min(length, -(-visible // 8) * 8), masked)


def segments_and_positions(
    ids: Int[Array, "B L"], bos: int, pad: int
) -> tuple[Int[Array, "B L"], Int[Array, "B L"]]:
    """Returns segments and positions of packed rows.

    Each <s> (`bos`) starts a segment. Segments count from 1, and 0 is padding. Positions count
    from 0 in each segment.
    """
    slots = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    starts = ids == bos
    segments = jnp.where(ids == pad, 0, jnp.cumsum(starts, axis=1, dtype=jnp.int32))
    first = jax.lax.cummax(jnp.where(starts, slots, 0), axis=1)
    return segments, jnp.where(segments > 0, slots - first, 0)


def _rank(chosen: Bool[Array, "B L"], size: int) -> tuple[Int[Array, "B S"], Int[Array, "B L"]]:
    """Chosen slots, ascending (L where empty), and their inverse (`size` where not chosen).

    Slots beyond the first `size` chosen ones count as not chosen.
    """
    length = chosen.shape[1]
    index = jnp.where(chosen, jnp.cumsum(chosen, axis=1, dtype=jnp.int32) - 1, size)
    slots = jnp.where(chosen, jnp.arange(length, dtype=jnp.int32), length)
    return jnp.sort(slots, axis=1)[:, :size], jnp.minimum(index, size)


def at_slots(values: Int[Array, "B L"], slots: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Returns `values` at `slots`; 0 where a slot is empty."""
    length = values.shape[1]
    return jnp.where(
        slots < length, jnp.take_along_axis(values, jnp.minimum(slots, length - 1), axis=1), 0
    )


def _count_visible(
    positions: Int[Array, "B L"], segments: Int[Array, "B L"], visible: Bool[Array, "B L"]
) -> Int[Array, "B L"]:
    """The number of visible slots of the same segment before each slot."""
    before = jnp.cumsum(visible, axis=1, dtype=jnp.int32) - visible.astype(jnp.int32)
    return before - jax.lax.cummax(jnp.where((positions == 0) & (segments > 0), before, 0), axis=1)


def split(
    ids: Int[Array, "B L"],
    segments: Int[Array, "B L"],
    positions: Int[Array, "B L"],
    selected: Bool[Array, "B L"],
    visible_to_encoder: Bool[Array, "B L"],
    sizes: Budget,
    shown: int | Int[Array, "B L"],
    renumber: bool = False,
) -> Inputs:
    """Makes Inputs from a given mask pattern.

    With `sizes.visible` = L, slot i of the encoder is slot i of the row, and the attention mask
    hides dropped slots. With a smaller number the visible slots are gathered.

    Args:
        ids: Tokens.
        segments: Segments, 0 at padding.
        positions: Positions in each segment.
        selected: Slots to predict. Those beyond the first M are visible and not predicted.
        visible_to_encoder: Selected slots that the encoder reads, with the id in `shown`.
        sizes: Sizes of the result.
        shown: Ids that replace selected tokens: <mask>, or an id for each slot.
        renumber: True gives the encoder positions that count the visible slots of a segment.

    Returns:
        What the model reads.
    """
    length = ids.shape[1]
    masked_slots, masked_index = _rank(selected, sizes.masked)
    selected = masked_index < sizes.masked
    visible = (segments > 0) & (~selected | visible_to_encoder)
    if sizes.visible < length:
        encoder_slots, encoder_index = _rank(visible, sizes.visible)
    else:
        slots = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), ids.shape)
        encoder_slots = encoder_index = jnp.where(visible, slots, length)
    encoder_ids = jnp.take_along_axis(
        jnp.where(selected, shown, ids), jnp.minimum(encoder_slots, length - 1), axis=1
    )
    encoder_positions = at_slots(
        _count_visible(positions, segments, visible) if renumber else positions, encoder_slots
    )
    return Inputs(
        ids,
        segments,
        positions,
        encoder_slots,
        encoder_index,
        encoder_ids,
        encoder_positions,
        masked_slots,
        masked_index,
    )


def _first_of_unit(
    key: Key[Array, ""],
    ids: Int[Array, " L"],
    eligible: Bool[Array, " L"],
    unit: str,
    special: config.SpecialIds,
) -> Int[Array, " L"]:
    """The slot at which each slot's unit begins. Slots of one unit are selected together."""
    slots = jnp.arange(ids.size, dtype=jnp.int32)
    if unit == "token":
        return slots
    if unit == "word":
        begins = ~jnp.take(_of_every_id(special), ids)
    else:
        begins = jax.random.bernoulli(key, SPAN_ENDS, ids.shape)
    begins |= ~eligible | ~jnp.roll(eligible, 1)
    begins = begins.at[0].set(True)
    offset = slots - jax.lax.cummax(jnp.where(begins, slots, 0))
    return slots - offset % UNIT_LIMIT


def _of_every_id(special: config.SpecialIds) -> Bool[Array, " W"]:
    """`continues_word` as an array. Raises ValueError where it is empty."""
    if not special.continues_word:
        raise ValueError("these masks need SpecialIds.continues_word: Vocabulary.special gives it")
    return jnp.asarray(special.continues_word)


def _shown(
    key: Key[Array, ""], ids: Int[Array, " L"], masking: config.Masking, special: config.SpecialIds
) -> Int[Array, " L"]:
    """The replacement id of each slot: <mask>, a uniformly random text token, or its token."""
    mask = jnp.full_like(ids, special.mask)
    if not (masking.random_fraction or masking.keep_fraction):
        return mask
    reserved = sorted({special.bos, special.pad, special.eos, special.unk, special.mask})
    other = jax.random.randint(
        jax.random.fold_in(key, 0),
        ids.shape,
        0,
        _of_every_id(special).size - len(reserved),
        dtype=ids.dtype,
    )
    # `other` is n; the n-th id that is text is found by stepping over each smaller special id.
    for taken in reserved:
        other = other + (other >= taken).astype(ids.dtype)
    which = jax.random.uniform(jax.random.fold_in(key, 1), ids.shape)
    return jnp.where(
        which < masking.random_fraction,
        other,
        jnp.where(which < masking.random_fraction + masking.keep_fraction, ids, mask),
    )


def draw(
    keys: Key[Array, " B"],
    ids: Int[Array, "B L"],
    masking: config.Masking,
    sizes: Budget,
    special: config.SpecialIds,
) -> Inputs:
    """Draws the masks of a batch of rows.

    Of a row's n tokens, floor(rate n + u) are selected without replacement, u uniform in [0, 1). Of
    the k selected ones the encoder sees floor(delta k + v), v uniform in [0, 1).

    Units (words, spans) are taken in random order as long as they fit. The unit that exceeds the
    number is taken with the probability that makes the expected number right.

    A row's mask depends on its key and its tokens alone, so it is the same on every mesh.

    Source: selection as in github.com/yumeng5/MAE-LM; random and unchanged replacement ids as in
    BERT (Devlin et al. 2019).

    Args:
        keys: One key for each row.
        ids: Tokens of packed rows.
        masking: The settings of masking.
        sizes: Result of `budget` for these settings and L.
        special: Ids of special tokens.

    Returns:
        What the model reads.
    """
    segments, positions = segments_and_positions(ids, special.bos, special.pad)
    tokens = segments > 0
    eligible = tokens
    if not masking.mask_special_tokens:
        eligible = tokens & ~jnp.isin(ids, jnp.asarray(special.never_masked, dtype=ids.dtype))
    most = sizes.masked if masking.unit == "token" else sizes.masked - UNIT_LIMIT + 1

    def row(key, ids, tokens, eligible):
        u, v = jax.random.uniform(jax.random.fold_in(key, 0), (2,))
        count = jnp.minimum(
            jnp.floor(masking.rate * tokens.sum(dtype=jnp.float32) + u).astype(jnp.int32), most
        )
        first = _first_of_unit(jax.random.fold_in(key, 2), ids, eligible, masking.unit, special)
        # 31 random bits. Bit 32 is set at ineligible slots, which sorts them to the end.
        noise = jax.random.bits(jax.random.fold_in(key, 1), tokens.shape)[first] >> 1
        # argsort is stable, so a unit's slots stay together.
        order = jnp.argsort(jnp.where(eligible, noise, noise | jnp.uint32(1 << 31)))
        rank = (
            jnp.zeros_like(order)
            .at[order]
            .set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
        )
        size = jnp.zeros_like(first).at[first].add(1)[first]
        left = count - rank[first]  # tokens still to be selected when the unit's turn comes
        chance = jax.random.uniform(jax.random.fold_in(key, 3))
        selected = eligible & (chance * size.astype(jnp.float32) < left.astype(jnp.float32))
        visible_to_encoder = rank < jnp.floor(
            masking.encoder_mask_fraction * selected.sum(dtype=jnp.float32) + v
        ).astype(jnp.int32)
        return (
            selected,
            selected & visible_to_encoder,
            _shown(jax.random.fold_in(key, 4), ids, masking, special),
        )

    selected, visible_to_encoder, shown = jax.vmap(row)(keys, ids, tokens, eligible)
    return split(
        ids, segments, positions, selected, visible_to_encoder, sizes, shown, masking.renumber
    )
