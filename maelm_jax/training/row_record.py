"""Record of a run's training data: `rows.json` in the workdir names the row stores.

A run resumes only with the rows that it began with. If the source text has changed, the recorded
stores are used. If they do not exist any more, the run is refused unless new data is accepted.
"""

import json
import logging
import pathlib
import typing

import jax

from maelm_jax import config, json_files, storage
from maelm_jax.data import rows, sources, store
from maelm_jax.data import vocabulary as vocabularies
from maelm_jax.training import coordination

FILE = "rows.json"
log = logging.getLogger(__name__)


class RunRows(typing.NamedTuple):
    """The rows of a run.

    `stores` is {source: {"train": Rows, "heldout": Rows}}. `rates` is {source: share of the rows}.
    `record` is the content of `rows.json`. `former` is the content that new data replaces.
    """

    stores: dict[str, dict[str, store.Rows]]
    rates: dict[str, float]
    record: dict
    former: dict | None = None


def choose_rows(
    workdir: str, corpus: config.Corpus, vocabulary: vocabularies.Vocabulary,
    accept_new_data: bool = False,
) -> RunRows:  # fmt: skip
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
    recorded = read(workdir)
    if recorded is None:  # a new run, or a run of a version without rows.json
        begun = (storage.local_path(workdir) / "config.gin").is_file()
        chosen = _prepare(corpus, vocabulary, any_text=begun)
    else:
        _check_vocabulary(workdir, recorded, vocabulary)
        if accept_new_data:
            chosen = _prepare(corpus, vocabulary)
            if _differences(recorded, chosen.record):
                chosen = chosen._replace(former=recorded)
        else:
            chosen = _rows_of_record(workdir, recorded, corpus, vocabulary)
    described = {
        # Without "text": a host may have the rows but not the text.
        source: json.dumps({key: value for key, value in entry.items() if key != "text"})
        for source, entry in chosen.record["sources"].items()
    }
    coordination.check_equal("row store", described)
    return chosen


def open_recorded(
    workdir: str, corpus: config.Corpus, vocabulary: vocabularies.Vocabulary
) -> RunRows | None:
    """Opens the recorded rows of a run. Returns None if a store is missing or differs.

    Also if there is no record, or if `corpus` and `vocabulary` ask for other rows.
    """
    recorded = read(workdir)
    if recorded is None or set(recorded["sources"]) != set(sources.rates(corpus)):
        return None
    prefixes = {source: rows.prefix(source, corpus, vocabulary) for source in recorded["sources"]}
    if not all(
        entry["store"].startswith(prefixes[source]) for source, entry in recorded["sources"].items()
    ):
        return None
    return _open_if_there(recorded, corpus)


def write(workdir: str, chosen: RunRows, step: int):
    """Writes `rows.json` of a run that is at `step`. Only process 0 writes.

    When new rows replace others, the list `replaced` gets the former content and `step`, the last
    step that used it.
    """
    if jax.process_index():
        return
    before = read(workdir) or {}
    record = dict(chosen.record)
    replaced = before.get("replaced", [])
    if chosen.former is not None:
        replaced = [*replaced, {"step": step, **_without_history(chosen.former)}]
        words = "; ".join(_differences(chosen.former, chosen.record))
        print(f"{workdir}: new data after step {step}, recorded in {FILE}: {words}")
    if replaced:
        record["replaced"] = replaced
    if record != before:
        storage.write(storage.local_path(workdir) / FILE, json.dumps(record, indent=1) + "\n")
        storage.send(workdir)


def read(workdir: str) -> dict | None:
    """Reads `rows.json`. Returns None if there is none. Raises ConfigError if it is damaged."""
    path = storage.local_path(workdir) / FILE
    if not path.is_file():
        return None
    remedy = (
        "put a copy of it there, or remove it and the run goes on with the rows that its settings "
        "give"
    )
    return json_files.read(path, _is_record, remedy)


def _is_record(value: typing.Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("vocabulary"), str):
        return False
    if not isinstance(value.get("replaced", []), list) or type(value.get("length")) is not int:
        return False
    entries = value.get("sources")
    return isinstance(entries, dict) and len(entries) > 0 and all(map(_is_entry, entries.values()))


def _is_entry(value: typing.Any) -> bool:
    if not isinstance(value, dict) or type(value.get("rate")) is not float or not value["rate"] > 0:
        return False
    name, counts = value.get("store"), value.get("rows")
    if not isinstance(name, str) or not name or "/" in name or not isinstance(counts, dict):
        return False
    known = (isinstance(value.get("fingerprint"), (str, type(None)))
             and json_files.is_text_map(value.get("text")))  # fmt: skip
    return known and all(type(count) is int for count in counts.values())


def _without_history(record: dict) -> dict:
    return {key: value for key, value in record.items() if key != "replaced"}


def _check_vocabulary(workdir: str, recorded: dict, vocabulary: vocabularies.Vocabulary):
    if recorded["vocabulary"] != vocabulary.fingerprint:
        raise config.ConfigError(
            f"{workdir}/vocabulary: not the vocabulary that the run began with (sha256 "
            f"{recorded['vocabulary'][:12]} -> {vocabulary.fingerprint[:12]}); put that one back"
        )


