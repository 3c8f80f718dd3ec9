"""What the model reads: a batch of rows under a mask pattern, in static shapes.

Words, here and in the rest of the package: a *masked* slot is one whose token the model predicts. A
*visible* slot is one that the encoder reads: all slots that are not masked and, if
`Masking.encoder_mask_fraction` is above 0, some that are. At those it reads a replacement: [MASK],
a random token, or the token itself. A *dropped* slot is masked and not visible. An *empty* slot
holds nothing, because shapes are static.

Axis letters: B rows, L slots of a row, V visible slots (the encoder's budget), M masked slots (the
head's budget). A slot index equal to the axis's length means "empty".
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
    encoder_slots: Int[Array, "B V"]  # visible slots, ascending; L where empty
    encoder_index: Int[Array, "B L"]  # inverse of encoder_slots: v of a slot; V if not visible
    # The token at v, or its replacement if the slot is masked.
    encoder_ids: Int[Array, "B V"]
    # The position of the slot, unless `Masking.renumber` counts visible tokens only.
    encoder_positions: Int[Array, "B V"]
    masked_slots: Int[Array, "B M"]  # masked slots, ascending; L where empty
    masked_index: Int[Array, "B L"]  # inverse of masked_slots: m of a slot; M if not masked


@dataclasses.dataclass(frozen=True)
class Budget:
    """Static sizes: V visible and M masked slots of a row."""

    visible: int
    masked: int


class SlotInfo(typing.NamedTuple):
    """Segment and position of each slot. Segment 0 means empty."""

    segments: Int[Array, "B T"]
    positions: Int[Array, "B T"]

    def take(self, slots: Int[Array, "B S"]) -> "SlotInfo":
        """Returns the values at `slots`; segment 0 where a slot is empty."""
        return SlotInfo(take_at_slots(self.segments, slots), take_at_slots(self.positions, slots))


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


class SlotIndex(typing.NamedTuple):
    """Some slots of each row."""

    slots: Int[Array, "B S"]  # ascending; L where empty
    index: Int[Array, "B L"]  # the inverse; S where a slot is not chosen


def _find_slots(chosen: Bool[Array, "B L"], size: int) -> SlotIndex:
    """Returns the first `size` chosen slots of each row."""
    length = chosen.shape[1]
    index = jnp.where(chosen, jnp.cumsum(chosen, axis=1, dtype=jnp.int32) - 1, size)
    slots = jnp.where(chosen, jnp.arange(length, dtype=jnp.int32), length)
    return SlotIndex(jnp.sort(slots, axis=1)[:, :size], jnp.minimum(index, size))


def take_at_slots(values: Int[Array, "B L"], slots: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Returns `values` at `slots`; 0 where a slot is empty."""
    length = values.shape[1]
    return jnp.where(
        slots < length, jnp.take_along_axis(values, jnp.minimum(slots, length - 1), axis=1), 0
    )


def _count_visible(
    positions: Int[Array, "B L"], segments: Int[Array, "B L"], visible: Bool[Array, "B L"]
) -> Int[Array, "B L"]:
    """Returns the number of visible slots of the same segment before each slot."""
    before = jnp.cumsum(visible, axis=1, dtype=jnp.int32) - visible.astype(jnp.int32)
    return before - jax.lax.cummax(jnp.where((positions == 0) & (segments > 0), before, 0), axis=1)


def split(
    ids: Int[Array, "B L"],
    segments: Int[Array, "B L"],
    positions: Int[Array, "B L"],
    masked: Bool[Array, "B L"],
    masked_visible: Bool[Array, "B L"],
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
        masked: Slots to predict. Those beyond the first M are not masked.
        masked_visible: Masked slots that the encoder reads, with the id in `replacement_ids`.
        sizes: Sizes of the result. Visible slots beyond the first V are left out.
        replacement_ids: Ids that replace masked tokens: <mask>, or an id for each slot.
        renumber: True gives the encoder positions that count the visible slots of a segment.

    Returns:
        What the model reads.
    """
    length = ids.shape[1]
    masked_slots, masked_index = _find_slots(masked, sizes.masked)
    masked = masked_index < sizes.masked
    visible = (segments > 0) & (~masked | masked_visible)
    if sizes.visible < length:
        encoder_slots, encoder_index = _find_slots(visible, sizes.visible)
    else:
        slots = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), ids.shape)
        encoder_slots = encoder_index = jnp.where(visible, slots, length)
    encoder_ids = jnp.take_along_axis(
        jnp.where(masked, replacement_ids, ids), jnp.minimum(encoder_slots, length - 1), axis=1
    )
    encoder_positions = take_at_slots(
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
