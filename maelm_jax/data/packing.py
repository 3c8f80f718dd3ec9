"""Packs documents into rows: documents -> lines -> sentences -> ids -> rows of one length.

A segment is `<s>` line `</s>` line `</s>` ... of one document. A row can hold several segments.
When the next sentence does not fit into the row, the segment ends and the row is padded. The
document goes on in the next row, in a new segment. Segment numbers and positions are not stored,
because a segment begins at each `<s>`.
"""

import itertools
import typing

import numpy as np

from maelm_jax.data import vocabularies
from maelm_jax.data.documents import sentences

MINIMUM_SLOTS = 8  # a new segment needs this many free slots, else it begins in the next row


class Packed(typing.NamedTuple):
    """Documents as rows."""

    rows: np.ndarray  # uint32 [rows, length]
    segments: int  # number of segments in them


class Packer:
    """Fills rows of `length` ids, greedily and in order."""

    def __init__(self, vocabulary: vocabularies.Vocabulary, length: int):
        self.bos, self.pad, self.eos = vocabulary.bos, vocabulary.pad, vocabulary.eos
        self.length = length
        self.rows: list[list[int]] = []
        self.row: list[int] = []
        self.open = False  # whether a segment is open; a slot is kept free for its last `</s>`
        self.segments = 0

    def add(self, document: list[list[list[int]]]):
        """Adds a document: a list of lines, each a list of sentences, each a list of ids."""
        for line in document:
            line = [ids for ids in line if ids]
            for ids in line:
                self._sentence(ids)
            if line:
                self.row.append(self.eos)
        self.open = False

    def finish(self) -> np.ndarray:
        """Returns all rows, uint32 [rows, length]. The last row is padded."""
        if self.row:
            self._break()
        if not self.rows:
            return np.zeros((0, self.length), np.uint32)
        return np.fromiter(
            itertools.chain.from_iterable(self.rows), np.uint32, len(self.rows) * self.length
        ).reshape(-1, self.length)

    def _sentence(self, ids: list[int]):
        if not self.open and self.length - len(self.row) < min(MINIMUM_SLOTS, self.length):
            self._break()
        if len(ids) > self._free_slots():
            # A sentence that is longer than a row is cut between tokens.
            if len(ids) + 2 > self.length:
                ids = self._fill_rows(ids)
            else:
                self._break()
        self._append(ids)

    def _fill_rows(self, ids: list[int]) -> list[int]:
        """Fills rows with the ids and returns the rest, which fits into the current row."""
        start = 0
        while len(ids) - start > (free := self._free_slots()):
            if free > 0:
                self._append(ids[start : start + free])
                start += free
            self._break()
        return ids[start:]

    def _free_slots(self) -> int:
        """Returns how many ids the row can take, apart from `<s>` and the closing `</s>`."""
        return self.length - len(self.row) - 1 - (not self.open)

    def _append(self, ids: list[int]):
        if not self.open:
            self.row.append(self.bos)
            self.open = True
            self.segments += 1
        self.row += ids

    def _break(self):
        if self.row[-1] != self.eos:
            self.row.append(self.eos)
        self.rows.append(self.row + [self.pad] * (self.length - len(self.row)))
        self.row = []
        self.open = False


def tokenise(
    documents: list[str], vocabulary: vocabularies.Vocabulary
) -> list[list[list[list[int]]]]:
    """Returns the ids of documents, as documents -> lines -> sentences -> ids."""
    cut = [[sentences(line) for line in text.split("\n")] for text in documents]
    ids = iter(
        vocabulary.encode_batch([sentence for lines in cut for line in lines for sentence in line])
    )
    return [[list(itertools.islice(ids, len(line))) for line in lines] for lines in cut]


def pack(documents: list[str], vocabulary: vocabularies.Vocabulary, length: int) -> Packed:
    """Packs documents into rows.

    Args:
        documents: Texts whose lines are paragraphs.
        vocabulary: Turns text into ids.
        length: Ids in a row.
    """
    packer = Packer(vocabulary, length)
    for document in tokenise(documents, vocabulary):
        packer.add(document)
    return Packed(packer.finish(), packer.segments)
