"""Fixed-length rows of ids on disk: prepared once per (source, vocabulary, length), then read at random.

A store (store.py) is a folder `<source>-<request>-<content>` under `rows_dir`. `request` is a hash of
what was asked for, `content` one of the text. Where the text itself is not at hand (a GPU node that
got the rows copied over), the store of the same request is taken. `text.json` in the folder says what
the text was made of. packing.py makes rows of text, blocks.py shares the work.
"""

import hashlib
import json
import logging
import pathlib
import re
import shutil
import time
import typing

from maelm_jax import config, storage
from maelm_jax.data import blocks, json_files, packing, sources, store
from maelm_jax.data import vocabulary as vocabularies
from maelm_jax.data.store import VERSION
from maelm_jax.data.store import Rows as Rows

TEXT_FILE = "text.json"  # of a store and of a vocabulary: source -> {part of its text: version or hash}
SHARD_ROWS = 4096  # rows in one file of the store
POLL_SECONDS = 2.0  # between looks at what other hosts have done
SILENCE_SECONDS = 1800  # after which a host that waits for the others gives up; a block takes seconds, joining a large store minutes
log = logging.getLogger(__name__)


def prepare(
    corpus: config.Corpus,
    vocabulary: vocabularies.Vocabulary,
    host: int = 0,
    hosts: int = 1,
    any_text: bool = False,
) -> dict[str, dict[str, Rows]]:
    """The rows of each source of the corpus, made first where they are not there yet.

    Of several hosts with one `rows_dir`, each tokenises its share; host 0 joins the shares, the others wait for it. Rows come out the same whatever
    the number of hosts and processes.

    Args:
        corpus: The sources, and where rows are kept.
        vocabulary: What turns text into ids.
        host: The number of this host, from 0.
        hosts: How many hosts share the work.
        any_text: Whether rows of a former state of the text will do (`folders`).

    Returns:
        {source: {"train": Rows, "heldout": Rows}}

    Raises:
        ConfigError: A source cannot be read or has too little text for one row, or `rows_dir` cannot be used.
    """
    result = {}
    for source, path in folders(corpus, vocabulary, any_text).items():
        if not (path / store.MANIFEST).is_file():
            with sources.writing(corpus):
                _make(path, source, corpus, vocabulary, host, hosts)
        result[source] = store.open_splits(path)
        if not len(result[source]["train"]):
            raise config.ConfigError(f"{source}: no text left to train on; the source is too short, or Corpus.heldout_fraction too large")
    return result


def prepared(corpus: config.Corpus, vocabulary: vocabularies.Vocabulary) -> bool:
    """Whether the rows of every source are there already."""
    return all((path / store.MANIFEST).is_file() for path in folders(corpus, vocabulary).values())


def folders(
    corpus: config.Corpus, vocabulary: vocabularies.Vocabulary, any_text: bool = False
) -> dict[str, pathlib.Path]:
    """The folder of each source's rows, there or not.

    With `any_text`, where the present text has no rows yet: the newest rows of a former state of it.
    """
    result = {}
    for source in sources.rates(corpus):
        result[source] = _find(corpus, prefix(source, corpus, vocabulary), [source], store.MANIFEST, any_text)
    return result


def prefix(source: str, corpus: config.Corpus, vocabulary: vocabularies.Vocabulary) -> str:
    """How the names of a source's stores begin: the same for every state of its text."""
    request = [VERSION, source, corpus.json_field, vocabulary.fingerprint, corpus.sequence_length, corpus.heldout_fraction]
    return _prefix(_slug(source), request)


def _prefix(slug: str, request: list) -> str:
    return f"{slug}-{hashlib.sha256(json.dumps(request).encode()).hexdigest()[:12]}"


def is_of_present_text(folder: pathlib.Path, source: str, corpus: config.Corpus) -> bool:
    """Whether a store is of the text that the source has now. Raises Unavailable when that is not on this machine."""
    return folder.name.endswith(f"-{_content([source], corpus)}")


def _content(names: typing.Iterable[str], corpus: config.Corpus, partial: bool = False) -> str:
    """How the names of stores of the present text end."""
    content = "".join(sources.identity(name, corpus, partial) for name in names)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def text_of(folder: pathlib.Path) -> dict[str, dict[str, str]]:
    """What the text of a store or a vocabulary was made of, {source: {part: version or hash}}; {} where that was not kept."""
    path = folder / TEXT_FILE
    if not path.is_file():
        return {}
    return json_files.read(path, _is_text, f"remove {path}: nothing but messages depends on it")


def _is_text(value: typing.Any) -> bool:
    return isinstance(value, dict) and all(map(json_files.is_text_map, value.values()))


def _keep_text(path: pathlib.Path, names: typing.Iterable[str], corpus: config.Corpus):
    path.mkdir(parents=True, exist_ok=True)
    storage.write(path / TEXT_FILE, json.dumps({name: sources.parts(name, corpus) for name in names}, indent=1))


