"""Picks the text that a vocabulary is trained on. Of a large corpus only a part is read.

Text is read until it is TIMES_READ times as large as the sample. The sample is picked from it by
hash. A smaller corpus is read as a whole. What is read depends on the order of the files alone: not
on their folder, and not on the number of processes.
"""

import contextlib
import heapq
import itertools
import logging
import typing

from maelm_jax import config
from maelm_jax.data import deduplication, documents, sources

TIMES_READ = 8  # text read, as a multiple of the sample
FILES_READ = 64  # a large corpus is read from the beginnings of about so many files
log = logging.getLogger(__name__)


def of_source(source: str, corpus: config.Corpus, megabytes: float) -> list[str]:
    """Picks a sample of the documents of a source that are not held out.

    Args:
        source: The source.
        corpus: Says which documents are left out, and which are held out.
        megabytes: The size of the sample, in 10**6 characters.

    Raises:
        ConfigError: The source cannot be read.
    """
    shards = sources.shards(source, corpus)
    limit = int(TIMES_READ * megabytes * 1e6)
    # A tenth more than is needed on average, as reading a shard again takes longer.
    part = 1.1 * limit / (1 - corpus.heldout_fraction) / min(len(shards), FILES_READ)
    documents_read = [0] * len(shards)
    texts = _spread(shards, part, documents_read)
    if corpus.deduplicate:
        texts = deduplication.distinct(texts)
    training_texts = (
        text for text in texts if not documents.is_heldout(text, corpus.heldout_fraction)
    )
    result = pick(_first(training_texts, limit), megabytes)
    log.info(
        "%s: the vocabulary is trained on %.1f MB, picked from the text of %d of %d files",
        source,
        sum(map(len, result)) / 1e6,
        sum(map(bool, documents_read)),
        len(shards),
    )
    return result


def _spread(
    shards: list[sources.Shard], part: float, documents_read: list[int]
) -> typing.Iterator[str]:
    """Reads all documents, in an order whose beginning is spread over many shards.

    The beginnings of all shards come first, then the next parts of the longer ones, and so on. To
    go on with a shard, it is read again from its beginning. As each part is twice as long as the
    one before, at most twice the text is read.

    Args:
        shards: The shards.
        part: Characters to read of each shard at first.
        documents_read: Counts the documents that were read, for each shard.
    """
    unfinished = sorted(range(len(shards)), key=lambda number: documents.text_hash(str(number)))
    while unfinished:
        longer = []
        for number in unfinished:
            size = 0
            with contextlib.closing(shards[number].readable_documents()) as texts:
                for text in itertools.islice(texts, documents_read[number], None):
                    documents_read[number] += 1
                    size += len(text)
                    yield text
                    if size >= part:
                        longer.append(number)
                        break
        unfinished, part = longer, 2 * part


def _first(texts: typing.Iterable[str], characters: int) -> typing.Iterator[str]:
    """Yields the first texts, until they have so many characters together."""
    size = 0
    for text in texts:
        yield text
        size += len(text)
        if size >= characters:
            return


def pick(texts: typing.Iterable[str], megabytes: float) -> list[str]:
    """Picks the documents with the smallest hashes that fit into a size together.

    The result does not depend on the order of the documents.

    Args:
        texts: Any number of documents.
        megabytes: The size, in 10**6 characters.

    Returns:
        The documents in the order of their hashes.
    """
    limit, total = int(megabytes * 1e6), 0
    heap: list[tuple[int, str]] = []  # (-hash, text): the largest hash is on top
    bound = None  # documents from this hash on do not fit
    for text in texts:
        key = documents.text_hash(text)
        if bound is not None and key >= bound:
            continue
        heapq.heappush(heap, (-key, text))
        total += len(text)
        while total > limit and len(heap) > 1:
            key, dropped = heapq.heappop(heap)
            bound = -key
            total -= len(dropped)
    return [text for _, text in sorted(heap, reverse=True)]
