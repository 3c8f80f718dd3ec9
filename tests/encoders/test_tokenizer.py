"""The tokenizer that serves is the one that trains: ours as a Hugging Face tokenizer, theirs as our vocabulary, and both in JavaScript."""

import io
import json
import lzma
import pathlib
import random
import subprocess
from pydoc_data import topics

import numpy as np
import pytest
import sentencepiece
import tokenizers as library
from testing import ROOT, SHARED, call, english, stock_config
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from maelm_jax import config, export
from maelm_jax.data import vocabularies, vocabulary_training
from maelm_jax.encoders import opened, tokenizer, weight_files
from maelm_jax.encoders.bert import BERT
from maelm_jax.encoders.modernbert import MODERNBERT
from maelm_jax.encoders.mpnet import MPNET
from maelm_jax.encoders.opened import load_model
from maelm_jax.encoders.roberta import ROBERTA, XLM_ROBERTA

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", "<unk>", "a", "text", "##s"]
CAPITALS = ["ΣΑΣ ΟΔΟΣ ΣΊΣΥΦΟΣ", "～ 10～20", "İstanbul IĞDIR ısı", "Straße GROẞ", "ﬁn ﬂ ½ ² ™ Ⅷ", "㋿ 令和 ℡", "ALL CAPITALS, Mixed"]


def find_differing(built, vocabulary, texts) -> list[str]:
    """The texts to which a tokenizer gives other ids than the vocabulary."""
    ours = vocabulary.encode_batch(texts)
    theirs = [encoding.ids for encoding in built.encode_batch(texts)]
    return [text for text, a, b in zip(texts, ours, theirs, strict=True) if [vocabulary.bos, *a, vocabulary.eos] != b]


def train_sentencepiece(lines, **options) -> vocabularies.SentencePieceVocabulary:
    model = io.BytesIO()
    ids = {"bos_id": 0, "pad_id": 1, "eos_id": 2, "unk_id": 3, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **ids, **options)
    return vocabularies.SentencePieceVocabulary(model.getvalue())


@pytest.fixture(scope="module")
def built(vocabulary):
    return tokenizer.build(vocabulary, MPNET.pair)


