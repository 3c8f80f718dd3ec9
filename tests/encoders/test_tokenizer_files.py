"""The tokenizer that is exported gives our vocabulary's ids: on real text, on odd text, on every single character."""

import io
import lzma
import random

import pytest
import sentencepiece

from maelm_jax import config
from maelm_jax.data import vocabularies, vocabulary_training
from maelm_jax.encoders import tokenizer_files
from maelm_jax.encoders.mpnet import MPNET


@pytest.fixture(scope="module")
def tokenizer(vocabulary):
    return tokenizer_files.build(vocabulary, MPNET.pair)


def differing(tokenizer, vocabulary, lines) -> list[str]:
    ours = vocabulary.encode_batch(lines)
    theirs = [encoding.ids for encoding in tokenizer.encode_batch(lines)]
    return [line for line, a, b in zip(lines, ours, theirs, strict=True) if [vocabulary.bos, *a, vocabulary.eos] != b]


@pytest.mark.parametrize("line", tokenizer_files.ODD_LINES, ids=ascii)
def test_odd_lines(tokenizer, vocabulary, line):
    assert differing(tokenizer, vocabulary, [line]) == []


def test_literal_special_tokens_are_text(tokenizer, vocabulary):
    ids = tokenizer.encode("<s> a <mask> b </s>").ids
    assert ids[0] == vocabulary.bos and ids[-1] == vocabulary.eos
    assert not set(ids[1:-1]) & set(vocabulary.special_ids)


def test_pairs_are_separated_as_in_fine_tuning(tokenizer, vocabulary):
    a, b = vocabulary.encode("first"), vocabulary.encode("and second")
    eos = vocabulary.eos
    assert tokenizer.encode("first", "and second").ids == [vocabulary.bos, *a, eos, eos, *b, eos]


def test_every_character_by_itself_and_inside_a_word(tokenizer, vocabulary):
    characters = [chr(code) for code in range(0x3000) if not 0xD800 <= code < 0xE000]
    assert differing(tokenizer, vocabulary, characters) == []
    assert differing(tokenizer, vocabulary, [f"ab{character}cd" for character in characters]) == []


def test_random_text(tokenizer, vocabulary):
    draw = random.Random(0)
    letters = [chr(code) for code in range(0x250)]
    lines = ["".join(draw.choice(letters) for _ in range(60)) for _ in range(500)]
    runs = ["".join(draw.choice("ab-= .") * draw.randrange(1, 9) for _ in range(30)) for _ in range(1000)]
    words = ["".join(draw.choice("etaoinshrdlu  .,'\"") for _ in range(80)) for _ in range(1000)]
    assert differing(tokenizer, vocabulary, lines + runs + words) == []


def test_real_text(corpus_file):
    """Every line of the held-out corpus and every cell of the GLUE dev sets, with a vocabulary of that corpus's size and kind."""
    text = lzma.decompress(corpus_file.read_bytes()).decode("utf-8")
    vocabulary = vocabulary_training.train(text.split("\n\n"), config.Vocabulary(size=4096))
    lines = text.split("\n")
    for path in sorted((corpus_file.parent.parent / "glue").glob("*/dev*")):
        content = path.read_bytes()
        content = (lzma.decompress(content) if path.suffix == ".xz" else content).decode("utf-8")
        lines += sorted({cell for line in content.split("\n") for cell in line.split("\t")})
    assert len(lines) > 30_000
    assert differing(tokenizer_files.build(vocabulary, MPNET.pair), vocabulary, lines) == []


def test_other_bpe_models():
    from pydoc_data import topics

    lines = [line for topic in topics.topics.values() for line in topic.split("\n")]
    for options in ({"normalization_rule_name": "nmt_nfkc"}, {"byte_fallback": True}, {"normalization_rule_name": "identity"}):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=700,
            bos_id=0,
            pad_id=1,
            eos_id=2,
            unk_id=3,
            minloglevel=2,
            **options,
        )
        other = vocabularies.SentencePieceVocabulary(model.getvalue())
        assert differing(tokenizer_files.build(other, MPNET.pair), other, [*lines[:500], *tokenizer_files.ODD_LINES]) == [], options


def test_a_vocabulary_without_an_equal_is_refused(tmp_path):
    from pydoc_data import topics

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(topics.topics["if"].split("\n")),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        model_type="char",
        bos_id=0,
        pad_id=1,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    with pytest.raises(tokenizer_files.NoEqual, match="only BPE has an equal Hugging Face tokenizer$"):
        tokenizer_files.write(tmp_path, vocabularies.SentencePieceVocabulary(model.getvalue()), 48, MPNET.pair)


def test_a_tokenizer_json_keeps_its_ids(tmp_path, vocabulary):
    tokenizer_files.write(tmp_path, vocabulary, 48, MPNET.pair)
    taken = vocabularies.load(tmp_path / "tokenizer.json")
    lines = list(tokenizer_files.ODD_LINES)
    assert taken.encode_batch(lines) == vocabulary.encode_batch(lines)
    assert differing(tokenizer_files.build(taken, MPNET.pair), taken, lines) == []
