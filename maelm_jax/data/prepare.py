"""Prepares rows: text is read once, part by part, and the parts are joined into stores (rows.py).

A part is a pure function of its number, the text and the settings, and becomes one file
(`make_part`). Three drivers call this function: processes of this machine (`prepare`), the tasks of
an array job (`make_parts`, then `join`), and Apache Beam (beam_runner.py). Nothing else
coordinates. An interrupted preparation goes on with the parts that are missing.

A store's folder in `Corpus.rows_dir` is named after its source, its settings and vocabulary, and
its text: `files_books-<settings>-<text>`. The parts lie beside it, in `<name>.parts`, until they
are joined.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import logging
import math
import pathlib
import re
import shutil
import time
import typing
import zipfile
import zlib

import numpy as np

from maelm_jax import progress, storage
from maelm_jax.config import ConfigError, Corpus, Run, RunError
from maelm_jax.data import batches, packing, readers, rows, sources, vocabularies, workers
from maelm_jax.data.readers import BadFile, Unavailable
from maelm_jax.data.vocabularies import Vocabulary

VERSION = 3  # of the way rows are made; the names of stores depend on it
BATCH_CHARACTERS = 1_000_000  # of text that is encoded at a time
SHORT = 4  # documents are short if so many of them fit into a row
LITTLE = 0.01  # share of a source's tokens; files with fewer are not worth a warning
PLAN = "plan.json"  # in the folder of the parts: what they are made of
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The rows of a corpus."""

    stores: dict[str, dict[str, rows.Rows]]  # {source: {"train": Rows, "heldout": Rows}}
    # "request", a hash of the settings; "vocabulary", its fingerprint; "length", in ids;
    # "sources": {source: {"rate", "store" (a folder's name), "fingerprint" (of the rows)}}.
    record: dict

    @property
    def rates(self) -> dict[str, float]:
        """{source: share of the rows}."""
        return {source: entry["rate"] for source, entry in self.record["sources"].items()}

    def split(self, name: str) -> dict[str, rows.Rows]:
        """The rows of a split ("train" or "heldout") by source."""
        return {source: splits[name] for source, splits in self.stores.items()}

    @property
    def words_per_row(self) -> float | None:
        """Mean number of words (between spaces) in a row of a batch. None: not counted."""
        return self._mean_per_row("words")

    @property
    def tokens_per_row(self) -> float:
        """Mean number of tokens in a row of a batch, without padding."""
        return self._mean_per_row("tokens")

    def _mean_per_row(self, what: str) -> float | None:
        """Returns the mean of a count of the stores, exact over a whole pass of each source."""
        mean = 0.0
        for source, train in self.split("train").items():
            if what not in train.statistics:
                return None
            mean += self.rates[source] * train.statistics[what] / len(train)
        return mean / sum(self.rates.values())

    def describe_passes(self, run: Run) -> list[str]:
        """Returns a line for each source: how often the steps of a run read it."""
        lines, scheduled = [], batches.make_schedule(list(self.rates.values())).slots
        for (source, train), slots in zip(self.split("train").items(), scheduled, strict=True):
            pass_steps = len(train) / (int(slots) / batches.PERIOD * run.batch_size)
            words = train.statistics.get("words")
            what = f"{len(train):,} rows" if words is None else f"{words:,} words"
            lines.append(
                f"{source}: {run.train_steps:,} steps of {run.batch_size:,} rows are "
                f"{run.train_steps / pass_steps:.2f} passes over {what}; "
                f"10 passes are {math.ceil(10 * pass_steps):,} steps"
            )
        return lines


def make_on_this_machine(folder: pathlib.Path, task: int = 0, tasks: int = 1):
    """Makes the missing parts of a folder in `Corpus.processes` processes. Shows a progress bar.

    A task of an array job makes every `tasks`-th part, from `task` on.
    """
    missing, plan = missing_parts(folder, task, tasks), _read_plan(folder)
    made = workers.results(functools.partial(make_part, folder), missing, plan.corpus.processes)
    name = f"rows of {plan.source}"[:40]
    for _ in progress.Bar(made, desc=name, total=len(missing), unit="part"):
        pass


def missing_parts(folder: pathlib.Path, task: int = 0, tasks: int = 1) -> list[int]:
    """Returns the numbers of the parts that are not made yet."""
    present = {path.name for path in folder.iterdir()}
    numbers = range(task, len(_read_plan(folder).parts), tasks)
    return [number for number in numbers if _part_path(folder, number).name not in present]


