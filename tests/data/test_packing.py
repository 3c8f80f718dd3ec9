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


def test_rows_break_at_sentences(documents, vocabulary):
    """A segment that goes on in the next row ends where a sentence ends, if it fits into a row."""
    length = 128
    for text in documents[:30]:
        sentences = [ids for line in packing.tokenise([text], vocabulary)[0] for ids in line]
        if max(map(len, sentences)) + 2 > length:
            continue
        ends, place = set(np.cumsum([len(ids) for ids in sentences])), 0
        for segment in segments(packing.pack([text], vocabulary, length), vocabulary):
            place += sum(i not in (vocabulary.bos, vocabulary.eos) for i in segment)
            assert place in ends


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


def test_fill_at_512_on_the_corpus(documents, vocabulary):
    table = packing.pack(documents, vocabulary, 512)
    assert (table != vocabulary.pad).mean() > 0.94


def test_half_a_megabyte_without_a_space_become_rows(vocabulary):
    text = "".join(random.Random(0).choices("abcdefgh", k=500_000))
    began = time.process_time()
    table = packing.pack([text], vocabulary, 64)
    assert (table > 2).sum() > 125_000
    assert time.process_time() - began < 15, "a second or less, in proportion to the length"
