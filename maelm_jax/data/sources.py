"""Reads text from `installed_docs`, `files:GLOB`, `tfds:NAME` and `seqio:NAME`.

A document is a string whose lines are its paragraphs, without empty lines. A source is read as
shards. Each shard can be read alone and gives its documents in a fixed order. TensorFlow and seqio
are imported only for `tfds:` and `seqio:` sources, through seqio_tasks.py.
"""

import contextlib
import dataclasses
import errno
import glob
import gzip
import hashlib
import json
import logging
import lzma
import os
import pathlib
import re
import typing
import zlib

from maelm_jax import config, json_files, storage

SUFFIXES = (".txt", ".jsonl")
PACKINGS = ("", ".gz", ".xz")
WITHOUT = "configs/tiny.gin needs no download"
DIFFERENCES_SHOWN = 5
HASH = re.compile("[0-9a-f]{64}")
log = logging.getLogger(__name__)


class Unavailable(config.ConfigError):
    """The source cannot be read on this machine. Rows prepared elsewhere can still be used."""


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

    def documents(self) -> typing.Iterator[str]:
        """The documents, in a fixed order.

        Raises:
            ConfigError: The data cannot be read. The message names the file and the position.
        """
        if self.source.startswith(("tfds:", "seqio:")):
            from maelm_jax.data import seqio_tasks

            texts = seqio_tasks.texts(self.source, self.corpus, self.index, self.count)
        elif ".jsonl" in pathlib.Path(self.path).suffixes:
            texts = _json_records(self.path, self.corpus.json_field)
        else:
            texts = _blank_line_documents(self.path)
        for text in texts:
            document = "\n".join(line for line in map(str.strip, text.split("\n")) if line)
            if document:
                yield document


def shards(source: str, corpus: config.Corpus) -> list[Shard]:
    """The shards of a source, in order. The text of `installed_docs` is extracted once and kept.

    Raises:
        ConfigError: No file matches, the TFDS dataset is missing, or seqio does not know the name.
    """
    if source.startswith(("tfds:", "seqio:")):
        from maelm_jax.data import seqio_tasks

        count = seqio_tasks.shard_count(source, corpus)
        return [Shard(source, corpus, index=index, count=count) for index in range(count)]
    if source == "installed_docs":
        from maelm_jax.data import installed_docs

        return [Shard(source, corpus, path=str(installed_docs.text_file(corpus)))]
    return [Shard(source, corpus, path=path) for path in _files(source)]


def documents(source: str, corpus: config.Corpus) -> typing.Iterator[str]:
    """All documents of a source, in the order of its shards."""
    for shard in shards(source, corpus):
        yield from shard.documents()


def rows_folder(corpus: config.Corpus) -> pathlib.Path:
    """The local folder of `corpus.rows_dir`. It may not exist yet.

    Raises:
        ConfigError: The path cannot be a folder.
    """
    folder = storage.local_path(corpus.rows_dir)
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise config.ConfigError(
            f"Corpus.rows_dir: {corpus.rows_dir} cannot be a folder: {nearest} is none; "
            "name another folder")
    return folder


@contextlib.contextmanager
def writing(corpus: config.Corpus) -> typing.Iterator[None]:
    """Context manager that turns failed writes under `corpus.rows_dir` into ConfigError.

    A full disk stays an OSError, because the setting is not wrong.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        reason = f"{error.strerror or error}: {error.filename or corpus.rows_dir}"
        raise config.ConfigError(
            f"Corpus.rows_dir: {corpus.rows_dir} cannot be written to ({reason}); "
            "name another folder") from error


def _remember(path: pathlib.Path, value: typing.Any):
    """Writes a file that saves work later. Goes on without it on a read-only disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps(value, indent=0)
        if not path.is_file() or path.read_text() != content:
            storage.write(path, content)
    except OSError as error:
        log.info("%s is not kept: %s", path, error.strerror or error)


