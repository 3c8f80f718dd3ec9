r"""Measure the rate at which text becomes rows, compared with bare SentencePiece.

Bare SentencePiece encodes the same documents with as many processes and does nothing else.

    python benchmarks/prepare.py --gin_file=base.gin --gin.TEXT_FILES='books/*.txt' \
        --gin.Corpus.processes=2

Rows are made in a temporary folder. The vocabulary comes from Corpus.rows_dir; if there is none, it
is trained first. The two measurements alternate. SentencePiece gets the text from memory. Making
rows includes reading the files and decompressing them, and starting the processes if there are
several. CPU time (user and system) hardly depends on other work of the machine.
"""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time
import typing

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from maelm_jax import cli, config
from maelm_jax.data import vocabulary_training

MEGABYTES = 4.0  # of text that a process gets at once


def main(argv: list[str]):
    """Runs the command with these arguments."""
    flags = cli.parser(__doc__)
    flags.add_argument("--rounds", type=int, default=3)
    args, experiment = cli.parse(flags, argv)

    from maelm_jax.data import prepare, sources, vocabularies

    corpus = dataclasses.replace(
        experiment.corpus, processes=experiment.corpus.processes or os.cpu_count()
    )
    words = vocabulary_training.vocabulary_for(experiment.vocabulary, corpus)
    if not isinstance(words, vocabularies.SentencePieceVocabulary):
        raise config.ConfigError(
            "this compares with SentencePiece: Vocabulary.file must be one of its models, or None"
        )
    texts = [
        text for source in sources.rates(corpus) for text in sources.documents_of(source, corpus)
    ]
    size = sum(len(text.encode()) for text in texts) / 1e6
    parts = divided(texts)
    ours, bare, ours_cpu, bare_cpu = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder) / "model"
        words.save(model)
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(
            corpus.processes, spawn, _load, (str(model / words.FILE),)
        ) as pool:
            list(pool.map(_encode, [["warm"]] * corpus.processes))
            for number in range(args.rounds):
                start = time.perf_counter()
                encoded = list(pool.map(_encode, parts))
                bare.append(time.perf_counter() - start)
                bare_cpu.append(sum(part.cpu_seconds for part in encoded))
                start, cpu_before = time.perf_counter(), sum(os.times()[:4])
                prepared = prepare.prepare(
                    dataclasses.replace(corpus, rows_dir=f"{folder}/{number}"), words
                )
                ours.append(time.perf_counter() - start)
                ours_cpu.append(sum(os.times()[:4]) - cpu_before)
    filled = sum(
        split.statistics["tokens"] for store in prepared.stores.values() for split in store.values()
    )
    print(
        f"{size:.1f} MB of text, {len(texts):,} documents, {corpus.processes} processes; "
        f"{sum(part.ids for part in encoded):,} ids; rows hold {filled:,}, <s> and </s> included"
    )
    for name, times, cpu in (("SentencePiece", bare, bare_cpu), ("rows", ours, ours_cpu)):
        print(
            f"{name:<14}{size / statistics.median(times):>8.2f} MB/s   "
            f"{size / statistics.median(cpu):>8.2f} MB per CPU second   "
            f"({', '.join(f'{value:.1f}' for value in cpu)} s of CPU)"
        )
    print(
        f"rows are made at {statistics.median(bare) / statistics.median(ours):.0%} of bare "
        f"SentencePiece's rate, {statistics.median(bare_cpu) / statistics.median(ours_cpu):.0%} by "
        "CPU time"
    )


def divided(texts: list[str]) -> list[list[str]]:
    """Divides texts into parts of about `MEGABYTES`, in their order."""
    parts, part, held = [], [], 0.0
    for text in texts:
        part.append(text)
        held += len(text) / 1e6
        if held >= MEGABYTES:
            parts.append(part)
            part, held = [], 0.0
    return [*parts, part]


def _load(path: str):
    """Loads the SentencePiece model in a worker process."""
    global model  # noqa: PLW0603  (each worker loads it once)
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=path)


class Encoded(typing.NamedTuple):
    """What SentencePiece made of documents, and the time it took."""

    ids: int
    cpu_seconds: float


def _encode(texts: list[str]) -> Encoded:
    """Encodes documents line by line."""
    began = time.process_time()
    count = sum(len(ids) for text in texts for ids in model.encode(text.splitlines()))
    return Encoded(count, time.process_time() - began)


if __name__ == "__main__":
    cli.run(main)
