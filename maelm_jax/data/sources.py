"""The text of `installed_docs`, `files:GLOB`, `tfds:NAME` and `seqio:NAME` sources.

The text of a source is divided into parts, which can be read alone. A part is some small files, a
large file, or a range of one. How it is divided depends on the text alone.
"""

import collections
import hashlib
import itertools
import logging
import os
import typing

from maelm_jax.config import ConfigError, Corpus
from maelm_jax.data import installed_docs, readers, seqio_tasks

PART_BYTES = 8_000_000  # of the files of a part, if they can be divided so
CHARACTERS_PER_TOKEN = 4  # about as many in English; turns a number of tokens into text
log = logging.getLogger(__name__)


class Piece(typing.NamedTuple):
    """Something of a source that a part holds as a whole."""

    name: str  # a file, or the source itself if it is a dataset
    start: int  # first byte; of a dataset: the number of its shard
    end: int | None  # end of the bytes, None for all; of a dataset: how many shards it has
    document: int | str = 1  # consecutive rows of a document, or the column that tells them apart


def rates(corpus: Corpus) -> dict[str, float]:
    """Returns {source: share of the rows}, summing to 1. Members of a seqio Mixture replace it.

    The sources are sorted by name, because batches depend on their order. Raises Unavailable if a
    source is a `seqio:` name, and seqio is not installed.
    """
    result: dict[str, float] = {}
    for source, rate in corpus.rates.items():
        members = {source: 1.0}
        if source.startswith("seqio:"):
            members = seqio_tasks.members(source, corpus)
        for member, share in members.items():
            result[member] = result.get(member, 0.0) + rate * share
    return dict(sorted(result.items()))


def parts(source: str, corpus: Corpus) -> list[list[Piece]]:
    """Returns the parts of a source, in the order of its text.

    The text of `installed_docs` is extracted once and kept. Raises Unavailable if the source is not
    on this machine.
    """
    document = corpus.documents.get(source, 1)
    if seqio_tasks.is_dataset(source):
        count = seqio_tasks.shard_count(source, corpus)
        return [[Piece(source, index, count, document)] for index in range(count)]
    if source == "installed_docs":
        source = f"files:{installed_docs.text_file(corpus)}"
    return _parts_of_files(source.removeprefix("files:"), document)


def heldout_parts(corpus: Corpus) -> list[list[Piece]]:
    """Returns the parts of `Corpus.heldout_files`, [] without this setting."""
    if not corpus.heldout_files:
        return []
    document = corpus.documents.get(f"files:{corpus.heldout_files}", 1)
    return _parts_of_files(corpus.heldout_files, document)


def check_files_differ(corpus: Corpus):
    """Raises ConfigError if a file is in two sources, or also one of `Corpus.heldout_files`."""
    patterns = {
        source: source.removeprefix("files:")
        for source in corpus.rates
        if source.startswith("files:")
    }
    if corpus.heldout_files:
        patterns[f"Corpus.heldout_files={corpus.heldout_files!r}"] = corpus.heldout_files
    if len(patterns) < 2:
        return
    places: dict[str, str] = {}
    for place, pattern in patterns.items():
        for file in readers.list_files(pattern):
            other = places.setdefault(os.path.realpath(file.path), place)
            if other != place:
                raise ConfigError(
                    f"{file.path}: in {other} and in {place}; narrow one of the globs"
                )


def _parts_of_files(pattern: str, document: int | str) -> list[list[Piece]]:
    result: list[list[Piece]] = []
    free = 0
    for file in readers.list_files(pattern):
        for piece in _cut(file):
            size = file.size if piece.end is None else piece.end - piece.start
            if not result or size > free:
                result.append([])
                free = PART_BYTES
            result[-1].append(piece._replace(document=document))
            free -= size
    return result


