"""Vocabularies: ids in their places, text that comes back, special tokens, words, sentences, offsets."""

import copy
import dataclasses
import io
import json
import os
import pickle

import pytest
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from testing import english
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from maelm_jax import config
from maelm_jax.data import packing, vocabularies, vocabulary_training

TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
BERT_TOKENS = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")
MARKDOWN = ["# Title", "## Part", "### Deep", "#### Deeper", "x = 1 ## comment"] * 50


def byte_level(documents, **settings):
    """A tokenizer as RoBERTa's. Some of its pieces begin with ##."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=[*TOKENS], initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator(documents[:5] + MARKDOWN, trainer)
    model.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), **settings)
    return model


def word_piece(documents):
    """A tokenizer as BERT's."""
    model = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    model.normalizer = normalizers.BertNormalizer(lowercase=True)
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    model.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=900, special_tokens=[*BERT_TOKENS], show_progress=False)
    model.train_from_iterator(documents[:5], trainer)
    return model


def robbert(documents):
    """A tokenizer as RobBERT's: it adds a space before each word, also where the text has one."""
    model = byte_level(documents, trim_offsets=True, add_prefix_space=True)
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Whitespace(),
            pre_tokenizers.ByteLevel(add_prefix_space=True),
            pre_tokenizers.Punctuation(),
        ]
    )
    return model


def llama(documents):
    """A tokenizer whose normalizer puts a space before a text."""
    model = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=[*TOKENS], show_progress=False)
    model.train_from_iterator(documents[:5], trainer)
    return model


def metaspace(documents):
    model = llama(documents)
    model.normalizer, model.pre_tokenizer = normalizers.NFC(), pre_tokenizers.Metaspace()
    return model


KINDS = [byte_level, word_piece, robbert, llama, metaspace]


@pytest.fixture(params=KINDS, ids=lambda make: make.__name__)
def of_kind(request, documents, tmp_path):
    """A vocabulary of each kind of tokenizer.json."""
    request.param(documents).save(str(tmp_path / "tokenizer.json"))
    return vocabularies.load(tmp_path)


def loaded(model, tmp_path):
    model.save(str(tmp_path / "tokenizer.json"))
    return vocabularies.load(tmp_path / "tokenizer.json")


# ---- ids and text


def test_special_ids_are_the_references(vocabulary):
    special = (vocabulary.bos, vocabulary.pad, vocabulary.eos, vocabulary.unk, vocabulary.mask)
    assert special == (0, 1, 2, 3, 1999) and vocabulary.size == 2000
    assert [vocabulary.pieces[i] for i in special] == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def test_ids_come_back_as_the_normalised_text(vocabulary, documents):
    lines = [line for text in documents[:20] for line in text.split("\n")]

    def normalised(line: str) -> str:
        return vocabulary.model.normalize(line).replace("▁", " ").strip()

    for line, ids in zip(lines, vocabulary.encode_batch(lines), strict=True):
        if vocabulary.unk not in ids:
            assert vocabulary.decode(ids) == normalised(line)
            assert normalised(line) == normalised(line.upper()).replace("ß", "ss")


def test_a_cased_vocabulary_keeps_case(documents):
    cased = vocabulary_training.train(documents[:40], config.Vocabulary(size=1000, cased=True))
    assert cased.decode(cased.encode("The London Gazette")) == "The London Gazette"


def test_saved_and_pickled_vocabularies_are_the_same(vocabulary, tmp_path):
    vocabulary.save(tmp_path / "vocabulary")
    for other in (vocabularies.load(tmp_path / "vocabulary"), pickle.loads(pickle.dumps(vocabulary))):
        assert other.fingerprint == vocabulary.fingerprint
        assert other.encode("Some text.") == vocabulary.encode("Some text.")


def test_a_plan_counts_the_ids_of_the_named_file(vocabulary, tmp_path):
    vocabulary.save(tmp_path)
    named = vocabularies.with_size_of_file(config.Vocabulary(size=32768, file=str(tmp_path)))
    assert named == config.Vocabulary(size=2000, file=str(tmp_path))
    assert vocabularies.with_size_of_file(config.Vocabulary(size=32768)).size == 32768


