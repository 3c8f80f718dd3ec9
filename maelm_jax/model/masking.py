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


class Inputs(typing.NamedTuple):
    """All that the model reads. Every mask pattern can be written as one, so patterns can also be imposed from outside."""

    ids: Int[Array, "B L"]  # the original tokens
    segments: Int[Array, "B L"]  # 1, 2, ... within a row; 0 at padding. Attention stays within a segment
    positions: Int[Array, "B L"]  # from 0 in each segment
    encoder_slots: Int[Array, "B V"]  # slot of the row that the encoder reads at v; L where empty
    encoder_index: Int[Array, "B L"]  # its inverse: v for a slot, V where the encoder does not read it
    encoder_ids: Int[Array, "B V"]  # what the encoder reads there: the token, or <mask> where one is let in
    masked_slots: Int[Array, "B M"]  # slots that are predicted; L where empty
    masked_index: Int[Array, "B L"]  # its inverse: m for a slot, M where it is not predicted


@dataclasses.dataclass(frozen=True)
class Budget:
    """Static sizes: V visible and M masked slots."""

    visible: int
    masked: int


def budget(masking: config.Masking, length: int) -> Budget:
    """Slots that the numbers drawn at `length` need: at most ceil(rate L) are selected, and at least floor(rate L) of a full row."""
    masked = math.ceil(masking.rate * length)
    if not masking.compact:
        return Budget(length, masked)
    visible = length - math.floor(masking.rate * length) + math.ceil(masking.encoder_mask_fraction * masked)
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


def split(
    ids: Int[Array, "B L"],
    segments: Int[Array, "B L"],
    positions: Int[Array, "B L"],
    selected: Bool[Array, "B L"],
    let_in: Bool[Array, "B L"],
    sizes: Budget,
    mask_id: int,
) -> Inputs:
    """Inputs for a given pattern: `selected` slots are predicted, and of those `let_in` stand in the encoder's input as <mask>.

    With `sizes.visible` = L the encoder's slots stay where they are (full length, dropped ones empty: hidden by the attention mask);
    with less they are gathered. Selected slots beyond M are left as they are (visible, not predicted).
    """
    length = ids.shape[1]
    masked_slots, masked_index = _rank(selected, sizes.masked)
    selected = masked_index < sizes.masked
    visible = (segments > 0) & (~selected | let_in)
    if sizes.visible < length:
        encoder_slots, encoder_index = _rank(visible, sizes.visible)
    else:
        slots = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), ids.shape)
        encoder_slots = encoder_index = jnp.where(visible, slots, length)
    seen = jnp.where(selected, mask_id, ids)
    encoder_ids = jnp.take_along_axis(seen, jnp.minimum(encoder_slots, length - 1), axis=1)
    return Inputs(ids, segments, positions, encoder_slots, encoder_index, encoder_ids, masked_slots, masked_index)


def draw(keys: Key[Array, " B"], ids: Int[Array, "B L"], masking: config.Masking, sizes: Budget, special: config.SpecialIds) -> Inputs:
    """Selects floor(rate n + u) of a row's n tokens, u uniform in [0, 1), without replacement; then floor(delta k + u') of the k to let in.

    One key per row: a row's mask depends on its key alone, so it is the same on every mesh. Source: the reference's masking.
    """
    segments, positions = segments_and_positions(ids, special.bos, special.pad)
    tokens = segments > 0
    eligible = tokens
    if not masking.mask_special_tokens:
        eligible = tokens & ~jnp.isin(ids, jnp.asarray(special.never_masked, dtype=ids.dtype))

    def row(key, tokens, eligible):
        u, v = jax.random.uniform(jax.random.fold_in(key, 0), (2,))
        count = jnp.minimum(jnp.floor(masking.rate * tokens.sum(dtype=jnp.float32) + u).astype(jnp.int32), sizes.masked)
        noise = jax.random.bits(jax.random.fold_in(key, 1), tokens.shape) >> 1  # 31 bits: the top one sends the ineligible to the end
        order = jnp.argsort(jnp.where(eligible, noise, noise | jnp.uint32(1 << 31)))
        rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
        selected = eligible & (rank < count)
        let_in = rank < jnp.floor(masking.encoder_mask_fraction * selected.sum(dtype=jnp.float32) + v).astype(jnp.int32)
        return selected, selected & let_in

    selected, let_in = jax.vmap(row)(keys, tokens, eligible)
    return split(ids, segments, positions, selected, let_in, sizes, special.mask)
