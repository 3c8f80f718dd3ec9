"""Packs texts into batches of few shapes, so that little is padding and little is compiled.

JAX compiles a program for each shape. A row of a batch holds several texts, as the rows of
pretraining do: attention stays within a text, and positions start anew in each.
"""

import bisect
import collections.abc
import typing

import jax
import numpy as np

# Lengths of rows. A text is put into a row at least twice as long, up to 512 tokens, because then
# others fill the rest. For longer texts it is the next power of two.
LENGTHS = (64, 256, 1024)
# Slots of a batch. On CPU the activations of so many stay in the cache.
SLOTS = {"cpu": 1024}
ACCELERATOR_SLOTS = 16_384
SMALL = 16  # few texts are computed in batches of so many times fewer rows


class PackedBatch(typing.NamedTuple):
    """Texts in rows. A slot without a token has segment 0.

    Attributes:
        texts: The numbers of the texts in the batch.
        ids: int32 [rows, slots], the tokens.
        positions: int32 [rows, slots], the position of each token in its text.
        segments: int32 [rows, slots], 1, 2, ... within a row; 0 at padding.
        owners: int32 [rows, slots], the index into `texts` of the text of each token; 0 at padding.
    """

    texts: list[int]
    ids: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    owners: np.ndarray

    def select(self, values: np.ndarray, index: int) -> np.ndarray:
        """Returns the values [rows, slots, ...] at the tokens of the text `texts[index]`."""
        return values[(self.owners == index) & (self.segments > 0)]


def pack_texts(
    texts: collections.abc.Sequence[list[int]], pad: int
) -> collections.abc.Iterator[PackedBatch]:
    """Packs the ids of texts into batches, the longest texts first.

    If a batch does not fit in memory, the first one fails. There are at most eight shapes.

    Args:
        texts: The ids of each text, one or more.
        pad: The id of `<pad>`.
    """
    by_length: dict[int, list[int]] = {}
    for number in reversed(range(len(texts))):
        by_length.setdefault(len(texts[number]), []).append(number)
    lengths = sorted(by_length)  # of the texts that are left

    def take_longest(most: int) -> int | None:
        """Takes the longest text of at most `most` tokens. Returns its number, or None."""
        index = bisect.bisect_right(lengths, most) - 1
        if index < 0:
            return None
        number = by_length[lengths[index]].pop()
        if not by_length[lengths[index]]:
            del lengths[index]
        return number

    while lengths:
        length, rows = row_length(lengths[-1]), []
        full = max(batch_slots() // length, 1)
        while lengths and len(rows) < full:
            row, left = [], length
            while (number := take_longest(left)) is not None:
                row.append(number)
                left -= len(texts[number])
            rows.append(row)
        size = full
        if len(rows) <= full // 4 and length <= 256:
            size = max(full // SMALL, 1)
        for start in range(0, len(rows), size):
            yield _fill_batch(rows[start : start + size], texts, (size, length), pad)


def row_length(longest: int) -> int:
    """Returns the length of a row for texts of at most `longest` tokens."""
    fitting = [length for length in LENGTHS if 2 * longest <= length]
    return fitting[0] if fitting else max(LENGTHS[-1], 1 << (longest - 1).bit_length())


def batch_slots() -> int:
    """Returns the number of slots of a batch on the default device."""
    return SLOTS.get(jax.default_backend(), ACCELERATOR_SLOTS)


def _fill_batch(
    rows: list[list[int]],
    texts: collections.abc.Sequence[list[int]],
    shape: tuple[int, int],
    pad: int,
) -> PackedBatch:
    """Returns the batch with these texts in each row."""
    ids = np.full(shape, pad, np.int32)
    positions, segments, owners = (np.zeros(shape, np.int32) for _ in range(3))
    numbers: list[int] = []
    for row, members in enumerate(rows):
        start = 0
        for segment, number in enumerate(members, start=1):
            end = start + len(texts[number])
            ids[row, start:end] = texts[number]
            positions[row, start:end] = np.arange(end - start)
            segments[row, start:end] = segment
            owners[row, start:end] = len(numbers)
            numbers.append(number)
            start = end
    return PackedBatch(numbers, ids, positions, segments, owners)
