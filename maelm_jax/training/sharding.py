"""Devices as a mesh (data, fsdp, tensor), and the one table that says how each parameter lies on it."""

import math
import os
import re

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maelm_jax import config

# Every parameter's path matches exactly one rule. Blocks have a leading layer axis. Linear kernels are [in, out]: the first of a pair is
# cut along its output over `tensor`, the second along its input, so that a pair needs one all-reduce. `fsdp` cuts the other axis.
RULES = (
    (r"encoder/token_embedding", PartitionSpec("tensor", "fsdp")),
    (r"(encoder|decoder)/position_embedding", PartitionSpec(None, "fsdp")),
    (r"(encoder|decoder)/relative_bias/table", PartitionSpec()),
    (r"(encoder|decoder)/blocks/(cross/)?(query|key|value|up)/kernel", PartitionSpec(None, "fsdp", "tensor")),
    (r"(encoder|decoder)/blocks/(cross/)?(query|key|value|up)/bias", PartitionSpec(None, "tensor")),
    (r"(encoder|decoder)/blocks/(cross/)?(out|down)/kernel", PartitionSpec(None, "tensor", "fsdp")),
    (r"(encoder|decoder)/blocks/(cross/)?(out|down)/bias", PartitionSpec()),
    (r"((encoder|decoder)/(blocks/(cross/)?(attention|output)_)?|head/)norm(/(scale|bias))", PartitionSpec()),
    (r"(head/dense|head/resize|decoder/resize)/kernel", PartitionSpec("fsdp", None)),
    (r"(head/dense|decoder/resize)/bias", PartitionSpec()),
    (r"head/bias", PartitionSpec("tensor")),
    (r"(classifier/(dense|out)|span)/(kernel|bias)", PartitionSpec()),
)
TOP_LEVEL_MODULES = ("encoder", "decoder", "head", "classifier", "span")  # what a parameter's path begins with
BATCH = PartitionSpec(("data", "fsdp"))  # rows are divided over data and fsdp


def spec(path: str) -> PartitionSpec:
    """The rule for a parameter's path, as in encoder/blocks/query/kernel. Raises RunError unless exactly one matches."""
    found = [spec for pattern, spec in RULES if re.fullmatch(pattern, path)]
    if len(found) != 1:
        raise config.RunError(
            f"the parameter {path} matches {len(found)} sharding rules. Give it exactly one in RULES of maelm_jax/training/sharding.py"
        )
    return found[0]


def path_of(keys) -> str:
    """A tree path as parameter path; the optimiser's moments have the parameter's path behind their own."""
    names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in keys]
    rooms = [index for index, name in enumerate(names) if name in TOP_LEVEL_MODULES]
    return "/".join(names[rooms[0] :]) if rooms else ""


def tree(shapes, mesh: jax.sharding.Mesh):
    """A sharding for every leaf: parameters and their moments by the table, scalars (step, counts) on every device.

    Raises:
        ConfigError: The mesh does not divide a parameter.
        RunError: A parameter has no rule.
    """

    def leaf(keys, value):
        path = path_of(keys)
        if not path and value.ndim:
            path = jax.tree_util.keystr(keys, simple=True, separator="/")  # of no known module: spec() refuses it
        rule = spec(path) if path else PartitionSpec()
        check_divides(path, value.shape, rule, mesh)
        return NamedSharding(mesh, rule)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def check_divides(path: str, shape: tuple[int, ...], rule: PartitionSpec, mesh: jax.sharding.Mesh):
    """Raises ConfigError unless the mesh divides every dimension of a parameter that the rule cuts."""
    for size, axis in zip(shape, rule, strict=False):
        parts = mesh.shape[axis] if axis else 1
        if size % parts:
            raise config.ConfigError(f"Mesh.{axis}={parts} does not divide the {size} rows or columns of {path}. {_fitting(axis, size)}")


def _fitting(axis: str, size: int) -> str:
    """How to fix an axis that does not divide `size`."""
    few = [str(count) for count in range(1, 33) if size % count == 0]
    return f"Use a Mesh.{axis} that does, as {', '.join(few)}"