# ---- special tokens in text


def test_special_tokens_of_the_model_are_ordinary_text(vocabulary, of_kind):
    for one in (vocabulary, of_kind):
        pieces = one.pieces
        text = "a " + " and ".join(pieces[i] for i in one.special_ids) + " b"
        ids = one.encode(text)
        assert not set(ids) & {one.bos, one.pad, one.eos, one.mask}
    assert vocabulary.decode(vocabulary.encode("the <mask> and <s>")) == "the <mask> and <s>"


def test_added_tokens_are_read_as_transformers_reads_them(documents, tmp_path):
    """Entity markers, with the spaces around them as the file says. Not the five of the model."""
    model = byte_level(documents)
    model.add_special_tokens([tokenizers.AddedToken("[E1]", rstrip=True)])
    model.add_special_tokens([tokenizers.AddedToken("[/E1]", lstrip=True)])
    model.add_tokens(["covid", tokenizers.AddedToken("Ngram", normalized=False)])
    text = "See [E1] Bill [/E1] has covid, Ngram."
    expected = model.encode(text, add_special_tokens=False).ids
    vocabulary = loaded(model, tmp_path)
    assert vocabulary.encode(text) == expected == vocabulary.encode_with_offsets(text).ids
    assert vocabulary.encode_batch([text])[0] == expected
    for token in ("[E1]", "[/E1]", "covid", "Ngram"):
        assert model.token_to_id(token) in expected
    assert vocabulary.mask not in vocabulary.encode("[E1] a <mask>")
    assert vocabulary.mask in vocabulary.encode_masked("[E1] a [MASK]")


def test_a_model_file_without_mask_gets_one_at_the_end(vocabulary, tmp_path):
    proto = sentencepiece_model_pb2.ModelProto.FromString(vocabulary.content)
    del proto.pieces[-1]
    (tmp_path / "own.model").write_bytes(proto.SerializeToString())
    assert vocabularies.load(tmp_path / "own.model").mask == 1999
    for name in ("<mask>", "[CLS]", "[SEP]", "[PAD]"):
        proto.pieces.add(piece=name, type=proto.SentencePiece.USER_DEFINED)
    (tmp_path / "own.model").write_bytes(proto.SerializeToString())
    own = vocabularies.load(tmp_path / "own.model")
    ids = own.encode("a <mask>, [CLS] and [SEP], then [PAD]")
    assert not set(ids) & {own.mask, own.bos, own.eos, own.pad}


# ---- words, sentences, offsets


def test_where_words_go_on(vocabulary, of_kind):
    for one in (vocabulary, of_kind):
        continues = one.special.continues_word
        ids = one.encode("an uncommonly reimplemented ### word")
        assert len(continues) == one.size
        words = sum(not continues[i] for i in ids)
        # WordPiece takes each # for a word. A byte-level text does not begin with a space.
        assert words in {4, 5, 7} and words < len(ids)
        spaces = [place for place, i in enumerate(ids) if not continues[i]]
        assert 0 in spaces or one.pieces[ids[0]] == "an"


def test_continuations_come_from_the_file_and_not_from_a_spelling(documents, tmp_path):
    vocabulary = loaded(byte_level(documents), tmp_path)
    pieces = vocabulary.pieces
    assert any(piece.startswith("##") and len(piece) > 2 for piece in pieces)
    for piece, continues in zip(pieces, vocabulary.special.continues_word, strict=True):
        assert continues is not piece.startswith("Ġ")


@pytest.fixture(scope="module")
def scripts(documents):
    """A vocabulary of text in several scripts."""
    texts = ["彼は来た。彼女は行った！本当？はい。", "他说：「好。」然后走了。", "वह आया। वह गई।", "هل جاء؟ نعم."]
    return vocabulary_training.train(documents[:10] + texts * 99, config.Vocabulary(size=1000))


