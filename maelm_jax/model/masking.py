"""(key, rows) -> which slots the encoder reads and which are predicted, in static shapes (paper section 3; delta: section 4.3).

Axis letters, here and in the rest of model/: B rows, L slots of a row, V visible slots (the encoder's budget), M masked slots (the
head's budget). A slot index equal to the axis's length means "empty".
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from maelm_jax import config

UNIT_LIMIT = 10  # tokens; a longer word or span is cut (the longest span of SpanBERT, Joshi et al. 2020)
SPAN_ENDS = 0.2  # chance that a span ends after a token: lengths are geometric, as in SpanBERT


class Inputs(typing.NamedTuple):
    """All that the model reads. Every mask pattern can be written as one, so patterns can also be imposed from outside."""

    ids: Int[Array, "B L"]  # the original tokens
    segments: Int[Array, "B L"]  # 1, 2, ... within a row; 0 at padding. Attention stays within a segment
    positions: Int[Array, "B L"]  # from 0 in each segment
    encoder_slots: Int[Array, "B V"]  # slot of the row that the encoder reads at v; L where empty
    encoder_index: Int[Array, "B L"]  # its inverse: v for a slot, V where the encoder does not read it
    encoder_ids: Int[Array, "B V"]  # what the encoder reads there: the token, or what stands in for a selected one that is let in
    encoder_positions: Int[Array, "B V"]  # the position it is read at: the slot's own, unless visible tokens are renumbered
    masked_slots: Int[Array, "B M"]  # slots that are predicted; L where empty
    masked_index: Int[Array, "B L"]  # its inverse: m for a slot, M where it is not predicted


@dataclasses.dataclass(frozen=True)
class Budget:
    """Static sizes: V visible and M masked slots."""

    visible: int
    masked: int


def budget(masking: config.Masking, length: int) -> Budget:
    """Slots that the numbers drawn at `length` need: at most ceil(rate L) are selected, and at least floor(rate L) of a full row.

    Words and spans are selected whole, so their number may be off by one unit either way.
    """
    slack = 0 if masking.unit == "token" else UNIT_LIMIT - 1
    masked = min(length, math.ceil(masking.rate * length) + slack)
    if not masking.compact:
        return Budget(length, masked)
    visible = length - math.floor(masking.rate * length) + slack + math.ceil(masking.encoder_mask_fraction * masked)
    return Budget(min(length, -(-visible // 8) * 8), masked)


def segments_and_positions(ids: Int[Array, "B L"], bos: int, pad: int) -> tuple[Int[Array, "B L"], Int[Array, "B L"]]:
    """A segment starts at each <s>; padding is segment 0. Positions count from 0 in each segment."""
    slots = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    starts = ids == bos
    segments = jnp.where(ids == pad, 0, jnp.cumsum(starts, axis=1, dtype=jnp.int32))
    first = jax.lax.cummax(jnp.where(starts, slots, 0), axis=1)
    return segments, jnp.where(segments > 0, slots - first, 0)


def _rank(chosen: Bool[Array, "B L"], size: int) -> tuple[Int[Array, "B S"], Int[Array, "B L"]]:
    """Chosen slots in ascending order (L where empty), and their inverse (`size` where not chosen). Those beyond `size` are left out."""
    length = chosen.shape[1]
    index = jnp.where(chosen, jnp.cumsum(chosen, axis=1, dtype=jnp.int32) - 1, size)
    slots = jnp.where(chosen, jnp.arange(length, dtype=jnp.int32), length)
    return jnp.sort(slots, axis=1)[:, :size], jnp.minimum(index, size)


def at_slots(values: Int[Array, "B L"], slots: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """`values` at `slots`; 0 where a slot is empty."""
    length = values.shape[1]
    return jnp.where(slots < length, jnp.take_along_axis(values, jnp.minimum(slots, length - 1), axis=1), 0)


def _count_visible(positions: Int[Array, "B L"], segments: Int[Array, "B L"], visible: Bool[Array, "B L"]) -> Int[Array, "B L"]:
    """How many visible slots of the same segment come before each slot."""
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
    """Inputs for a given pattern: `selected` slots are predicted, and of those `visible_to_encoder` stand in the encoder's input as `shown`.

    `shown` is <mask>, or an id for each slot. With `renumber` the encoder's positions count the visible slots of a segment.

    With `sizes.visible` = L the encoder's slots stay where they are (full length, dropped ones empty: hidden by the attention mask);
    with less they are gathered. Selected slots beyond M are left as they are (visible, not predicted).
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
    encoder_ids = jnp.take_along_axis(jnp.where(selected, shown, ids), jnp.minimum(encoder_slots, length - 1), axis=1)
    encoder_positions = at_slots(_count_visible(positions, segments, visible) if renumber else positions, encoder_slots)
    return Inputs(ids, segments, positions, encoder_slots, encoder_index, encoder_ids, encoder_positions, masked_slots, masked_index)


