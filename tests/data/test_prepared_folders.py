"""What was prepared before is found by settings and text, also where the text is not."""

import types
from pydoc_data import topics

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


def test_rows_of_another_column_are_not_taken_where_the_text_is_not(small_vocabulary, tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    texts = [" ".join(topic.split())[:300] for topic in topics.topics.values()]
    columns = {name: [f"{name} {text}" for text in texts] for name in ("text", "title", "summary")}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    text = config.Corpus(text_files=f"{tmp_path}/*.parquet", sequence_length=16, heldout_fraction=0.1, rows_dir=str(tmp_path / "rows"), processes=1)
    title = config.dataclasses.replace(text, text_column="title")
    here = [prepared_rows(corpus, small_vocabulary)["train"] for corpus in (text, title)]
    settings = config.Vocabulary(size=300)
    trained = [vocabulary_training.vocabulary_for(settings, corpus).fingerprint for corpus in (text, title)]
    (tmp_path / "a.parquet").unlink()
    for corpus, rows_here, fingerprint in zip((text, title), here, trained, strict=True):
        np.testing.assert_array_equal(prepared_rows(corpus, small_vocabulary)["train"], rows_here)
        assert vocabulary_training.vocabulary_for(settings, corpus).fingerprint == fingerprint
    with pytest.raises(config.ConfigError, match="no text file matches"):
        rows.prepare(config.dataclasses.replace(text, text_column="summary"), small_vocabulary)


def test_the_names_of_stores_stay_what_they_were_before_a_column_could_be_named():
    corpus, vocabulary = config.Corpus(json_field="body"), types.SimpleNamespace(fingerprint="0")
    assert rows.prefix("files:a/*.jsonl", corpus, vocabulary) == "files_a_jsonl-c88f7d3aae86"
