"""The file `rows.json` of a workdir, which names the row stores that the run trains on."""

import json
import typing

import jax

from maelm_jax import json_files, storage
from maelm_jax.data import store

FILE = "rows.json"


class RunRows(typing.NamedTuple):
    """The rows that a run trains on, and how `rows.json` records them."""

    stores: dict[str, dict[str, store.Rows]]  # {source: {"train": Rows, "heldout": Rows}}
    rates: dict[str, float]  # {source: share of the rows}
    record: dict  # the content of rows.json
    former: dict | None = None  # the content that new data replaces


def write(workdir: str, rows: RunRows, step: int):
    """Writes `rows.json` of a run that is at `step`. Only process 0 writes.

    When new rows replace others, the list `replaced` gets the former content and `step`, the last
    step that used it.
    """
    if jax.process_index():
        return
    before = read(workdir) or {}
    record = dict(rows.record)
    replaced = before.get("replaced", [])
    if rows.former is not None:
        replaced = [*replaced, {"step": step, **without_history(rows.former)}]
        changes = "; ".join(differences(rows.former, rows.record))
        print(f"{workdir}: new data after step {step}, recorded in {FILE}: {changes}")
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
    if not isinstance(value.get("fingerprint"), (str, type(None))):
        return False
    return json_files.is_text_map(value.get("text")) and all(
        type(count) is int for count in counts.values()
    )


def without_history(record: dict) -> dict:
    """Returns a record without the list of the records that it replaced."""
    return {key: value for key, value in record.items() if key != "replaced"}


def differences(recorded: dict, other: dict) -> list[str]:
    """Describes how two records differ. Fingerprints are compared if both have them."""
    changes = [
        f"{key} {recorded[key]} -> {other[key]}"
        for key in ("vocabulary", "length")
        if recorded[key] != other[key]
    ]
    before, after = recorded["sources"], other["sources"]
    for source in sorted({*before, *after}):
        if source not in before:
            changes.append(f"{source} is new")
        elif source not in after:
            changes.append(f"{source} is gone")
        else:
            changes += _entry_differences(source, before[source], after[source])
    return changes


def _entry_differences(source: str, before: dict, after: dict) -> list[str]:
    has_fingerprints = None not in (before["fingerprint"], after["fingerprint"])
    keys = ("rows", "rate", "fingerprint" if has_fingerprints else "store")
    return [
        f"{key} of {source} {_shortened(before[key])} -> {_shortened(after[key])}"
        for key in keys
        if before[key] != after[key]
    ]


def _shortened(value: typing.Any) -> str:
    """Text of a value. A checksum is shortened to 12 digits."""
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
