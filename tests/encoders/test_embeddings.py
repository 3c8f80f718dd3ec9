"""The blocks of docs/embeddings.md run, and maelm_jax gives the vectors of what they make."""

import json
import re
from pydoc_data import topics

import numpy as np
import pytest
from testing import ROOT

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