@pytest.fixture(scope="module")
def written(vocabulary, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.write(folder, vocabulary, 48, MPNET.pair)
    return folder


@pytest.fixture(scope="module")
def random_texts() -> list[str]:
    draw = random.Random(0)
    letters = [chr(code) for code in range(1, 0x250)]
    texts = ["".join(draw.choice(letters) for _ in range(60)) for _ in range(500)]
    texts += ["".join(draw.choice("ab-= .") * draw.randrange(1, 9) for _ in range(30)) for _ in range(1000)]
    return texts + ["".join(draw.choice("etaoinshrdlu  .,'\"") for _ in range(80)) for _ in range(1000)]


def test_every_character_by_itself_and_inside_a_word(built, vocabulary):
    characters = [chr(code) for code in range(1, 0x10000) if not 0xD800 <= code < 0xE100]
    assert find_differing(built, vocabulary, characters) == []
    assert find_differing(built, vocabulary, [f"ab{character}cd" for character in characters[:0x3000]]) == []


def test_random_and_hard_texts(built, vocabulary, random_texts):
    assert find_differing(built, vocabulary, [*random_texts, *tokenizer.HARD_TEXTS, *CAPITALS]) == []


def test_real_text(documents):
    """Every line of real text, and every cell of the GLUE dev sets if they are here, with a vocabulary that was trained on such text."""
    vocabulary = vocabularies.load(ROOT / "pretrained")
    lines = "\n\n".join(documents).split("\n")
    for path in sorted((SHARED / "glue").glob("*/dev*")):
        content = path.read_bytes()
        content = (lzma.decompress(content) if path.suffix == ".xz" else content).decode("utf-8")
        lines += sorted({cell for line in content.split("\n") for cell in line.split("\t")})
    assert len(lines) > (30_000 if SHARED.is_dir() else 100)
    assert find_differing(tokenizer.build(vocabulary, MPNET.pair), vocabulary, lines) == []


@pytest.mark.parametrize(
    "options",
    [{"normalization_rule_name": "nmt_nfkc"}, {"byte_fallback": True}, {"normalization_rule_name": "identity"}, {"add_dummy_prefix": False}],
    ids=str,
)
def test_other_bpe_models(options):
    lines = [line for topic in topics.topics.values() for line in topic.split("\n")]
    other = train_sentencepiece(lines, model_type="bpe", vocab_size=700, **options)
    assert find_differing(tokenizer.build(other, MPNET.pair), other, [*lines[:500], *tokenizer.HARD_TEXTS]) == []


def test_a_character_map_of_ones_own_is_refused(tmp_path):
    """Its rules may be of several characters, which no tokenizer of Hugging Face applies."""
    (tmp_path / "rules.tsv").write_text("41 42\t63\n61 301\t65\n")  # AB becomes c
    lines = [line for topic in topics.topics.values() for line in topic.split("\n")]
    other = train_sentencepiece(lines, model_type="bpe", vocab_size=700, normalization_rule_tsv=str(tmp_path / "rules.tsv"))
    with pytest.raises(tokenizer.NoEqual):
        tokenizer.build(other, MPNET.pair)


def test_a_tokenizer_json_keeps_its_ids(written, vocabulary):
    taken = vocabularies.load(written / "tokenizer.json")
    texts = [*tokenizer.HARD_TEXTS, *tokenizer.SPECIAL_TEXTS]
    assert taken.encode_batch(texts) == vocabulary.encode_batch(texts)


# Special tokens in a text: those of the model are text, those that a user added are tokens.


@pytest.fixture(scope="module")
def marked() -> library.Tokenizer:
    """A WordPiece tokenizer with two special tokens and a plain one that a user added."""
    pieces = WORDS[:5] + sorted({*"abcdefghijklmnopqrstuvwxyz.,[]/1"} | {f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz1"})
    made = make_wordpiece(pieces, pieces[:5])
    made.add_special_tokens(["[E1]", "[/E1]"])
    made.add_tokens(["covid19x"])
    return made


def make_wordpiece(words, special, unknown="[UNK]", **normalizer) -> library.Tokenizer:
    made = library.Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token=unknown))
    made.normalizer = normalizers.BertNormalizer(**normalizer)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(special)
    return made


def find_difference(stock: library.Tokenizer, vocabulary, texts=()) -> str | None:
    def encode(text: str, split_special_tokens: bool) -> list[int]:
        stock.encode_special_tokens = split_special_tokens
        return stock.encode(text).ids

    return tokenizer.find_difference(encode, vocabulary, texts)


@pytest.mark.parametrize("removed", ["[E1]", "covid19x", "lower case"])
def test_a_tokenizer_that_reads_hard_text_otherwise_is_found(marked, tmp_path, removed):
    """What `verify` compares: added tokens and capitals, not weights alone."""
    marked.save(str(tmp_path / "tokenizer.json"))
    loaded = vocabularies.load(tmp_path)
    other = tokenizer.build(loaded, MPNET.pair)
    assert find_difference(other, loaded, ["never trained on [MASK]"]) is None
    if removed == "lower case":
        other.normalizer = normalizers.BertNormalizer(lowercase=False)
    else:
        content = json.loads(other.to_str())
        content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != removed]
        other = library.Tokenizer.from_str(json.dumps(content))
    assert find_difference(other, loaded) is not None


@pytest.mark.parametrize("text", ["the value of the <mask> is used.", "<mask> is a value", "the <mask>, and", "<mask>", "a <mask> <mask> b"])
def test_mask_stands_in_the_place_of_a_word(written, vocabulary, text):
    """The ids around <mask> are those around a word of one piece."""
    [word] = vocabulary.encode("the")
    ids = library.Tokenizer.from_file(str(written / "tokenizer.json")).encode(text).ids[1:-1]
    assert ids.count(vocabulary.mask) == text.count("<mask>")
    assert [word if index == vocabulary.mask else index for index in ids] == vocabulary.encode(text.replace("<mask>", "the"))


