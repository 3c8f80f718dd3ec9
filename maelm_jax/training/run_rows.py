"""Chooses the rows that a run trains on: the recorded ones, or newly prepared ones.

A run resumes only with the rows that it began with. If the source text has changed, the recorded
stores are used. If they do not exist any more, the run is refused unless new data is accepted.
"""

import json
import logging
import pathlib

import jax

from maelm_jax import config, storage
from maelm_jax.data import (
    prepared_folders,
    rows,
    rows_dir,
    rows_in_place,
    sources,
    store,
    store_manifest,
    vocabularies,
)
from maelm_jax.data.documents import Unavailable
from maelm_jax.training import distributed, row_record
from maelm_jax.training.row_record import RunRows

log = logging.getLogger(__name__)


def choose_rows(
    workdir: str,
    corpus: config.Corpus,
    vocabulary: vocabularies.Vocabulary,
    accept_new_data: bool = False,
) -> RunRows:
    """Returns the rows that the run trains on: the recorded ones, or newly prepared ones.

    Every process of the run calls this function with the same arguments.

    Args:
        workdir: The folder of the run, on this machine or in a bucket.
        corpus: The sources, and the folder of the row stores.
        vocabulary: The vocabulary of the run.
        accept_new_data: Whether rows other than the recorded ones are allowed.

    Raises:
        ConfigError: The run began with other rows, and their stores do not exist any more. The
            message names the differences. Also the errors of `rows.prepare`.
    """
    recorded = row_record.read(workdir)
    if recorded is None:  # a new run, or a run of a version without rows.json
        begun = (storage.local_path(workdir) / "config.gin").is_file()
        chosen = _prepare(corpus, vocabulary, any_text=begun)
    else:
        _check_vocabulary(workdir, recorded, vocabulary)
        if accept_new_data:
            chosen = _prepare(corpus, vocabulary)
            if row_record.differences(recorded, chosen.record):
                chosen = chosen._replace(former=recorded)
        else:
            chosen = _open_or_remake(workdir, recorded, corpus, vocabulary)
        chosen = _in_order(chosen, list(recorded["sources"]))
    _check_same_on_all_processes(chosen.record)
    return chosen


def _check_same_on_all_processes(record: dict):
    entries = {
        # Without "text": a host may have the rows but not the text.
        source: json.dumps({key: value for key, value in entry.items() if key != "text"})
        for source, entry in record["sources"].items()
    }
    distributed.check_equal("row store", entries)


def open_recorded(
    workdir: str, corpus: config.Corpus, vocabulary: vocabularies.Vocabulary
) -> RunRows | None:
    """Opens the recorded rows of a run. Returns None if a store is missing or differs.

    Also if there is no record, or if `corpus` and `vocabulary` ask for other rows.
    """
    recorded = row_record.read(workdir)
    if recorded is None or set(recorded["sources"]) != set(sources.rates(corpus)):
        return None
    prefixes = {source: rows.prefix(source, corpus, vocabulary) for source in recorded["sources"]}
    if not all(
        entry["store"].startswith(prefixes[source]) for source, entry in recorded["sources"].items()
    ):
        return None
    return _open_stores(recorded, corpus)


def _check_vocabulary(workdir: str, recorded: dict, vocabulary: vocabularies.Vocabulary):
    if recorded["vocabulary"] != vocabulary.fingerprint:
        raise config.ConfigError(
            f"{workdir}/vocabulary is not the vocabulary that the run began with (sha256 "
            f"{recorded['vocabulary'][:12]} -> {vocabulary.fingerprint[:12]}). Put that one back"
        )


def _prepare(
    corpus: config.Corpus, vocabulary: vocabularies.Vocabulary, any_text: bool = False
) -> RunRows:
    """Returns the rows that the settings ask for, and prepares those that do not exist."""
    ready = storage.in_bucket(corpus.rows_dir) or rows.prepared(corpus, vocabulary)
    # Prepared rows may be copies on each host. To prepare them, all need the same folder.
    if not distributed.all_true(ready):
        with rows_dir.writing(corpus):
            distributed.check_shared_folder(str(rows_dir.local_folder(corpus)), "row store")
    stores = rows.prepare(corpus, vocabulary, jax.process_index(), jax.process_count(), any_text)
    rates = sources.rates(corpus)
    entries = {
        source: _entry(source, splits, rates[source], corpus) for source, splits in stores.items()
    }
    record = {
        "vocabulary": vocabulary.fingerprint,
        "length": corpus.sequence_length,
        "sources": entries,
    }
    return RunRows(stores, rates, record)


