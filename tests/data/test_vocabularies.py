"""The vocabulary: ids in their places, text that comes back, special tokens that text cannot forge, training that does not depend on order."""

import copy
import json
import os
import pickle

import pytest
import tokenizers
from sentencepiece import sentencepiece_model_pb2

from maelm_jax import config
from maelm_jax.data import vocabularies, vocabulary_training
from maelm_jax.data.documents import sentences


@pytest.fixture(scope="session")
def trained(documents):
    return vocabulary_training.train(documents, config.Vocabulary(size=2000))


def test_where_words_go_on(trained):
    special = trained.special
    ids = trained.encode("an uncommonly long-winded reimplementation")
    words = sum(not special.continues_word[i] for i in ids)
    assert words == 4 < len(ids), "one piece of each word begins it"
    assert len(special.continues_word) == trained.size and special.mask == trained.mask


def test_a_plan_counts_the_ids_of_the_named_file(trained, tmp_path):
    trained.save(tmp_path)
    named = vocabularies.with_size_of_file(config.Vocabulary(size=32768, file=str(tmp_path)))
    assert named == config.Vocabulary(size=2000, file=str(tmp_path))
    assert vocabularies.with_size_of_file(config.Vocabulary(size=32768)).size == 32768
    with pytest.raises(config.ConfigError, match="no vocabulary .*missing.model. Name a SentencePiece"):
        vocabularies.with_size_of_file(config.Vocabulary(file=str(tmp_path / "missing.model")))


def test_special_ids_are_the_references(trained):
    assert (trained.bos, trained.pad, trained.eos, trained.unk, trained.mask, trained.size) == (0, 1, 2, 3, 1999, 2000)
    assert [trained.model.id_to_piece(i) for i in (0, 1, 2, 3, 1999)] == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def test_literal_special_tokens_are_ordinary_text(trained):
    text = "the <mask> and <s> and </s> and <pad> and <unk>, <mask>"
    ids = trained.encode(text)
    assert not set(ids) & set(trained.special_ids)
    assert trained.decode(ids) == text


def test_ids_come_back_as_the_normalised_text(trained, documents):
    lines = [line for text in documents[:20] for line in text.split("\n")]

    def normalised(line: str) -> str:
        return trained.model.normalize(line).replace("▁", " ").strip()

    for line, ids in zip(lines, trained.encode_batch(lines), strict=True):
        if trained.unk not in ids:
            assert trained.decode(ids) == normalised(line)
            assert normalised(line) == normalised(line.upper()).replace("ß", "ss")


def test_sentences_join_to_the_line_and_encode_alike(trained, documents):
    lines = [line for text in documents for line in text.split("\n")]
    differing = 0
    for line in lines:
        parts = sentences(line)
        assert "".join(parts) == line and all(part[0].isspace() for part in parts[1:]), "white space begins the next sentence"
        differing += [i for ids in trained.encode_batch(parts) for i in ids] != trained.encode(line)
    assert differing <= 0.001 * len(lines), "cutting a line into sentences changes its ids"


def test_a_cased_vocabulary_keeps_case(documents):
    cased = vocabulary_training.train(documents[:40], config.Vocabulary(size=1000, cased=True))
    assert cased.decode(cased.encode("The London Gazette")) == "The London Gazette"


def test_saved_and_pickled_vocabularies_are_the_same(trained, tmp_path):
    trained.save(tmp_path / "vocabulary")
    for vocabulary in (vocabularies.load(tmp_path / "vocabulary"), pickle.loads(pickle.dumps(trained))):
        assert vocabulary.fingerprint == trained.fingerprint
        assert vocabulary.encode("Some text.") == trained.encode("Some text.")


def test_a_model_file_without_mask_gets_one_at_the_end(trained, tmp_path):
    proto = sentencepiece_model_pb2.ModelProto.FromString(trained.content)
    del proto.pieces[-1]
    (tmp_path / "own.model").write_bytes(proto.SerializeToString())
    assert vocabularies.load(tmp_path / "own.model").mask == 1999
    proto.pieces.add(piece="<mask>", type=proto.SentencePiece.USER_DEFINED)
    (tmp_path / "own.model").write_bytes(proto.SerializeToString())
    assert 1999 not in vocabularies.load(tmp_path / "own.model").encode("a <mask> here")
    kinds = proto.SentencePiece
    for name in ("[CLS]", "[SEP]", "[PAD]"):
        proto.pieces.add(piece=name, type=kinds.USER_DEFINED)
    (tmp_path / "own.model").write_bytes(proto.SerializeToString())
    loaded = vocabularies.load(tmp_path / "own.model")
    assert not set(loaded.encode("write [CLS] and [SEP], then [PAD]")) & {loaded.bos, loaded.eos, loaded.pad}


