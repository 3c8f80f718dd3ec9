r"""Measure the rows/s from the row store to device memory, without training.

    python benchmarks/input.py --gin_file=base.gin --gin.BATCH_SIZE=256 \
        --gin.TEXT_FILES='books/*.txt'

The rows are prepared first if they do not exist yet. Batches have the size and order of training.
The process has read no rows before, but the operating system's file cache may hold them. With
--bucket, the rows are copied to an emulator of S3 or GCS on this machine and read from there. The
emulator answers some hundred requests a second. With Corpus.shuffle_shards, a request is a whole
file of rows.
"""

import contextlib
import dataclasses
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))

from maelm_jax import cli, config
from maelm_jax.data import prepare, vocabulary_training


@contextlib.contextmanager
def in_bucket(prepared: prepare.Prepared, corpus: config.Corpus, kind: str):
    """Context manager that gives the same rows, in a bucket of an emulator."""
    import emulators

    folder = pathlib.Path(corpus.rows_dir).expanduser()
    with emulators.emulated(kind) as bucket:
        for entry in prepared.record["sources"].values():
            for path in (folder / entry["store"]).rglob("*"):
                if path.is_file():
                    emulators.put(f"{bucket}/rows/{path.relative_to(folder)}", path.read_bytes())
        elsewhere = dataclasses.replace(corpus, rows_dir=f"{bucket}/rows")
        yield prepare.open_record(prepared.record, elsewhere)


def main(argv: list[str]):
    """Runs the command with these arguments."""
    flags = cli.parser(__doc__)
    batches_help = "batches timed, after two that are not"
    flags.add_argument("--batches", type=cli.whole_number(1), default=100, help=batches_help)
    flags.add_argument("--bucket", choices=("s3", "gs"), help="read from an emulator of it")
    args, experiment = cli.parse(flags, argv)

    import jax

    from maelm_jax.data import batches
    from maelm_jax.training import sharding

    mesh = sharding.make_mesh(experiment.mesh)
    sharding.check_mesh(experiment, mesh)
    corpus = experiment.corpus
    vocabulary = vocabulary_training.vocabulary_for(experiment.vocabulary, corpus)
    prepared = prepare.prepare(corpus, vocabulary)
    opened = contextlib.nullcontext(prepared)
    if args.bucket:
        opened = in_bucket(prepared, corpus, args.bucket)
    times, cpu = [], 0.0
    with opened as found:
        train = batches.Batches(
            found.split("train"),
            found.rates,
            experiment.run.batch_size,
            experiment.run.seed,
            shuffle_shards=corpus.shuffle_shards,
        )
        for number in range(args.batches + 2):
            start, cpu = time.perf_counter(), cpu or time.process_time()
            jax.block_until_ready(sharding.shard_batch(train.batch(number), mesh))
            times.append(time.perf_counter() - start)
        cpu = (time.process_time() - cpu) / len(times)
    times = times[2:]
    size, length = experiment.run.batch_size, corpus.sequence_length
    print(
        f"{sum(map(len, prepared.split('train').values())):,} rows of {length} ids; batches of "
        f"{size}; {jax.device_count()} x {jax.devices()[0].device_kind}"
    )
    print(
        f"{size * len(times) / sum(times):,.0f} rows/s ({1e3 * statistics.median(times):.2f} ms a "
        f"batch, slowest {1e3 * max(times):.2f} ms; {1e3 * cpu:.2f} CPU ms)"
    )


if __name__ == "__main__":
    cli.run(main)
