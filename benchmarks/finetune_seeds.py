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
import typing

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from maelm_jax import cli, config, gin_files, tables
from maelm_jax.finetuning import batches, features, heads, initial_encoder, task_data
from maelm_jax.training import optimizers, sharding, step

CLASSES = 3


class Way(typing.NamedTuple):
    """One way to train all seeds."""

    name: str
    step: typing.Callable[[], None]  # one step of all seeds


def main(argv: list[str]):
    """Runs the command with these arguments."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--init_from", required=True)
    for name, value in (("seeds", 5), ("batch_size", 32), ("length", 64), ("repetitions", 9)):
        flags.add_argument(f"--{name}", type=cli.whole_number(1), default=value)
    args = flags.parse_args(argv)
    ways = make_ways(args)
    first = [seconds_of(way.step) for way in ways]
    later = [[seconds_of(way.step) for way in ways] for _ in range(args.repetitions)]
    medians = [statistics.median(times) for times in zip(*later, strict=True)]
    print(
        f"{jax.devices()[0].device_kind}; {args.seeds} seeds, batch {args.batch_size}, "
        f"length {args.length}"
    )
    rows = [
        (way.name, f"{median:.3f}", f"{compilation:.1f}")
        for way, median, compilation in zip(ways, medians, first, strict=True)
    ]
    print(tables.plain(("seeds", "s a step of all seeds", "s the first time"), rows))


def seconds_of(function: typing.Callable[[], None]) -> float:
    """Wall-clock seconds of one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def make_ways(args: argparse.Namespace) -> list[Way]:
    """Both ways to train all seeds: one after the other, and in one step."""
    source = initial_encoder.load(args.init_from)
    experiment = gin_files.load([source.gin_file, "finetune/base.gin", "finetune/mnli.gin"])
    size, pad = source.vocabulary.size, source.vocabulary.pad
    mesh = sharding.make_mesh(experiment.mesh)
    head = task_data.Head("sentence", CLASSES)
    graph, init = heads.create(experiment.model, size, pad, head)
    updates = optimizers.create(experiment.optimizer)

    def fresh_states() -> list[step.State]:
        return [step.create_state(init, updates, seed, mesh) for seed in range(args.seeds)]

    by_seed = random_batches(args, size)
    states = fresh_states()
    one_seed = step.make_train_step(heads.loss_of(graph, head), updates, states[0], 0, 1, mesh)
    every_seed = jax.jit(jax.vmap(one_seed, in_axes=(0, 0, None)), donate_argnums=0)
    rate = np.float32(3e-5)
    stacked_states, stacked_batches = stack(fresh_states()), stack(by_seed)

    def one_by_one():
        states[:] = [one_seed(*pair, rate)[0] for pair in zip(states, by_seed, strict=True)]
        jax.block_until_ready(states)

    def in_one_step():
        nonlocal stacked_states
        stacked_states = jax.block_until_ready(every_seed(stacked_states, stacked_batches, rate)[0])

    return [Way("one by one", one_by_one), Way("vmap", in_one_step)]


def random_batches(args: argparse.Namespace, vocabulary_size: int) -> list:
    """One batch of random ids and labels for each seed."""
    draw = np.random.default_rng(0)
    first_text_id = config.SpecialIds.of_size(vocabulary_size).unk + 1
    ids = [
        draw.integers(first_text_id, vocabulary_size - 1, args.length).astype(np.int32)
        for _ in range(args.batch_size)
    ]
    labels = draw.integers(0, CLASSES, args.batch_size).astype(np.int32)
    rows = features.Features(ids, labels, np.zeros(args.batch_size, np.int32))
    packed = [
        batches.pack(rows, args.length, args.batch_size, 1, seed) for seed in range(args.seeds)
    ]
    return jax.tree.map(jnp.asarray, packed)


def stack(trees: list):
    """One tree of the same structure whose leaves have a leading axis of seeds."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


if __name__ == "__main__":
    cli.run(main)
