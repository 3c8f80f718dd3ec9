"""Prepares fixed-length rows of ids on disk, once for each (source, vocabulary, length).

A store (store.py) is a folder under Corpus.rows_dir (prepared_folders.py). packing.py turns text
into rows, blocks.py divides the work.
"""

import contextlib
import dataclasses
import logging
import pathlib
import re
import shutil
import time

import numpy as np

from maelm_jax import config, storage
from maelm_jax.data import (
    block_files,
    blocks,
    cleaning,
    deduplication,
    prepared_folders,
    rows_dir,
    rows_in_place,
    sources,
    store,
    store_manifest,
    vocabularies,
    waiting,
)

SHARD_ROWS = 4096  # rows in one file of the store
log = logging.getLogger(__name__)


def prepare(
    corpus: config.Corpus,
    vocabulary: vocabularies.Vocabulary,
    host: int = 0,
    hosts: int = 1,
    any_text: bool = False,
) -> dict[str, dict[str, store.Rows]]:
    """Opens the rows of each source of the corpus. Makes those that do not exist yet.

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
    store_folders = folders(corpus, vocabulary, any_text)
    for source, folder in store_folders.items():
        if not is_complete(folder):
            with rows_dir.writing(corpus):
                _make(folder, source, corpus, vocabulary, host, hosts)
        # The blocks of this process, or of one that was killed after the join.
        shutil.rmtree(blocks_folder(folder), ignore_errors=True)
    stores = rows_in_place.open_stores(store_folders, corpus)
    for source, splits in stores.items():
        if not len(splits["train"]):
            raise config.ConfigError(
                f"{source}: no text left to train on; {_why_empty(store_folders[source])}"
            )
    return stores


def _why_empty(folder: pathlib.Path) -> str:
    """Returns what may have left a store without rows to train on."""
    left_out = store_manifest.left_out(folder)
    if left_out and left_out.files:
        first = next(iter(left_out.files.values()))
        return f"files left out: {len(left_out.files)}, the first for this reason: {first}"
    return "the source is too short, or Corpus.heldout_fraction too large"


def is_complete(folder: pathlib.Path) -> bool:
    """Returns whether the store in a folder is complete."""
    return (folder / store_manifest.FILE).is_file()


def prepared(corpus: config.Corpus, vocabulary: vocabularies.Vocabulary) -> bool:
    """Returns whether the rows of every source exist."""
    return all(map(is_complete, folders(corpus, vocabulary).values()))


def folders(
    corpus: config.Corpus, vocabulary: vocabularies.Vocabulary, any_text: bool = False
) -> dict[str, pathlib.Path]:
    """Returns the folder of each source's rows. It may not exist yet.

    Args:
        corpus: The sources, and the folder of the rows.
        vocabulary: Turns text into ids.
        any_text: True gives the newest rows of an earlier state of the text, if the present text
            has no rows.
    """
    return {
        source: prepared_folders.find(
            corpus, prefix(source, corpus, vocabulary), [source], store_manifest.FILE, any_text
        )
        for source in sources.rates(corpus)
    }


def prefix(source: str, corpus: config.Corpus, vocabulary: vocabularies.Vocabulary) -> str:
    """Returns the start of the names of a source's stores, the same for every state of its text."""
    request = [
        store_manifest.VERSION,
        source,
        prepared_folders.text_fields(corpus),
        vocabulary.fingerprint,
        corpus.sequence_length,
        corpus.heldout_fraction,
        *cleaning.request(corpus),
    ]
    name = re.sub(r"[^A-Za-z0-9]+", "_", source).strip("_")[-60:]
    return prepared_folders.prefix(name, request)


def check_parts(corpus: config.Corpus):
    """Raises ConfigError if the settings do not allow parts that know nothing of each other."""
    if corpus.deduplicate:
        raise config.ConfigError(
            "Corpus.deduplicate compares all documents, and a part of an array job or pipeline "
            "has only its own; start prepare with --host=I --hosts=N instead, on all machines at "
            "the same time"
        )


def write_part(corpus: config.Corpus, vocabulary: vocabularies.Vocabulary, part: int, parts: int):
    """Tokenises one part of the text, as one task of an array job. `join` makes the stores.

    Args:
        corpus: The sources, and the folder of the rows, which all tasks share.
        vocabulary: Turns text into ids.
        part: Number of the part, from 0.
        parts: Number of parts.

    Raises:
        ConfigError: The text cannot be read or changes meanwhile, or `rows_dir` cannot be used.
    """
    check_parts(corpus)
    for source, folder in folders(corpus, vocabulary).items():
        if is_complete(folder):
            continue
        prepared_folders.require_local(corpus, f"whole store of the rows of {source}")
        blocks_path = blocks_folder(folder)
        with rows_dir.writing(corpus):
            _take_over_blocks(folder, source, corpus, vocabulary)
        with rows_dir.writing(corpus), _only_process(blocks_path, part):
            text_before = prepared_folders.text_to_read(folder, [source], corpus)
            shards = sources.shards(source, corpus)
            _write_blocks(folder, blocks_path, shards, corpus, vocabulary, part, parts, None)
            check_unchanged(text_before, blocks_path, corpus)