def _prepare(
    corpus: config.Corpus, vocabulary: vocabularies.Vocabulary, any_text: bool = False
) -> RunRows:
    """Returns the rows that the settings ask for, and prepares those that do not exist."""
    ready = storage.in_bucket(corpus.rows_dir) or rows.prepared(corpus, vocabulary)
    # Prepared rows may be copies on each host. To prepare them, all need the same folder.
    if not coordination.all_true(ready):
        with sources.writing(corpus):
            coordination.check_shared_folder(corpus.rows_dir, "row store")
    stores = rows.prepare(corpus, vocabulary, jax.process_index(), jax.process_count(), any_text)
    rates = sources.rates(corpus)
    entries = {source: _entry(source, splits, rates[source], corpus)
               for source, splits in stores.items()}  # fmt: skip
    length = corpus.sequence_length
    return RunRows(
        stores, rates, {"vocabulary": vocabulary.fingerprint, "length": length, "sources": entries}
    )


def _entry(source: str, splits: dict[str, store.Rows], rate: float, corpus: config.Corpus) -> dict:
    folder = splits["train"].folder
    return {
        "store": folder.name,
        "fingerprint": store.fingerprint(folder),
        "rows": {split: len(found) for split, found in splits.items()},
        "rate": rate,
        "text": _text_of(folder, source, corpus),
    }


def _text_of(folder: pathlib.Path, source: str, corpus: config.Corpus) -> dict[str, str]:
    """Returns the text that a store was made from (`sources.parts`), or {} if it is unknown."""
    text = rows.text_of(folder).get(source, {})
    try:
        if not text and rows.is_of_present_text(folder, source, corpus):
            return sources.parts(source, corpus)
    except sources.Unavailable:
        pass
    return text


def _rows_of_record(
    workdir: str, recorded: dict, corpus: config.Corpus, vocabulary: vocabularies.Vocabulary
) -> RunRows:
    """Opens the recorded stores. If one does not exist, prepares the same rows again."""
    found = _open_if_there(recorded, corpus)
    if coordination.all_true(found is not None):
        for source, entry in recorded["sources"].items():
            folder = found.stores[source]["train"].folder
            if words := _changed_text(folder.name, source, entry, corpus):
                log.warning(
                    "%s goes on with %s, although its text has changed: %s", workdir, folder, words
                )
        return found
    _refuse(workdir, _changes_since(recorded, corpus, vocabulary))
    chosen = _prepare(corpus, vocabulary)
    _refuse(workdir, _differences(recorded, chosen.record))
    return chosen


def _open_if_there(recorded: dict, corpus: config.Corpus) -> RunRows | None:
    folder = sources.rows_folder(corpus)
    stores, entries = {}, {}
    for source, entry in recorded["sources"].items():
        if storage.in_bucket(corpus.rows_dir):
            storage.fetch_folders(corpus.rows_dir, entry["store"], store.MANIFEST)
        path = folder / entry["store"]
        if not (path / store.MANIFEST).is_file():
            return None
        stores[source] = store.open_splits(path)
        entries[source] = (
            _entry(source, stores[source], entry["rate"], corpus) | {"text": entry["text"]}
        )
    record = _without_history(recorded) | {"sources": entries}
    if _differences(recorded, record):
        return None
    return RunRows(stores, {source: entry["rate"] for source, entry in entries.items()}, record)


def _changed_text(name: str, source: str, entry: dict, corpus: config.Corpus) -> str:
    """Describes how a source's text differs from the recorded one. "" if equal or unavailable."""
    try:
        if rows.is_of_present_text(pathlib.Path(name), source, corpus):
            return ""
        return sources.differences({source: entry["text"]}, {source: sources.parts(source, corpus)})
    except sources.Unavailable:
        return ""


def _changes_since(
    recorded: dict, corpus: config.Corpus, vocabulary: vocabularies.Vocabulary
) -> list[str]:
    """Describes what prevents the recorded rows from being prepared again. [] if nothing does."""
    found = []
    for source, folder in rows.folders(corpus, vocabulary).items():
        entry = recorded["sources"].get(source)
        if entry is None:
            found.append(f"{source} is new")
        elif folder.name != entry["store"]:
            words = _changed_text(entry["store"], source, entry, corpus) or (
                f"{entry['store']} -> {folder.name}"
            )
            found.append(f"the text of {source} has changed: {words}")
    return found


def _differences(recorded: dict, other: dict) -> list[str]:
    """Describes how two records differ. Fingerprints are compared if both have them."""
    found = [
        f"{key} {recorded[key]} -> {other[key]}"
        for key in ("vocabulary", "length") if recorded[key] != other[key]
    ]  # fmt: skip
    before, after = recorded["sources"], other["sources"]
    for source in sorted({*before, *after}):
        if source not in before or source not in after:
            found.append(f"{source} is {'new' if source in after else 'gone'}")
            continue
        keys = ["rows", "rate", "fingerprint"]
        if None in (before[source]["fingerprint"], after[source]["fingerprint"]):
            keys = ["rows", "rate", "store"]
        for key in keys:
            if before[source][key] != after[source][key]:
                found.append(
                    f"{key} of {source} {_brief(before[source][key])} -> "
                    f"{_brief(after[source][key])}"
                )
    return found


def _brief(value: typing.Any) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)


def _refuse(workdir: str, problems: list[str]):
    """Raises ConfigError on every process if any process has a problem."""
    if coordination.all_true(not problems):
        return
    said = "; ".join(problems) or "another process of this run sees other data"
    raise config.ConfigError(
        f"{workdir}: the rows that the run began with are not in Corpus.rows_dir any more "
        f"({said}); put them back, or go on with the present text by --accept_new_data"
    )
