"""Packing: nothing lost, segments whole, rows that break at sentences."""

import time

import numpy as np
import pytest

from maelm_jax.data import packing


def segments(table, vocabulary):
    """The segments of rows, in order, each a list of ids from `<s>` to before the next one or the padding."""
    result = []
    for row in table.tolist():
        filled = row[: row.index(vocabulary.pad)] if vocabulary.pad in row else row
        assert set(row[len(filled) :]) <= {vocabulary.pad}
        assert filled[0] == vocabulary.bos
        starts = [place for place, i in enumerate(filled) if i == vocabulary.bos]
        result += [filled[start:end] for start, end in zip(starts, [*starts[1:], len(filled)], strict=True)]
    return result


@pytest.mark.parametrize("length", [8, 17, 64, 512])
def test_packing_loses_nothing_and_mixes_no_documents(documents, vocabulary, length):
    chosen = documents[:12]
    table, count = packing.pack(chosen, vocabulary, length)
    found = segments(table, vocabulary)
    assert len(found) == count
    assert all(segment[-1] == vocabulary.eos and len(segment) > 2 for segment in found)
    for document in packing.tokenise(chosen, vocabulary):
        lines = [[i for ids in line for i in ids] for line in document]
        ids = [i for line in lines for i in line]
        collected, ends = [], set()
        while len(collected) < len(ids):  # whole segments add up to the document exactly: none holds a piece of the next
            for i in found.pop(0)[1:]:
                ends.add(len(collected)) if i == vocabulary.eos else collected.append(i)
        assert collected == ids
        assert set(np.cumsum([len(line) for line in lines])) <= ends, "each line ends with </s>"
    assert not found


def test_rows_break_at_sentences(documents, vocabulary):
    """A segment that goes on in the next row ends where a sentence ends, unless the sentence is longer than a row."""
    length = 128
    for text in documents[:30]:
        sentences = [ids for line in packing.tokenise([text], vocabulary)[0] for ids in line if ids]
        if max(map(len, sentences)) + 2 > length:
            continue
        ends = set(np.cumsum([len(ids) for ids in sentences]))
        place = 0
        for segment in segments(packing.pack([text], vocabulary, length)[0], vocabulary):
            place += sum(i not in (vocabulary.bos, vocabulary.eos) for i in segment)
            assert place in ends


def test_a_sentence_that_just_fits_fills_the_row(vocabulary):
    packer = packing.Packer(vocabulary, 16)
    packer.add([[[50] * 14]])
    packer.add([[[60] * 7]])
    packer.add([[[70] * 6]])  # 7 slots are left: too few to begin a segment
    assert packer.finish().tolist() == [[0, *[50] * 14, 2], [0, *[60] * 7, 2, *[1] * 7], [0, *[70] * 6, 2, *[1] * 8]]


def test_fill_at_512_on_the_corpus(documents, vocabulary):
    table, _ = packing.pack(documents, vocabulary, 512)
    assert (table != vocabulary.pad).mean() > 0.94


def test_a_text_without_a_space_is_done_in_proportion_to_its_length(tmp_path):
    """20 MB were never done: the time grew with the square of the length. The work is counted, as times depend on the machine."""
    copied = 0

    class Counted(list):
        def __getitem__(self, index):
            nonlocal copied
            found = list.__getitem__(self, index)
            copied += len(found) if isinstance(index, slice) else 1
            return Counted(found) if isinstance(index, slice) else found

    class Vocabulary:
        bos, pad, eos = 0, 1, 2

    packer = packing.Packer(Vocabulary(), 8)
    packer.add([[Counted(range(3, 100_003))]])
    assert len(packer.finish()) == -(-100_000 // 6)
    assert copied <= 2 * 100_000


def test_two_megabytes_without_a_space_become_rows(vocabulary, tmp_path):
    import random

    text = "".join(random.Random(0).choices("abcdefgh", k=2_000_000))
    began = time.process_time()
    table, _ = packing.pack([text], vocabulary, 64)
    assert (table > 2).sum() > 500_000 and time.process_time() - began < 60, "a second or two"
