"""Measure how costs grow: with the length, the vocabulary, devices, files, shards, checkpoints.

    python benchmarks/growth.py
    python benchmarks/growth.py --axes=files,shards

Prints a table. Every figure is CPU time (user and system, of all threads) of a process of its own.
`growth` is the ratio of the cost to that of the size before, and the ratio of the sizes: "2.00 for
4" grows slower than the size.

length       a training step of tiny.gin on 8,192 tokens, in rows of this length
vocabulary   a training step of tiny.gin, with so many ids
devices      a training step of tiny.gin on 64 rows, on simulated CPU devices, which share the cores
files        preparation of the same 10,000 documents of 1,600 characters, in so many files
shards       100 batches of 64 rows, read from a store of so many files of 4,096 rows
checkpoints  restoring the newest of so many checkpoints, and saving the next one
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time
import typing

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from maelm_jax import cli, config, tables  # noqa: E402

STEPS = 5  # that are timed, after the first one; the median counts
TOKENS = 8192  # of a batch, for `length`
DOCUMENTS, DOCUMENT_CHARACTERS = 10_000, 1600  # for `files`
LENGTH = 16  # of a row, for `shards`


def time_step(flags: list[str], devices: int = 1) -> float:
    """Returns the CPU seconds of a training step of tiny.gin with some more flags."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    _, experiment = cli.parse(cli.parser(__doc__), ["--gin_file=tiny.gin", *flags])
    import training_setup

    setup = training_setup.set_up(experiment)
    return statistics.median(training_setup.time_steps(setup, STEPS + 1, time.process_time)[1:])


def length(size: int) -> float:
    """Measures rows of this length."""
    names = ("SEQUENCE_LENGTH", "Encoder.max_positions")
    flags = [f"--gin.{name}={size}" for name in names]
    return time_step([*flags, f"--gin.BATCH_SIZE={TOKENS // size}"])


def vocabulary(size: int) -> float:
    """Measures a vocabulary of this size."""
    return time_step([f"--gin.Vocabulary.size={size}"])


def devices(size: int) -> float:
    """Measures a batch of 64 rows on so many simulated devices."""
    return time_step(["--gin.BATCH_SIZE=64"], size)


def files(size: int) -> float:
    """Measures the preparation of text in so many files, in one process."""
    from maelm_jax.data import prepare, vocabularies

    text = " ".join((ROOT / "LICENSE").read_text().split())
    starts = [index % (len(text) - DOCUMENT_CHARACTERS) for index in range(DOCUMENTS)]
    documents = [text[start : start + DOCUMENT_CHARACTERS] for start in starts]
    vocabulary = vocabularies.load(ROOT / "pretrained")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(size):
            content = "\n\n".join(documents[number::size])
            pathlib.Path(folder, f"{number}.txt").write_text(content)
        corpus = config.Corpus(
            sources={f"files:{folder}/*.txt": 1.0},
            rows_dir=f"{folder}/rows",
            sequence_length=128,
            processes=1,
        )
        start = time.process_time()
        prepare.prepare(corpus, vocabulary)
        return time.process_time() - start


def shards(size: int) -> float:
    """Measures the reading of batches from a store of so many files."""
    import numpy as np

    from maelm_jax.data import batches, rows

    generator = np.random.default_rng(0)
    blocks = {"train": size, "heldout": 1}
    counts = {
        split: dict.fromkeys(rows.COUNTS, 1) | {"rows": number * rows.SHARD_ROWS}
        for split, number in blocks.items()
    }

    def random_rows(split: str):
        for _ in range(blocks[split]):
            yield generator.integers(0, 1000, (rows.SHARD_ROWS, LENGTH), np.uint16)

    with tempfile.TemporaryDirectory() as folder:
        store = pathlib.Path(folder, "store")
        rows.write(store, random_rows, counts, LENGTH, np.dtype(np.uint16), {})
        start = time.process_time()
        stores = {"text": rows.open_stores({"text": str(store)})["text"]["train"]}
        read = batches.Batches(stores, {"text": 1.0}, batch_size=64, seed=0)
        for step in range(100):
            read.batch(step)
        return time.process_time() - start


def checkpoints(size: int) -> float:
    """Measures a workdir with so many checkpoints."""
    import jax.numpy as jnp

    from maelm_jax.training import checkpoint
    from maelm_jax.training.workdir import Workdir

    state = {"params": {"kernel": jnp.zeros((256, 256))}}
    with tempfile.TemporaryDirectory() as folder:
        workdir = Workdir(folder)
        before = checkpoint.Checkpoints(workdir, keep=size + 1)
        for step in range(1, size + 1):
            before.save(step, state)
        before.wait()
        before.close()
        start = time.process_time()
        after = checkpoint.Checkpoints(workdir, keep=size + 1)
        assert checkpoint.restore_newest(workdir, state).step == size
        after.save(size + 1, state)
        after.wait()
        seconds = time.process_time() - start
        after.close()
    return seconds


class Axis(typing.NamedTuple):
    """What grows."""

    measure: typing.Callable[[int], float]
    sizes: tuple[int, ...]


AXES = {
    "length": Axis(length, (128, 512, 2048, 8192)),
    "vocabulary": Axis(vocabulary, (8192, 32768, 131072)),
    "devices": Axis(devices, (1, 2, 4, 8)),
    "files": Axis(files, (1, 100, 10_000)),
    "shards": Axis(shards, (10, 100, 1000)),
    "checkpoints": Axis(checkpoints, (3, 30, 300)),
}


def main(argv: list[str]):
    """Runs the command with these arguments."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--axes", default=",".join(AXES), help="default: all")
    chosen = flags.parse_args(argv).axes.split(",")
    table = []
    for name in chosen:
        before = None
        for size in AXES[name].sizes:
            spawn = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, spawn) as process:
                seconds = process.submit(AXES[name].measure, size).result()
            growth = f"{seconds / before[1]:.2f} for {size / before[0]:.0f}" if before else ""
            table.append((name, f"{size:,}", f"{seconds:.2f}", growth))
            print(*table[-1], file=sys.stderr)
            before = size, seconds
    print(tables.plain(["what grows", "size", "CPU s", "growth"], table))


if __name__ == "__main__":
    main(sys.argv[1:])