def prepare(
    corpus: Corpus,
    vocabulary: Vocabulary,
    make_all: typing.Callable[[pathlib.Path], None] = make_on_this_machine,
) -> Prepared:
    """Opens the rows of each source of the corpus. Makes those that do not exist yet.

    Of several processes that prepare the same rows, one works and the others wait for it. Where the
    text is not on this machine, the rows that were prepared last are opened. `make_all` makes the
    parts that are missing in a folder.
    """
    try:
        names = store_names(corpus, vocabulary)
        for source, name in names.items():
            parts = _parts_folder(corpus, name)
            if not has_store(corpus, name):
                rows.require_local(corpus)
                _make_store(parts, source, corpus, vocabulary, make_all)
            shutil.rmtree(parts, ignore_errors=True)  # also of a process that was killed
    except Unavailable as error:
        key = f"rows-{hash_settings(corpus, vocabulary)}"
        record = rows.recall(corpus, key)
        if record is None:
            raise
        log.warning("%s; taking what was prepared before for these settings", error)
        return open_record(record, corpus)
    manifests = {
        source: rows.read_manifest(rows.path_of(corpus, name)) for source, name in names.items()
    }
    rates = sources.rates(corpus)
    if corpus.reads_all:
        counts = {source: found["splits"]["train"]["rows"] for source, found in manifests.items()}
        total = max(sum(counts.values()), 1)
        rates = {source: count / total for source, count in counts.items()}
    record = {
        "request": hash_settings(corpus, vocabulary),
        "vocabulary": vocabulary.fingerprint,
        "length": corpus.sequence_length,
        "sources": {
            source: {
                "rate": rates[source],
                "store": name,
                "fingerprint": manifests[source]["fingerprint"],
            }
            for source, name in names.items()
        },
    }
    prepared = open_record(record, corpus)
    _require_heldout(prepared, corpus)
    for source, manifest in manifests.items():
        _warn_of_short_documents(source, manifest, corpus)
    rows.remember(corpus, f"rows-{record['request']}", record)
    return prepared


def _require_heldout(prepared: Prepared, corpus: Corpus):
    """Raises ConfigError if no row is held out. Warns of sources without one."""
    without = [source for source, held in prepared.split("heldout").items() if not len(held)]
    if len(without) < len(prepared.stores):
        if without and not corpus.heldout_files:
            log.warning("no document of %s is held out for evaluation", ", ".join(without))
        return
    if corpus.heldout_files:
        raise ConfigError(f"Corpus.heldout_files={corpus.heldout_files!r}: no text in these files")
    documents = sum(train.statistics["documents"] for train in prepared.split("train").values())
    patterns = [source[6:] for source in prepared.stores if source.startswith("files:")]
    files = sum(len(readers.list_files(pattern)) for pattern in patterns)
    of_files = f" in {files:,} files; a document ends at a blank line" if patterns else ""
    raise ConfigError(
        f"none of the text is held out for evaluation: {documents:,} documents{of_files}. Name "
        f"Corpus.heldout_files, or raise Corpus.heldout_fraction={corpus.heldout_share:g}"
    )


def _warn_of_short_documents(source: str, manifest: dict, corpus: Corpus):
    """Warns if files of a source have documents that are much shorter than a row."""
    short: dict[str, dict[str, int]] = manifest["short"]
    if not short:
        return
    tokens = sum(numbers["tokens"] for numbers in short.values())
    documents = sum(numbers["documents"] for numbers in short.values())
    share = tokens / sum(manifest["splits"][split]["tokens"] for split in rows.SPLITS)
    if share < LITTLE:
        return
    largest = max(short, key=lambda file: short[file]["tokens"])
    more = f" and {len(short) - 1} more" if len(short) > 1 else ""
    own_source, apart = source, ""
    if share < 1 - LITTLE and largest != source:  # the only name in a dataset is its own
        own_source = f"files:{largest}"
        apart = f"move these files to a source of their own in Corpus.sources, {own_source!r}, and "
    log.warning(
        "%s: documents of about %.0f tokens in rows of %d: %s%s, %.0f%% of the tokens. Attention "
        "stays in a document. If each is a sentence of a longer text, %sset "
        "Corpus.documents={%r: N} (rows a document) or name a column",
        source,
        tokens / documents,
        corpus.sequence_length,
        largest,
        more,
        100 * share,
        apart,
        own_source,
    )


