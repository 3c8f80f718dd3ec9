"""Trains a SentencePiece vocabulary on a sample of a corpus, once for each corpus and settings."""

import contextlib
import heapq
import io
import itertools
import logging
import os
import pathlib
import time
import typing

import sentencepiece

from maelm_jax import config, storage
from maelm_jax.data import rows, sources, vocabularies, workers
from maelm_jax.data.readers import Unavailable

VERSION = 3  # of the way vocabularies are trained; their names depend on it
TIMES_READ = 8  # text read, as a multiple of the sample
PARTS_READ = 64  # a large corpus is read from the beginnings of about so many parts
LONGER = 8  # times as much is read of each part, if the beginnings are too short
EXCERPT_CHARACTERS = 1 << 14  # of a document; at most 64 KiB, the limit of SentencePiece's trainer
ASCII = "".join(chr(code) for code in range(33, 127))  # pieces of every trained vocabulary
log = logging.getLogger(__name__)


def vocabulary_for(settings: config.Vocabulary, corpus: config.Corpus) -> vocabularies.Vocabulary:
    """Returns the vocabulary of `settings.file`, or one trained on the corpus.

    A trained vocabulary is kept under `rows_dir`. Training samples the sources by their rates and
    leaves out held-out documents. Where the text is not on this machine, the vocabulary that was
    trained last for these settings is taken.
    """
    if settings.file:
        return vocabularies.load(settings.file)
    request = rows.digest(
        [
            (VERSION, sentencepiece.__version__),
            (settings.size, settings.cased, settings.sample_megabytes),
            sorted(corpus.rates.items()),
            (corpus.text_field, corpus.heldout_share),
            sorted(corpus.documents.items()),
        ]
    )
    pointer = f"vocabulary-{request}"
    try:
        sources.check_files_differ(corpus)
        rates = sources.rates(corpus)
        text = rows.digest([sources.identity(source, corpus) for source in rates])
        path = rows.path_of(corpus, f"{pointer}-{text}.model")
        if not storage.exists(path):
            rows.require_local(corpus)
            with _temporary_lock(pathlib.Path(f"{path}.lock")):
                if not os.path.exists(path):
                    storage.write(path, _train_on(corpus, rates, settings).content)
    except Unavailable:
        name = rows.recall(corpus, pointer)
        if name is None:
            raise
        path = rows.path_of(corpus, name)  # without a warning: the rows have one
    rows.remember(corpus, pointer, os.path.basename(path))
    return vocabularies.load(path)


@contextlib.contextmanager
def _temporary_lock(path: pathlib.Path) -> typing.Iterator[None]:
    """Context manager that holds a lock and removes its file. A folder made for it goes too."""
    is_new = not path.parent.exists()
    try:
        with storage.locked(path, "trains the same vocabulary"):
            yield
    finally:
        path.unlink(missing_ok=True)
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty
                path.parent.rmdir()


def _train_on(
    corpus: config.Corpus, rates: dict[str, float], settings: config.Vocabulary
) -> vocabularies.Vocabulary:
    began = time.monotonic()
    log.info("training a vocabulary of %d ids", settings.size)
    samples = (
        sample(source, corpus, settings.sample_megabytes * rate) for source, rate in rates.items()
    )
    trained = train(itertools.chain.from_iterable(samples), settings)
    log.info("trained it in %.0f s", time.monotonic() - began)
    return trained


def sample(source: str, corpus: config.Corpus, megabytes: float) -> list[str]:
    """Picks a sample of the documents of a source that are not held out.

    The parts of the source are read in an order that depends on their number alone, until
    TIMES_READ times the size of the sample is read. At most an equal share of this size is read
    from each part, from the beginnings of its files. Long documents are cut into excerpts, and the
    sample is picked from these by hash. A megabyte is 10**6 characters. Raises ConfigError if the
    source cannot be read.
    """
    parts = sources.parts(source, corpus)
    limit = int(TIMES_READ * megabytes * 1e6)
    most = limit / min(len(parts), PARTS_READ)
    order = sorted(range(len(parts)), key=lambda number: sources.text_hash(str(number)))
    while True:
        reading = _Reading(corpus)
        picked = pick(
            _first(
                (text for number in order for text in reading.of_part(parts[number], most)), limit
            ),
            megabytes,
        )
        # A document that is longer than a part is read with the part in which it begins.
        if not reading.left_text or reading.characters >= megabytes * 1e6:
            return picked
        most *= LONGER