def _cut(file: readers.File) -> list[Piece]:
    """Cuts a large file into ranges, if it can be cut."""
    count = -(-file.size // PART_BYTES)
    if count < 2 or not readers.can_be_cut(file.path):
        return [Piece(file.path, 0, None)]
    bounds = [file.size * number // count for number in range(count + 1)]
    return [Piece(file.path, start, end) for start, end in itertools.pairwise(bounds)]


def documents_of_part(
    part: typing.Iterable[Piece],
    corpus: Corpus,
    counts: dict[str, collections.Counter[str]] | None = None,
) -> typing.Iterator[str]:
    """Reads the documents of a part in order.

    A document does not go on in another piece. Sets `counts[name]` of each piece's name to the
    numbers of its "documents", of their "characters", and of "empty" rows. Raises BadFile if a file
    cannot be read.
    """
    for piece in part:
        numbers: collections.Counter[str] = collections.Counter()
        if counts is not None:
            numbers = counts.setdefault(piece.name, numbers)
        for document in _documents_of_piece(piece, corpus, numbers):
            numbers["documents"] += 1
            numbers["characters"] += len(document)
            yield document


def _documents_of_piece(
    piece: Piece, corpus: Corpus, numbers: collections.Counter[str]
) -> typing.Iterator[str]:
    lines: list[str] = []
    rows, last = 0, None
    for text, value in _rows_of(piece, corpus):
        row = [line for line in map(str.strip, text.split("\n")) if line]
        if not row:
            numbers["empty"] += 1
            continue
        if lines and value != last:  # the values are None where no column is named
            yield "\n".join(lines)
            lines = []
        lines += row
        rows, last = rows + 1, value
        if rows == piece.document:
            yield "\n".join(lines)
            lines, rows = [], 0
    if lines:
        yield "\n".join(lines)


def _rows_of(piece: Piece, corpus: Corpus) -> typing.Iterator[readers.TextRow]:
    column = piece.document if isinstance(piece.document, str) else None
    if not seqio_tasks.is_dataset(piece.name):
        fields = corpus.listed("text_field")
        yield from readers.rows(piece.name, fields, column, piece.start, piece.end)
        return
    if column is not None:
        raise ConfigError(
            f"Corpus.documents: {piece.name} has no columns here. Give a number of rows"
        )
    for text in seqio_tasks.texts(piece.name, corpus, piece.start, piece.end):
        yield readers.TextRow(text, None)


def readable_documents(part: typing.Iterable[Piece], corpus: Corpus) -> typing.Iterator[str]:
    """Reads the documents of a part. With `Corpus.skip_bad_files`, of bad files up to the fault."""
    for piece in part:
        try:
            yield from documents_of_part([piece], corpus)
        except readers.BadFile as error:
            if not corpus.skip_bad_files:
                raise
            log.warning("left out: %s", error)


def documents_of(source: str, corpus: Corpus) -> typing.Iterator[str]:
    """Reads the documents of a source, as `readable_documents`."""
    for part in parts(source, corpus):
        yield from readable_documents(part, corpus)


def first_texts(corpus: Corpus, tokens: int) -> list[str]:
    """Returns the first documents of `Corpus.text_files`, the last one cut.

    They have at most CHARACTERS_PER_TOKEN characters a token. Raises ConfigError if there is no
    text.
    """
    texts, characters = [], tokens * CHARACTERS_PER_TOKEN
    for document in documents_of(f"files:{corpus.text_files}", corpus):
        texts.append(document[:characters])
        characters -= len(texts[-1])
        if characters == 0:
            break
    if not texts:
        raise ConfigError(
            f"Corpus.text_files={corpus.text_files!r}: the files hold no text. Name other files"
        )
    return texts


def identity(source: str, corpus: Corpus) -> str:
    """Returns a hash of what identifies the text of a source, without reading that text.

    It covers the names, sizes and times of files (in buckets their checksums), the versions of the
    packages of `installed_docs`, or the version and sizes of a dataset. Raises Unavailable if the
    source is not on this machine.
    """
    if seqio_tasks.is_dataset(source):
        content = seqio_tasks.identity(source, corpus)
    elif source == "installed_docs":
        content = installed_docs.identity()
    else:
        files = readers.list_files(source.removeprefix("files:"))
        content = "\n".join(
            f"{os.path.basename(path)} {size} {version}" for path, size, version in files
        )
    return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def text_hash(text: str) -> int:
    """Returns a number in [0, 2**64) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def is_heldout(text: str, fraction: float) -> bool:
    """Returns whether a document is held out. Of many documents, about a `fraction` is."""
    return text_hash(text) < fraction * 2.0**64
