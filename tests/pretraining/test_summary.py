"""What `train` says about the mask rate and about settings without effect."""

import jax
import numpy as np
import pytest

from maelm_jax import config, gin_files
from maelm_jax.model import masking
from maelm_jax.pretraining import summary

SPECIAL = config.SpecialIds.of_size(50)


def test_the_rate_said_is_the_rate_drawn():
    """The rate counts all tokens and selects among text tokens. Short segments: three special tokens in each eight."""
    row = [0, 10, 11, 2, 12, 13, 14, 2] * 7 + [1] * 8
    rows = np.tile(np.array(row, np.int32), (2000, 1))
    settings = config.Masking(rate=0.15)
    keys = jax.random.split(jax.random.key(0), len(rows))
    drawn = masking.draw(keys, jax.numpy.asarray(rows), settings, masking.budget(settings, rows.shape[1]), SPECIAL)
    text = 2000 * 35  # of 2000 * 56 tokens
    said = float(summary.describe_mask_rate(settings, rows, SPECIAL).split(" = ")[1].split()[0])
    assert abs(said - 0.24) < 1e-9
    assert abs(int((drawn.masked_slots < rows.shape[1]).sum()) / text - said) < 0.002
    assert "among them" in summary.describe_mask_rate(config.Masking(mask_special_tokens=True), rows, SPECIAL)


@pytest.mark.parametrize(
    "setting,has_head", [("Optimizer.warmup_steps=600", False), ("Optimizer.warmup_steps=599", None), ("Model.unigram_bias=True", True)]
)
def test_settings_without_effect_are_named(capsys, setting, has_head):
    summary.print_without_effect(gin_files.load(["tiny.gin"], ["Model.unigram_bias=False", setting]), bool(has_head))
    said = capsys.readouterr().out
    assert said == "" if has_head is None else said.startswith(setting.split("=")[0]) and said.count("\n") == 1