def _in_order(chosen: RunRows, recorded: list[str]) -> RunRows:
    """Returns the rows with their sources in the recorded order, then those that are new.

    Batches depend on the order of the sources, and settings of another order count as equal.
    """
    new = [source for source in chosen.stores if source not in recorded]
    names = [source for source in recorded if source in chosen.stores] + new
    entries = {source: chosen.record["sources"][source] for source in names}
    return chosen._replace(
        stores={source: chosen.stores[source] for source in names},
        rates={source: chosen.rates[source] for source in names},
        record=chosen.record | {"sources": entries},
    )


def _entry(source: str, splits: dict[str, store.Rows], rate: float, corpus: config.Corpus) -> dict:
    folder = splits["train"].folder
    return {
        "store": folder.name,
        "fingerprint": store_manifest.fingerprint(folder),
        "rows": {split: len(split_rows) for split, split_rows in splits.items()},
        "rate": rate,
        "text": _text_of(folder, source, corpus),
    }


def _text_of(folder: pathlib.Path, source: str, corpus: config.Corpus) -> dict[str, str]:
    """Returns the text that a store was made from (`sources.parts`), or {} if it is unknown."""
    text = prepared_folders.text_of(folder).get(source, {})
    try:
        if not text and prepared_folders.is_of_present_text(folder, [source], corpus):
            return sources.parts(source, corpus)
    except Unavailable:
        pass
    return text


def _open_or_remake(
    workdir: str, recorded: dict, corpus: config.Corpus, vocabulary: vocabularies.Vocabulary
) -> RunRows:
    """Opens the recorded stores. If one does not exist, prepares the same rows again."""
    opened = _open_stores(recorded, corpus)
    if distributed.all_true(opened is not None):
        for source, entry in recorded["sources"].items():
            folder = opened.stores[source]["train"].folder
            if changes := _changed_text(folder.name, source, entry, corpus):
                log.warning(
                    "%s goes on with %s, although its text has changed: %s",
                    workdir,
                    folder,
                    changes,
                )
        return opened
    _refuse(workdir, _changes_since(recorded, corpus, vocabulary))
    chosen = _prepare(corpus, vocabulary)
    _refuse(workdir, row_record.differences(recorded, chosen.record))
    return chosen


def _open_stores(recorded: dict, corpus: config.Corpus) -> RunRows | None:
    """Opens the recorded stores. Returns None if one is missing or differs from its record."""
    folders = {}
    for source, entry in recorded["sources"].items():
        rows_dir.fetch(corpus, entry["store"], store_manifest.FILE)
        folders[source] = rows_dir.prepared_folder(corpus) / entry["store"]
        if not rows.is_complete(folders[source]):
            return None
    stores, entries = rows_in_place.open_stores(folders, corpus), {}
    for source, entry in recorded["sources"].items():
        entries[source] = _entry(source, stores[source], entry["rate"], corpus)
        entries[source]["text"] = entry["text"]
    record = row_record.without_history(recorded) | {"sources": entries}
    if row_record.differences(recorded, record):
        return None
    return RunRows(stores, {source: entry["rate"] for source, entry in entries.items()}, record)


def _changed_text(name: str, source: str, entry: dict, corpus: config.Corpus) -> str:
    """Describes how a source's text differs from the recorded one. "" if equal or unavailable."""
    try:
        if prepared_folders.is_of_present_text(pathlib.Path(name), [source], corpus):
            return ""
        return sources.differences({source: entry["text"]}, {source: sources.parts(source, corpus)})
    except Unavailable:
        return ""


def _changes_since(
    recorded: dict, corpus: config.Corpus, vocabulary: vocabularies.Vocabulary
) -> list[str]:
    """Describes what prevents the recorded rows from being prepared again. [] if nothing does."""
    changes = []
    for source, folder in rows.folders(corpus, vocabulary).items():
        entry = recorded["sources"].get(source)
        if entry is None:
            changes.append(f"{source} is new")
        elif folder.name != entry["store"]:
            text_changes = _changed_text(entry["store"], source, entry, corpus)
            text_changes = text_changes or f"{entry['store']} -> {folder.name}"
            changes.append(f"the text of {source} has changed: {text_changes}")
    return changes


def _refuse(workdir: str, problems: list[str]):
    """Raises ConfigError on every process if any process has a problem."""
    if distributed.all_true(not problems):
        return
    reason = "; ".join(problems) or "another process of this run sees other data"
    raise config.ConfigError(
        f"{workdir}: the rows that the run began with are not in Corpus.rows_dir any more "
        f"({reason}). Put them back, or go on with the present text by --accept_new_data"
    )
