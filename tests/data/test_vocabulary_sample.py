"""The sample that a vocabulary is trained on: by hash, of all text of a small corpus, of a bounded part of a large one."""

import collections
import dataclasses
import itertools
import random

import pytest

from maelm_jax import config
from maelm_jax.data import sources, vocabulary_sample
from maelm_jax.data.documents import BadFile, is_heldout

DOCUMENTS = [f"Document {number} of these files. It has the number {number * 7919 % 1000}." for number in range(4000)]
CHARACTERS = sum(map(len, DOCUMENTS))


def test_sample_is_by_hash_and_within_its_size(documents):
    chosen = vocabulary_sample.pick(documents, 0.3)
    assert set(chosen) == set(vocabulary_sample.pick(documents[::-1], 0.3))
    assert 0.2e6 < sum(map(len, chosen)) <= 0.3e6


def write(folder, sizes, **settings) -> config.Corpus:
    """Files with so many of the documents each."""
    folder.mkdir(exist_ok=True)
    texts = iter(DOCUMENTS)
    for number, size in enumerate(sizes):
        part = itertools.islice(texts, size)
        (folder / f"{number:03d}.txt").write_text("\n\n".join(part))
    return config.Corpus(text_files=f"{folder}/*.txt", heldout_fraction=0.1, rows_dir=str(folder / "rows"), **settings)


@pytest.fixture
def read(monkeypatch):
    """Counts the documents that are read of each file."""
    original, counts = sources.Shard.documents, collections.Counter()

    def documents(shard, dropped=None):
        for text in original(shard, dropped):
            counts[shard.path] += 1
            yield text

    monkeypatch.setattr(sources.Shard, "documents", documents)
    return counts


def sample(corpus, megabytes):
    return vocabulary_sample.of_source(f"files:{corpus.text_files}", corpus, megabytes)


@pytest.mark.parametrize("sizes", [[4000], [2000, 2000], [10] * 90 + [3100]])
def test_a_small_corpus_is_read_as_a_whole(tmp_path, sizes):
    corpus, megabytes = write(tmp_path, sizes), CHARACTERS / 1e6 / vocabulary_sample.TIMES_READ
    expected = vocabulary_sample.pick((text for text in DOCUMENTS if not is_heldout(text, 0.1)), megabytes)
    assert sample(corpus, megabytes) == expected and len(expected) > 400


@pytest.mark.parametrize("sizes,files,most", [([4000], 1, 0.25), ([20] * 200, 50, 0.25), ([1000] * 4, 4, 0.25), ([1] * 100 + [3900], 101, 0.5)])
def test_of_a_large_corpus_a_bounded_part_of_many_files_is_read(tmp_path, read, sizes, files, most):
    """A fifth is needed, and a tenth is held out. One long file among short ones is read in several parts, each from its beginning."""
    corpus, megabytes = write(tmp_path, sizes), CHARACTERS / 1e6 / 40
    chosen = sample(corpus, megabytes)
    assert 0.9 * megabytes < sum(map(len, chosen)) / 1e6 <= megabytes
    assert 0.2 < sum(read.values()) / len(DOCUMENTS) < most and len(read) >= files


def test_a_copy_of_the_files_gives_the_same_sample_with_any_number_of_processes(tmp_path):
    first, second = write(tmp_path / "a", [20] * 200, processes=1), write(tmp_path / "b", [20] * 200, processes=7)
    assert sample(first, 0.005) == sample(second, 0.005) != sample(write(tmp_path / "c", [40] * 100), 0.005)


def test_duplicates_do_not_fill_the_sample(tmp_path):
    write(tmp_path, [2000])
    for number in range(1, 40):
        (tmp_path / f"{number:03d}.txt").write_text("\n\n".join([DOCUMENTS[0]] * 500))
    corpus = dataclasses.replace(write(tmp_path, [2000]), deduplicate=True)
    chosen = sample(corpus, CHARACTERS / 1e6 / 40)
    assert sum(map(len, chosen)) > 0.9 * CHARACTERS / 40 and len(set(chosen)) == len(chosen)


def test_a_bad_file_is_read_to_its_bad_place_if_asked(tmp_path):
    corpus = write(tmp_path, [2000, 2000])
    texts = DOCUMENTS[:2000]
    random.Random(0).shuffle(texts)
    (tmp_path / "000.txt").write_bytes("\n\n".join(texts).encode() + b"\n\ncaf\xe9")
    with pytest.raises(BadFile, match="not UTF-8"):
        sample(corpus, 1.0)
    assert len(sample(dataclasses.replace(corpus, skip_bad_files=True), 1.0)) > 3000
