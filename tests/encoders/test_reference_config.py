"""--format=reference: the message names a config file that works, and it does."""

import json
import re

import numpy as np
import pytest

from maelm_jax import config, export, gin_files
from maelm_jax.encoders import published, source, torch_file


def test_the_config_that_the_message_names_makes_any_run_exportable():
    for size in ("tiny.gin", "small.gin", "base.gin", "miniature.gin"):
        with pytest.raises(config.ConfigError) as error:
            published.check(gin_files.load([size]).model)
        [named] = re.findall(r"--gin_file=(\S+)", str(error.value))
        assert "Model.relative_buckets is 't5'" in str(error.value)
        published.check(gin_files.load([size, named]).model)
        published.check(gin_files.load([size, "mlm.gin", named]).model)


def test_a_tiny_run_with_it_is_exported_and_read_back(make_workdir, tmp_path):
    settings = gin_files.load(["tiny.gin", published.CONFIG]).model
    changes = {
        f"Model.{name}": getattr(settings, name)
        for name in ("relative_buckets", "decoder_relative_bias")
    }
    run = make_workdir(tmp_path / "run", changes)
    assert (
        export.main(
            [
                f"--workdir={run}",
                f"--output={tmp_path / 'out'}",
                "--format=reference",
                "--no-verify",
            ]
        )
        == 0
    )
    assert torch_file.read(tmp_path / "out" / "model.pt")["args"].rel_pos == 1
    written, own = (
        source.find(str(path)).read(config.Model()) for path in (tmp_path / "out", run)
    )
    assert written.keys() == own.keys() and all(
        np.array_equal(written[path], own[path]) for path in own
    )


@pytest.mark.parametrize("start,vocabulary,said,length", [
    (None, None, None, 48), ("stock", "stock", None, 160), ("stock", "stock", 128, 128), ("stock", "stock", 10**30, 160),
    ("stock", "stock", 20, 48), ("stock", "stock", "long", 160), ("gone", "gone", None, 160), ("runs/tiny", "runs/tiny/vocabulary", None, 48),
    ("model.pt", None, None, 160),
])  # fmt: skip
def test_the_longest_input_is_that_of_the_encoder_it_started_from(
    tmp_path, monkeypatch, start, vocabulary, said, length
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stock").mkdir()
    if said is not None:
        (tmp_path / "stock" / "tokenizer_config.json").write_text(
            json.dumps({"model_max_length": said})
        )
    bindings = [
        f"Run.init_from={start!r}",
        f"Vocabulary.file={vocabulary!r}",
        "SEQUENCE_LENGTH=48",
        "Model.max_positions=160",
    ]
    experiment = gin_files.load(["tiny.gin"], bindings)
    assert export.longest_input(experiment, {}) == length
    assert export.longest_input(experiment, {"max_length": 96}) == 96, "a fine-tuned run's own"
