"""Where text comes from: `installed_docs`, `files:GLOB`, `tfds:NAME`, `seqio:NAME`.

A document is a string whose lines are its paragraphs, without empty lines. A source is read as shards, each by itself and always in the same
order. Local text needs neither TensorFlow nor seqio: those are imported for tfds: and seqio: sources alone, through tasks.py.
"""

import dataclasses
import glob
import gzip
import hashlib
import json
import lzma
import os
import pathlib
import typing
import zlib

from maelm_jax import config, storage

SUFFIXES = (".txt", ".jsonl")
PACKINGS = ("", ".gz", ".xz")
WITHOUT = "configs/tiny.gin needs no download"


class Unavailable(config.ConfigError):
    """The source cannot be read on this machine (rows prepared elsewhere can still be used)."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of a source that can be read by itself: a file, or for TFDS and seqio the `index`-th of `count` parts. Pickles."""

    source: str
    corpus: config.Corpus
    path: str = ""
    index: int = 0
    count: int = 1

    def documents(self) -> typing.Iterator[str]:
        """The documents, in a fixed order. Raises ConfigError, naming file and place, on data that cannot be read."""
        if self.source.startswith(("tfds:", "seqio:")):
            from maelm_jax.data import tasks

            texts = tasks.texts(self.source, self.corpus, self.index, self.count)
        elif ".jsonl" in pathlib.Path(self.path).suffixes:
            texts = _json_records(self.path, self.corpus.json_field)
        else:
            texts = _blank_line_documents(self.path)
        for text in texts:
            document = "\n".join(line for line in map(str.strip, text.split("\n")) if line)
            if document:
                yield document


def shards(source: str, corpus: config.Corpus) -> list[Shard]:
    """The parts of a source, in order. Makes the text of `installed_docs` if it is not cached under `corpus.rows_dir`.

    Raises ConfigError: no file matches, TFDS data that is not there, a name seqio does not know.
    """
    if source.startswith(("tfds:", "seqio:")):
        from maelm_jax.data import tasks

        count = tasks.shard_count(source, corpus)
        return [Shard(source, corpus, index=index, count=count) for index in range(count)]
    if source == "installed_docs":
        from maelm_jax.data import installed_docs

        return [Shard(source, corpus, path=str(installed_docs.text_file(corpus)))]
    return [Shard(source, corpus, path=path) for path in _files(source)]


def documents(source: str, corpus: config.Corpus) -> typing.Iterator[str]:
    """All documents of a source, shard after shard."""
    for shard in shards(source, corpus):
        yield from shard.documents()


def rates(corpus: config.Corpus) -> dict[str, float]:
    """Source -> share of the rows, summing to 1, with each seqio Mixture replaced by its Tasks at their rates.

    What a Mixture holds is kept under `rows_dir`, so that it is known where seqio is not installed.
    """
    result: dict[str, float] = {}
    for source, rate in corpus.rates.items():
        parts = {source: 1.0}
        if source.startswith("seqio:"):
            record = storage.here(corpus.rows_dir) / f"mixture-{hashlib.sha256(source.encode()).hexdigest()[:12]}.json"
            try:
                from maelm_jax.data import tasks

                parts = tasks.members(source, corpus)
                record.parent.mkdir(parents=True, exist_ok=True)
                storage.write(record, json.dumps(parts))
            except Unavailable:
                if storage.in_bucket(corpus.rows_dir):
                    storage.fetch_files(corpus.rows_dir, (record.name,))
                if not record.is_file():
                    raise
                parts = json.loads(record.read_text())
        for part, share in parts.items():
            result[part] = result.get(part, 0.0) + rate * share
    return result


def identity(source: str, corpus: config.Corpus, partial: bool = False) -> str:
    """A hash of the source's content: the bytes of its files, the versions of the documented distributions, or a TFDS dataset's version and size.

    Raises Unavailable (a ConfigError) when the source is not on this machine, or (unless `partial`) not all the distributions of installed_docs are.
    """
    if source.startswith(("tfds:", "seqio:")):
        from maelm_jax.data import tasks

        parts = [tasks.identity(source, corpus)]
    elif source == "installed_docs":
        from maelm_jax.data import installed_docs

        parts = [installed_docs.identity(partial)]
    else:
        parts = [corpus.json_field if any(".jsonl" in path for path in _files(source)) else ""]
        known = storage.here(corpus.rows_dir) / "file_hashes.json"
        hashes = json.loads(known.read_text()) if known.is_file() else {}
        before = len(hashes)
        for path in _files(source):
            stat = os.stat(path)
            key = f"{os.path.abspath(path)} {stat.st_size} {stat.st_mtime_ns}"  # an unchanged file is not read again at each start
            if key not in hashes:
                with open(path, "rb") as file:
                    hashes[key] = hashlib.file_digest(file, "sha256").hexdigest()
            parts.append(f"{os.path.basename(path)} {hashes[key]}")
        if len(hashes) > before:
            known.parent.mkdir(parents=True, exist_ok=True)
            storage.write(known, json.dumps(hashes, indent=0))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _files(source: str) -> list[str]:
    pattern = source.removeprefix("files:")
    paths = sorted(path for path in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(path))
    if not paths:
        raise Unavailable(f"no text file matches {pattern!r} (in {os.getcwd()}); give a glob of .txt or .jsonl files, each also .gz or .xz")
    for path in paths:
        if not path.endswith(tuple(suffix + packing for suffix in SUFFIXES for packing in PACKINGS)):
            raise config.ConfigError(f"{path}: not a .txt or .jsonl file (each also .gz or .xz); narrow the glob {pattern!r}")
    return paths


def lines(path: str) -> typing.Iterator[tuple[int, bytes]]:
    """(byte offset in the unpacked text, line without its end) of a file. Raises ConfigError: empty, or corrupt gzip/xz."""
    opener = gzip.open if path.endswith(".gz") else lzma.open if path.endswith(".xz") else open
    offset = 0
    try:
        with opener(path, "rb") as file:
            for line in file:
                yield offset, line.rstrip(b"\r\n")
                offset += len(line)
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        kind = "gzip" if path.endswith(".gz") else "xz"
        raise config.ConfigError(f"{path}: corrupt {kind} data after {offset} bytes of text ({error}); fetch or pack the file again") from error
    except OSError as error:
        raise config.ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    if offset == 0:
        raise config.ConfigError(f"{path}: the file is empty; remove it or leave it out of the glob")


def decode(data: bytes, path: str, offset: int) -> str:
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
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise config.ConfigError(f"{path}:{number}: not JSON ({error}); a .jsonl file holds one record a line") from error
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            fields = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise config.ConfigError(f"{path}:{number}: no text field {field!r} in the record ({fields}); set Corpus.json_field")
        yield record[field].encode("utf-8", "replace").decode("utf-8")  # a lone surrogate is JSON, but no text
