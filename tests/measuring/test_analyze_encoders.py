"""`analyze --encoders`: any encoders on the same documents."""

import json

import numpy as np
import pytest
from testing import english

from maelm_jax import analyze, config, export
from maelm_jax.data import packing
from maelm_jax.measuring import runs
from maelm_jax.training import run_rows


def test_a_run_and_its_export_are_measured_alike(workdirs, tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(english()))
    export.main([f"--workdir={workdirs['mpnet']}", f"--output={tmp_path / 'exported'}", "--no-verify"])
    flags = [f"--encoders={workdirs['mpnet']},{tmp_path / 'exported'}", f"--text={tmp_path / 'text.txt'}", f"--workdir={tmp_path / 'report'}"]
    assert analyze.main([*flags, "--tokens=8000", "--sets=1"]) == 0
    run, exported = json.loads((tmp_path / "report" / "ranks.json").read_text())["runs"]
    assert (run["length"], run["rows"], run["layers"]) == (48, exported["rows"], exported["layers"])
    assert run["tokens"]["mask"] > 100, "[MASK] was read"
    assert run["curve"]["losses"] == [], "the losses of its training are of other text and masks"
    text = (tmp_path / "report" / "report.md").read_text()
    assert f"Tokens are the text of `{tmp_path / 'text.txt'}`" in text and "[MASK] replaces 15% of the tokens" in text
    assert "pretraining, seed" not in text
    header, _, *rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")][:4]
    columns = header.index("delta"), header.index("training rate"), header.index("rate here")
    assert [[row[column] for column in columns] for row in rows] == [["-", "-", "0.15"]] * 2, "the masking of the measurement is not that of training"


def rows_of(opened: list[runs.MeasuredRun], tokens: int) -> list[np.ndarray]:
    corpus = opened[0].experiment.corpus
    return packing.pack_same_text([run.vocabulary for run in opened], corpus, tokens, corpus.sequence_length)


def test_every_encoder_gets_the_same_documents(workdirs, tmp_path):
    (tmp_path / "text.txt").write_text("\n\n".join(f"Document {number} says {number} times a word. " * 20 for number in range(200)))
    opened = runs.open_encoders([str(workdirs["mpnet"]), str(workdirs["roberta"])], str(tmp_path / "text.txt"))
    a, b = rows_of(opened, 8000)
    with pytest.raises(config.ConfigError, match="--text"):
        runs.require_tokens(opened[0], rows_of(opened, 100)[0])
    assert np.array_equal(a, b) and a.shape[1] == 48, "the two have the same tokenizer"
    assert run_rows.describe_differences(opened, [a, b], [0, 0]) == []