def vocabulary_for(settings: config.Vocabulary, corpus: config.Corpus) -> vocabularies.Vocabulary:
    """The vocabulary of `settings.file`, or one trained on the corpus (its sources by their rates, no held-out document), kept under `rows_dir`."""
    if settings.file:
        return vocabularies.load(settings.file)
    rates = sources.rates(corpus)
    request = [VERSION, vocabularies.describe(settings), sorted(rates.items()), corpus.json_field, corpus.heldout_fraction]
    name = vocabularies.SentencePieceVocabulary.FILE
    path = _find(corpus, _prefix("vocabulary", request), list(rates), name)
    if not (path / name).is_file():
        _not_in_bucket(corpus, "vocabulary")
        with sources.writing(corpus):
            _train_vocabulary(path, settings, corpus, rates)
    return vocabularies.load(path)


def _train_vocabulary(path: pathlib.Path, settings: config.Vocabulary, corpus: config.Corpus, rates: dict[str, float]):
    started = time.monotonic()
    path.mkdir(parents=True, exist_ok=True)  # fails here, not after minutes of training
    _say_what_changed(path, rates, corpus, vocabularies.SentencePieceVocabulary.FILE)
    sampled = (vocabularies.sample(_training_text(source, corpus), settings.sample_megabytes * rate) for source, rate in rates.items())
    trained = vocabularies.train((text for texts in sampled for text in texts), settings)
    _keep_text(path, rates, corpus)
    trained.save(path)
    log.info("vocabulary of %d ids trained in %.0f s, kept in %s", trained.size, time.monotonic() - started, path)


def _training_text(source: str, corpus: config.Corpus) -> typing.Iterator[str]:
    return (text for text in sources.documents(source, corpus) if not packing.is_heldout(text, corpus.heldout_fraction))


def _slug(source: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", source).strip("_")[-60:]


def _find(
    corpus: config.Corpus, prefix: str, names: list[str], manifest: str, any_text: bool = False
) -> pathlib.Path:
    """The folder of what was asked for, there or not.

    Where a source is not (wholly) on this machine, or with `any_text`: the newest whole folder of the same request, if any.
    """
    folder = sources.rows_folder(corpus)
    if storage.in_bucket(corpus.rows_dir):  # rows are read at random, which a bucket is slow at: the whole store is copied, once
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
    log.warning("taking %s, although the text has changed since: %s", newest, changed_text(newest, names, corpus))
    return newest


def _say_what_changed(path: pathlib.Path, names: typing.Iterable[str], corpus: config.Corpus, manifest: str):
    """Where the same was asked for before, of another state of the text: one line that says what differs."""
    prefix = path.name.rpartition("-")[0]
    former = [found.parent for found in path.parent.glob(f"{prefix}-*/{manifest}")]
    if former:
        newest = max(former, key=lambda folder: (folder / manifest).stat().st_mtime)
        log.warning("making %s: the text has changed since %s: %s", path, newest.name, changed_text(newest, names, corpus))


def changed_text(folder: pathlib.Path, names: typing.Iterable[str], corpus: config.Corpus) -> str:
    """In words, how the present text of the sources differs from the text that `folder` was made of."""
    then = text_of(folder)
    if not then:
        return "what its text was made of is not known"
    return sources.differences(then, {name: sources.parts(name, corpus) for name in names})


def _not_in_bucket(corpus: config.Corpus, what: str):
    if storage.in_bucket(corpus.rows_dir):
        raise config.ConfigError(f"{corpus.rows_dir} holds no {what} for these settings; launch/prepare_data.sh makes it and copies it there")


def _make(path: pathlib.Path, source: str, corpus: config.Corpus, vocabulary: vocabularies.Vocabulary, host: int, hosts: int):
    _not_in_bucket(corpus, f"whole store of the rows of {source}")
    _say_what_changed(path, [source], corpus, store.MANIFEST)
    started = time.monotonic()
    folder = path.with_name(path.name + ".parts")
    shards = sources.shards(source, corpus)
    try:
        blocks.write(folder, shards, vocabulary, corpus.sequence_length, host, hosts)
    except FileNotFoundError:  # host 0 had every block, joined them and cleared the folder while this host was still counting
        if not (path / store.MANIFEST).is_file():
            raise
    seen, since = None, time.monotonic()
    while not (path / store.MANIFEST).is_file():
        if host == 0 and not any(blocks.missing(folder, number) for number in range(len(shards))):
            _keep_text(path, [source], corpus)
            files = blocks.finished(folder, len(shards))
            dtype = blocks.dtype(vocabulary)
            store.write(path, files, source, vocabulary.fingerprint, corpus.sequence_length, dtype, SHARD_ROWS)
            shutil.rmtree(folder, ignore_errors=True)
            break
        if seen is None:
            log.warning("%s: waiting for the other hosts' share of %s", source, folder)
        if (written := len(list(folder.glob("*")))) != seen:
            seen, since = written, time.monotonic()
        elif time.monotonic() - since > SILENCE_SECONDS and not (path / store.MANIFEST).is_file():
            raise config.RunError(f"{folder}: no host wrote anything for {SILENCE_SECONDS / 60:.0f} minutes; start prepare again where it ended")
        time.sleep(POLL_SECONDS)
    total = json.loads((path / store.MANIFEST).read_text())["splits"]
    size = sum(total[split]["bytes"] for split in blocks.SPLITS) / 1e6
    log.info("%s: %.1f MB of text in %.0f s, kept in %s", source, size, time.monotonic() - started, path)
