"""Trains a SentencePiece vocabulary on a sample of a corpus, once for each corpus and settings."""

import io
import json
import logging
import os
import pathlib
import re
import time
import typing

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from maelm_jax import config
from maelm_jax.data import (
    cleaning,
    documents,
    prepared_folders,
    rows_dir,
    sources,
    vocabularies,
    vocabulary_sample,
)

FORMAT_VERSION = 1  # the names of the folders of trained vocabularies depend on it
ASCII = "".join(chr(code) for code in range(33, 127))  # pieces of every trained vocabulary
# What SentencePiece's messages say about a size that does not fit the text.
TOO_LARGE = re.compile(r"less than or equal to (\d+)|value <= (\d+)")
TOO_SMALL = re.compile(r"required_chars\S* (\d+) vs (\d+)")
log = logging.getLogger(__name__)


def train(
    texts: typing.Iterable[str], settings: config.Vocabulary
) -> vocabularies.SentencePieceVocabulary:
    """Trains a SentencePiece BPE on a sample of documents.

    The same documents in any order give the same model, byte for byte.

    Args:
        texts: The documents.
        settings: Size and kind of the vocabulary, and size of the sample.

    Raises:
        ConfigError: There is no text, or `settings.size` does not fit the text.
    """
    sentences = [
        sentence
        for text in vocabulary_sample.pick(texts, settings.sample_megabytes)
        for line in text.split("\n")
        for sentence in documents.sentences(line)
        if not sentence.isspace() and sentence
    ]
    if not sentences:
        raise config.ConfigError(
            "Vocabulary: the corpus holds no text to train a vocabulary on; "
            "check Corpus.sources or TEXT_FILES"
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
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
            num_threads=os.cpu_count() or 1,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        raise config.ConfigError(_reason(" ".join(str(error).split()), settings.size)) from error
    return vocabularies.SentencePieceVocabulary(_without_machine(model.getvalue()))


def _without_machine(content: bytes) -> bytes:
    """Returns a model without the number of threads that trained it, which changes no piece."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(content)
    proto.trainer_spec.ClearField("num_threads")
    return proto.SerializeToString(deterministic=True)


def _reason(message: str, size: int) -> str:
    """Returns our message for a message of SentencePiece's trainer."""
    too_large = TOO_LARGE.search(message)
    if "too high" in message or too_large:
        most = int(too_large[1] or too_large[2]) + 1 if too_large else None
        if most is not None and most < config.LEAST_VOCABULARY:
            return (
                f"the corpus supports a vocabulary of {most} ids only, and the smallest has "
                f"{config.LEAST_VOCABULARY}: give more text"
            )
        return (
            "vocabulary larger than the corpus supports: set Vocabulary.size "
            f"{'lower' if most is None else f'to at most {most}'} (it is {size})"
        )
    if too_small := TOO_SMALL.search(message):
        return (
            f"Vocabulary.size {size} does not hold the corpus's characters: "
            f"set it above {int(too_small[2]) + 1}"
        )
    return f"Vocabulary: SentencePiece cannot train on this corpus: {message[:300]}"


def _request(settings: config.Vocabulary) -> str:
    """Returns the settings that a trained vocabulary depends on, as text for its key."""
    return json.dumps(
        [settings.size, settings.cased, settings.sample_megabytes, sentencepiece.__version__]
    )


def vocabulary_for(settings: config.Vocabulary, corpus: config.Corpus) -> vocabularies.Vocabulary:
    """Returns the vocabulary of `settings.file`, or one trained on the corpus.

    A trained vocabulary is kept under `rows_dir`. Training samples the sources by their rates and
    leaves out held-out documents.

    Args:
        settings: The file, or the size and kind of the vocabulary to train.
        corpus: The sources, and the folder of trained vocabularies.

    Raises:
        ConfigError: The file is no vocabulary, a source cannot be read, or training fails.
    """
    if settings.file:
        return vocabularies.load(settings.file)
    rates = sources.rates(corpus)
    request = [
        FORMAT_VERSION,
        _request(settings),
        sorted(rates.items()),
        prepared_folders.text_fields(corpus),
        corpus.heldout_fraction,
        *cleaning.request(corpus),
    ]
    file = vocabularies.SentencePieceVocabulary.FILE
    folder = prepared_folders.find(
        corpus, prepared_folders.prefix("vocabulary", request), list(rates), file
    )
    if not (folder / file).is_file():
        prepared_folders.require_local(corpus, "vocabulary")
        with rows_dir.writing(corpus):
            _train_in(folder, settings, corpus, rates)
    return vocabularies.load(folder)


def _train_in(
    folder: pathlib.Path,
    settings: config.Vocabulary,
    corpus: config.Corpus,
    rates: dict[str, float],
):
    """Trains a vocabulary on the corpus and writes it into a folder."""
    started = time.monotonic()
    # An unusable folder fails here and not after minutes of training.
    folder.mkdir(parents=True, exist_ok=True)
    prepared_folders.log_changes(folder, rates, corpus, vocabularies.SentencePieceVocabulary.FILE)
    text_before = prepared_folders.text_to_read(folder, rates, corpus)
    samples = (
        vocabulary_sample.of_source(source, corpus, settings.sample_megabytes * rate)
        for source, rate in rates.items()
    )
    trained = train((text for texts in samples for text in texts), settings)
    prepared_folders.check_unchanged(text_before, corpus)
    prepared_folders.record_text(folder, rates, corpus)
    trained.save(folder)
    log.info(
        "vocabulary of %d ids trained in %.0f s, kept in %s",
        trained.size,
        time.monotonic() - started,
        folder,
    )