def rates(corpus: config.Corpus) -> dict[str, float]:
    """{source: share of the rows}, summing to 1, with the Tasks of each seqio Mixture in its place.

    The members of a Mixture are kept under `rows_dir`, for machines without seqio.
    """
    result: dict[str, float] = {}
    for source, rate in corpus.rates.items():
        parts = _mixture(source, corpus) if source.startswith("seqio:") else {source: 1.0}
        for part, share in parts.items():
            result[part] = result.get(part, 0.0) + rate * share
    return result


def _mixture(source: str, corpus: config.Corpus) -> dict[str, float]:
    """{Task: rate} of a seqio Mixture, from seqio or from the kept file."""
    record = rows_folder(corpus) / f"mixture-{hashlib.sha256(_bytes(source)).hexdigest()[:12]}.json"
    try:
        from maelm_jax.data import seqio_tasks

        members = seqio_tasks.members(source, corpus)
    except Unavailable:
        if storage.in_bucket(corpus.rows_dir):
            storage.fetch_files(corpus.rows_dir, (record.name,))
        if not record.is_file():
            raise
        return json_files.read(
            record, _is_rates, f"remove {record}; prepare writes it again where seqio is installed")
    _remember(record, members)
    return members


def _is_rates(value: typing.Any) -> bool:
    if not isinstance(value, dict) or not value:
        return False
    return all(type(rate) in (int, float) and 0 < rate <= 1 for rate in value.values())


def identity(source: str, corpus: config.Corpus, partial: bool = False) -> str:
    """A hash of the text of a source.

    It covers the contents of files, the versions of the packages of `installed_docs`, or the
    version and sizes of a dataset.

    Args:
        source: The source.
        corpus: Holds the settings for reading it.
        partial: True accepts that some packages of `installed_docs` are not installed.

    Raises:
        Unavailable: The source is not (completely) on this machine.
    """
    if source.startswith(("tfds:", "seqio:")):
        from maelm_jax.data import seqio_tasks

        content = [seqio_tasks.identity(source, corpus)]
    elif source == "installed_docs":
        from maelm_jax.data import installed_docs

        content = [installed_docs.identity(partial)]
    else:
        field = corpus.json_field if any(".jsonl" in path for path in _files(source)) else ""
        content = [
            field,
            *(
                f"{os.path.basename(path)} {digest}"
                for path, digest in _file_hashes(source, corpus).items()
            ),
        ]
    return hashlib.sha256(_bytes("\n".join(content))).hexdigest()


def parts(source: str, corpus: config.Corpus) -> dict[str, str]:
    """What the text of a source is made of.

    Returns:
        {distribution: version}, {file: hash}, or {source: version and sizes} of a dataset.
    """
    if source.startswith(("tfds:", "seqio:")):
        from maelm_jax.data import seqio_tasks

        return {source: seqio_tasks.identity(source, corpus)}
    if source == "installed_docs":
        from maelm_jax.data import installed_docs

        return installed_docs.versions()
    return {path: digest[:12] for path, digest in _file_hashes(source, corpus).items()}


