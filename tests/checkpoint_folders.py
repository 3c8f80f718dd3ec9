"""Checkpoints of a small state, and what tests do with their files."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from maelm_jax.training import checkpoint, step
from maelm_jax.training.workdir import Workdir

SIZES = (40, 60)


def state_of(number: int, sizes: tuple[int, int] = SIZES) -> step.State:
    kernel = jax.random.normal(jax.random.key(number), sizes)
    return step.State(step=jnp.int32(number), params={"kernel": kernel, "bias": kernel[0]}, opt_state=({"mu": kernel * 2}, ()))


def write(workdir: pathlib.Path, *numbers: int):
    checkpoints = checkpoint.Checkpoints(Workdir(workdir))
    for number in numbers:
        checkpoints.save(number, state_of(number))
        checkpoints.wait()
    checkpoints.close()


def restore(workdir: pathlib.Path, like: step.State | None = None):
    return checkpoint.restore_newest(Workdir(workdir), state_of(0) if like is None else like)


def content(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def largest_file(folder: pathlib.Path) -> pathlib.Path:
    return max(folder.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)


def flip(path: pathlib.Path, bit: int):
    changed = bytearray(path.read_bytes())
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)


def equal(tree, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True))