@pytest.mark.parametrize("text", ["the value of <mask> is used.", "[MASK] is a value", "a <mask> [MASK]<mask>, and", "the <mask>ing", "no mask"])
def test_both_kinds_of_vocabulary_read_both_names_of_the_mask(written, vocabulary, text):
    ids = vocabulary.encode_masked(text)
    assert ids.count(vocabulary.mask) == text.count("<mask>") + text.count("[MASK]")
    assert vocabularies.load(written / "tokenizer.json").encode_masked(text) == ids
    assert vocabulary.mask not in vocabulary.encode(text)


@pytest.mark.parametrize("lstrip", [False, True])
def test_the_space_before_a_mask_is_dropped_where_the_tokenizer_says_so(written, tmp_path, lstrip):
    content = json.loads((written / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["lstrip"] = lstrip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    taken, text = vocabularies.load(tmp_path), "the value of <mask> is used."
    theirs = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert taken.encode_masked(text) == theirs
    rebuilt = tokenizer.build(taken, MPNET.pair).get_added_tokens_decoder().values()
    assert {token.content: token.lstrip for token in rebuilt}["<mask>"] is lstrip, "it goes out as it came in"


# Tokenizers of other folders.


def test_special_tokens_go_before_pieces_of_the_same_meaning(tmp_path):
    """A BERT vocabulary in which <s>, </s> and <unk> are ordinary pieces."""
    make_wordpiece(WORDS, WORDS[:5]).save(str(tmp_path / "tokenizer.json"))
    loaded = vocabularies.load(tmp_path)
    assert (loaded.bos, loaded.pad, loaded.eos, loaded.unk, loaded.mask) == (2, 0, 3, 1, 4)


def test_the_unk_that_the_vocabulary_does_not_take_is_text_in_an_export_too(tmp_path):
    """MPNet's tokenizer.json may mark both <unk> and [UNK] as special."""
    made = make_wordpiece(WORDS, [*WORDS[:5], "<unk>"])
    made.save(str(tmp_path / "tokenizer.json"))
    loaded = vocabularies.load(tmp_path)
    assert loaded.model.id_to_token(loaded.unk) == "[UNK]"
    built = tokenizer.build(loaded, MPNET.pair)
    built.encode_special_tokens = True
    assert built.encode("a <unk> b").ids[1:-1] == loaded.encode("a <unk> b")


@pytest.mark.parametrize(
    "stated,stored,option",
    [
        ({"do_lower_case": True}, {"lowercase": False}, "do_lower_case"),
        ({}, {"lowercase": False}, "do_lower_case"),
        ({"strip_accents": False}, {}, "strip_accents"),
        ({"tokenize_chinese_chars": False}, {}, "tokenize_chinese_chars"),
        ({"tokenizer_class": "TokenizersBackend"}, {"lowercase": False}, None),
        ({"do_lower_case": False, "strip_accents": True}, {"lowercase": False, "strip_accents": True}, None),
        ({}, {}, None),
    ],
)
def test_a_normalization_that_the_files_contradict_is_refused(tmp_path, stated, stored, option):
    make_wordpiece(WORDS, WORDS[:5], **stored).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"} | stated))
    if option is None:
        tokenizer.check_options(BERT, tmp_path)
        return
    with pytest.raises(config.ConfigError, match=option):
        tokenizer.check_options(BERT, tmp_path)


@pytest.mark.parametrize("part,step", [("normalizer", {"type": "NFKC"}), ("normalizer", None), ("pre_tokenizer", {"type": "WhitespaceSplit"})])
def test_a_step_that_the_tokenizer_class_replaces_is_refused(tmp_path, part, step):
    make_wordpiece(WORDS, WORDS[:5]).save(str(tmp_path / "tokenizer.json"))
    tokenizer.check_options(BERT, tmp_path)
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(file | {part: step}))
    with pytest.raises(config.ConfigError, match=step["type"] if part == "pre_tokenizer" else "do_lower_case"):
        tokenizer.check_options(BERT, tmp_path)
    with pytest.raises(config.ConfigError):
        tokenizer.check_options(ROBERTA, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    tokenizer.check_options(BERT, tmp_path)


GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "[CLS]", "eos_token": {"content": "[SEP]"}}


@pytest.mark.parametrize(
    "option,value", [("continuing_subword_prefix", "@@"), ("max_input_chars_per_word", 200), ("unk_token", "a"), ("max_input_chars_per_word", None)]
)
def test_a_model_that_the_tokenizer_class_replaces_is_refused(tmp_path, option, value):
    """A file without max_input_chars_per_word means 100, as the class does."""
    make_wordpiece(WORDS, WORDS[:5]).save(str(tmp_path / "tokenizer.json"))
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    file["model"].pop(option)
    if value is None:
        (tmp_path / "tokenizer.json").write_text(json.dumps(file))
        tokenizer.check_options(BERT, tmp_path)
        return
    (tmp_path / "tokenizer.json").write_text(json.dumps(file | {"model": file["model"] | {option: value}}))
    with pytest.raises(config.ConfigError, match=option):
        tokenizer.check_options(BERT, tmp_path)


def test_special_tokens_that_are_split_in_a_text_are_refused(tmp_path):
    """Unless they are those that maelm_jax reads as text too."""
    (tmp_path / "tokenizer_config.json").write_text('{"split_special_tokens": true}')
    make_wordpiece(WORDS, WORDS[:5]).save(str(tmp_path / "tokenizer.json"))
    tokenizer.check_options(BERT, tmp_path)
    make_wordpiece(WORDS, [*WORDS[:5], "text"]).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(config.ConfigError, match="split_special_tokens.*'text'"):
        tokenizer.check_options(BERT, tmp_path)


def lower_case(file: dict):
    file["normalizer"] = {"type": "Lowercase"}


def split_digits(file: dict):
    file["pre_tokenizer"]["pretokenizers"].append({"type": "Digits", "individual_digits": True})


def name_another_unknown(file: dict):
    file["model"]["unk_id"] = 10


@pytest.mark.parametrize("stated", [{}, {"add_prefix_space": False}, GENERIC], ids=["class", "no space", "generic"])
@pytest.mark.parametrize("change", [None, lower_case, split_digits, name_another_unknown])
def test_a_class_that_splits_as_sentencepiece_does_so_whatever_the_file_states(tmp_path, change, stated):
    characters = dict.fromkeys(character for text in tokenizer.HARD_TEXTS for character in text.replace("▁", ""))
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", "<mask>", *list(characters)[:40], "10", "99", "▁a"]
    made = Tokenizer(models.Unigram([(piece, -float(number > 3) - number / 100) for number, piece in enumerate(pieces)], 3))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "<pad>", "</s>", "<unk>", "<mask>")])
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 2)])
    file = json.loads(made.to_str())
    if change:
        change(file)
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    names = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated | names))
    vocabulary = vocabularies.load(tmp_path)
    if stated is GENERIC or not (change or stated):
        tokenizer.check_ids(XLM_ROBERTA, tmp_path, vocabulary)
        return
    with pytest.raises(config.ConfigError, match="XLMRobertaTokenizer anew"):
        tokenizer.check_ids(XLM_ROBERTA, tmp_path, vocabulary)


