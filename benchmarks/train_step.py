"""Measure the training step of a config on any backend.

Prints tokens/s, model FLOP/s, its share of the machine's matmul rate, and peak memory.

    python benchmarks/train_step.py --gin_file=tiny.gin
    python benchmarks/train_step.py --gin_file=base.gin --gin.BATCH_SIZE=2 --gin.Model.dtype=float32

Rows are random ids of full length; the cost of a step does not depend on the ids. Tokens are
counted before masking. The matmul rate is that of a 2048^3 product in the config's dtype. It is
measured in the same process before and after the steps; the larger value counts.
"""

import pathlib
import resource
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from maelm_jax import cli, config  # noqa: E402


def main(argv: list[str]):
    flags = cli.parser(__doc__)
    flags.add_argument("--steps", type=int, default=10, help="steps timed, after two that are not")
    args, experiment = cli.parse(flags, argv)

    import jax
    import numpy as np

    from maelm_jax.model import maelm
    from maelm_jax.training import metrics, optimizer, sharding, step

    mesh = sharding.make_mesh(experiment.mesh)
    sharding.check_mesh(experiment, mesh)
    size, run, length = (
        experiment.vocabulary.size,
        experiment.run,
        experiment.corpus.sequence_length,
    )
    special = config.SpecialIds.of_size(size)
    graph, init = maelm.create(experiment.model, size, special)
    updates = optimizer.create(experiment.optimizer, run.train_steps)
    state = step.create_state(init, updates, run.seed, mesh)
    train_step = step.make_train_step(
        step.pretraining_loss(experiment, graph, special),
        updates,
        state,
        run.seed,
        run.accumulate,
        mesh,
    )
    ids = np.random.default_rng(0).integers(4, size - 1, (run.batch_size, length)).astype(np.int32)
    ids[:, 0] = special.bos
    batch = sharding.shard_batch(ids, mesh)

    before = metrics.measured_peak(experiment.model.dtype)
    start = time.perf_counter()
    state, _ = jax.block_until_ready(train_step(state, batch))
    compiled_in = time.perf_counter() - start
    state, _ = jax.block_until_ready(train_step(state, batch))
    times = []
    for _ in range(args.steps):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(train_step(state, batch))
        times.append(time.perf_counter() - start)
    peak = max(before, metrics.measured_peak(experiment.model.dtype))

    seconds, tokens = statistics.median(times), run.batch_size * length
    flops = sum(metrics.flops_terms(experiment, size).values())
    statistics_of_device = jax.devices()[0].memory_stats() or {}
    memory = statistics_of_device.get(
        "peak_bytes_in_use", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    model = experiment.model
    rows = {
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}, {model.dtype}",
        "shape": f"{model.layers}+{model.decoder_layers} x {model.width}, vocabulary {size}, "
        f"length {length}, batch {run.batch_size}",
        "dropout, attention dropout": f"{model.dropout}, {model.attention_dropout}",
        "step": f"{1e3 * seconds:.1f} ms (median of {len(times)}; {1e3 * min(times):.1f} to "
        f"{1e3 * max(times):.1f}); first {compiled_in:.1f} s",
        "tokens/s": f"{tokens / seconds:,.0f}",
        "model FLOP/s": f"{flops / seconds / 1e9:,.1f} G",
        "matmul FLOP/s": f"{peak / 1e9:,.1f} G (2048^3)",
        "share": f"{flops / seconds / peak:.1%}",
        "peak memory": f"{memory / 2**30:.2f} GiB",
    }
    for name, value in rows.items():
        print(f"{name:<28}{value}")


if __name__ == "__main__":
    cli.run(main)
