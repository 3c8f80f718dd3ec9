"""The device mesh (data, fsdp, tensor), and one table of how each parameter is sharded on it."""

import math
import os
import re

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maelm_jax import config

# Every parameter's path matches exactly one rule. Blocks have a leading layer axis. Linear kernels
# are [in, out]. `tensor` shards the first kernel of a pair along its output and the second along
# its input, so that a pair needs one all-reduce. `fsdp` shards the other axis.
RULES = (
    (r"encoder/token_embedding", PartitionSpec("tensor", "fsdp")),
    (r"(encoder|decoder)/position_embedding", PartitionSpec(None, "fsdp")),
    (r"(encoder|decoder)/relative_bias/table", PartitionSpec()),
    (
        r"(encoder|decoder)/blocks/(cross/)?(query|key|value|up)/kernel",
        PartitionSpec(None, "fsdp", "tensor"),
    ),
    (r"(encoder|decoder)/blocks/(cross/)?(query|key|value|up)/bias", PartitionSpec(None, "tensor")),
    (r"(encoder|decoder)/blocks/(cross/)?(out|down)/kernel", PartitionSpec(None, "tensor", "fsdp")),
    (r"(encoder|decoder)/blocks/(cross/)?(out|down)/bias", PartitionSpec()),
    (
        r"((encoder|decoder)/(blocks/(cross/)?(attention|output)_)?|head/)norm(/(scale|bias))",
        PartitionSpec(),
    ),
    (r"(head/dense|head/resize|decoder/resize)/kernel", PartitionSpec("fsdp", None)),
    (r"(head/dense|decoder/resize)/bias", PartitionSpec()),
    (r"head/bias", PartitionSpec("tensor")),
    (r"(classifier/(dense|out)|span)/(kernel|bias)", PartitionSpec()),
)
# The first names of parameter paths.
TOP_LEVEL_MODULES = ("encoder", "decoder", "head", "classifier", "span")
BATCH = PartitionSpec(("data", "fsdp"))  # rows are sharded over data and fsdp


def spec(path: str) -> PartitionSpec:
    """Returns the sharding rule of a parameter.

    Args:
        path: Path of the parameter, such as encoder/blocks/query/kernel.

    Raises:
        RunError: No rule matches the path, or several do.
    """
    found = [spec for pattern, spec in RULES if re.fullmatch(pattern, path)]
    if len(found) != 1:
        raise config.RunError(
            f"the parameter {path} matches {len(found)} sharding rules. "
            "Give it exactly one in RULES of maelm_jax/training/sharding.py"
        )
    return found[0]


def path_of(keys) -> str:
    """Returns the parameter's path in a tree path: the part from a top-level module on.

    The paths of the optimiser's moments end with the parameter's path. The result is empty for
    other leaves, such as counts.
    """
    names = [
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in keys
    ]
    rooms = [index for index, name in enumerate(names) if name in TOP_LEVEL_MODULES]
    return "/".join(names[rooms[0] :]) if rooms else ""


def tree(shapes, mesh: jax.sharding.Mesh):
    """Returns a sharding for every leaf of a state.

    Parameters and their moments follow `RULES`. Scalars (step, counts) are on every device.

    Raises:
        ConfigError: The mesh does not divide a parameter.
        RunError: A parameter does not match exactly one rule.
    """

    def leaf(keys, value):
        path = path_of(keys)
        if not path and value.ndim:  # an array of no known module: spec() raises RunError
            path = jax.tree_util.keystr(keys, simple=True, separator="/")
        rule = spec(path) if path else PartitionSpec()
        check_divides(path, value.shape, rule, mesh)
        return NamedSharding(mesh, rule)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def check_divides(path: str, shape: tuple[int, ...], rule: PartitionSpec, mesh: jax.sharding.Mesh):
    """Raises ConfigError unless the mesh divides every sharded dimension of a parameter."""
    for size, axis in zip(shape, rule, strict=False):
        parts = mesh.shape[axis] if axis else 1
        if size % parts:
            raise config.ConfigError(
                f"Mesh.{axis}={parts} does not divide the {size} rows or columns of "
                f"{path}. {_fitting(axis, size)}"
            )


def _fitting(axis: str, size: int) -> str:
    """How to fix a mesh axis that does not divide `size`."""
    few = [str(count) for count in range(1, 33) if size % count == 0]
    return f"Use a Mesh.{axis} that does, as {', '.join(few)}"


