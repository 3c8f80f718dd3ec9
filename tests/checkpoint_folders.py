"""Checkpoints of a small state, and what tests do with their files."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from maelm_jax.training import checkpoint, step

SIZES = (40, 60)


def state_of(number: int, sizes: tuple[int, int] = SIZES) -> step.State:
    kernel = jax.random.normal(jax.random.key(number), sizes)
    return step.State(step=jnp.int32(number), params={"kernel": kernel, "bias": kernel[0]}, opt_state=({"mu": kernel * 2}, ()))


def restore(workdir: pathlib.Path, like: step.State | None = None):
    checkpoints = checkpoint.Checkpoints(str(workdir))
    try:
        return checkpoints.restore(state_of(0) if like is None else like)
    finally:
        checkpoints.close()


def content(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip(path: pathlib.Path, bit: int):
    changed = bytearray(path.read_bytes())
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)


def equal(tree, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True))