def differences(then: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> str:
    """In words, how two states of the text differ. A state is {source: `parts`}."""
    found = []
    for source in sorted({*then, *now}):
        before, after = then.get(source, {}), now.get(source, {})
        for part in sorted({*before, *after}):
            if before.get(part) != after.get(part):
                found.append(f"{part} {before.get(part, 'absent')} -> {after.get(part, 'absent')}")
    more = f" and {len(found) - DIFFERENCES_SHOWN} more" if len(found) > DIFFERENCES_SHOWN else ""
    return (", ".join(found[:DIFFERENCES_SHOWN]) or "nothing that is recorded") + more


def _file_hashes(source: str, corpus: config.Corpus) -> dict[str, str]:
    """{file: SHA-256}. Hashes are kept, so an unchanged file is not read at each start."""
    known = rows_folder(corpus) / "file_hashes.json"
    hashes = {}
    if known.is_file():
        hashes = json_files.read(known, _is_hashes, f"remove {known}; it is made again")
    before, result = len(hashes), {}
    for path in _files(source):
        try:
            stat = os.stat(path)
            key = f"{os.path.abspath(path)} {stat.st_size} {stat.st_mtime_ns}"
            if key not in hashes:
                with open(path, "rb") as file:
                    hashes[key] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise _unreadable(path, error) from error
        result[path] = hashes[key]
    if len(hashes) > before:
        _remember(known, hashes)
    return result


def _is_hashes(value: typing.Any) -> bool:
    return json_files.is_text_map(value) and all(map(HASH.fullmatch, value.values()))


def _unreadable(path: str, error: OSError) -> config.ConfigError:
    return config.ConfigError(
        f"{path}: cannot be read ({error.strerror or error}); check its permissions or leave it out"
    )


def _bytes(text: str) -> bytes:
    """UTF-8. File names that are not UTF-8 keep their bytes."""
    return text.encode("utf-8", "surrogateescape")


def _files(source: str) -> list[str]:
    """The files of a `files:GLOB` source, sorted."""
    pattern = source.removeprefix("files:")
    paths = sorted(
        path
        for path in glob.glob(os.path.expanduser(pattern), recursive=True)
        if os.path.isfile(path))
    if not paths:
        raise Unavailable(
            f"no text file matches {pattern!r} (in {os.getcwd()}); "
            "give a glob of .txt or .jsonl files, each also .gz or .xz")
    for path in paths:
        if not path.endswith(
            tuple(suffix + packing for suffix in SUFFIXES for packing in PACKINGS)
        ):
            raise config.ConfigError(
                f"{path}: not a .txt or .jsonl file (each also .gz or .xz); "
                f"narrow the glob {pattern!r}")
    return paths


def lines(path: str) -> typing.Iterator[tuple[int, bytes]]:
    """The lines of a text file, which can be packed with gzip or xz.

    Yields:
        (byte offset in the unpacked text, line without its end)

    Raises:
        ConfigError: The file is empty, corrupt or unreadable.
    """
    opener = gzip.open if path.endswith(".gz") else lzma.open if path.endswith(".xz") else open
    offset = 0
    try:
        with opener(path, "rb") as file:
            for line in file:
                yield offset, line.rstrip(b"\r\n")
                offset += len(line)
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        kind = "gzip" if path.endswith(".gz") else "xz"
        raise config.ConfigError(
            f"{path}: corrupt {kind} data after {offset} bytes of text ({error}); "
            "fetch or pack the file again") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    if offset == 0:
        raise config.ConfigError(
            f"{path}: the file is empty; remove it or leave it out of the glob")


def decode(data: bytes, path: str, offset: int) -> str:
    """A line as text; `offset` is its position in the file. Raises ConfigError if not UTF-8."""
    try:
        return data.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        place = f"{path}: not UTF-8 at byte {offset + error.start} of the (unpacked) text"
        raise config.ConfigError(f"{place}; convert the file, e.g. with iconv -t UTF-8") from error


def _blank_line_documents(path: str) -> typing.Iterator[str]:
    paragraphs: list[str] = []
    for offset, line in lines(path):
        text = decode(line, path, offset).strip()
        if text:
            paragraphs.append(text)
        elif paragraphs:
            yield "\n".join(paragraphs)
            paragraphs = []
    if paragraphs:
        yield "\n".join(paragraphs)


def _json_records(path: str, field: str) -> typing.Iterator[str]:
    for number, (offset, line) in enumerate(lines(path), start=1):
        text = decode(line, path, offset)
        if not text.strip():
            continue
        record = json_files.parse(text, f"{path}:{number}", "a .jsonl file holds one record a line")
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            fields = (
                _printable(", ".join(record))[:200]
                if isinstance(record, dict)
                else type(record).__name__)
            raise config.ConfigError(
                f"{path}:{number}: no text field {field!r} in the record ({fields}); "
                "set Corpus.json_field")
        # JSON can hold a lone surrogate, which is not valid text.
        yield record[field].encode("utf-8", "replace").decode("utf-8")


def _printable(text: str) -> str:
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text)