@pytest.mark.parametrize("names", [("<s>", "<pad>", "</s>", "<unk>", "<mask>"), ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")])
def test_a_tokenizer_json_has_the_same_interface(documents, tmp_path, names):
    import tokenizers

    model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=names[3]))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, special_tokens=list(names), initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator(documents[:5], trainer)
    model.save(str(tmp_path / "tokenizer.json"))
    loaded = vocabularies.load(tmp_path / "tokenizer.json")
    assert (loaded.bos, loaded.pad, loaded.eos, loaded.unk, loaded.mask) == (0, 1, 2, 3, 4)
    text = f"A literal {names[4]} here. And {names[0]}"
    ids = pickle.loads(pickle.dumps(loaded)).encode(text)
    assert not set(ids) & set(loaded.special_ids)
    assert loaded.decode([0, *ids, 2, 1]) == text
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != names[4]]
    del content["model"]["vocab"][names[4]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(config.ConfigError, match=r"tokenizer.json cannot be read as tokenizer.json: it has no special token <mask>"):
        vocabularies.load(tmp_path / "tokenizer.json")


def test_a_file_that_is_no_vocabulary_is_an_error(tmp_path):
    (tmp_path / "bad.model").write_bytes(b"\xff\xfe nothing")
    (tmp_path / "bad.json").write_text("{}")
    for name in ("bad.model", "bad.json", "absent.model"):
        with pytest.raises(config.ConfigError, match=name):
            vocabularies.load(tmp_path / name)


TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


@pytest.fixture(scope="module")
def content():
    """A tokenizer.json that loads."""
    from pydoc_data import topics

    model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=list(TOKENS), show_progress=False)
    model.train_from_iterator([topics.topics["for"]], trainer)
    return json.loads(model.to_str())


def refused(path) -> str:
    with pytest.raises(config.ConfigError) as caught:
        vocabularies.load(path)
    said = str(caught.value)
    assert f"{path} cannot be read as " in said and "Correct it, or name another one" in said and "\n" not in said and len(said) < 500
    return said


def test_the_file_of_these_tests_loads(content, tmp_path, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert vocabularies.load(tmp_path / "tokenizer.json").size == len(content["model"]["vocab"])
    assert "TOKENIZERS_PARALLELISM" not in os.environ, "the user's own tokenizers keep their threads"


WHOLE = {
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "text": b'"tokenizer"',
    "deep": b"[" * 100_000,
    "digits": b"9" * 5000,
    "binary": b"\xff\xfe\x00\x01",
    "surrogate": b'{"version": "\\ud800"}',
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("file", ["tokenizer.json", "sentencepiece.model"])
def test_a_file_of_anything_else(tmp_path, name, file):
    (tmp_path / file).write_bytes(WHOLE[name])
    assert file in refused(tmp_path / file)


CHANGES = {
    "model": [None, [], 3, "BPE", {"type": "BPE"}, {"type": "Nothing", "vocab": {}}, {"type": "WordLevel", "vocab": {}, "unk_token": "<unk>"}],
    "added_tokens": [None, {}, 3, [3], [{"id": "0", "content": "<s>"}], [{"id": -1, "content": "<s>"}]],
    "normalizer": [3, [], {"type": "Nothing"}, {"type": "Replace"}],
    "pre_tokenizer": [3, {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}],
}


@pytest.mark.parametrize("key,value", [(key, value) for key, values in CHANGES.items() for value in values], ids=str)
def test_a_tokenizer_json_with_a_field_of_another_type(content, tmp_path, key, value):
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {key: value}))
    refused(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("number", [2**32 - 1, 2**32, 2**22, -1, 1.5, "7", None, 10**5000 // 10**4000])
def test_ids_that_no_table_can_have(content, tmp_path, number):
    changed = copy.deepcopy(content)
    changed["model"]["vocab"]["zz"] = number
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    said = refused(tmp_path / "tokenizer.json")
    if number in (2**32 - 1, 2**22):
        assert f"a token of id {number}" in said


def test_special_tokens_that_share_an_id(content, tmp_path):
    changed = copy.deepcopy(content)
    changed["added_tokens"] = []
    changed["model"]["vocab"]["<pad>"] = changed["model"]["vocab"]["<s>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    assert "same id" in refused(tmp_path / "tokenizer.json")


def test_a_vocabulary_that_cannot_encode_an_unknown_character(tmp_path):
    """WordLevel without its unknown token loads, and fails at the first text."""
    words = {name: number for number, name in enumerate(TOKENS)} | {"a": 5}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[nothing]"))
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
    monkeypatch.setattr(vocabularies.TokenizerJsonVocabulary, "__init__", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        vocabularies.load(tmp_path / "tokenizer.json")


def test_a_sentencepiece_model_without_its_parts(tmp_path):
    proto = sentencepiece_model_pb2.ModelProto()
    for name, kind in (("<unk>", proto.SentencePiece.UNKNOWN), ("a", proto.SentencePiece.NORMAL), ("a", proto.SentencePiece.NORMAL)):
        proto.pieces.add(piece=name, score=0.0, type=kind)
    (tmp_path / "twice.model").write_bytes(proto.SerializeToString())
    refused(tmp_path / "twice.model")
    proto = sentencepiece_model_pb2.ModelProto()
    proto.pieces.add(piece="a", score=0.0)
    (tmp_path / "without.model").write_bytes(proto.SerializeToString())
    assert "unk is not defined" in refused(tmp_path / "without.model")