def join(corpus: config.Corpus, vocabulary: vocabularies.Vocabulary):
    """Joins the parts of all sources into stores.

    Args:
        corpus: The sources, and the folder of the rows.
        vocabulary: Turns text into ids.

    Raises:
        ConfigError: A part is not finished. The message names a shard that lacks it.
    """
    for source, folder in folders(corpus, vocabulary).items():
        if is_complete(folder):
            continue
        blocks_path, shards = blocks_folder(folder), sources.shards(source, corpus)
        unfinished = [
            shard.path or f"{source}, part {number}"
            for number, shard in enumerate(shards)
            if block_files.missing(blocks_path, number)
        ]
        if unfinished:
            raise config.ConfigError(
                f"{blocks_path}: {len(unfinished)} of {len(shards)} files are not finished, the "
                f"first is {unfinished[0]}; run prepare with every --shard first"
            )
        with rows_dir.writing(corpus), _only_process(blocks_path, 0):
            if not is_complete(folder):
                _join(folder, blocks_path, source, len(shards), corpus, vocabulary)
            shutil.rmtree(blocks_path, ignore_errors=True)


def blocks_folder(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the blocks of a store that is not complete."""
    return folder.with_name(f"{folder.name}.parts")


def _make(
    folder: pathlib.Path,
    source: str,
    corpus: config.Corpus,
    vocabulary: vocabularies.Vocabulary,
    host: int,
    hosts: int,
):
    """Makes the store of a source, together with the other hosts."""
    prepared_folders.require_local(corpus, f"whole store of the rows of {source}")
    prepared_folders.log_changes(folder, [source], corpus, store_manifest.FILE)
    started = time.monotonic()
    parts = blocks_folder(folder)
    _take_over_blocks(folder, source, corpus, vocabulary)
    with _only_process(parts, host):
        if not is_complete(folder):
            text_before = prepared_folders.text_to_read(folder, [source], corpus)
            shards = sources.shards(source, corpus)
            duplicates = None
            if corpus.deduplicate:
                duplicates = deduplication.find(
                    source, parts, shards, host, hosts, lambda: is_complete(folder)
                )
            if not is_complete(folder):  # host 0 may have joined the blocks already
                _write_blocks(folder, parts, shards, corpus, vocabulary, host, hosts, duplicates)
            if host == 0:
                waiting.for_hosts(
                    source, parts, lambda: block_files.all_written(parts, len(shards))
                )
                check_unchanged(text_before, parts, corpus)
                _join(folder, parts, source, len(shards), corpus, vocabulary)
            else:
                waiting.for_hosts(source, parts, lambda: is_complete(folder))
    splits = store_manifest.read(folder)["splits"]
    megabytes = sum(splits[split]["bytes"] for split in block_files.SPLITS) / 1e6
    log.info(
        "%s: %.1f MB of text in %.0f s, kept in %s",
        source,
        megabytes,
        time.monotonic() - started,
        folder,
    )


def _take_over_blocks(
    folder: pathlib.Path, source: str, corpus: config.Corpus, vocabulary: vocabularies.Vocabulary
):
    """Renames the blocks of a preparation that ended at a bad file, which is now to be left out.

    They are the same: `Corpus.skip_bad_files` changes nothing in the blocks of good files.
    """
    if not corpus.skip_bad_files or blocks_folder(folder).exists():
        return
    strict = dataclasses.replace(corpus, skip_bad_files=False)
    content = folder.name.rpartition("-")[2]
    name = f"{prefix(source, strict, vocabulary)}-{content}"
    earlier = blocks_folder(folder.with_name(name))
    with contextlib.ExitStack() as files:
        locks = [files.enter_context(open(path, "wb")) for path in earlier.glob("*.lock")]
        if not earlier.is_dir() or not all(map(storage.try_lock, locks)):
            return  # another process works there
        with contextlib.suppress(OSError):  # another host has just begun
            earlier.rename(blocks_folder(folder))
            log.info("%s: going on from the blocks of %s", source, earlier.name)


def check_unchanged(before: dict[str, dict[str, str]], parts: pathlib.Path, corpus: config.Corpus):
    """Removes the blocks and raises ConfigError if the text changed while it was read."""
    try:
        prepared_folders.check_unchanged(before, corpus)
    except config.ConfigError:
        shutil.rmtree(parts, ignore_errors=True)
        raise


def _only_process(parts: pathlib.Path, host: int) -> contextlib.AbstractContextManager[None]:
    """Context manager that waits while another process works on the same blocks as this host.

    Two commands that are started twice by mistake would else join the same store at once.
    """
    return waiting.only_process(parts / waiting.LOCK_FILE.format(host), f"prepares {parts}")


def _write_blocks(
    folder: pathlib.Path,
    parts: pathlib.Path,
    shards: list[sources.Shard],
    corpus: config.Corpus,
    vocabulary: vocabularies.Vocabulary,
    host: int,
    hosts: int,
    duplicates: list[np.ndarray] | None,
):
    try:
        with waiting.beating(parts, host):
            blocks.write(parts, shards, vocabulary, corpus.sequence_length, host, hosts, duplicates)
    except FileNotFoundError:
        # Host 0 may have joined all blocks and removed the folder while this host was reading.
        if not is_complete(folder):
            raise


def _join(
    folder: pathlib.Path,
    parts: pathlib.Path,
    source: str,
    shards: int,
    corpus: config.Corpus,
    vocabulary: vocabularies.Vocabulary,
):
    """Joins all blocks into the store."""
    prepared_folders.record_text(folder, [source], corpus)
    left_out = None
    if cleaning.changed_settings(corpus):
        left_out = block_files.left_out(parts, shards)
    with waiting.beating(parts, host=0):
        store.write(
            folder,
            block_files.finished(parts, shards),
            source,
            vocabulary.fingerprint,
            corpus.sequence_length,
            blocks.dtype(vocabulary),
            SHARD_ROWS,
            left_out,
        )
