"""Finds what was prepared from a text before: folders `<name>-<request>-<content>` in rows_dir.

`request` is a hash of the settings that the content of the folder depends on. `content` is a hash
of the text. `text.json` in the folder records what the text was made of. A folder is complete when
it has its main file, which is written last.
"""

import hashlib
import json
import logging
import pathlib
import typing

from maelm_jax import config, json_files, storage
from maelm_jax.data import rows_dir, sources
from maelm_jax.data.documents import Unavailable

TEXT_FILE = "text.json"  # {source: {part of its text: version or hash}}
log = logging.getLogger(__name__)


def prefix(name: str, request: list) -> str:
    """Returns the start of a folder's name, the same for every state of the text."""
    return f"{name}-{hashlib.sha256(json.dumps(request).encode()).hexdigest()[:12]}"


def text_fields(corpus: config.Corpus) -> str | list[str]:
    """Returns the names of the fields that hold the documents, for `prefix`.

    The default of `text_column` is left out: stores from before it was a part keep their names.
    """
    if corpus.text_column == config.Corpus.__pydantic_fields__["text_column"].default:
        return corpus.json_field
    return [corpus.json_field, corpus.text_column]


def find(
    corpus: config.Corpus, prefix: str, names: list[str], main_file: str, any_text: bool = False
) -> pathlib.Path:
    """Returns the folder of a request. It may not exist yet.

    If a source is not on this machine, it is the newest complete folder of the request.

    Args:
        corpus: The sources, and the folder that holds the result.
        prefix: The start of the folder's name (`prefix`).
        names: The sources of the text.
        main_file: Name of the file that a complete folder has.
        any_text: True accepts the newest folder if there is none of the present text.
    """
    parent = rows_dir.prepared_folder(corpus)
    written = rows_dir.complete_folders(corpus, prefix, main_file)
    newest = max(written, key=written.__getitem__, default=None)
    try:
        chosen = f"{prefix}-{_content_hash(names, corpus)}"
    except Unavailable as error:
        chosen = newest or f"{prefix}-{_content_hash(names, corpus, partial=True)}"
        if newest is not None:
            states = f", the newest of {len(written)} states of the text"
            log.warning(
                "%s; taking what was prepared before: %s%s",
                error,
                parent / newest,
                states if len(written) > 1 else "",
            )
    is_changed = newest is not None and any_text and chosen not in written
    if is_changed:
        chosen = newest
    if chosen in written:
        rows_dir.fetch(corpus, chosen, main_file)
    if is_changed:
        log.warning(
            "taking %s, although the text has changed since: %s",
            parent / chosen,
            changed_text(parent / chosen, names, corpus),
        )
    return parent / chosen


def _content_hash(names: typing.Iterable[str], corpus: config.Corpus, partial: bool = False) -> str:
    """Returns the end of the names of folders of the present text."""
    content = "".join(sources.identity(name, corpus, partial) for name in names)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def is_of_present_text(
    folder: pathlib.Path, names: typing.Iterable[str], corpus: config.Corpus
) -> bool:
    """Returns whether a folder is of the text that its sources have now.

    Raises:
        Unavailable: A source cannot be read on this machine.
    """
    return folder.name.endswith(f"-{_content_hash(names, corpus)}")


def text_to_read(
    folder: pathlib.Path, names: typing.Iterable[str], corpus: config.Corpus
) -> dict[str, dict[str, str]]:
    """Returns `present_text` for `check_unchanged`, before the text of a folder is read.

    Raises:
        ConfigError: The text has changed since the folder was named after it.
    """
    before = present_text(names, corpus)
    if not is_of_present_text(folder, names, corpus):
        raise config.ConfigError(
            f"{', '.join(names)}: the text changed after the command began; "
            "give the same command again when nothing writes to these files"
        )
    return before


def record_text(folder: pathlib.Path, names: typing.Iterable[str], corpus: config.Corpus):
    """Writes TEXT_FILE into a folder, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    storage.write(folder / TEXT_FILE, json.dumps(present_text(names, corpus), indent=1))


def present_text(names: typing.Iterable[str], corpus: config.Corpus) -> dict[str, dict[str, str]]:
    """Returns what the text of sources is made of now, {source: {part: version or hash}}."""
    return {name: sources.parts(name, corpus) for name in names}


def check_unchanged(before: dict[str, dict[str, str]], corpus: config.Corpus):
    """Raises ConfigError, with the parts that differ, if `present_text` is not `before`."""
    now = present_text(before, corpus)
    if now != before:
        raise config.ConfigError(
            f"the text changed while it was read ({sources.differences(before, now)}); "
            "give the same command again when nothing writes to these files"
        )


def text_of(folder: pathlib.Path) -> dict[str, dict[str, str]]:
    """Returns what the text of a folder was made of.

    Returns:
        {source: {part: version or hash}}, or {} if that was not recorded.
    """
    path = folder / TEXT_FILE
    if not path.is_file():
        return {}
    return json_files.read(path, _is_text, f"remove {path}: nothing but messages depends on it")


def _is_text(value: typing.Any) -> bool:
    return isinstance(value, dict) and all(map(json_files.is_text_map, value.values()))


def changed_text(folder: pathlib.Path, names: typing.Iterable[str], corpus: config.Corpus) -> str:
    """Returns in words how the sources' present text differs from the text of `folder`."""
    then = text_of(folder)
    if not then:
        return "what its text was made of is not known"
    now = present_text(names, corpus)
    if then == now and corpus.document_filter:
        return f"nothing but the module of {corpus.document_filter}"
    return sources.differences(then, now)


def log_changes(
    folder: pathlib.Path, names: typing.Iterable[str], corpus: config.Corpus, main_file: str
):
    """Logs how the text differs from that of the newest folder of the same request."""
    written = rows_dir.complete_folders(corpus, folder.name.rpartition("-")[0], main_file)
    if written:
        newest = max(written, key=written.__getitem__)
        log.warning(
            "making %s: the text has changed since %s: %s",
            folder,
            newest,
            changed_text(folder.with_name(newest), names, corpus),
        )


def require_local(corpus: config.Corpus, content: str):
    """Raises ConfigError if `rows_dir` is in a bucket, where nothing is prepared.

    Args:
        corpus: Holds `rows_dir`.
        content: What is missing there, for the message.
    """
    if storage.in_bucket(corpus.rows_dir):
        raise config.ConfigError(
            f"{corpus.rows_dir} holds no {content} for these settings; "
            "launch/prepare_data.sh makes it and copies it there"
        )
