"""What the model reads: a batch of rows under a mask pattern, in static shapes.

Axis letters, here and in the rest of model/: B rows, L slots of a row, V visible slots (the
encoder's budget), M masked slots (the head's budget). A slot index equal to the axis's length
means "empty".
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


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


class SlotInfo(typing.NamedTuple):
    """Segment and position of each slot. Segment 0 means empty."""

    segments: Int[Array, "B T"]
    positions: Int[Array, "B T"]

    def at(self, slots: Int[Array, "B S"]) -> "SlotInfo":
        """Returns the values at `slots`; segment 0 where a slot is empty."""
        return SlotInfo(at_slots(self.segments, slots), at_slots(self.positions, slots))


def segments_and_positions(ids: Int[Array, "B L"], bos: int, pad: int) -> SlotInfo:
    """Returns segments and positions of packed rows.

    Each <s> (`bos`) starts a segment. Segments count from 1, and 0 is padding. Positions count
    from 0 in each segment.
    """
    slots = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    starts = ids == bos
    segments = jnp.where(ids == pad, 0, jnp.cumsum(starts, axis=1, dtype=jnp.int32))
    first = jax.lax.cummax(jnp.where(starts, slots, 0), axis=1)
    return SlotInfo(segments, jnp.where(segments > 0, slots - first, 0))


class ChosenSlots(typing.NamedTuple):
    """Some slots of each row."""

    slots: Int[Array, "B S"]  # ascending; L where empty
    index: Int[Array, "B L"]  # the inverse; S where a slot is not chosen


def _chosen_slots(chosen: Bool[Array, "B L"], size: int) -> ChosenSlots:
    """The first `size` chosen slots of each row."""
    length = chosen.shape[1]
    index = jnp.where(chosen, jnp.cumsum(chosen, axis=1, dtype=jnp.int32) - 1, size)
    slots = jnp.where(chosen, jnp.arange(length, dtype=jnp.int32), length)
    return ChosenSlots(jnp.sort(slots, axis=1)[:, :size], jnp.minimum(index, size))


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
    replacement_ids: int | Int[Array, "B L"],
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
        visible_to_encoder: Selected slots that the encoder reads, with the id in `replacement_ids`.
        sizes: Sizes of the result.
        replacement_ids: Ids that replace selected tokens: <mask>, or an id for each slot.
        renumber: True gives the encoder positions that count the visible slots of a segment.

    Returns:
        What the model reads.
    """
    length = ids.shape[1]
    masked_slots, masked_index = _chosen_slots(selected, sizes.masked)
    selected = masked_index < sizes.masked
    visible = (segments > 0) & (~selected | visible_to_encoder)
    if sizes.visible < length:
        encoder_slots, encoder_index = _chosen_slots(visible, sizes.visible)
    else:
        slots = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), ids.shape)
        encoder_slots = encoder_index = jnp.where(visible, slots, length)
    encoder_ids = jnp.take_along_axis(
        jnp.where(selected, replacement_ids, ids), jnp.minimum(encoder_slots, length - 1), axis=1
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
