"""Our sources as seqio Tasks, and our vocabulary as one of seqio."""

import dataclasses

import numpy as np
import pytest

from maelm_jax import config
from maelm_jax.data import seqio_mixture, sources

pytest.importorskip("seqio")
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs: of TensorFlow and seqio


def test_the_seqio_vocabulary_keeps_our_padding_and_reads_on_after_the_end_of_a_line(vocabulary):
    ours = seqio_mixture.seqio_vocabulary(vocabulary)
    ids = [*vocabulary.encode("document"), vocabulary.eos, *vocabulary.encode("number")]
    assert (ours.pad_id, ours.eos_id, ours.bos_id, ours.unk_id, ours.vocab_size) == (1, 2, 0, 3, 2000)
    assert ours.decode(ids) == vocabulary.decode(ids) and "number" in ours.decode(ids)
    assert ours.encode_tf("a document").numpy().tolist() == vocabulary.encode("a document") == ours.encode("a document")
    assert ours.decode_tf(np.array(ids, np.int32)).numpy().decode() == vocabulary.decode(ids)
    assert ours == seqio_mixture.seqio_vocabulary(vocabulary)


def test_the_corpus_is_registered_as_a_mixture_of_tasks(vocabulary, tmp_path):
    import seqio

    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"Text {name} {number}." for number in range(20)))
    corpus = config.Corpus(sources={f"files:{tmp_path}/a.txt": 3.0, f"files:{tmp_path}/b.txt": 1.0}, rows_dir=str(tmp_path))
    mixture = seqio.get_mixture_or_task(seqio_mixture.register(corpus, vocabulary))
    of_a, of_b = sorted(mixture.tasks, key=mixture.get_rate, reverse=True)
    assert [mixture.get_rate(task) for task in (of_a, of_b)] == [0.75, 0.25]
    assert of_a.supports_caching, "by seqio_cache_tasks"
    examples = list(of_a.get_dataset(None, "train", shuffle=False).as_numpy_iterator())
    assert [example["targets"].tolist() for example in examples] == vocabulary.encode_batch([f"Text a {number}." for number in range(20)])
    assert seqio_mixture.register(corpus, vocabulary) == mixture.name
    smaller = dataclasses.replace(corpus, heldout_fraction=0.4)
    tasks = seqio.get_mixture_or_task(seqio_mixture.register(smaller, vocabulary)).tasks
    texts = {
        example["targets_pretokenized"].decode() for task in tasks for example in task.get_dataset(None, "train", shuffle=False).as_numpy_iterator()
    }
    every = {f"Text {name} {number}." for name in "ab" for number in range(20)}
    assert texts == {text for text in every if not sources.is_heldout(text, 0.4)} and 0 < len(texts) < 40
