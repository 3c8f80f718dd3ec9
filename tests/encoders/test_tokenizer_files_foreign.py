"""Folders whose tokenizer says something else than ours would guess: the ids of transformers, or one line."""

import json
import shutil

import numpy as np
import pytest
import tokenizers as library
from tokenizers import models, normalizers, pre_tokenizers, processors

from maelm_jax import config, embed, export
from maelm_jax.data import vocabularies
from maelm_jax.encoders import source, tokenizer_files, weight_files
from maelm_jax.encoders.encoder import Encoder
from maelm_jax.encoders.mpnet import MPNET

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", "<unk>", "a", "text", "##s"]


def bert_tokenizer(words, special, unknown="[UNK]", **normalizer):
    tokenizer = library.Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(**normalizer)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(special)
    return tokenizer


def test_special_tokens_go_before_pieces_of_the_same_meaning(tmp_path):
    """A BERT vocabulary in which <s>, </s> and <unk> are ordinary pieces."""
    bert_tokenizer(WORDS, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]).save(str(tmp_path / "tokenizer.json"))
    loaded = vocabularies.load(tmp_path)
    assert (loaded.bos, loaded.pad, loaded.eos, loaded.unk, loaded.mask) == (2, 0, 3, 1, 4)


def test_unk_is_the_token_that_unknown_text_gets(tmp_path):
    """As MPNet, which has <unk> and [UNK]."""
    words = ["<s>", "<pad>", "</s>", "<unk>", "a", "[UNK]", "<mask>"]
    bert_tokenizer(words, [word for word in words if word != "a"]).save(str(tmp_path / "tokenizer.json"))
    loaded = vocabularies.load(tmp_path)
    assert loaded.encode("a zebra") == [4, 5] and loaded.unk == 5


@pytest.mark.parametrize(
    "stated,stored,message",
    [
        ({"do_lower_case": True}, {"lowercase": False}, "do_lower_case True, but tokenizer.json was made with False"),
        ({"do_lower_case": False}, {}, "do_lower_case False, but tokenizer.json was made with True"),
        ({}, {"lowercase": False}, r"do_lower_case True \(the default\), but tokenizer.json was made with False"),
        ({"strip_accents": False}, {}, "strip_accents False, but tokenizer.json was made with None"),
        ({"strip_accents": None}, {"strip_accents": False}, "strip_accents None, but tokenizer.json was made with False"),
        ({"tokenize_chinese_chars": False}, {}, "tokenize_chinese_chars False, but tokenizer.json was made with True"),
        ({"tokenizer_class": "TokenizersBackend"}, {"lowercase": False}, None),
        ({"do_lower_case": False, "strip_accents": True}, {"lowercase": False, "strip_accents": True}, None),
        ({}, {}, None),
    ],
)
def test_a_normalization_that_the_files_contradict_is_refused(workdirs, tmp_path, stated, stored, message):
    folder = tmp_path / "out"
    assert export.main([f"--workdir={workdirs['roberta']}", f"--output={folder}", "--no-verify"]) == 0
    (folder / "sentencepiece.model").unlink()
    content = json.loads((folder / "config.json").read_text())
    bert_tokenizer(WORDS, WORDS[:5], **stored).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"} | stated))
    (folder / "config.json").write_text(json.dumps(content | {"model_type": "bert", "architectures": ["BertModel"], "type_vocab_size": 1}))
    if message is None:
        assert source.find(str(folder)).kind == "bert folder"
        return
    with pytest.raises(config.ConfigError, match=message):
        source.find(str(folder))


def test_tokens_that_were_added_to_an_export_are_read(workdirs, tmp_path):
    """transformers rewrites tokenizer.json and leaves sentencepiece.model as it was."""
    folder = tmp_path / "out"
    assert export.main([f"--workdir={workdirs['roberta']}", f"--output={folder}", "--no-verify"]) == 0
    assert source.find(str(folder)).vocabulary == str(folder)
    tokenizer = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    tokenizer.add_tokens(["quinine"])
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / weight_files.WEIGHTS
    tensors = {name: np.array(value) for name, value in weight_files.Safetensors(path).items()}
    table = next(name for name in tensors if name.endswith("word_embeddings.weight"))
    tensors[table] = np.concatenate([tensors[table], np.full((1, 32), 0.5, np.float32)])
    weight_files.write_safetensors(path, tensors)
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {"vocab_size": size + 1}))
    encoder = Encoder.load(folder)
    assert size in encoder.vocabulary.encode("some quinine")
    assert (encoder.params["encoder/token_embedding"][size] == 0.5).all()