class _Reading:
    """Reads excerpts of the documents that are not held out.

    Attributes:
        characters: How many characters were read.
        left_text: Whether the end of a file was not read.
    """

    def __init__(self, corpus: config.Corpus):
        self._corpus = corpus
        self.characters = 0
        self.left_text = False

    def of_part(self, part: list[sources.Piece], most: float) -> typing.Iterator[str]:
        """Yields about `most` characters of a part, from the beginnings of all its files."""
        end = self.characters + most
        for number, piece in enumerate(part):
            share = (end - self.characters) / (len(part) - number)
            end_of_piece = self.characters + share
            for excerpt in self._excerpts(piece):
                if self.characters >= end_of_piece:
                    self.left_text = True
                    break
                self.characters += len(excerpt)
                yield excerpt

    def _excerpts(self, piece: sources.Piece) -> typing.Iterator[str]:
        for text in sources.readable_documents([piece], self._corpus):
            if not sources.is_heldout(text, self._corpus.heldout_share):
                yield from excerpts(text)


def excerpts(text: str) -> typing.Iterator[str]:
    """Cuts a document into whole lines of at most EXCERPT_CHARACTERS together, or parts of one."""
    lines: list[str] = []
    size = 0
    for line in text.split("\n"):
        for start in range(0, len(line), EXCERPT_CHARACTERS):
            part = line[start : start + EXCERPT_CHARACTERS]
            if lines and size + len(part) >= EXCERPT_CHARACTERS:
                yield "\n".join(lines)
                lines, size = [], 0
            lines.append(part)
            size += len(part) + 1
    if lines:
        yield "\n".join(lines)


def _first(texts: typing.Iterable[str], characters: float) -> typing.Iterator[str]:
    """Yields the first texts, until they have so many characters together."""
    size = 0
    for text in texts:
        yield text
        size += len(text)
        if size >= characters:
            return


def pick(texts: typing.Iterable[str], megabytes: float) -> list[str]:
    """Picks the documents with the smallest hashes that fit into a size together.

    The result is in the order of the hashes, whatever the order of the documents. A megabyte is
    10**6 characters.
    """
    limit, total = int(megabytes * 1e6), 0
    heap: list[tuple[int, str]] = []  # (-hash, text): the largest hash is on top
    bound = None  # documents from this hash on do not fit
    for text in texts:
        key = sources.text_hash(text)
        if bound is not None and key >= bound:
            continue
        heapq.heappush(heap, (-key, text))
        total += len(text)
        while total > limit and len(heap) > 1:
            key, dropped = heapq.heappop(heap)
            bound = -key
            total -= len(dropped)
    return [text for _, text in sorted(heap, reverse=True)]


def train(
    texts: typing.Iterable[str], settings: config.Vocabulary
) -> vocabularies.SentencePieceVocabulary:
    """Trains a SentencePiece BPE on a sample of documents.

    The same documents in any order give the same model, byte for byte.

    Raises:
        ConfigError: There is no text, or `settings.size` does not fit it.
    """
    lines = [
        line
        for text in pick(texts, settings.sample_megabytes)
        for excerpt in excerpts(text)
        for line in excerpt.split("\n")
        if not line.isspace()
    ]
    if not lines:
        raise config.ConfigError(
            "Vocabulary: the corpus holds no text to train a vocabulary on; "
            "check Corpus.sources or TEXT_FILES"
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            # <mask> is appended later. The trainer would give it one of the first ids.
            vocab_size=settings.size - 1,
            character_coverage=0.9999,
            normalization_rule_name="nmt_nfkc" if settings.cased else "nmt_nfkc_cf",
            max_sentence_length=1 << 16,
            bos_id=0,
            pad_id=1,
            eos_id=2,
            unk_id=3,
            unk_surface="<unk>",
            required_chars=ASCII if settings.cased else ASCII.lower(),
            shuffle_input_sentence=False,
            num_threads=workers.usable_cores(),
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).rpartition("]")[2].split())
        raise config.ConfigError(
            f"Vocabulary.size={settings.size} does not fit this corpus: {reason}"
        ) from error
    return vocabularies.SentencePieceVocabulary(model.getvalue())
