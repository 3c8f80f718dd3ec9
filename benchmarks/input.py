r"""Measure the rows/s from the row store to device memory, without training.

    python benchmarks/input.py --gin_file=base.gin --gin.BATCH_SIZE=256 \
        --gin.TEXT_FILES='books/*.txt'

The rows are prepared first if they do not exist yet. Batches have the size and order of training.
The process has read no rows before, but the operating system's file cache may hold them.
"""

import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from maelm_jax import cli
from maelm_jax.data import prepare, vocabulary_training


def main(argv: list[str]):
    """Runs the command with these arguments."""
    flags = cli.parser(__doc__)
    batches_help = "batches timed, after two that are not"
    flags.add_argument("--batches", type=cli.whole_number(1), default=100, help=batches_help)
    args, experiment = cli.parse(flags, argv)

    import jax

    from maelm_jax.data import batches
    from maelm_jax.training import sharding

    mesh = sharding.make_mesh(experiment.mesh)
    sharding.check_mesh(experiment, mesh)
    corpus = experiment.corpus
    vocabulary = vocabulary_training.vocabulary_for(experiment.vocabulary, corpus)
    prepared = prepare.prepare(corpus, vocabulary)
    train = batches.Batches(
        prepared.split("train"),
        prepared.rates,
        experiment.run.batch_size,
        experiment.run.seed,
        shuffle_shards=corpus.shuffle_shards,
    )
    times, cpu = [], time.process_time()
    for number in range(args.batches + 2):
        start = time.perf_counter()
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