@pytest.mark.parametrize(
    "processor",
    [
        processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True),
        processors.ByteLevel(trim_offsets=True),
        processors.ByteLevel(trim_offsets=False),
    ],
)
def test_offsets_leave_out_the_space_before_a_word_as_before(tmp_path, processor):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: index for index, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *alphabet, "Ġa", "<mask>"])}
    tokenizer = library.Tokenizer(models.BPE(ids, [("Ġ", "a")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    tokenizer.post_processor = processor
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    built = tokenizer_files.build(vocabularies.load(tmp_path), MPNET.pair)
    given = [offset for offset in tokenizer.encode("b a c").offsets if offset != (0, 0)]
    assert [offset for offset in built.encode("b a c").offsets if offset != (0, 0)] == given


@pytest.mark.parametrize(
    "texts,words",
    [
        ("one text", "texts is one string"),
        ([("a", "b")], r"texts\[0\] is tuple"),
        (["a", None], r"texts\[1\] is NoneType"),
        ([b"a"], r"texts\[0\] is bytes"),
        (3, r"texts\[0\] is int"),
    ],
)
def test_what_is_no_list_of_strings_is_refused(workdirs, texts, words):
    with pytest.raises(config.ConfigError, match=words):
        Encoder.load(workdirs["roberta"]).encode(texts)


def test_an_encoder_is_printed_in_one_line(workdirs):
    assert repr(Encoder.load(workdirs["roberta"])).startswith("Encoder(2 layers of width 32, ")


def test_any_iterable_of_strings_is_embedded(workdirs):
    encoder, texts = Encoder.load(workdirs["roberta"]), ["one text", "another"]
    expected = encoder.encode(texts)
    for given in (tuple(texts), np.array(texts), (text for text in texts)):
        assert np.array_equal(encoder.encode(given), expected)


@pytest.mark.parametrize("command", [export, embed])
def test_an_output_in_a_bucket_is_refused_and_a_home_is_found(workdirs, tmp_path, monkeypatch, command):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "lines.txt").write_text("A line.\n")
    more = ["--no-verify"] if command is export else ["--input=~/lines.txt"]
    with pytest.raises(config.ConfigError, match="gs://b/out.npy: only train and prepare know buckets"):
        command.main([f"--workdir={workdirs['roberta']}", "--output=gs://b/out.npy", *more])
    assert command.main([f"--workdir={workdirs['roberta']}", "--output=~/new/out.npy", *more]) == 0
    assert (tmp_path / "new" / "out.npy").exists()


@pytest.mark.parametrize("name", [weight_files.WEIGHTS, weight_files.PYTORCH_WEIGHTS])
def test_a_single_file_goes_before_an_index_that_was_left_behind(workdirs, tmp_path, name, monkeypatch):
    """transformers reads the single file, and save_pretrained leaves an older index in the folder."""
    folder = tmp_path / "out"
    assert export.main([f"--workdir={workdirs['roberta']}", f"--output={folder}", "--no-verify"]) == 0
    path = folder / weight_files.WEIGHTS
    tensors = {key: np.array(value) for key, value in weight_files.Safetensors(path).items()}
    monkeypatch.setattr(weight_files.torch_checkpoint, "read", lambda file: tensors)
    shutil.move(path, folder / name)
    (folder / f"{name}{weight_files.INDEX}").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "part.bin")}))
    assert weight_files.open_folder(folder).keys() == tensors.keys()
    shutil.move(folder / name, folder / "part.bin")  # now only the index names it
    assert weight_files.open_folder(folder).keys() == tensors.keys()