def mesh_sizes(settings: config.Mesh, devices: int) -> tuple[int, int, int]:
    """(data, fsdp, tensor) with -1 worked out. Raises ConfigError, with what would fit, when the product is not `devices`."""
    sizes = [settings.data, settings.fsdp, settings.tensor]
    known = math.prod(size for size in sizes if size > 0)  # of Python's integers, which do not overflow
    sizes = [devices // known if size == -1 else size for size in sizes]
    if math.prod(sizes) != devices:
        divisors = [size for size in range(1, devices + 1) if devices % size == 0]
        raise config.ConfigError(
            f"Mesh: data {settings.data} x fsdp {settings.fsdp} x tensor {settings.tensor} does not make the {devices} devices here; "
            f"each size must be one of {divisors}, with product {devices}, as in --gin.Mesh.data={devices} --gin.Mesh.fsdp=1 --gin.Mesh.tensor=1"
        )
    return tuple(sizes)


def make_mesh(settings: config.Mesh) -> jax.sharding.Mesh:
    """The mesh over all devices of all processes."""
    axes = ("data", "fsdp", "tensor")
    return jax.make_mesh(mesh_sizes(settings, jax.device_count()), axes, axis_types=(jax.sharding.AxisType.Auto,) * 3)


def check(experiment: config.Experiment, mesh: jax.sharding.Mesh):
    """Raises ConfigError, with what would fit, unless rows, heads, width and feed-forward divide over the mesh, and a batch fits in memory."""
    model, run = experiment.model, experiment.run
    check_memory(run.batch_size, experiment.corpus.sequence_length)
    rows, tensor, fsdp = mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["tensor"], mesh.shape["fsdp"]
    micro = run.batch_size // run.accumulate
    if micro % rows:
        fits = max(micro // rows, 1) * rows * run.accumulate
        raise config.ConfigError(
            f"Run.batch_size {run.batch_size} in {run.accumulate} part(s) does not divide over {rows} devices (data x fsdp); "
            f"{fits} or {fits + rows * run.accumulate} would"
        )
    for part, of in ((model, ""), (model.decoder, " of the decoder")):
        for name, size in (("heads", tensor), ("feed_forward", tensor), ("width", fsdp)):
            if getattr(part, name) % size:
                raise config.ConfigError(f"Model.{name} {getattr(part, name)}{of} does not divide over the mesh's {size} devices")


def check_memory(batch_size: int, length: int):
    """Raises ConfigError when the rows of a batch alone, as ids of 4 bytes, fill this machine's share of memory."""
    needed = 4 * batch_size * length / jax.process_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory / 4:  # read, converted and handed to the devices, a batch exists several times
        most = int(batch_size * memory / 4 / needed)
        raise config.ConfigError(
            f"Run.batch_size={batch_size}: its ids alone take {needed / 1e9:,.1f} GB of this machine's {memory / 1e9:,.1f} GB. Use at most {most}"
        )


def local_row_indices(size: int, mesh: jax.sharding.Mesh) -> np.ndarray:
    """The places of a batch of `size` rows that this process's devices hold, ascending: all of them where `tensor` spans the hosts."""
    return np.unique(np.concatenate([np.arange(size)[index] for (index,) in _row_slices(size, mesh).values()]))


def _row_slices(size: int, mesh: jax.sharding.Mesh) -> dict:
    return NamedSharding(mesh, BATCH).addressable_devices_indices_map((size,))


def shard_batch(rows: np.ndarray, mesh: jax.sharding.Mesh, size: int | None = None) -> jax.Array:
    """The rows at this process's `local_row_indices` as its part of a batch of `size` rows [size, L]; by default these are all rows."""
    size = len(rows) if size is None else size
    mine = local_row_indices(size, mesh)
    part = lambda index: rows[np.searchsorted(mine, np.arange(size)[index[0]])]  # noqa: E731
    return jax.make_array_from_callback((size, *rows.shape[1:]), NamedSharding(mesh, BATCH), part)