@pytest.mark.parametrize(
    ("family", "file", "name", "lowercase", "option"),
    [
        (XLM_ROBERTA, "tokenizer_config.json", "BertTokenizer", False, "do_lower_case"),
        (XLM_ROBERTA, "config.json", "BertTokenizerFast", False, "do_lower_case"),
        (XLM_ROBERTA, "config.json", "XLMRobertaTokenizer", False, None),
        (BERT, "tokenizer_config.json", "XLMRobertaTokenizerFast", False, None),
        (BERT, "tokenizer_config.json", "", False, "do_lower_case"),
        (BERT, "tokenizer_config.json", "T5Tokenizer", True, "tokenizer_class T5Tokenizer"),
        (ROBERTA, "tokenizer_config.json", "BertTokenizer", True, None),
        (MODERNBERT, "tokenizer_config.json", "BertTokenizer", False, None),
    ],
)
def test_the_options_are_those_of_the_class_that_a_folder_states(tmp_path, family, file, name, lowercase, option):
    """Not of its family's. AutoTokenizer takes the class of tokenizer_config.json, else of config.json."""
    make_wordpiece(WORDS, WORDS[:5], lowercase=lowercase).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / file).write_text(json.dumps({"tokenizer_class": name}))
    if option is None:
        tokenizer.check_options(family, tmp_path)
        return
    with pytest.raises(config.ConfigError, match=option):
        tokenizer.check_options(family, tmp_path)


