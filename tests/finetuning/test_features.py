"""What the model reads, and what is cut off."""

import itertools

from testing import input_format

from maelm_jax.finetuning import features


def cut_one_by_one(a: int, b: int, room: int) -> tuple[int, int]:
    while a + b > room:
        a, b = (a - 1, b) if a > b else (a, b - 1)
    return a, b


def test_the_longer_sentence_is_cut_first():
    for a, b, room in itertools.product(range(12), range(12), range(1, 15)):
        assert features.kept_sizes((a, b), room) == cut_one_by_one(a, b, room), (a, b, room)
    assert features.kept_sizes((9,), 4) == (4,)


def test_what_the_model_reads(vocabulary):
    rows, _, cut = features.sentences([("the cat", "a dog"), ("the cat " * 20, "a dog")], input_format(vocabulary, 16))
    bos, eos = vocabulary.bos, vocabulary.eos
    assert rows[0].tolist() == [bos, *vocabulary.encode("the cat"), eos, eos, *vocabulary.encode("a dog"), eos]
    assert cut == 1 and len(rows[1]) == 16 and rows[1][-1] == eos and (rows[1] == eos).sum() == 3
    rows, _, _ = features.sentences([("the cat",), ("",)], input_format(vocabulary, 16))
    assert rows[0].tolist() == [bos, *vocabulary.encode("the cat"), eos] and rows[1].tolist() == [bos, eos]