def find(corpus: Corpus, vocabulary: Vocabulary) -> Prepared | None:
    """Opens the rows that were prepared last for these settings. None if there are none."""
    record = rows.recall(corpus, f"rows-{hash_settings(corpus, vocabulary)}")
    return record and open_record(record, corpus)


def open_record(record: dict, corpus: Corpus) -> Prepared:
    """Opens the rows of a record.

    Raises ConfigError if they are missing or damaged, not the recorded ones, or none to train on.
    """
    folders = {
        source: rows.path_of(corpus, entry["store"]) for source, entry in record["sources"].items()
    }
    for source, entry in record["sources"].items():
        manifest = rows.read_manifest(folders[source])
        if manifest["fingerprint"] != entry["fingerprint"]:
            raise ConfigError(
                f"{folders[source]}: these are not the recorded rows of {source}. Put those back, "
                "or remove the folder to make them again"
            )
        files = manifest["left_out"]
        if files:
            reasons = "; ".join(files.values())
            log.warning("%s: %d files were left out: %s", source, len(files), reasons)
        if manifest["empty"]:
            log.warning("%s: %d rows without text were left out", source, manifest["empty"])
        if not manifest["splits"]["train"]["rows"]:
            first = next(iter(files.values()), "the source is too short")
            raise ConfigError(f"{source}: no text left to train on; {first}")
    return Prepared(rows.open_stores(folders), record)


def hash_settings(corpus: Corpus, vocabulary: Vocabulary) -> str:
    """Returns a hash of the settings that the rows of a corpus depend on."""
    heldout = [corpus.heldout_files] if corpus.heldout_files else []
    documents = [sorted(corpus.documents.items())] if corpus.documents else []
    rates = corpus.sources if corpus.reads_all else corpus.rates
    settings = [_settings(corpus, vocabulary), sorted(rates.items()), *heldout, *documents]
    return rows.digest(settings)


def _settings(corpus: Corpus, vocabulary: Vocabulary) -> list:
    return [
        VERSION,
        vocabulary.fingerprint,
        corpus.sequence_length,
        corpus.heldout_share,
        corpus.text_field,
    ]


def store_names(corpus: Corpus, vocabulary: Vocabulary) -> dict[str, str]:
    """Returns the name of the store of each source, {source: name}. A store may not exist yet.

    Raises Unavailable if a source is not on this machine.
    """
    names = {}
    sources.check_files_differ(corpus)
    for source in sources.rates(corpus):
        words = re.sub(r"[^A-Za-z0-9]+", "_", source).strip("_")[-60:]
        document = [corpus.documents[source]] if source in corpus.documents else []
        settings = rows.digest([source, _settings(corpus, vocabulary), *document])
        names[source] = f"{words}-{settings}-{_identity(source, corpus)}"
    return names


def _identity(source: str, corpus: Corpus) -> str:
    """Returns a hash of what identifies the text of a store."""
    text = sources.identity(source, corpus)
    if _has_heldout_files(source, corpus):
        heldout = f"files:{corpus.heldout_files}"
        document = corpus.documents.get(heldout, 1)
        return rows.digest([text, sources.identity(heldout, corpus), document])
    return text


def _has_heldout_files(source: str, corpus: Corpus) -> bool:
    """Returns whether the store of a source holds the rows of `Corpus.heldout_files`."""
    return corpus.heldout_files is not None and source == next(iter(sources.rates(corpus)))


def has_store(corpus: Corpus, name: str) -> bool:
    """Returns whether a whole store of this name exists."""
    return storage.exists(f"{rows.path_of(corpus, name)}/{rows.MANIFEST}")


def make_parts(corpus: Corpus, vocabulary: Vocabulary, task: int, tasks: int):
    """Makes every `tasks`-th part, as one task of an array job. `join` makes the stores.

    Tasks are numbered from 0, and share `Corpus.rows_dir`.
    """
    for source, name in store_names(corpus, vocabulary).items():
        if not has_store(corpus, name):
            rows.require_local(corpus)
            parts = _parts_folder(corpus, name)
            _write_plan(parts, source, corpus, vocabulary)
            make_on_this_machine(parts, task, tasks)


def join(corpus: Corpus, vocabulary: Vocabulary) -> Prepared:
    """Joins the parts that the tasks of an array job made, and opens the rows.

    Raises ConfigError if a part is missing.
    """

    def require_all(folder: pathlib.Path):
        count = len(_read_plan(folder).parts)
        if missing := missing_parts(folder):
            raise ConfigError(
                f"{folder}: {len(missing)} of {count} parts are missing, the first is "
                f"{missing[0]}; run prepare with every --part first"
            )

    return prepare(corpus, vocabulary, require_all)


