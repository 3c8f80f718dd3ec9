"""What `train` says about the mask rate: it counts all tokens and selects among text tokens."""

import numpy as np
import pytest

from maelm_jax import config, train
from maelm_jax.pretraining import mask_rate

SPECIAL = config.SpecialIds.of_size(50)


@pytest.mark.parametrize("length,share", [(16, "0.1714")])
def test_dry_run_says_the_rate_of_text_tokens(length, share, tmp_path, capsys):
    settings = {"SEQUENCE_LENGTH": length, "BATCH_SIZE": 8, "Model.layers": 1, "Model.width": 32, "Model.heads": 2, "Model.feed_forward": 32}
    argv = ["--gin_file=tiny.gin", "--dry_run", f"--workdir={tmp_path}", *(f"--gin.{name}={value}" for name, value in settings.items())]
    assert train.main(argv) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mask rate")]
    assert line.startswith(f"mask rate 0.15 of all tokens = {share} of text tokens at {length} tokens a segment of one line")


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


def test_where_special_tokens_are_masked_the_rates_are_one():
    assert "among them" in mask_rate.of_length(config.Masking(mask_special_tokens=True), 100)