@pytest.mark.parametrize(
    ("line", "sentences"),
    [
        ("He came. She went.", ["He came.", "She went."]),
        ('"He came?" She asked. (So it is!) Yes.', ['"he came?"', "she asked.", "(so it is!)", "yes."]),
        ("It costs 3.14 in e.g. Rome", ["it costs 3.14 in e.g.", "rome"]),
        ("彼は来た。彼女は行った！本当？はい。", ["彼は来た。", "彼女は行った!", "本当?", "はい。"]),
        ("他说：「好。」然后走了。", ["他说:「好。」", "然后走了。"]),
        ("वह आया। वह गई।", ["वह आया।", "वह गई।"]),
        ("هل جاء؟ نعم.", ["هل جاء؟", "نعم."]),
        ("", []),
        ("word", ["word"]),
    ],
)
def test_where_sentences_end(scripts, line, sentences):
    ((found,),) = [packing.tokenise([line], scripts)[0]]
    assert [scripts.decode(ids).strip() for ids in found] == [scripts.decode(scripts.encode(sentence)).strip() for sentence in sentences]


def test_the_sentences_of_a_line_are_its_ids(of_kind, vocabulary, documents):
    """Also where a vocabulary puts a space before each text that it encodes."""
    texts = [*documents[5:9], "", "a\n\nb.", "\n", "One. Two!  Three?"]
    for one in (of_kind, vocabulary):
        found = packing.tokenise(texts, one)
        for text, document in zip(texts, found, strict=True):
            for line, sentences in zip(text.split("\n"), document, strict=True):
                assert [i for ids in sentences for i in ids] == one.encode(line)
        assert max(len(line) for document in found for line in document) > 5


def test_offsets_cover_each_character_and_begin_at_it(of_kind, vocabulary):
    text = "I saw a cabinet (in October 1973), 5 . naïve Y"
    for one in (of_kind, vocabulary):
        ids, offsets = one.encode_with_offsets(text)
        assert ids == one.encode(text)
        covered = {place for start, end in offsets for place in range(start, end)}
        assert {place for place, character in enumerate(text) if not character.isspace()} <= covered
        assert all(start == end or not text[start].isspace() for start, end in offsets)


def test_a_tokenizer_whose_offsets_leave_out_characters_is_refused(documents, tmp_path, monkeypatch):
    byte_level(documents).save(str(tmp_path / "tokenizer.json"))
    original = vocabularies.TokenizerJsonVocabulary.encode_with_offsets

    def late(self, text):
        ids, offsets = original(self, text)
        return vocabularies.Encoding(ids, [(min(start + 1, end), end) for start, end in offsets])

    monkeypatch.setattr(vocabularies.TokenizerJsonVocabulary, "encode_with_offsets", late)
    assert "offsets" in refused(tmp_path / "tokenizer.json")


# ---- files that are no vocabulary


@pytest.fixture(scope="module")
def content(documents):
    """A tokenizer.json that loads."""
    return json.loads(metaspace(documents).to_str())


def refused(path) -> str:
    with pytest.raises(config.ConfigError) as caught:
        vocabularies.load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("file", ["tokenizer.json", "sentencepiece.model"])
@pytest.mark.parametrize("damage", [b"", b"null", b'{"model": {"type": "BPE"}}', b"\xff\xfe\x00\x01"])
def test_a_file_of_anything_else(tmp_path, file, damage):
    (tmp_path / file).write_bytes(damage)
    refused(tmp_path / file)
    with pytest.raises(config.ConfigError, match="absent"):
        vocabularies.load(tmp_path / f"absent-{file}")
    with pytest.raises(config.ConfigError):
        vocabularies.load(tmp_path.parent)


