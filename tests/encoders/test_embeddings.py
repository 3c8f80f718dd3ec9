"""The blocks of docs/embeddings.md run, and maelm_jax gives the vectors of folders of sentence-transformers."""

import json
import re
from pydoc_data import topics

import numpy as np
import pytest
from testing import ROOT

import maelm_jax
from maelm_jax import export

PAGE = ROOT / "docs" / "embeddings.md"


def test_an_encoder_is_tuned_by_sentence_transformers_and_read_again(workdirs, tmp_path, monkeypatch):
    for name in ("sentence_transformers", "accelerate", "datasets"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install -r requirements-torch.txt")
    monkeypatch.chdir(tmp_path)
    lines = [" ".join(topics.topics[name].split()[:30]) for name in sorted(topics.topics)[:34]]
    pairs = [{"anchor": line[:80], "positive": line[40:120]} for line in lines]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    scored = [{"sentence1": line[:60], "sentence2": line[20:90], "score": number % 5} for number, line in enumerate(lines)]
    (tmp_path / "scored.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scored))
    export.main([f"--workdir={workdirs['mpnet']}", "--output=exported", "--no-verify"])
    tuning, reading = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    names = {}
    exec(tuning, names)
    exec(reading, names)
    theirs = names["model"].encode(["A sentence."])
    assert np.abs(names["vectors"] - theirs).max() < 1e-5
    fresh = names["SentenceTransformer"]("exported", device="cpu").encode(["A sentence."])
    assert np.abs(fresh - theirs).max() > 1e-4, "tuned"


def test_the_vectors_of_a_folder_are_those_of_sentence_transformers(copy_stock, tmp_path):
    """As the installed version writes it: pooling, modules, default prompt and longest input."""
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling

    stock = str(copy_stock("bert", "AutoModel", tmp_path / "stock"))
    lines = ["a short line", "", "The encoder reads the visible tokens only. " * 5, "x"]
    norm = LayerNorm(32)
    torch.nn.init.normal_(norm.norm.weight)
    recipes = {
        "bge": [Pooling(32, "cls"), Normalize()],
        "labse": [Pooling(32, "cls"), Dense(32, 32), Normalize()],
        "several": [Pooling(32, ("lasttoken", "max", "weightedmean")), Dropout(0.5)],
        "residual": [Pooling(32, "mean"), norm, Dense(32, 8, bias=False, activation_function=torch.nn.GELU(), use_residual=True)],
        "instructor": [Pooling(32, "mean", include_prompt=False), Normalize()],
    }
    for name, modules in recipes.items():
        folder = str(tmp_path / name)
        prompts = {"prompts": {"document": "passage: "}, "default_prompt_name": "document"} if name in ("several", "instructor") else {}
        made = sentence_transformers.SentenceTransformer(modules=[Transformer(stock, max_seq_length=24), *modules], device="cpu", **prompts)
        made.save(folder)
        theirs = sentence_transformers.SentenceTransformer(folder, device="cpu").encode(lines)
        ours = maelm_jax.load_encoder(folder).encode(lines)
        assert np.abs(ours - theirs).max() < 1e-5 * max(np.abs(theirs).max(), 1), name
