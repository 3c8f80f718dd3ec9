"""Training a vocabulary: on a sample by hash, without held-out text, the same on any machine."""

import collections
import itertools

import pytest

from maelm_jax import config
from maelm_jax.data import readers, sources, vocabulary_training, workers

DOCUMENTS = [f"Document {number} of these files. It has the number {number * 7919 % 1000}." for number in range(4000)]
CHARACTERS = sum(map(len, DOCUMENTS))


def test_the_order_of_documents_changes_nothing(documents):
    settings = config.Vocabulary(size=1000, sample_megabytes=0.3)
    one, other = (vocabulary_training.train(texts, settings) for texts in (documents, documents[::-1]))
    assert one.fingerprint == other.fingerprint


def test_a_machine_with_more_cores_trains_the_same_vocabulary(documents, monkeypatch):
    """Its hash names the stores of rows."""
    fingerprints = set()
    for cores in (1, 3):
        monkeypatch.setattr(workers, "usable_cores", lambda cores=cores: cores)
        trained = vocabulary_training.train(documents, config.Vocabulary(size=500))
        fingerprints.add(trained.fingerprint)
    assert len(fingerprints) == 1


def test_a_size_that_the_corpus_does_not_support_is_told_what_is_possible(documents):
    with pytest.raises(config.ConfigError, match="Vocabulary.size=60000") as caught:
        vocabulary_training.train(documents[:3], config.Vocabulary(size=60000))
    most = int(str(caught.value).split("<= ")[1].split(".")[0])
    trained = vocabulary_training.train(documents[:3], config.Vocabulary(size=most))
    assert trained.size == most
    for text in ("One short text, and no more.", " \n "):
        with pytest.raises(config.ConfigError, match="Vocabulary"):
            vocabulary_training.train([text], config.Vocabulary(size=1000))


def test_a_vocabulary_knows_nothing_of_heldout_text(corpus, tmp_path):
    settings = config.Vocabulary(size=500)
    trained = vocabulary_training.vocabulary_for(settings, corpus)
    candidates = (f"Zyzzyva zyzzyva number {number}." for number in range(1000))
    secret = next(text for text in candidates if sources.is_heldout(text, corpus.heldout_fraction))
    (tmp_path / "c.txt").write_text(f"{secret}\n\n" * 1000)
    again = vocabulary_training.vocabulary_for(settings, corpus)
    assert again.fingerprint == trained.fingerprint


def test_a_vocabulary_is_trained_once_and_found_without_the_text(corpus, tmp_path, monkeypatch):
    settings = config.Vocabulary(size=500)
    trained = vocabulary_training.vocabulary_for(settings, corpus)
    monkeypatch.setattr(vocabulary_training, "train", None)
    assert vocabulary_training.vocabulary_for(settings, corpus).content == trained.content
    for name in "ab":
        (tmp_path / f"{name}.txt").unlink()
    assert vocabulary_training.vocabulary_for(settings, corpus).content == trained.content
    with pytest.raises(readers.Unavailable):
        vocabulary_training.vocabulary_for(config.Vocabulary(size=400), corpus)
    assert not list((tmp_path / "rows").glob("*.lock"))


def write(folder, sizes) -> config.Corpus:
    """Writes files with so many of the documents each."""
    texts = iter(DOCUMENTS)
    for number, size in enumerate(sizes):
        (folder / f"{number:03d}.txt").write_text("\n\n".join(itertools.islice(texts, size)))
    return config.Corpus(text_files=f"{folder}/*.txt", heldout_fraction=0.1, rows_dir=str(folder))


def sample(corpus, megabytes):
    return vocabulary_training.sample(f"files:{corpus.text_files}", corpus, megabytes)


@pytest.mark.parametrize("sizes", [[4000], [2000, 2000], [40] * 100])
def test_a_small_corpus_is_read_as_a_whole(tmp_path, sizes):
    megabytes = CHARACTERS / 1e6 / vocabulary_training.TIMES_READ
    texts = (text for text in DOCUMENTS if not sources.is_heldout(text, 0.1))
    expected = vocabulary_training.pick(texts, megabytes)
    assert sample(write(tmp_path, sizes), megabytes) == expected and len(expected) > 400


@pytest.mark.parametrize("sizes", [[4000], [20] * 200, [1000] * 4, [1] * 100 + [3900]])
def test_of_a_large_corpus_a_bounded_share_is_read_of_many_places(tmp_path, monkeypatch, sizes):
    monkeypatch.setattr(sources, "PART_BYTES", 5000)
    original, read = readers.rows, collections.Counter()

    def rows(path, fields, column, start, end):
        for row in original(path, fields, column, start, end):
            read[path, start] += 1
            yield row

    monkeypatch.setattr(readers, "rows", rows)
    megabytes = CHARACTERS / 1e6 / 40
    chosen = sample(write(tmp_path, sizes), megabytes)
    assert 0.9 * megabytes < sum(map(len, chosen)) / 1e6 <= megabytes
    assert 0.2 < sum(read.values()) / len(DOCUMENTS) < 0.3 and len(read) >= 30


def write_lines(folder, sizes) -> config.Corpus:
    """Writes files without a blank line, of so many characters each."""
    for number, size in enumerate(sizes):
        text = "".join(f"file{number} Line {line} is of one document.\n" for line in range(size // 35))
        (folder / f"{number}.txt").write_text(text)
    return config.Corpus(text_files=f"{folder}/*.txt", heldout_fraction=0.005, rows_dir=str(folder))


@pytest.mark.parametrize("sizes", [[3_000_000], [400_000] * 6, [2_000_000, 1_000, 300_000]])
@pytest.mark.parametrize("part_bytes", [8_000_000, 30_000])
def test_files_without_blank_lines_give_a_sample_of_its_size_from_each(tmp_path, monkeypatch, sizes, part_bytes):
    monkeypatch.setattr(sources, "PART_BYTES", part_bytes)
    chosen = sample(write_lines(tmp_path, sizes), 0.2)
    assert 150_000 < sum(map(len, chosen)) <= 200_000
    assert {text.split()[0] for text in chosen} >= {f"file{number}" for number, size in enumerate(sizes) if size > 100_000}
    whole = "".join((tmp_path / f"{number}.txt").read_text() for number in range(len(sizes)))
    assert all(f"{text}\n" in whole for text in chosen), "of whole lines"


def test_a_text_that_is_refused_leaves_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n')
    corpus = config.Corpus(text_files=f"{tmp_path}/*.jsonl", rows_dir=str(tmp_path / "rows"))
    with pytest.raises(readers.BadFile):
        vocabulary_training.vocabulary_for(config.Vocabulary(size=500), corpus)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    (tmp_path / "rows").mkdir()
    with pytest.raises(readers.BadFile):
        vocabulary_training.vocabulary_for(config.Vocabulary(size=500), corpus)
    assert list((tmp_path / "rows").iterdir()) == [], "a folder of the user stays"
