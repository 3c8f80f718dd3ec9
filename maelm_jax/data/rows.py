"""Fixed-length rows of ids on disk, prepared once per (source, vocabulary, length).

A store (store.py) is a folder `<source>-<request>-<content>` under Corpus.rows_dir. `request` is a
hash of the settings that the rows depend on. `content` is a hash of the text. If the text is not on
this machine (a GPU node with copied rows), the newest store of the same request is used.
`text.json` in the folder records what the text was made of. packing.py turns text into rows,
blocks.py divides the work.
"""

import hashlib
import json
import logging
import pathlib
import re
import shutil
import time
import typing

from maelm_jax import config, json_files, storage
from maelm_jax.data import blocks, packing, sources, store
from maelm_jax.data import vocabulary as vocabularies
from maelm_jax.data.store import VERSION
from maelm_jax.data.store import Rows as Rows

# In a store or vocabulary: {source: {part of its text: version or hash}}.
TEXT_FILE = "text.json"
SHARD_ROWS = 4096  # rows in one file of the store
POLL_SECONDS = 2.0  # between checks of the other hosts' progress
# A waiting host gives up after this long without a new file. A block takes seconds, joining a large
# store takes minutes.
SILENCE_SECONDS = 1800
log = logging.getLogger(__name__)


def prepare(
    corpus: config.Corpus, vocabulary: vocabularies.Vocabulary, host: int = 0, hosts: int = 1,
    any_text: bool = False
) -> dict[str, dict[str, Rows]]:
    """The rows of each source of the corpus. Makes those that do not exist yet.

    Hosts with one shared `rows_dir` each tokenise a part of the text. Host 0 joins the parts and
    the others wait for it. The rows do not depend on the number of hosts and processes.

    Args:
        corpus: The sources, and the folder of the rows.
        vocabulary: Turns text into ids.
        host: Number of this host, from 0.
        hosts: Number of hosts that share the work.
        any_text: True accepts rows of an earlier state of the text, see `folders`.

    Returns:
        {source: {"train": Rows, "heldout": Rows}}

    Raises:
        ConfigError: A source cannot be read or has too little text for one row, or `rows_dir`
            cannot be used.
    """
    result = {}
    for source, path in folders(corpus, vocabulary, any_text).items():
        if not (path / store.MANIFEST).is_file():
            with sources.writing(corpus):
                _make(path, source, corpus, vocabulary, host, hosts)
        result[source] = store.open_splits(path)
        if not len(result[source]["train"]):
            raise config.ConfigError(
                f"{source}: no text left to train on; the source is too short, "
                "or Corpus.heldout_fraction too large")
    return result


def prepared(corpus: config.Corpus, vocabulary: vocabularies.Vocabulary) -> bool:
    """Whether the rows of every source exist."""
    return all((path / store.MANIFEST).is_file() for path in folders(corpus, vocabulary).values())


def folders(
    corpus: config.Corpus, vocabulary: vocabularies.Vocabulary, any_text: bool = False
) -> dict[str, pathlib.Path]:
    """The folder of each source's rows. It may not exist yet.

    Args:
        corpus: The sources, and the folder of the rows.
        vocabulary: Turns text into ids.
        any_text: True gives the newest rows of an earlier state of the text, if the present text
            has no rows.
    """
    result = {}
    for source in sources.rates(corpus):
        result[source] = _find(
            corpus, prefix(source, corpus, vocabulary), [source], store.MANIFEST, any_text)
    return result


def prefix(source: str, corpus: config.Corpus, vocabulary: vocabularies.Vocabulary) -> str:
    """The start of the names of a source's stores, the same for every state of its text."""
    request = [
        VERSION, source, corpus.json_field, vocabulary.fingerprint, corpus.sequence_length,
        corpus.heldout_fraction]
    return _prefix(_slug(source), request)


def _prefix(slug: str, request: list) -> str:
    return f"{slug}-{hashlib.sha256(json.dumps(request).encode()).hexdigest()[:12]}"


def is_of_present_text(folder: pathlib.Path, source: str, corpus: config.Corpus) -> bool:
    """Whether the store holds the text that the source has now.

    Raises:
        Unavailable: The source cannot be read on this machine.
    """
    return folder.name.endswith(f"-{_content([source], corpus)}")


def _content(names: typing.Iterable[str], corpus: config.Corpus, partial: bool = False) -> str:
    """The end of the names of stores of the present text."""
    content = "".join(sources.identity(name, corpus, partial) for name in names)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def text_of(folder: pathlib.Path) -> dict[str, dict[str, str]]:
    """What the text of a store or vocabulary was made of.

    Returns:
        {source: {part: version or hash}}, or {} if that was not recorded.
    """
    path = folder / TEXT_FILE
    if not path.is_file():
        return {}
    return json_files.read(path, _is_text, f"remove {path}: nothing but messages depends on it")


def _is_text(value: typing.Any) -> bool:
    return isinstance(value, dict) and all(map(json_files.is_text_map, value.values()))


def _keep_text(path: pathlib.Path, names: typing.Iterable[str], corpus: config.Corpus):
    path.mkdir(parents=True, exist_ok=True)
    storage.write(
        path / TEXT_FILE,
        json.dumps({name: sources.parts(name, corpus) for name in names}, indent=1),
    )


