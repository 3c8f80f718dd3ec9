"""The command `embed`: its vectors, where it cuts lines, what it refuses. No PyTorch needed."""

import shutil

import numpy as np
import pytest
from testing import unflatten

import maelm_jax
from maelm_jax import config, embed, export
from maelm_jax.encoders import encoder as encoders
from maelm_jax.encoders import inference, source

LINES = ["a short line", "", "The encoder reads the visible tokens only; the part that is kept after pretraining. " * 9, "a short line", "é 🙂", "x"]


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_embeddings_are_the_encoders_states(workdirs, vocabulary, tmp_path, pooling, monkeypatch, capsys):
    (tmp_path / "lines.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    monkeypatch.setattr(encoders, "TOKENS", 64)  # several batches, the last one not full
    argv = [f"--workdir={workdirs['mpnet']}", f"--input={tmp_path / 'lines.txt'}", f"--output={tmp_path / 'vectors.npy'}", f"--pooling={pooling}"]
    assert embed.main(argv) == 0
    assert "1 lines cut to 48 tokens" in capsys.readouterr().out
    vectors = np.load(tmp_path / "vectors.npy")
    assert vectors.dtype == np.float32 and vectors.shape == (6, 32)
    encoder_source = source.find(str(workdirs["mpnet"]))
    ids = inference.batch(LINES, vocabulary, 48)
    states = inference.hidden_states(unflatten(encoder_source.read(config.Model())), encoder_source.model(config.Model()), vocabulary, ids)
    for row, state, vector in zip(ids, states, vectors, strict=True):
        state = state[row != vocabulary.pad]
        assert np.abs((state.mean(0) if pooling == "mean" else state[0]) - vector).max() < 1e-5


def test_embeddings_of_a_fine_tuned_run_are_cut_at_its_length(workdirs, tmp_path, capsys):
    folder = tmp_path / "tuned"
    shutil.copytree(workdirs["mpnet"], folder)
    (folder / "results.json").write_text('{"max_length": 20}')
    (tmp_path / "lines.txt").write_bytes(("\ufeff" + "\n".join([LINES[2], "one", LINES[2]])).encode())
    output = tmp_path / "sequence_length=v.npy"  # a name, which sets no length
    argv = [f"--workdir={folder}", f"--input={tmp_path / 'lines.txt'}", f"--output={output}"]
    assert embed.main(argv) == 0 and "2 lines cut to 20 tokens" in capsys.readouterr().out
    vectors = np.load(output)
    assert np.array_equal(vectors[0], vectors[2]), "the byte-order mark is no text"
    assert np.allclose(vectors, maelm_jax.load_encoder(folder).encode([LINES[2], "one", LINES[2]], pooling="mean"), atol=1e-6)
    with pytest.raises(config.ConfigError, match="Model.layers: 2 -> 5"):
        embed.main([*argv, "--gin.Model.layers=5"])


def test_embeddings_are_cut_where_the_command_says(workdirs, tmp_path, capsys):
    (tmp_path / "lines.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    assert export.main([f"--workdir={workdirs['mpnet']}", f"--output={tmp_path / 'out'}", "--no-verify"]) == 0
    for path in (workdirs["mpnet"], tmp_path / "out"):
        argv = [f"--workdir={path}", f"--input={tmp_path / 'lines.txt'}"]
        for length in (30, 160):
            assert embed.main([*argv, f"--output={tmp_path / 'v.npy'}", f"--max_length={length}"]) == 0
            assert f"1 lines cut to {length} tokens" in capsys.readouterr().out
        with pytest.raises(config.ConfigError, match=f"--max_length=161 is longer than the 160 positions of {path}. Give at most 160"):
            embed.main([*argv, f"--output={tmp_path / 'v.npy'}", "--max_length=161"])


def test_a_pooling_of_another_name_is_refused(workdirs):
    with pytest.raises(config.ConfigError, match="pooling must be 'mean' or 'first', got 'max'"):
        maelm_jax.load_encoder(workdirs["mpnet"]).encode(["x"], pooling="max")


@pytest.mark.parametrize(
    "content,output,message",
    [(None, "v.npy", "No such file"), (b"", "v.npy", "no line"), (b"ok\n\xff\xfe", "v.npy", "not UTF-8: byte 3"), (b"x\n", "v.txt", "ends in .npy")],
)
def test_embed_refuses(workdirs, tmp_path, content, output, message):
    if content is not None:
        (tmp_path / "in.txt").write_bytes(content)
    with pytest.raises(config.ConfigError, match=message):
        embed.main([f"--workdir={workdirs['mpnet']}", f"--input={tmp_path / 'in.txt'}", f"--output={tmp_path / output}"])