class _Plan(typing.NamedTuple):
    """What the parts of a source are made of."""

    source: str
    corpus: Corpus
    parts: list[list[sources.Piece]]
    heldout_parts: int  # the last of the parts: those of Corpus.heldout_files
    vocabulary: Vocabulary

    @property
    def dtype(self) -> np.dtype:
        """The type of ids in rows."""
        return np.dtype(np.uint16 if self.vocabulary.size <= 65536 else np.uint32)


def _parts_folder(corpus: Corpus, name: str) -> pathlib.Path:
    """Returns the folder of a store's parts. Raises ConfigError if its links lead out of it."""
    folder = pathlib.Path(f"{rows.path_of(corpus, name)}.parts")
    if not storage.in_bucket(corpus.rows_dir):
        storage.inside(folder.parent, folder.name)
        storage.require_own_files(folder)
    return folder


def _part_path(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / f"{number:06d}.zip"


def _write_plan(folder: pathlib.Path, source: str, corpus: Corpus, vocabulary: Vocabulary):
    """Writes what every part of a source is made of, for the processes that make them."""
    vocabulary.save(folder)
    heldout = sources.heldout_parts(corpus) if _has_heldout_files(source, corpus) else []
    plan = {
        "source": source,
        "corpus": dataclasses.asdict(corpus),
        "parts": [*sources.parts(source, corpus), *heldout],
        "heldout_parts": len(heldout),
    }
    storage.write(folder / PLAN, json.dumps(plan))
    _read_plan.cache_clear()


@functools.lru_cache(1)
def _read_plan(folder: pathlib.Path) -> _Plan:
    plan = storage.read_json(folder / PLAN)
    parts = [[sources.Piece(*piece) for piece in part] for part in plan["parts"]]
    vocabulary = vocabularies.load(folder)
    corpus = Corpus(**plan["corpus"])
    return _Plan(plan["source"], corpus, parts, plan["heldout_parts"], vocabulary)


def make_part(folder: pathlib.Path, number: int):
    """Makes one part, unless it is there: reads its text, and writes its rows to one file.

    The folder holds the plan of the parts and the vocabulary.
    """
    path, plan = _part_path(folder, number), _read_plan(folder)
    bad_files: dict[str, str] = {}  # {path: why it cannot be read}
    while not path.is_file():
        pieces = [piece for piece in plan.parts[number] if piece.name not in bad_files]
        try:
            with storage.atomic_file(path) as file:
                is_heldout = number >= len(plan.parts) - plan.heldout_parts
                _write_part(file, pieces, plan, bad_files, is_heldout)
        except BadFile as error:  # found after a part of it was written: begin again without it
            if not plan.corpus.skip_bad_files:
                raise
            bad_files[error.path] = str(error)


def _write_part(
    file: typing.BinaryIO,
    pieces: list[sources.Piece],
    plan: _Plan,
    bad_files: dict[str, str],
    all_heldout: bool,
):
    """Writes a part: a zip file, which has a checksum of each entry.

    It holds arrays of rows, named after their split, and last the counts.
    """
    corpus = plan.corpus
    packers = {
        split: packing.Packer(plan.vocabulary, corpus.sequence_length) for split in rows.SPLITS
    }
    counts = {split: dict.fromkeys(rows.COUNTS, 0) for split in rows.SPLITS}
    with zipfile.ZipFile(file, "w") as archive:

        def write(name: str, content: bytes):  # without the time, so that equal parts are equal
            archive.writestr(zipfile.ZipInfo(name), content)

        def write_rows(split: str, array: np.ndarray):
            counts[split]["rows"] += len(array)
            counts[split]["tokens"] += int((array != plan.vocabulary.pad).sum())
            write(f"{split}/{len(archive.filelist)}", array.astype(plan.dtype).tobytes())

        by_file: dict[str, collections.Counter[str]] = {}
        documents = sources.documents_of_part(pieces, corpus, by_file)
        for texts in _in_batches(documents):
            chosen: dict[str, list[str]] = {split: [] for split in rows.SPLITS}
            for text in texts:
                is_heldout = all_heldout or sources.is_heldout(text, corpus.heldout_share)
                chosen["heldout" if is_heldout else "train"].append(text)
            for split, split_texts in chosen.items():
                for document in packing.tokenise(split_texts, plan.vocabulary):
                    packers[split].add(document)
                counts[split]["documents"] += len(split_texts)
                counts[split]["bytes"] += sum(len(text.encode()) for text in split_texts)
                counts[split]["words"] += sum(len(text.split()) for text in split_texts)
                write_rows(split, packers[split].take())
        for split, packer in packers.items():
            write_rows(split, packer.finish())
            counts[split]["segments"] = packer.segments
        content = {
            "counts": counts,
            "left_out": bad_files,
            "empty": sum(numbers["empty"] for numbers in by_file.values()),
            "short": {} if all_heldout else _short_documents(by_file, counts, corpus),
        }
        write("counts.json", json.dumps(content).encode())


def _short_documents(
    by_file: dict[str, collections.Counter[str]],
    counts: dict[str, dict[str, int]],
    corpus: Corpus,
) -> dict[str, dict[str, int]]:
    """Returns the files whose documents are short, {file: "documents" and about their "tokens"}."""
    tokens = sum(counts[split]["tokens"] for split in rows.SPLITS)
    characters = sum(numbers["characters"] for numbers in by_file.values())
    short = {}
    for file, numbers in by_file.items():
        documents = numbers["documents"]
        if documents > 1:
            in_file = round(numbers["characters"] * tokens / characters)
            if in_file * SHORT < documents * corpus.sequence_length:
                short[file] = {"documents": documents, "tokens": in_file}
    return short


def _in_batches(documents: typing.Iterable[str]) -> typing.Iterator[list[str]]:
    """Yields the documents in lists of at least BATCH_CHARACTERS, except the last one."""
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _make_store(
    folder: pathlib.Path,
    source: str,
    corpus: Corpus,
    vocabulary: Vocabulary,
    make_all: typing.Callable[[pathlib.Path], None],
):
    """Makes the parts of a source and joins them, unless another process does so meanwhile."""
    store = folder.with_suffix("")
    with storage.locked(folder / "lock", f"prepares {folder}"):
        if not has_store(corpus, store.name):
            began = time.monotonic()
            _write_plan(folder, source, corpus, vocabulary)
            make_all(folder)
            _join(folder, store)
            log.info("%s: %.0f s, kept in %s", source, time.monotonic() - began, store)


def _join(folder: pathlib.Path, store: pathlib.Path):
    """Joins all parts of a folder into a store.

    Raises:
        ConfigError: The text changed after the command began. The parts are removed.
        RunError: A part is damaged. The part is removed, and made again by the next start.
    """
    plan = _read_plan(folder)
    if not store.name.endswith(f"-{_identity(plan.source, plan.corpus)}"):
        shutil.rmtree(folder)
        raise ConfigError(
            f"{plan.source}: the text changed while it was read; "
            "give the same command again when nothing writes to these files"
        )
    paths = [_part_path(folder, number) for number in range(len(plan.parts))]
    counts = {split: collections.Counter(dict.fromkeys(rows.COUNTS, 0)) for split in rows.SPLITS}
    left_out: dict[str, str] = {}
    empty = 0
    short: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path in paths:
        with _opened_part(path) as archive:
            content = json.loads(archive.read("counts.json"))
        for split in rows.SPLITS:
            counts[split].update(content["counts"][split])
        left_out |= content["left_out"]
        empty += content["empty"]
        for file, numbers in content.get("short", {}).items():
            short[file].update(numbers)

    def blocks(split: str) -> typing.Iterator[np.ndarray]:
        for path in paths:
            with _opened_part(path) as archive:
                for name in archive.namelist():
                    if name.startswith(f"{split}/"):
                        ids = np.frombuffer(archive.read(name), plan.dtype)
                        yield ids.reshape(-1, plan.corpus.sequence_length)

    joined = folder / "joined"
    length = plan.corpus.sequence_length
    rows.write(joined, blocks, counts, length, plan.dtype, left_out, empty, short)
    shutil.rmtree(store, ignore_errors=True)  # a copy that was interrupted: it has no manifest
    joined.rename(store)  # a store is whole or absent
    storage.flush_folder(store.parent)


@contextlib.contextmanager
def _opened_part(path: pathlib.Path) -> typing.Iterator[zipfile.ZipFile]:
    """Opens the file of a part. Removes it if it is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        path.unlink()
        raise RunError(
            f"{path}: damaged ({error}), and removed; give the same command again to make it again"
        ) from error
