"""Packs documents into rows: documents -> lines -> ids -> sentences -> rows of one length.

A segment is `<s>` line `</s>` line `</s>` ... of one document. A row can hold several segments.
When the next sentence does not fit into the row, the segment ends and the row is padded. If more
than an eighth of the row is free, the sentence is cut instead, and fills the row: rows of 64 and
128 tokens that end at sentences are padding in 15 to 20% of their slots. The document goes on in
the next row, in a new segment. Segment numbers and positions are not stored, because a segment
begins at each `<s>`.

A line is encoded as a whole, as in fine-tuning, and cut into sentences afterwards.
"""

import itertools

import numpy as np

from maelm_jax import config
from maelm_jax.data import sources, vocabularies

MINIMUM_SLOTS = 8  # a new segment needs this many free slots, else it begins in the next row
CUT_ABOVE = 1 / 8  # share of a row; where more is free, a sentence is cut
LONGEST_ROW = 512  # tokens, of text that several encoders read

Document = list[list[np.ndarray]]  # lines, each a list of sentences, each int32 [ids]


class Packer:
    """Fills rows of `length` ids, greedily and in order.

    Attributes:
        segments: Number of segments begun so far.
    """

    def __init__(self, vocabulary: vocabularies.Vocabulary, length: int):
        self._bos, self._eos = (np.array([index]) for index in (vocabulary.bos, vocabulary.eos))
        self._pad = vocabulary.pad
        self.length = length
        self.segments = 0
        self._rows: list[np.ndarray] = []
        self._row: list[np.ndarray] = []
        self._used = 0  # slots of the row
        self._open = False  # whether a segment is open; a slot is kept free for its last `</s>`

    def add(self, document: Document):
        """Adds a document."""
        for line in document:
            for ids in line:
                self._add_sentence(ids)
            if line:
                self._append(self._eos)
        self._open = False

    def take(self) -> np.ndarray:
        """Returns the full rows and forgets them, uint32 [rows, length]."""
        rows, self._rows = self._rows, []
        return np.stack(rows) if rows else np.zeros((0, self.length), np.uint32)

    def finish(self) -> np.ndarray:
        """Returns the rows that are left, uint32 [rows, length]. The last row is padded."""
        if self._row:
            self._break()
        return self.take()

    def _add_sentence(self, ids: np.ndarray):
        if not self._open and self.length - self._used < min(MINIMUM_SLOTS, self.length):
            self._break()
        while len(ids) > (free := self._free_slots()):
            is_longer_than_a_row = len(ids) + 2 > self.length
            if free > (0 if is_longer_than_a_row else self.length * CUT_ABOVE):
                self._append_text(ids[:free])
                ids = ids[free:]
            self._break()
        self._append_text(ids)

    def _free_slots(self) -> int:
        """Returns how many ids the row can take, apart from `<s>` and the closing `</s>`."""
        return self.length - self._used - 1 - (not self._open)

    def _append_text(self, ids: np.ndarray):
        if not self._open:
            self._append(self._bos)
            self._open = True
            self.segments += 1
        self._append(ids)

    def _append(self, ids: np.ndarray):
        self._row.append(ids)
        self._used += len(ids)

    def _break(self):
        if self._row[-1] is not self._eos:
            self._append(self._eos)
        row = np.full(self.length, self._pad, np.uint32)
        np.concatenate(self._row, out=row[: self._used], casting="unsafe")
        self._rows.append(row)
        self._row, self._used, self._open = [], 0, False


def tokenise(documents: list[str], vocabulary: vocabularies.Vocabulary) -> list[Document]:
    """Returns the ids of documents, as documents -> lines -> sentences -> ids.

    The ids of the sentences of a line together are those of `vocabulary.encode(line)`.
    """
    lines = [text.split("\n") for text in documents]
    encoded = vocabulary.encode_batch(list(itertools.chain.from_iterable(lines)))
    ids = np.fromiter(itertools.chain.from_iterable(encoded), np.int32)
    line_ends = np.cumsum([len(line) for line in encoded], dtype=np.int64)
    is_end = vocabulary.sentence_ends(ids)
    is_end[line_ends[line_ends > 0] - 1] = True
    ends = np.flatnonzero(is_end) + 1
    sentences = np.split(ids, ends[:-1])
    # The number of sentences up to the end of each line.
    counts = np.searchsorted(ends, line_ends, side="right")
    starts = itertools.chain([0], counts)
    per_line = iter([sentences[start:end] for start, end in zip(starts, counts, strict=False)])
    return [list(itertools.islice(per_line, len(part))) for part in lines]


def pack(documents: list[str], vocabulary: vocabularies.Vocabulary, length: int) -> np.ndarray:
    """Packs documents, whose lines are paragraphs, into rows, uint32 [rows, length]."""
    packer = Packer(vocabulary, length)
    for document in tokenise(documents, vocabulary):
        packer.add(document)
    return packer.finish()


def pack_same_text(
    tokenizers: list[vocabularies.Vocabulary], corpus: config.Corpus, tokens: int, length: int
) -> list[np.ndarray]:
    """Packs the start of a text (`sources.first_texts`) with each vocabulary, int32 [R, length].

    Raises ConfigError if there is no text.
    """
    texts = sources.first_texts(corpus, tokens)
    packed = [pack(texts, vocabulary, length).astype(np.int32) for vocabulary in tokenizers]
    if not all(map(len, packed)):
        raise config.ConfigError("--text has no tokens. Name files with text")
    return packed
