"""Packing: nothing lost, segments whole, rows that break at sentences."""

import random
import time

import numpy as np
import pytest

from maelm_jax.data import packing


def segments(table, vocabulary):
    """Returns the segments of rows, each a list of ids from `<s>` to before the next or the padding."""
    result = []
    for row in table.tolist():
        filled = row[: row.index(vocabulary.pad)] if vocabulary.pad in row else row
        assert set(row[len(filled) :]) <= {vocabulary.pad}
        assert filled[0] == vocabulary.bos
        starts = [place for place, i in enumerate(filled) if i == vocabulary.bos]
        ends = [*starts[1:], len(filled)]
        result += [filled[start:end] for start, end in zip(starts, ends, strict=True)]
    return result


@pytest.mark.parametrize("length", [8, 17, 64, 512])
def test_packing_loses_nothing_and_mixes_no_documents(documents, vocabulary, length):
    chosen = documents[:12]
    table = packing.pack(chosen, vocabulary, length)
    found = segments(table, vocabulary)
    assert all(segment[-1] == vocabulary.eos and len(segment) > 2 for segment in found)
    for text in chosen:
        lines = vocabulary.encode_batch(text.split("\n"))
        ids = [i for line in lines for i in line]
        collected, ends = [], set()
        # Whole segments add up to the document exactly: none holds a piece of the next.
        while len(collected) < len(ids):
            for i in found.pop(0)[1:]:
                ends.add(len(collected)) if i == vocabulary.eos else collected.append(i)
        assert collected == ids
        assert set(np.cumsum([len(line) for line in lines])) <= ends, "each line ends with </s>"
    assert not found


@pytest.mark.parametrize("length", [64, 128])
def test_rows_break_at_sentences_unless_much_of_a_row_would_stay_empty(documents, vocabulary, length):
    """A sentence is cut only where its start fills the row, and at most an eighth of a row is empty."""
    cut = 0
    for text in documents[:30]:
        sentences = [ids for line in packing.tokenise([text], vocabulary)[0] for ids in line]
        ends, place = set(np.cumsum([len(ids) for ids in sentences])), 0
        table = packing.pack([text], vocabulary, length)
        for row in table:
            place += np.isin(row, (vocabulary.bos, vocabulary.eos, vocabulary.pad), invert=True).sum()
            if place not in ends:
                assert (row != vocabulary.pad).all()
                cut += 1
        assert ((table[:-1] == vocabulary.pad).sum(axis=1) <= length / 8 + 2).all(), "two slots are for <s> and </s>"
    assert cut > 0


def test_a_sentence_that_just_fits_fills_the_row(vocabulary):
    def repeated(index, count):
        return [[np.full(count, index)]]

    packer = packing.Packer(vocabulary, 16)
    packer.add(repeated(50, 14))
    packer.add(repeated(60, 7))
    packer.add(repeated(70, 6))  # 7 slots are left: too few to begin a segment
    assert packer.take().tolist() == [[0, *[50] * 14, 2], [0, *[60] * 7, 2, *[1] * 7]]
    assert packer.finish().tolist() == [[0, *[70] * 6, 2, *[1] * 8]]
    assert packer.finish().shape == (0, 16)


@pytest.mark.parametrize("length", [64, 128, 512])
def test_rows_of_the_corpus_are_full(documents, vocabulary, length):
    table = packing.pack(documents, vocabulary, length)
    assert (table != vocabulary.pad).mean() > 0.95


def test_half_a_megabyte_without_a_space_become_rows(vocabulary):
    text = "".join(random.Random(0).choices("abcdefgh", k=500_000))
    began = time.process_time()
    table = packing.pack([text], vocabulary, 64)
    assert (table > 2).sum() > 125_000
    assert time.process_time() - began < 15, "a second or less, in proportion to the length"