def mesh_sizes(settings: config.Mesh, devices: int) -> tuple[int, int, int]:
    """Returns (data, fsdp, tensor), with -1 replaced by the devices that are left.

    Raises:
        ConfigError: The product is not `devices`.
    """
    sizes = [settings.data, settings.fsdp, settings.tensor]
    known = math.prod(size for size in sizes if size > 0)  # Python's integers do not overflow
    sizes = [devices // known if size == -1 else size for size in sizes]
    if math.prod(sizes) != devices:
        divisors = [size for size in range(1, devices + 1) if devices % size == 0]
        raise config.ConfigError(
            f"Mesh: data {settings.data} x fsdp {settings.fsdp} x tensor {settings.tensor} "
            f"does not make the {devices} devices here; "
            f"each size must be one of {divisors}, with product {devices}, "
            f"as in --gin.Mesh.data={devices} --gin.Mesh.fsdp=1 --gin.Mesh.tensor=1"
        )
    return tuple(sizes)


def make_mesh(settings: config.Mesh) -> jax.sharding.Mesh:
    """Returns the mesh of all devices of all processes."""
    axes = ("data", "fsdp", "tensor")
    return jax.make_mesh(
        mesh_sizes(settings, jax.device_count()), axes, axis_types=(jax.sharding.AxisType.Auto,) * 3
    )


def check(experiment: config.Experiment, mesh: jax.sharding.Mesh):
    """Checks that the mesh divides rows, heads, width and feed-forward width.

    Raises:
        ConfigError: It does not, or a batch does not fit in memory.
    """
    model, run = experiment.model, experiment.run
    check_memory(run.batch_size, experiment.corpus.sequence_length)
    rows, tensor, fsdp = (
        mesh.shape["data"] * mesh.shape["fsdp"],
        mesh.shape["tensor"],
        mesh.shape["fsdp"],
    )
    micro = run.batch_size // run.accumulate
    if micro % rows:
        fits = max(micro // rows, 1) * rows * run.accumulate
        raise config.ConfigError(
            f"Run.batch_size {run.batch_size} in {run.accumulate} part(s) "
            f"does not divide over {rows} devices (data x fsdp); "
            f"{fits} or {fits + rows * run.accumulate} would"
        )
    for part, of in ((model, ""), (model.decoder, " of the decoder")):
        for name, size in (("heads", tensor), ("feed_forward", tensor), ("width", fsdp)):
            if getattr(part, name) % size:
                raise config.ConfigError(
                    f"Model.{name} {getattr(part, name)}{of} "
                    f"does not divide over the mesh's {size} devices"
                )


def check_memory(batch_size: int, length: int):
    """Checks that the ids of a batch take at most a quarter of this machine's memory.

    Args:
        batch_size: Rows of the batch, divided over all processes.
        length: Tokens of a row, 4 bytes each.

    Raises:
        ConfigError: They take more.
    """
    needed = 4 * batch_size * length / jax.process_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A batch exists several times: as it is read, as it is converted and on the devices.
    if needed > memory / 4:
        most = int(batch_size * memory / 4 / needed)
        raise config.ConfigError(
            f"Run.batch_size={batch_size}: its ids alone take {needed / 1e9:,.1f} GB "
            f"of this machine's {memory / 1e9:,.1f} GB. Use at most {most}"
        )


def local_row_indices(size: int, mesh: jax.sharding.Mesh) -> np.ndarray:
    """Returns the indices of the rows in a batch that this process's devices hold, ascending.

    These are all rows where `tensor` spans the hosts.

    Args:
        size: Rows of the global batch.
        mesh: Devices.
    """
    return np.unique(
        np.concatenate([np.arange(size)[index] for (index,) in _row_slices(size, mesh).values()])
    )


def _row_slices(size: int, mesh: jax.sharding.Mesh) -> dict:
    """The slice of rows of each local device."""
    return NamedSharding(mesh, BATCH).addressable_devices_indices_map((size,))


def shard_batch(rows: np.ndarray, mesh: jax.sharding.Mesh, size: int | None = None) -> jax.Array:
    """Puts this process's rows on its devices, as its part of the global batch.

    Args:
        rows: The rows at this process's `local_row_indices`, in that order.
        mesh: Devices.
        size: Rows of the global batch. None: `rows` are all of them.

    Returns:
        The global batch [size, L].
    """
    size = len(rows) if size is None else size
    mine = local_row_indices(size, mesh)
    part = lambda index: rows[np.searchsorted(mine, np.arange(size)[index[0]])]  # noqa: E731
    return jax.make_array_from_callback((size, *rows.shape[1:]), NamedSharding(mesh, BATCH), part)
