"""What was prepared before is found by settings and text, also where the text is not."""

import numpy as np
import pytest
from testing import prepared_rows

from maelm_jax import config
from maelm_jax.data import rows, vocabulary_training


def test_what_determines_the_rows_is_in_their_key(corpus, vocabulary, documents, tmp_path):
    def stores():
        return {path.parent.name for path in (tmp_path / "rows").glob("*/store.json")}

    rows.prepare(corpus, vocabulary)
    other = vocabulary_training.train(documents, config.Vocabulary(size=1000))
    for number, change in enumerate(
        (
            lambda: rows.prepare(corpus, other),
            lambda: rows.prepare(config.dataclasses.replace(corpus, sequence_length=64), vocabulary),
            lambda: rows.prepare(config.dataclasses.replace(corpus, heldout_fraction=0.2), vocabulary),
            lambda: (tmp_path / "b.txt").write_text("Another text altogether, though a short one.") and rows.prepare(corpus, vocabulary),
        )
    ):
        change()
        assert len(stores()) == number + 2
    rows.prepare(config.dataclasses.replace(corpus, processes=2), vocabulary)
    assert len(stores()) == 5


def test_rows_copied_to_a_machine_without_the_text_are_used(corpus, vocabulary, tmp_path):
    here = prepared_rows(corpus, vocabulary)
    trained = vocabulary_training.vocabulary_for(config.Vocabulary(size=500), corpus)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).unlink()
    np.testing.assert_array_equal(prepared_rows(corpus, vocabulary)["train"], here["train"])
    assert vocabulary_training.vocabulary_for(config.Vocabulary(size=500), corpus).fingerprint == trained.fingerprint
    with pytest.raises(config.ConfigError, match="no text file matches"):
        rows.prepare(config.dataclasses.replace(corpus, sequence_length=64), vocabulary)
