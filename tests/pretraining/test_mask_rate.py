"""What `train` says about the mask rate: it counts all tokens and selects among text tokens."""

import types

import numpy as np
import pytest

from maelm_jax import config, gin_files, train
from maelm_jax.pretraining import dry_run, mask_rate

SPECIAL = config.SpecialIds.of_size(50)


def test_dry_run_says_the_rate_of_text_tokens_of_each_plateau(tmp_path, capsys, monkeypatch):
    memory = types.SimpleNamespace(temp_size_in_bytes=1, argument_size_in_bytes=1)
    monkeypatch.setattr(dry_run, "_memory", lambda abstract: memory)  # nothing is compiled
    settings = {"TRAIN_STEPS": 10, "Masking.rate_plateaus": "((0, 0.3), (0.4, 0.15))", "SEQUENCE_LENGTH": 16}
    settings |= {"BATCH_SIZE": 8, "Model.layers": 1, "Model.width": 32, "Model.heads": 2, "Model.feed_forward": 32}
    argv = ["--gin_file=tiny.gin", "--dry_run", f"--workdir={tmp_path}", *(f"--gin.{name}={value}" for name, value in settings.items())]
    assert train.main(argv) == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith(("mask rate", "steps", "encoder slots"))]
    at = "of text tokens at 16 tokens a segment of one line (<s> and </s> count, but are not masked)"
    assert lines == [
        "steps 1 to 4: mask rate 0.3, 8 rows a step",
        "encoder slots 16, masked slots 5 a row",
        f"mask rate 0.3 of all tokens = 0.3429 {at}",
        "steps 5 to 10: mask rate 0.15, 8 rows a step",
        "encoder slots 16, masked slots 3 a row",
        f"mask rate 0.15 of all tokens = 0.1714 {at}",
    ]
    total, *of_phases = (float(line.split()[0]) for line in sorted(printed.splitlines()) if "FLOPs in" in line)
    assert "FLOPs in all 10 steps" in printed and max(total, *of_phases) == pytest.approx((total + sum(of_phases)) / 2, rel=1e-3)


def test_the_rate_said_is_the_rate_drawn():
    """Short segments: three special tokens in each eight."""
    import jax

    from maelm_jax.model import masking

    row = [0, 10, 11, 2, 12, 13, 14, 2] * 7 + [1] * 8
    rows = np.tile(np.array(row, np.int32), (2000, 1))
    settings = config.Masking(rate=0.15)
    drawn = masking.draw(
        jax.random.split(jax.random.key(0), len(rows)), jax.numpy.asarray(rows), settings, masking.budget(settings, rows.shape[1]), SPECIAL
    )
    text = 2000 * 35  # of 2000 * 56 tokens
    said = float(mask_rate.of_rows(settings, rows, SPECIAL).split(" = ")[1].split()[0])
    assert abs(said - 0.24) < 1e-9
    assert abs(int((drawn.masked_slots < rows.shape[1]).sum()) / text - said) < 0.002


def test_a_run_says_its_rates_and_that_of_its_evaluations_if_it_is_another():
    rows = np.arange(4, 20, dtype=np.int32)[None]
    share = "of all tokens = {0} of text tokens in the held-out rows (<s> and </s> count, but are not masked)"
    lines = [f"mask rate {rate} {share.format(text)}" for rate, text in (("0.4", "0.4000"), ("0.2", "0.2000"))]

    def said(*bindings):
        return mask_rate.of_run(gin_files.load(["base.gin"], bindings), rows, SPECIAL)

    assert said("Masking.rate=0.4") == lines[:1]
    assert said("Masking.rate=0.4", "Masking.heldout_rate=0.15") == [lines[0], "held-out losses and ranks: mask rate 0.15"]
    assert said("Masking.rate_plateaus=((0, 0.4), (0.5, 0.2))", "Masking.heldout_rate=0.2") == lines


def test_where_special_tokens_are_masked_the_rates_are_one():
    assert "among them" in mask_rate.of_length(config.Masking(mask_special_tokens=True), 100)
