"""A literal <mask> in the text of an exported tokenizer is the mask token, in the place of a word."""

import json
import pathlib

import pytest
import tokenizers as library

from maelm_jax import export
from maelm_jax.data import vocabularies
from maelm_jax.encoders import tokenizer_files
from maelm_jax.encoders.mpnet import MPNET


@pytest.fixture(scope="module")
def written(vocabulary, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_files.write(folder, vocabulary, 48, MPNET.pair)
    return folder


@pytest.mark.parametrize(
    "text",
    [
        "the value of the <mask> is used.",
        "<mask> is a value",
        "the <mask>.",
        "the <mask>, and",
        "<mask>",
        "a <mask> <mask> b",
    ],
)
def test_mask_stands_in_the_place_of_a_word(written, vocabulary, text):
    """The ids around <mask> are those around a word of one piece."""
    [word] = vocabulary.encode("the")
    tokenizer = library.Tokenizer.from_file(str(written / "tokenizer.json"))
    ids = tokenizer.encode(text).ids[1:-1]
    as_word = vocabulary.encode(text.replace("<mask>", "the"))
    assert ids.count(vocabulary.mask) == text.count("<mask>")
    assert [word if index == vocabulary.mask else index for index in ids] == as_word


@pytest.mark.parametrize(
    "text",
    [
        "the value of <mask> is used.",
        "[MASK] is a value",
        "a <mask> [MASK]<mask>, and",
        "the <mask>ing",
        "nothing masked  here",
    ],
)
def test_both_kinds_of_vocabulary_read_a_mask_alike(written, vocabulary, text):
    ids = vocabulary.encode_masked(text)
    assert ids.count(vocabulary.mask) == text.count("<mask>") + text.count("[MASK]")
    assert vocabularies.load(written / "tokenizer.json").encode_masked(text) == ids
    assert vocabulary.mask not in vocabulary.encode(text)


def test_the_files_say_nothing_of_splitting(written):
    assert "split_special_tokens" not in json.loads((written / "tokenizer_config.json").read_text())


def test_a_taken_over_tokenizer_keeps_its_own_mask(written, tmp_path):
    """A stock tokenizer.json whose <mask> leaves the space before it alone goes out as it came in."""
    content = json.loads((written / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["lstrip"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = tokenizer_files.build(vocabularies.load(tmp_path / "tokenizer.json"), MPNET.pair)
    kept = {token.content: token.lstrip for token in tokenizer.get_added_tokens_decoder().values()}
    assert kept["<mask>"] is False


def test_fill_mask_out_of_the_box(workdirs, vocabulary, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("torch", reason="PyTorch is not installed")
    assert export.main([f"--workdir={workdirs['roberta-mlm']}", f"--output={tmp_path / 'out'}", "--verify"]) == 0
    fill = transformers.pipeline("fill-mask", str(tmp_path / "out"), device="cpu")
    fills = fill("The value of the <mask> is used.", top_k=3)
    assert len(fills) == 3 and all(0 < one["score"] < 1 for one in fills)
    tokenizer = fill.tokenizer
    assert tokenizer("the <mask>.")["input_ids"] == [
        0,
        *vocabulary.encode("the"),
        vocabulary.mask,
        vocabulary.encode("a.")[-1],
        2,
    ]
    text = "the <mask> and <s>"
    assert tokenizer(text, split_special_tokens=True)["input_ids"] == [
        0,
        *vocabulary.encode(text),
        2,
    ]
