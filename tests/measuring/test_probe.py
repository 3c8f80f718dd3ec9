"""Linear probes: the states are those of each layer, the scores those of what is there to read."""

import json
import shutil

import numpy as np
import pytest

from maelm_jax import config, evaluate, load_encoder
from maelm_jax.measuring import probe


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A folder SST-2 whose label is whether the text has a certain word."""
    folder = tmp_path_factory.mktemp("glue") / "SST-2"
    folder.mkdir()
    draw = np.random.default_rng(0)
    words = ["value", "class", "object", "list", "number", "name"]
    rows = []
    for number in range(120):
        chosen = list(draw.choice(words, 4)) + (["exception exception"] if number % 3 == 0 else [])
        rows.append(f"The {' '.join(chosen)}.\t{int(number % 3 == 0)}")
    (folder / "train.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    (folder / "dev.tsv").write_text("sentence\tlabel\n" + rows[0] + "\n")
    return folder


def test_the_last_layer_is_what_encode_returns(uninterrupted):
    encoder, texts = load_encoder(uninterrupted), ["The value of an object.", "A class.", "It is"]
    rows = encoder.add_ends(encoder.vocabulary.encode_batch(texts))
    states = probe.mean_states(encoder, rows)
    assert states.shape == (encoder.model.encoder.layers + 1, 3, encoder.model.encoder.width)
    np.testing.assert_allclose(states[-1], encoder.encode(texts, pooling="mean"), atol=1e-5)
    assert not np.allclose(states[0], states[-1], atol=1e-2)


def test_what_the_words_say_is_read_from_every_layer(uninterrupted, task, tmp_path, capsys):
    assert evaluate.main([f"--models={uninterrupted}", f"--probe={task}", f"--output={tmp_path / 'out.json'}"]) == 0
    (score,) = json.loads((tmp_path / "out.json").read_text())["scores"]
    assert score["majority"] == pytest.approx(2 / 3) and score["examples"] == 120
    assert np.shape(score["layers"]) == (2, 5) and np.mean(score["layers"][0]) > 0.9
    assert "majority" in capsys.readouterr().out


def test_a_note_on_the_examples_names_its_model(uninterrupted, tmp_path, capsys):
    (tmp_path / "SST-2").mkdir()
    rows = [f"{'The value is an object. ' * 30}\t{number % 2}" for number in range(20)]
    (tmp_path / "SST-2" / "train.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    other = shutil.copytree(uninterrupted, tmp_path / "other")
    assert evaluate.main([f"--models={uninterrupted},{other}", f"--probe={tmp_path / 'SST-2'}"]) == 0
    said = capsys.readouterr().out
    assert all(said.count(f"{path}, step 60, SST-2: training: 20 of 20") == 1 for path in (uninterrupted, other))


def test_a_folder_without_classes_is_refused(uninterrupted, task, tmp_path):
    (tmp_path / "STS-B").mkdir()
    for flags, message in (([f"--probe={tmp_path / 'STS-B'}"], "STS-B"), ([f"--probe={task}", "--text=x"], "--probe")):
        with pytest.raises(config.ConfigError, match=message):
            evaluate.main([f"--models={uninterrupted}", *flags])