def test_special_tokens_that_are_missing_or_share_an_id(content, tmp_path, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    for name in ("<mask>", "<pad>"):
        changed = copy.deepcopy(content)
        changed["added_tokens"] = []
        if name == "<mask>":
            del changed["model"]["vocab"][name]
        else:
            changed["model"]["vocab"][name] = changed["model"]["vocab"]["<s>"]
        (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
        assert {"<mask>": "<mask>", "<pad>": "same id"}[name] in refused(tmp_path / "tokenizer.json")
    assert "TOKENIZERS_PARALLELISM" not in os.environ, "the user's own tokenizers keep their threads"


def test_a_vocabulary_that_cannot_encode_an_unknown_character(tmp_path):
    """WordLevel without its unknown token loads, and fails at the first text."""
    words = {name: number for number, name in enumerate(TOKENS)} | {"a": 5}
    model = tokenizers.Tokenizer(models.WordLevel(words, unk_token="[nothing]"))
    model.save(str(tmp_path / "tokenizer.json"))
    refused(tmp_path / "tokenizer.json")


def test_a_panic_of_the_library_is_one_line(content, tmp_path, monkeypatch):
    """Panics of Rust come as BaseException, not Exception."""

    class PanicException(BaseException):
        pass

    def panic(*_):
        raise PanicException("index out of bounds\nat line 3")

    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    monkeypatch.setattr(vocabularies.TokenizerJsonVocabulary, "__init__", panic)
    assert "index out of bounds at line 3" in refused(tmp_path / "tokenizer.json")


# The two files of the published scripts.


@pytest.fixture(scope="module")
def published_model() -> bytes:
    """A SentencePiece model as its own trainer makes it: <unk> 0, <s> 1, </s> 2, and neither <pad> nor <mask>."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(english()), model_writer=model, vocab_size=400, model_type="unigram", hard_vocab_limit=False, minloglevel=2
    )
    return model.getvalue()


def fairseq_ids(words: list[str]) -> dict[str, int]:
    """The ids that fairseq's dictionary gives to the words of its file."""
    names = {"<s>": "[CLS]", "<pad>": "[PAD]", "</s>": "[SEP]", "<unk>": "[UNK]", "<mask>": "[MASK]"}
    symbols = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", *words, "[MASK]"]
    return {word: number for number, word in enumerate(dict.fromkeys(names.get(symbol, symbol) for symbol in symbols))}


@pytest.mark.parametrize("name", ["sp.model", "sentencepiece.model"])
@pytest.mark.parametrize("order", ["of the model", "with counts, filled up", "another"])
def test_ids_are_those_of_the_dictionary_beside_the_model(published_model, tmp_path, name, order):
    model = sentencepiece.SentencePieceProcessor(model_proto=published_model)
    words = [model.id_to_piece(number) for number in range(len(model))]
    lines = list(words)
    if order == "another":
        lines = lines[:3] + lines[:2:-1]
    elif order != "of the model":
        words = lines = [*words[3:], "madeupword0000"]
        lines = [f"{word} {len(lines) - number}" for number, word in enumerate(lines)]
    (tmp_path / name).write_bytes(published_model)
    (tmp_path / "dict.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    vocabulary = vocabularies.load(tmp_path)
    ids = fairseq_ids([line.rsplit(" ", 1)[0] for line in lines])
    assert vocabulary.size == len(ids) and dataclasses.astuple(vocabulary.special)[:5] == (0, 1, 2, 3, len(ids) - 1)
    for text in english()[:20]:
        expected = [ids.get(piece, ids["[UNK]"]) for piece in model.encode(text, out_type=str)]
        assert vocabulary.encode(text) == expected
    again = vocabularies.load(vocabulary.save(tmp_path / "saved"))
    assert again.fingerprint == vocabulary.fingerprint


@pytest.mark.parametrize("change", ["a word more", "a word less"])
def test_a_dictionary_of_another_model_is_refused(published_model, tmp_path, change):
    model = sentencepiece.SentencePieceProcessor(model_proto=published_model)
    words = [model.id_to_piece(number) for number in range(len(model))]
    words = [*words, "zzzz"] if change == "a word more" else words[:-1]
    (tmp_path / "sp.model").write_bytes(published_model)
    (tmp_path / "dict.txt").write_text("\n".join(words), encoding="utf-8")
    with pytest.raises(config.ConfigError, match=r"dict\.txt") as caught:
        vocabularies.load(tmp_path)
    assert "\n" not in str(caught.value)
