"""Vocabulary files of wrong types: one line that names the file, whatever the library underneath makes of them."""

import copy
import json

import pytest
import tokenizers

from maelm_jax import config
from maelm_jax.data import vocabulary as vocabularies

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
    assert "Vocabulary.file" in said and "\n" not in said and len(said) < 500
    return said


def test_the_file_of_these_tests_loads(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert vocabularies.load(tmp_path / "tokenizer.json").size == len(content["model"]["vocab"])


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
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    for name, kind in (("<unk>", proto.SentencePiece.UNKNOWN), ("a", proto.SentencePiece.NORMAL), ("a", proto.SentencePiece.NORMAL)):
        proto.pieces.add(piece=name, score=0.0, type=kind)
    (tmp_path / "twice.model").write_bytes(proto.SerializeToString())
    refused(tmp_path / "twice.model")
    proto = sentencepiece_model_pb2.ModelProto()
    proto.pieces.add(piece="a", score=0.0)
    (tmp_path / "without.model").write_bytes(proto.SerializeToString())
    assert "unk is not defined" in refused(tmp_path / "without.model")
