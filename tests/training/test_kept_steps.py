"""Which checkpoints stay, and what their exports are called."""

import pytest

from maelm_jax import config
from maelm_jax.training import kept_steps


def test_words_are_kept_at_the_nearest_step_and_named_as_the_challenge_names_them():
    millions = [*range(1, 10), *range(10, 101, 10)]
    run = config.Run(batch_size=512, train_steps=2400, keep_at_words=[number * 10**6 for number in millions])
    kept = kept_steps.by_name(run, words_per_row=88.0)
    assert list(kept) == [f"chck_{number}M" for number in millions]
    for number, step in zip(millions, kept.values(), strict=True):
        assert abs(step * 512 * 88 - number * 10**6) <= 512 * 88 / 2
    assert list(kept_steps.by_name(config.Run(train_steps=100, batch_size=512, keep_at_words=[10**6, 10**8, 1500]), 88.0)) == [
        "chck_0.0015M",
        "chck_1M",
    ]


def test_steps_are_kept_beside_words():
    run = config.Run(batch_size=10, train_steps=9, keep_every=4, keep_at=[1, 8, 20], keep_at_words=[70])
    assert kept_steps.by_name(run, 1.0) == {"step_1": 1, "step_4": 4, "chck_7e-05M": 7, "step_8": 8}


def test_words_of_rows_that_were_not_counted_are_refused():
    with pytest.raises(config.ConfigError, match="Run.keep_at="):
        kept_steps.by_name(config.Run(keep_at_words=[10]), None)
