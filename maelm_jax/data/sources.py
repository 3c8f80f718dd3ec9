"""Reads text from `installed_docs`, `files:GLOB`, `tfds:NAME` and `seqio:NAME`.

A source is read as shards. Each shard can be read alone and gives its documents in a fixed order.
TensorFlow and seqio are imported only for `tfds:` and `seqio:` sources.
"""

import collections
import dataclasses
import hashlib
import logging
import typing

from maelm_jax import config, json_files, storage
from maelm_jax.data import (
    cleaning,
    documents,
    file_hashes,
    file_sources,
    installed_docs,
    rows_dir,
    seqio_tasks,
)

DIFFERENCES_SHOWN = 5
CHARACTERS_PER_TOKEN = 4  # about as many in English; turns a number of tokens into text
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of a source: one file, or part `index` of `count` of a TFDS or seqio source.

    Shards can be pickled.
    """

    source: str
    corpus: config.Corpus
    path: str = ""
    index: int = 0
    count: int = 1

    def documents(self, dropped: collections.Counter[str] | None = None) -> typing.Iterator[str]:
        """Reads the documents, in a fixed order, without short and refused ones.

        Args:
            dropped: Counts the documents that are left out, by the reason (cleaning.REASONS).

        Raises:
            ConfigError: The data cannot be read. The message names the file and the position.
        """
        if _is_dataset(self.source):
            texts = seqio_tasks.texts(self.source, self.corpus, self.index, self.count)
        else:
            texts = file_sources.documents_of(self.path, self.corpus)
        for document in filter(None, map(documents.clean, texts)):
            reason = cleaning.reason_to_drop(document, self.corpus)
            if reason is None:
                yield document
            elif dropped is not None:
                dropped[reason] += 1

    def readable_documents(self) -> typing.Iterator[str]:
        """Reads the documents. With `Corpus.skip_bad_files`, up to where the file is bad."""
        try:
            yield from self.documents()
        except documents.BadFile as error:
            if not self.corpus.skip_bad_files:
                raise
            log.warning("left out: %s", error)


def _is_dataset(source: str) -> bool:
    return source.startswith(("tfds:", "seqio:"))


def shards(source: str, corpus: config.Corpus) -> list[Shard]:
    """Returns the shards of a source, in order.

    The text of `installed_docs` is extracted once and kept.

    Raises:
        ConfigError: No file matches, the TFDS dataset is missing, or seqio does not know the name.
    """
    if _is_dataset(source):
        count = seqio_tasks.shard_count(source, corpus)
        return [Shard(source, corpus, index=index, count=count) for index in range(count)]
    if source == "installed_docs":
        return [Shard(source, corpus, path=str(installed_docs.text_file(corpus)))]
    return [Shard(source, corpus, path=path) for path in file_sources.matching(source)]


def documents_of(source: str, corpus: config.Corpus) -> typing.Iterator[str]:
    """Reads all documents of a source, in the order of its shards.

    With `Corpus.skip_bad_files`, a file is read up to the place where it is bad.
    """
    for shard in shards(source, corpus):
        yield from shard.readable_documents()


def first_texts(corpus: config.Corpus, tokens: int) -> list[str]:
    """Returns the first documents of `Corpus.text_files`, the last one cut.

    Args:
        corpus: Names the files.
        tokens: The documents have at most CHARACTERS_PER_TOKEN characters for each of them.

    Raises:
        ConfigError: There is no text.
    """
    texts, characters = [], tokens * CHARACTERS_PER_TOKEN
    for document in documents_of(f"files:{corpus.text_files}", corpus):
        texts.append(document[:characters])
        characters -= len(texts[-1])
        if characters == 0:
            break
    if not texts:
        raise config.ConfigError(
            f"Corpus.text_files={corpus.text_files!r}: the files hold no text. Name other files"
        )
    return texts


def rates(corpus: config.Corpus) -> dict[str, float]:
    """Returns {source: share of the rows}, summing to 1.

    The Tasks of a seqio Mixture stand in its place. They are recorded under `rows_dir`, for
    machines without seqio.
    """
    result: dict[str, float] = {}
    for source, rate in corpus.rates.items():
        members = _members(source, corpus) if source.startswith("seqio:") else {source: 1.0}
        for member, share in members.items():
            result[member] = result.get(member, 0.0) + rate * share
    return result


def _members(source: str, corpus: config.Corpus) -> dict[str, float]:
    """Returns {Task: rate} of a seqio Mixture, from seqio or from the record under `rows_dir`."""
    digest = hashlib.sha256(_bytes(source)).hexdigest()[:12]
    record = rows_dir.local_folder(corpus) / f"mixture-{digest}.json"
    try:
        members = seqio_tasks.members(source, corpus)
    except documents.Unavailable:
        if storage.in_bucket(corpus.rows_dir):
            storage.fetch_files(corpus.rows_dir, (record.name,))
        if not record.is_file():
            raise
        return json_files.read(
            record, _are_rates, f"remove {record}; prepare writes it again where seqio is installed"
        )
    rows_dir.remember(record, members)
    return members


def _are_rates(value: typing.Any) -> bool:
    if not isinstance(value, dict) or not value:
        return False
    return all(type(rate) in (int, float) and 0 < rate <= 1 for rate in value.values())


def identity(source: str, corpus: config.Corpus, partial: bool = False) -> str:
    """Returns a hash of the text of a source.

    It covers the contents of files, the versions of the packages of `installed_docs`, or the
    version and sizes of a dataset.

    Args:
        source: The source.
        corpus: Holds the settings for reading it.
        partial: True accepts that some packages of `installed_docs` are not installed.

    Raises:
        Unavailable: The source is not (completely) on this machine.
    """
    if _is_dataset(source):
        content = seqio_tasks.identity(source, corpus)
    elif source == "installed_docs":
        content = installed_docs.identity(partial)
    else:
        content = file_sources.identity(source, corpus)
    content += cleaning.identity(corpus)
    return hashlib.sha256(_bytes(content)).hexdigest()


def _bytes(text: str) -> bytes:
    """Returns the UTF-8 of a text. File names that are not UTF-8 keep their bytes."""
    return text.encode("utf-8", "surrogateescape")


def parts(source: str, corpus: config.Corpus) -> dict[str, str]:
    """Returns what the text of a source is made of.

    Returns:
        {distribution: version}, {file: hash}, or {source: version and sizes} of a dataset.
    """
    if _is_dataset(source):
        return {source: seqio_tasks.identity(source, corpus)}
    if source == "installed_docs":
        return installed_docs.versions()
    hashes = file_hashes.of_files(file_sources.matching(source), corpus)
    return {path: digest[:12] for path, digest in hashes.items()}


def differences(then: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> str:
    """Returns in words how two states of the text differ. A state is {source: `parts`}."""
    changes = []
    for source in sorted({*then, *now}):
        before, after = then.get(source, {}), now.get(source, {})
        changes += [
            f"{part} {before.get(part, 'absent')} -> {after.get(part, 'absent')}"
            for part in sorted({*before, *after})
            if before.get(part) != after.get(part)
        ]
    if not changes:
        return "nothing that is recorded"
    text = ", ".join(changes[:DIFFERENCES_SHOWN])
    left_out = len(changes) - DIFFERENCES_SHOWN
    return f"{text} and {left_out} more" if left_out > 0 else text