def vocabulary_for(settings: config.Vocabulary, corpus: config.Corpus) -> vocabularies.Vocabulary:
    """The vocabulary of `settings.file`, or one trained on the corpus and kept under `rows_dir`.

    Training samples the sources by their rates and leaves out held-out documents.

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
        VERSION, vocabularies.describe(settings), sorted(rates.items()), corpus.json_field,
        corpus.heldout_fraction]
    name = vocabularies.SentencePieceVocabulary.FILE
    path = _find(corpus, _prefix("vocabulary", request), list(rates), name)
    if not (path / name).is_file():
        _not_in_bucket(corpus, "vocabulary")
        with sources.writing(corpus):
            _train_vocabulary(path, settings, corpus, rates)
    return vocabularies.load(path)


def _train_vocabulary(
    path: pathlib.Path, settings: config.Vocabulary, corpus: config.Corpus, rates: dict[str, float]
):
    started = time.monotonic()
    # An unusable folder fails here and not after minutes of training.
    path.mkdir(parents=True, exist_ok=True)
    _say_what_changed(path, rates, corpus, vocabularies.SentencePieceVocabulary.FILE)
    sampled = (
        vocabularies.sample(_training_text(source, corpus), settings.sample_megabytes * rate)
        for source, rate in rates.items())
    trained = vocabularies.train((text for texts in sampled for text in texts), settings)
    _keep_text(path, rates, corpus)
    trained.save(path)
    log.info(
        "vocabulary of %d ids trained in %.0f s, kept in %s", trained.size,
        time.monotonic() - started, path)


def _training_text(source: str, corpus: config.Corpus) -> typing.Iterator[str]:
    return (
        text
        for text in sources.documents(source, corpus)
        if not packing.is_heldout(text, corpus.heldout_fraction))


def _slug(source: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", source).strip("_")[-60:]


def _find(
    corpus: config.Corpus, prefix: str, names: list[str], manifest: str, any_text: bool = False
) -> pathlib.Path:
    """The folder of a request, which may not exist yet.

    It is the newest complete folder of the same request if a source is not on this machine, or with
    `any_text` if the present text has none.
    """
    folder = sources.rows_folder(corpus)
    # Rows are read in random order, which is slow in a bucket. So a store is copied here once.
    if storage.in_bucket(corpus.rows_dir):
        storage.fetch_folders(corpus.rows_dir, f"{prefix}-*", manifest)
    whole = [path.parent for path in folder.glob(f"{prefix}-*/{manifest}")]
    newest = max(whole, key=lambda path: (path / manifest).stat().st_mtime, default=None)
    try:
        content = _content(names, corpus)
    except sources.Unavailable as error:
        if newest is not None:
            log.warning("%s; taking what was prepared before: %s", error, newest)
            return newest
        content = _content(names, corpus, partial=True)
    path = folder / f"{prefix}-{content}"
    if newest is None or not any_text or (path / manifest).is_file():
        return path
    log.warning(
        "taking %s, although the text has changed since: %s", newest,
        changed_text(newest, names, corpus))
    return newest


def _say_what_changed(
    path: pathlib.Path, names: typing.Iterable[str], corpus: config.Corpus, manifest: str
):
    """Logs how the text differs from that of the newest folder of the same request."""
    prefix = path.name.rpartition("-")[0]
    former = [found.parent for found in path.parent.glob(f"{prefix}-*/{manifest}")]
    if former:
        newest = max(former, key=lambda folder: (folder / manifest).stat().st_mtime)
        log.warning(
            "making %s: the text has changed since %s: %s", path, newest.name,
            changed_text(newest, names, corpus))


def changed_text(folder: pathlib.Path, names: typing.Iterable[str], corpus: config.Corpus) -> str:
    """In words, how the sources' present text differs from the text of `folder`."""
    then = text_of(folder)
    if not then:
        return "what its text was made of is not known"
    return sources.differences(then, {name: sources.parts(name, corpus) for name in names})


def _not_in_bucket(corpus: config.Corpus, what: str):
    if storage.in_bucket(corpus.rows_dir):
        raise config.ConfigError(
            f"{corpus.rows_dir} holds no {what} for these settings; "
            "launch/prepare_data.sh makes it and copies it there")


def _make(
    path: pathlib.Path, source: str, corpus: config.Corpus, vocabulary: vocabularies.Vocabulary,
    host: int, hosts: int
):
    _not_in_bucket(corpus, f"whole store of the rows of {source}")
    _say_what_changed(path, [source], corpus, store.MANIFEST)
    started = time.monotonic()
    folder = path.with_name(path.name + ".parts")
    shards = sources.shards(source, corpus)
    try:
        blocks.write(folder, shards, vocabulary, corpus.sequence_length, host, hosts)
    except FileNotFoundError:
        # Host 0 may have joined all blocks and removed the folder while this host was reading.
        if not (path / store.MANIFEST).is_file():
            raise
    seen, since = None, time.monotonic()
    while not (path / store.MANIFEST).is_file():
        if host == 0 and not any(blocks.missing(folder, number) for number in range(len(shards))):
            _keep_text(path, [source], corpus)
            files = blocks.finished(folder, len(shards))
            dtype = blocks.dtype(vocabulary)
            store.write(
                path, files, source, vocabulary.fingerprint, corpus.sequence_length, dtype,
                SHARD_ROWS)
            shutil.rmtree(folder, ignore_errors=True)
            break
        if seen is None:
            log.warning("%s: waiting for the other hosts' share of %s", source, folder)
        if (written := len(list(folder.glob("*")))) != seen:
            seen, since = written, time.monotonic()
        elif time.monotonic() - since > SILENCE_SECONDS and not (path / store.MANIFEST).is_file():
            raise config.RunError(
                f"{folder}: no host wrote anything for {SILENCE_SECONDS / 60:.0f} minutes; "
                "start prepare again where it ended")
        time.sleep(POLL_SECONDS)
    total = json.loads((path / store.MANIFEST).read_text())["splits"]
    size = sum(total[split]["bytes"] for split in blocks.SPLITS) / 1e6
    log.info(
        "%s: %.1f MB of text in %.0f s, kept in %s", source, size, time.monotonic() - started, path)
