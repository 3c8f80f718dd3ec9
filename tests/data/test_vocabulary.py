"""The vocabulary: ids in their places, text that comes back, special tokens that text cannot forge, training that does not depend on order."""

import json
import pickle

import pytest

from maelm_jax import config
from maelm_jax.data import vocabulary as vocabularies
from maelm_jax.data import vocabulary_training
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


def test_the_order_of_documents_changes_nothing(documents):
    settings = config.Vocabulary(size=1000, sample_megabytes=0.3)
    one, other = (vocabulary_training.train(texts, settings) for texts in (documents, documents[::-1]))
    assert one.fingerprint == other.fingerprint


def test_sample_is_by_hash_and_within_its_size(documents):
    chosen = vocabulary_training.sample(documents, 0.3)
    assert set(chosen) == set(vocabulary_training.sample(documents[::-1], 0.3))
    assert 0.2e6 < sum(map(len, chosen)) <= 0.3e6


def test_saved_and_pickled_vocabularies_are_the_same(trained, tmp_path):
    trained.save(tmp_path / "vocabulary")
    for copy in (vocabularies.load(tmp_path / "vocabulary"), pickle.loads(pickle.dumps(trained))):
        assert copy.fingerprint == trained.fingerprint
        assert copy.encode("Some text.") == trained.encode("Some text.")


def test_a_model_file_without_mask_gets_one_at_the_end(trained, tmp_path):
    proto = vocabularies.sentencepiece_model_pb2.ModelProto.FromString(trained.content)
    del proto.pieces[-1]
    (tmp_path / "own.model").write_bytes(proto.SerializeToString())
    assert vocabularies.load(tmp_path / "own.model").mask == 1999
    proto.pieces.add(piece="<mask>", type=proto.SentencePiece.USER_DEFINED)
    (tmp_path / "own.model").write_bytes(proto.SerializeToString())
    assert 1999 not in vocabularies.load(tmp_path / "own.model").encode("a <mask> here")


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
    with pytest.raises(config.ConfigError, match="has no token <mask>"):
        vocabularies.load(tmp_path / "tokenizer.json")


def test_a_vocabulary_larger_than_the_corpus_supports_says_what_is_possible(documents):
    with pytest.raises(config.ConfigError, match=r"larger than the corpus supports: set Vocabulary.size to at most \d+") as caught:
        vocabulary_training.train(documents[:3], config.Vocabulary(size=60000))
    most = int(str(caught.value).split("at most ")[1].split()[0])
    assert vocabulary_training.train(documents[:3], config.Vocabulary(size=most)).size == most


def test_a_file_that_is_no_vocabulary_is_an_error(tmp_path):
    (tmp_path / "bad.model").write_bytes(b"\xff\xfe nothing")
    (tmp_path / "bad.json").write_text("{}")
    for name in ("bad.model", "bad.json", "absent.model"):
        with pytest.raises(config.ConfigError, match=name):
            vocabularies.load(tmp_path / name)
