"""Packing: nothing lost, segments whole, rows that break at sentences."""

import itertools
import random

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from maelm_jax import config
from maelm_jax.data import packing

SPECIAL = config.SpecialIds(bos=0, pad=1, eos=2, unk=3, mask=4)
SENTENCES = strategies.integers(1, 90)  # tokens
DOCUMENTS = strategies.lists(strategies.lists(strategies.lists(SENTENCES, max_size=6), max_size=4), max_size=6)  # documents, lines, sentences


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


@hypothesis.given(DOCUMENTS, strategies.integers(8, 80), strategies.booleans())
def test_any_documents_come_back_out_of_their_rows(sizes, length, is_taken_early):
    """Each token has an id of its own, so that the order and the place of each sentence show."""
    fresh = itertools.count(5)
    documents = [[[np.array(list(itertools.islice(fresh, size))) for size in line] for line in lines] for lines in sizes]
    packer, tables = packing.Packer(SPECIAL, length), []
    for document in documents:
        packer.add(document)
        tables += [packer.take()] if is_taken_early else []
    table = np.concatenate([*tables, packer.finish()])
    assert table.shape[1] == length
    found = segments(table, SPECIAL)
    assert packer.segments == len(found)
    assert all(segment[-1] == SPECIAL.eos and len(segment) > 2 for segment in found)
    for document in documents:
        sentences = [ids.tolist() for line in document for ids in line]
        text, ends = [], set()
        while len(text) < sum(map(len, sentences)):
            for token in found.pop(0)[1:]:
                ends.add(len(text)) if token == SPECIAL.eos else text.append(token)
        assert text == [token for sentence in sentences for token in sentence], "a segment holds one document"
        assert set(np.cumsum([sum(map(len, line)) for line in document])) - {0} <= ends, "each line ends with </s>"
    assert not found
    check_that_rows_are_full(table, documents, length)


def check_that_rows_are_full(table, documents, length):
    """Checks that only the last row is far from full, and that a sentence is cut only where it fills the row."""
    begins = {int(ids[0]) for document in documents for line in document for ids in line}
    empty = (table == SPECIAL.pad).sum(axis=1)
    assert (empty[:-1] <= max(length / 8 + 2, packing.MINIMUM_SLOTS - 1)).all(), "two slots are for <s> and </s>"
    for row, following in itertools.pairwise(table):
        if following[1] not in begins:
            assert row[-1] == SPECIAL.eos


@pytest.mark.parametrize("length", [17, 512])
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


def test_rows_of_the_corpus_are_full(documents, vocabulary):
    tokenised = packing.tokenise(documents, vocabulary)
    for length in (64, 128, 512):
        packer = packing.Packer(vocabulary, length)
        for document in tokenised:
            packer.add(document)
        assert (packer.finish() != vocabulary.pad).mean() > 0.95, length


def test_half_a_megabyte_without_a_space_become_rows(vocabulary):
    text = "".join(random.Random(0).choices("abcdefgh", k=500_000))
    table = packing.pack([text], vocabulary, 64)
    assert (table > 2).sum() > 125_000
