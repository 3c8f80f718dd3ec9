"""Compare two ways to fine-tune the seeds of one cell of the grid.

The seeds run one after the other, or all in one compiled step. That step is a vmap over the
parameters, the optimiser's moments and the batches.

    python benchmarks/finetune_seeds.py --init_from=runs/tiny --seeds=5 --batch_size=32 --length=64

For both ways, prints the seconds that a step of all seeds takes and the seconds of the first one,
which includes compilation. The repetitions of the two ways alternate; the median is printed.
"""

import argparse
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from maelm_jax import gin_files  # noqa: E402
from maelm_jax.finetuning import batches, encoder_source, features, heads  # noqa: E402
from maelm_jax.training import optimizer, sharding, step  # noqa: E402


def main():
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--init_from", required=True)
    for name, value in (("seeds", 5), ("batch_size", 32), ("length", 64), ("repetitions", 9)):
        flags.add_argument(f"--{name}", type=int, default=value)
    args = flags.parse_args()
    begin = encoder_source.load(args.init_from)
    experiment = gin_files.load([begin.gin_file, "finetune/base.gin", "finetune/mnli.gin"])
    mesh = sharding.make_mesh(experiment.mesh)
    graph, init = heads.create(experiment.model, begin.vocabulary.size, begin.vocabulary.pad, 3)
    updates = optimizer.create_adjustable(experiment.optimizer)

    def fresh(seed: int) -> step.State:
        state = step.create_state(init, updates, seed, mesh)
        return state._replace(opt_state=optimizer.with_schedule(state.opt_state, 3e-5, 10, 1000))

    draw = np.random.default_rng(0)
    ids = [
        draw.integers(4, begin.vocabulary.size - 1, args.length).astype(np.int32)
        for _ in range(args.batch_size)
    ]
    rows = features.Features(
        ids,
        draw.integers(0, 3, args.batch_size).astype(np.int32),
        np.zeros(args.batch_size, np.int32),
    )
    packed = [
        jax.tree.map(jnp.asarray, batches.pack(rows, args.length, args.batch_size, 1, seed))
        for seed in range(args.seeds)
    ]
    states = [fresh(seed) for seed in range(args.seeds)]
    one = step.make_train_step(heads.loss_of(graph), updates, states[0], 0, 1, mesh)
    together = jax.jit(jax.vmap(one), donate_argnums=0)
    stack = lambda trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)  # noqa: E731
    all_states = stack([fresh(seed) for seed in range(args.seeds)])
    all_batches = stack(packed)

    def each():
        states[:] = [one(state, batch)[0] for state, batch in zip(states, packed, strict=True)]
        jax.block_until_ready(states)

    def at_once():
        nonlocal all_states
        all_states = jax.block_until_ready(together(all_states, all_batches)[0])

    def timed(function) -> float:
        began = time.perf_counter()
        function()
        return time.perf_counter() - began

    compiled = timed(each), timed(at_once)
    pairs = [(timed(each), timed(at_once)) for _ in range(args.repetitions)]
    print(
        f"{jax.devices()[0].device_kind}; {args.seeds} seeds, batch {args.batch_size}, length "
        f"{args.length}"
    )
    for number, name in enumerate(("one by one", "vmap")):
        print(
            f"{name:<12}{statistics.median(pair[number] for pair in pairs):>8.3f} s a step of all "
            f"seeds{compiled[number]:>8.1f} s the first time"
        )


if __name__ == "__main__":
    main()