def _first_of_unit(
    key: Key[Array, ""], ids: Int[Array, " L"], eligible: Bool[Array, " L"], unit: str, special: config.SpecialIds
) -> Int[Array, " L"]:
    """The slot at which each slot's unit begins: what is selected as a whole is the slots that share it."""
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
    if not special.continues_word:
        raise ValueError("these masks need SpecialIds.continues_word: Vocabulary.special gives it")
    return jnp.asarray(special.continues_word)


def _shown(key: Key[Array, ""], ids: Int[Array, " L"], masking: config.Masking, special: config.SpecialIds) -> Int[Array, " L"]:
    """What stands at each slot if it is selected and let in: <mask>; or a random text token, any with the same chance; or the token itself."""
    mask = jnp.full_like(ids, special.mask)
    if not (masking.random_fraction or masking.keep_fraction):
        return mask
    reserved = sorted({special.bos, special.pad, special.eos, special.unk, special.mask})
    other = jax.random.randint(jax.random.fold_in(key, 0), ids.shape, 0, _of_every_id(special).size - len(reserved), dtype=ids.dtype)
    for taken in reserved:  # the n-th id that is text: step over each special id on the way
        other = other + (other >= taken).astype(ids.dtype)
    which = jax.random.uniform(jax.random.fold_in(key, 1), ids.shape)
    return jnp.where(which < masking.random_fraction, other, jnp.where(which < masking.random_fraction + masking.keep_fraction, ids, mask))


def draw(keys: Key[Array, " B"], ids: Int[Array, "B L"], masking: config.Masking, sizes: Budget, special: config.SpecialIds) -> Inputs:
    """Selects floor(rate n + u) of a row's n tokens, u uniform in [0, 1), without replacement; then floor(delta k + u') of the k to let in.

    Units (words, spans) are taken in random order as long as they fit; the one that would exceed the number is taken with the chance that
    makes the number right on average. One key per row: a row's mask depends on its key alone, so it is the same on every mesh.
    Source: the reference's masking; what stands at a position let in, BERT's.
    """
    segments, positions = segments_and_positions(ids, special.bos, special.pad)
    tokens = segments > 0
    eligible = tokens
    if not masking.mask_special_tokens:
        eligible = tokens & ~jnp.isin(ids, jnp.asarray(special.never_masked, dtype=ids.dtype))
    most = sizes.masked if masking.unit == "token" else sizes.masked - UNIT_LIMIT + 1

    def row(key, ids, tokens, eligible):
        u, v = jax.random.uniform(jax.random.fold_in(key, 0), (2,))
        count = jnp.minimum(jnp.floor(masking.rate * tokens.sum(dtype=jnp.float32) + u).astype(jnp.int32), most)
        first = _first_of_unit(jax.random.fold_in(key, 2), ids, eligible, masking.unit, special)
        noise = jax.random.bits(jax.random.fold_in(key, 1), tokens.shape)[first] >> 1  # 31 bits: the top one sends the ineligible to the end
        order = jnp.argsort(jnp.where(eligible, noise, noise | jnp.uint32(1 << 31)))  # stable: a unit's slots stay together
        rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
        size = jnp.zeros_like(first).at[first].add(1)[first]
        left = count - rank[first]  # how many more may be selected when the unit's turn comes
        chance = jax.random.uniform(jax.random.fold_in(key, 3))
        selected = eligible & (chance * size.astype(jnp.float32) < left.astype(jnp.float32))
        visible_to_encoder = rank < jnp.floor(masking.encoder_mask_fraction * selected.sum(dtype=jnp.float32) + v).astype(jnp.int32)
        return selected, selected & visible_to_encoder, _shown(jax.random.fold_in(key, 4), ids, masking, special)

    selected, visible_to_encoder, shown = jax.vmap(row)(keys, ids, tokens, eligible)
    return split(ids, segments, positions, selected, visible_to_encoder, sizes, shown, masking.renumber)
