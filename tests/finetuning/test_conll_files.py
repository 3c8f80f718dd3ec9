"""Files with a line for each word: what is read, and what ends in one line."""

import lzma

import pytest

from maelm_jax import config
from maelm_jax.finetuning import conll_files

# As CoNLL-2003 has it: word, part of speech, chunk, entity.
TEXT = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O

# NN B-NP O


-DOCSTART- -X- -X- O
Peter NNP B-NP B-PER
"""


def read(folder, text: str | bytes, labelled=True, name="x.txt", **settings) -> conll_files.Sentences:
    content = text.encode() if isinstance(text, str) else text
    (folder / name).write_bytes(content)
    return conll_files.read(folder / name, config.Conll(**settings), labelled)


def test_sentences_end_at_blank_lines_and_documents(tmp_path):
    sentences = read(tmp_path, TEXT)
    assert sentences.words == [["EU", "rejects"], ["#"], ["Peter"]]
    assert sentences.labels == [["B-ORG", "O"], ["O"], ["B-PER"]]
    unlabelled = read(tmp_path, TEXT, labelled=False)
    assert unlabelled.words == sentences.words and unlabelled.labels == [[], [], []]


def test_columns_are_chosen_and_stand_between_spaces_or_tabs(tmp_path):
    text = "1\tEU\tNNP \r\n2  caf\u00e9\u00a0x \t NN\r\n"
    sentences = read(tmp_path, text, word_column=1)
    assert sentences.words == [["EU", "caf\u00e9\u00a0x"]] and sentences.labels == [["NNP", "NN"]]
    assert read(tmp_path, text, word_column=1, label_column=0).labels == [["1", "2"]]
    packed = lzma.compress(("\ufeff" + text).encode())
    assert read(tmp_path, packed, name="x.txt.xz", word_column=1).words == sentences.words


def test_a_file_to_predict_needs_words_only(tmp_path):
    assert read(tmp_path, "EU\nrejects\n", labelled=False).words == [["EU", "rejects"]]


@pytest.mark.parametrize(
    "text,settings,message",
    [
        ("EU B-ORG\nrejects\n", {}, "x.txt:2: 1 columns, line 1 has 2: 'rejects'. Columns stand between"),
        ("\nEU NNP O\nnot a call O\n", {}, "x.txt:3: 4 columns, line 2 has 3: 'not a call O'"),
        ("EU O\n", {"word_column": 2}, "x.txt:1: no column 2, the line has 2: 'EU O'. Correct Conll.word_column"),
        ("EU O\n", {"label_column": 7}, "x.txt:1: no column 7, .* Correct Conll.label_column"),
        ("EU\n", {}, "x.txt:1: the word and the label are the same column of 1: 'EU'. Give a file with both"),
        ("EU O\n", {"word_column": 1}, "x.txt:1: the word and the label are the same column of 2"),
        ("\n\n", {}, "x.txt: holds no word. Give a file"),
        ("-DOCSTART- O\n", {}, "x.txt: holds no word"),
        ("", {}, "x.txt: the file is empty"),
        (b"\xff\xfeE\x00U\x00", {}, "x.txt: not UTF-8"),
    ],
)
def test_a_file_of_another_form_ends_with_its_name_and_line(text, settings, message, tmp_path):
    with pytest.raises(config.ConfigError, match=message) as error:
        read(tmp_path, text, **settings)
    assert "\n" not in str(error.value)