def write_words(folder, template: str | None, stated: dict, special=WORDS[:5]) -> vocabularies.Vocabulary:
    """A folder with a tokenizer of WORDS whose post-processor is `template`."""
    made = make_wordpiece(WORDS, special)
    if template:
        names = [name for name in template.split() if name != "$A"]
        made.post_processor = processors.TemplateProcessing(template, None, [(name, WORDS.index(name)) for name in set(names)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return vocabularies.load(folder)


@pytest.mark.parametrize(
    ("template", "stated", "family", "is_refused"),
    [
        ("[CLS] $A [SEP]", GENERIC, BERT, False),
        ("[CLS] $A [SEP]", {"tokenizer_class": "BertTokenizer"}, BERT, False),
        (None, {"tokenizer_class": "BertTokenizer"}, BERT, False),  # the class adds them
        (None, {}, BERT, False),
        (None, GENERIC, BERT, True),
        (None, {"tokenizer_class": "BertTokenizer"}, MODERNBERT, True),
        ("[CLS] $A", GENERIC, BERT, True),
        ("$A [SEP]", {"tokenizer_class": "BertTokenizer"}, BERT, True),
        ("[CLS] [MASK] $A [SEP]", GENERIC, BERT, True),
        (None, GENERIC | {"add_bos_token": True, "add_eos_token": True}, BERT, True),  # transformers does not read these
    ],
)
def test_a_tokenizer_that_adds_other_tokens_is_refused(tmp_path, template, stated, family, is_refused):
    """transformers reads the post-processor of the file, and without one, classes of BERT's kind make one."""
    vocabulary = write_words(tmp_path, template, stated)
    if is_refused:
        with pytest.raises(config.ConfigError, match="post_processor"):
            tokenizer.check_ids(family, tmp_path, vocabulary)
    else:
        tokenizer.check_ids(family, tmp_path, vocabulary)


def test_the_tokens_around_a_text_are_those_of_the_post_processor(tmp_path):
    """Not those with the more usual names."""
    loaded = write_words(tmp_path, "<s> $A </s>", GENERIC)
    assert (loaded.bos, loaded.eos) == (WORDS.index("<s>"), WORDS.index("</s>"))
    tokenizer.check_ids(BERT, tmp_path, loaded)
    built = tokenizer.build(loaded, MPNET.pair)
    assert built.encode("a text").tokens == ["<s>", "a", "text", "</s>"]


@pytest.mark.parametrize("template", ["<bos> $A <eos>", None])
def test_bos_and_eos_have_the_names_of_gemma_too(tmp_path, template):
    """As in mmBERT, where <s> is a tag of HTML and no special token."""
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "a", "<s>", "</s>"]
    made = make_wordpiece(words, words[:5], unknown="<unk>")
    made.add_tokens(["<s>", "</s>"])
    if template:
        made.post_processor = processors.TemplateProcessing(template, None, [("<bos>", 2), ("<eos>", 1)])
    made.save(str(tmp_path / "tokenizer.json"))
    loaded = vocabularies.load(tmp_path)
    assert (loaded.bos, loaded.pad, loaded.eos, loaded.unk, loaded.mask) == (2, 0, 1, 3, 4)


def test_tokens_that_were_added_to_an_export_are_read(copy_export, tmp_path):
    """transformers rewrites tokenizer.json and leaves sentencepiece.model as it was."""
    folder = copy_export("roberta", tmp_path / "out")
    assert opened.find_model(folder).vocabulary_path == str(folder / "sentencepiece.model")
    longer = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = longer.get_vocab_size()
    longer.add_special_tokens(["[E1]"])
    longer.save(str(folder / "tokenizer.json"))
    for name in ("vocabulary.sha256", "decoder.safetensors"):  # the head of the decoder has no row more
        (folder / name).unlink(missing_ok=True)
    tensors = weight_files.read_folder(folder)
    table = next(name for name in tensors if name.endswith("word_embeddings.weight"))
    tensors[table] = np.concatenate([tensors[table], np.full((1, 32), 0.5, np.float32)])
    weight_files.write_safetensors(folder / weight_files.WEIGHTS, tensors)
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {"vocab_size": size + 1}))
    encoder = load_model(folder)
    assert size in encoder.vocabulary.encode("some [E1] quinine")
    assert (encoder.params["encoder/token_embedding"][size] == 0.5).all()
    assert export.main([f"--workdir={folder}", f"--output={tmp_path / 'again'}"]) == 0, "and verified where transformers is installed"


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
    made = library.Tokenizer(models.BPE(ids, [("Ġ", "a")], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    made.post_processor = processor
    made.save(str(tmp_path / "tokenizer.json"))
    built = tokenizer.build(vocabularies.load(tmp_path), MPNET.pair)
    given = [offset for offset in made.encode("b a c").offsets if offset != (0, 0)]
    assert [offset for offset in built.encode("b a c").offsets if offset != (0, 0)] == given


# In JavaScript.

SCRIPT = """
import { AutoTokenizer, env } from "@huggingface/transformers";
import fs from "fs";
env.allowRemoteModels = false;
env.localModelPath = "./";
const cases = JSON.parse(fs.readFileSync("cases.json"));
const found = {};
for (const [folder, texts] of Object.entries(cases)) {
  const tokenizer = await AutoTokenizer.from_pretrained(folder);
  found[folder] = texts.map((text) => Array.from(tokenizer.encode(text)));
}
fs.writeFileSync("found.json", JSON.stringify(found));
"""


def test_transformers_js_gives_the_same_ids(vocabulary, marked, tmp_path, documents):
    """Of our vocabulary, with upper and lower case alike, of a cased one, and of a BERT tokenizer with added tokens."""
    pytest.importorskip("transformers", reason="it runs with the tests of PyTorch, where CI lets nothing skip")
    install = "npm install --ignore-scripts --no-audit --no-fund @huggingface/transformers@4.3.1"
    done = subprocess.run(install, shell=True, cwd=tmp_path, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"npm does not install transformers.js: {done.stderr[-300:]}")
    lines = [line for document in documents for line in document.split("\n") if line.strip()][:2000]
    cased = vocabulary_training.train(lines, config.Vocabulary(size=1000, cased=True))
    (tmp_path / "wordpiece").mkdir()
    marked.save(str(tmp_path / "wordpiece" / "tokenizer.json"))
    of_folder = {"ours": vocabulary, "cased": cased, "marked": vocabularies.load(tmp_path / "wordpiece")}
    for folder, of_it in of_folder.items():
        (tmp_path / folder).mkdir()
        tokenizer.write(tmp_path / folder, of_it, 512, MPNET.pair)
        (tmp_path / folder / "config.json").write_text('{"model_type": "mpnet"}')
    texts = [*lines, *CAPITALS, *(text for text in tokenizer.HARD_TEXTS if "\x00" not in text)]
    marks = ["The [E1] cabinet [/E1] was led.", "a covid19x case", "[E1]a[/E1]"]
    cases = {folder: texts + marks * (folder == "marked") for folder in of_folder}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    (tmp_path / "script.mjs").write_text(SCRIPT)
    done = subprocess.run(["node", "script.mjs"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    for folder, of_it in of_folder.items():
        expected = [[of_it.bos, *ids, of_it.eos] for ids in of_it.encode_batch(cases[folder])]
        differing = [text for text, a, b in zip(cases[folder], found[folder], expected, strict=True) if a != b]
        assert differing == [], folder


def byte_level(folder, special: list[str]) -> vocabularies.Vocabulary:
    """A tokenizer like Llama's, with which EuroBERT reads text. Padding is not in the file: the model pads with the end of a text."""
    made = library.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    made.train_from_iterator(english()[:20], trainer)
    made.add_special_tokens(special)
    ends = [(name, made.token_to_id(name)) for name in special[:2]]
    template = processors.TemplateProcessing(f"{special[0]} $A {special[1]}", None, ends)
    made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    made.save(str(folder / "tokenizer.json"))
    return vocabularies.load(folder)


EUROBERT = ["<|begin_of_text|>", "<|end_of_text|>", "<|mask|>", "<|parallel_sep|>"]


def test_a_byte_level_file_needs_no_unk_and_no_pad_of_its_own(tmp_path):
    loaded = byte_level(tmp_path, EUROBERT)
    assert [loaded.pieces[index] for index in (loaded.bos, loaded.eos, loaded.mask, loaded.pad)] == EUROBERT
    assert loaded.unk == loaded.pad and len(loaded.special_ids) == 4
    text = "padded \N{BRAIN} <|parallel_sep|> <|end_of_text|>"
    assert loaded.decode(loaded.encode(text)) == text and not set(loaded.encode(text)) & set(loaded.special_ids)
    with pytest.raises(config.ConfigError, match="<pad>"):
        byte_level(tmp_path, EUROBERT[:3])


@pytest.mark.filterwarnings("ignore::Warning")  # of transformers and PyTorch
def test_a_folder_whose_model_pads_with_the_end_of_a_text_computes_the_same(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    stock, texts = tmp_path / "stock", ["A text \N{BRAIN} of some length.", "one", ""]
    stock.mkdir()
    vocabulary = byte_level(stock, EUROBERT)
    settings = stock_config("modernbert", vocabulary.size)
    settings.update({"pad_token_id": vocabulary.eos, "bos_token_id": vocabulary.bos, "eos_token_id": vocabulary.eos, "initializer_range": 0.3})
    torch.manual_seed(0)
    transformers.AutoModel.from_config(settings).save_pretrained(stock)
    names = {"bos_token": EUROBERT[0], "eos_token": EUROBERT[1], "pad_token": EUROBERT[1], "mask_token": EUROBERT[2]}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"], **names}
    (stock / "tokenizer_config.json").write_text(json.dumps(settings))

    def vectors(folder, auto=None):
        inputs = transformers.AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            states = transformers.AutoModel.from_pretrained(folder).eval()(**inputs).last_hidden_state
        real = inputs["attention_mask"][..., None]
        return ((states * real).sum(1) / real.sum(1)).numpy()

    np.testing.assert_allclose(load_model(stock).encode(texts), vectors(stock), atol=1e-5)
    rows = [f"{word} text number {number},{label}\n" for number in range(8) for word, label in (("good", 1), ("bad", 0))]
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(rows))
    table = [f"--gin.TRAIN_FILE={tmp_path / 'rows.csv'}", f"--gin.DEV_FILE={tmp_path / 'rows.csv'}", "--gin.EPOCHS=1", "--gin.BATCH_SIZE=8"]
    done = call("finetune", "--gin_file=finetune/own.gin", f"--init_from={stock}", f"--workdir={tmp_path / 'run'}", *table)
    assert done.status == 0, done.stderr
    [run] = (path.parent for path in (tmp_path / "run").rglob("results.json"))
    done = call("export", f"--workdir={run}", f"--output={tmp_path / 'out'}")
    assert done.status == 0 and "verified" in done.stdout, done
    np.testing.assert_allclose(load_model(tmp_path / "out").encode(texts), vectors(tmp_path / "out"), atol=1e-5)
