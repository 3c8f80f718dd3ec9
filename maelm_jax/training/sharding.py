"""The device mesh (data, fsdp, tensor), and one table of how each parameter is sharded on it."""

import math
import re
import typing

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maelm_jax import config

TASK_HEADS = ("classifier", "span", "token")  # modules of fine-tuned runs, beside the encoder
_TASK_HEADS = "|".join(TASK_HEADS)
OWN_HEAD = "own_head"  # module of an objective that needs parameters beside encoder and head
_BLOCKS = "(encoder|decoder)/blocks/(attention|cross_attention|feed_forward)"
# Every parameter's path matches exactly one rule. Blocks have a leading layer axis. Linear kernels
# are [in, out]. `tensor` shards the first kernel of a pair along its output and the second along
# its input, so that a pair needs one all-reduce. `fsdp` shards the other axis.
RULES = (
    (r"encoder/token_embedding", PartitionSpec("tensor", "fsdp")),
    (r"(encoder|decoder)/position_embedding", PartitionSpec(None, "fsdp")),
    (r"encoder/token_type_embedding", PartitionSpec(None, "fsdp")),
    (r"(encoder|decoder)/relative_bias/table", PartitionSpec()),
    (rf"{_BLOCKS}/(query|key|value|up|gate)/kernel", PartitionSpec(None, "fsdp", "tensor")),
    (rf"{_BLOCKS}/(query|key|value|up|gate)/bias", PartitionSpec(None, "tensor")),
    (rf"{_BLOCKS}/(out|down)/kernel", PartitionSpec(None, "tensor", "fsdp")),
    (rf"{_BLOCKS}/(out|down)/bias", PartitionSpec()),
    (rf"({_BLOCKS}_|(encoder|decoder|head)/)norm/(scale|bias)", PartitionSpec()),
    (r"(head/dense|head/resize|decoder/resize)/kernel", PartitionSpec("fsdp", None)),
    (r"(head/dense|decoder/resize)/bias", PartitionSpec()),
    (r"head/bias", PartitionSpec("tensor")),
    (rf"(({_TASK_HEADS})/(dense|out)|span)/(kernel|bias)", PartitionSpec()),
    (rf"({_TASK_HEADS})/norm/scale", PartitionSpec()),
    (rf"{OWN_HEAD}/.+", PartitionSpec()),
)
# The first names of parameter paths.
TOP_LEVEL_MODULES = ("encoder", "decoder", "head", OWN_HEAD, *TASK_HEADS)
BATCH_AXES = ("data", "fsdp")  # rows are sharded over these
BATCH = PartitionSpec(BATCH_AXES)


def partition_spec(path: str) -> PartitionSpec:
    """Returns the sharding rule of a parameter, by its path, as encoder/token_embedding.

    Raises RunError if no rule matches the path, or several do.
    """
    matches = [spec for pattern, spec in RULES if re.fullmatch(pattern, path)]
    if len(matches) != 1:
        raise config.RunError(
            f"the parameter {path} matches {len(matches)} sharding rules. Give it exactly one in "
            "RULES of maelm_jax/training/sharding.py, which also has the TOP_LEVEL_MODULES"
        )
    return matches[0]


def parameter_path(keys) -> str:
    """Returns the parameter's path in a tree path: the part from a top-level module on.

    The paths of the optimiser's moments end with the parameter's path. The result is empty for
    other leaves, such as counts.
    """
    names = jax.tree_util.keystr(keys, simple=True, separator="/").split("/")
    for index, name in enumerate(names):
        if name in TOP_LEVEL_MODULES:
            return "/".join(names[index:])
    return ""


def sharded_shapes(shapes, mesh: jax.sharding.Mesh):
    """Returns the shapes of a state with the shardings of `shardings_of`."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        shardings_of(shapes, mesh),
    )


def shardings_of(state, mesh: jax.sharding.Mesh):
    """Returns a sharding for every leaf of a state, or of parameters alone: arrays or shapes.

    Parameters and their moments follow `RULES`. Scalars (step, counts) are on every device.

    Raises:
        ConfigError: The mesh does not divide a parameter.
        RunError: A parameter does not match exactly one rule.
    """

    def leaf(keys, value):
        path = parameter_path(keys)
        if not path and value.ndim:  # an array of no known module: no rule matches it
            path = jax.tree_util.keystr(keys, simple=True, separator="/")
        spec = partition_spec(path) if path else PartitionSpec()
        _check_divides(path, value.shape, spec, mesh)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(leaf, state)


def _check_divides(path: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: jax.sharding.Mesh):
    """Raises ConfigError unless the mesh divides every sharded dimension of a parameter."""
    for size, axis in zip(shape, spec, strict=False):
        parts = mesh.shape[axis] if axis else 1
        if size % parts:
            divisors = [str(count) for count in range(1, 33) if size % count == 0]
            raise config.ConfigError(
                f"Mesh.{axis}={parts} does not divide the {size} rows or columns of "
                f"{path}. Set Mesh.{axis} to one of {', '.join(divisors)}"
            )


class MeshSizes(typing.NamedTuple):
    """Devices along each axis of the mesh."""

    data: int
    fsdp: int
    tensor: int


def mesh_sizes(settings: config.Mesh, devices: int) -> MeshSizes:
    """Returns the sizes of the mesh, with -1 replaced by the devices that are left.

    Raises ConfigError if their product is not `devices`.
    """
    sizes = [settings.data, settings.fsdp, settings.tensor]
    # Python's integers do not overflow.
    product_of_set = math.prod(size for size in sizes if size > 0)
    sizes = [devices // product_of_set if size == -1 else size for size in sizes]
    if math.prod(sizes) != devices:
        divisors = [size for size in range(1, devices + 1) if devices % size == 0]
        product = " x ".join(f"Mesh.{axis}={getattr(settings, axis)}" for axis in MeshSizes._fields)
        raise config.ConfigError(
            f"{product} does not equal the {devices} devices of this run. "
            f"Use sizes from {divisors} with product {devices}, "
            f"as --gin.Mesh.data={devices} --gin.Mesh.fsdp=1 --gin.Mesh.tensor=1"
        )
    return MeshSizes(*sizes)


def make_mesh(settings: config.Mesh) -> jax.sharding.Mesh:
    """Returns the mesh of all devices of all processes."""
    sizes = tuple(mesh_sizes(settings, jax.device_count()))
    axis_types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, MeshSizes._fields, axis_types=axis_types)


def check_mesh(experiment: config.Experiment, mesh: jax.sharding.Mesh):
    """Raises ConfigError unless the mesh divides rows, heads, width and feed-forward width.

    Each device has its share of causal rows in each microbatch.
    """
    _check_batch_divides(experiment.run, mesh)
    _check_causal_rows(experiment, mesh)
    parts: dict[str, config.Stack] = {"Encoder": experiment.encoder}
    if experiment.decoder:
        parts["Decoder"] = experiment.decoder.stack(experiment.encoder)
    for owner, part in parts.items():
        for name, axis in (("heads", "tensor"), ("feed_forward", "tensor"), ("width", "fsdp")):
            if getattr(part, name) % mesh.shape[axis]:
                raise config.ConfigError(
                    f"{owner}.{name}={getattr(part, name)} is not divisible by "
                    f"Mesh.{axis}={mesh.shape[axis]}. Use a Mesh.{axis} that divides it"
                )


def _check_batch_divides(run: config.Run, mesh: jax.sharding.Mesh):
    devices = row_shards(mesh)
    microbatch = run.batch_size // run.accumulate
    if microbatch % devices:
        step = devices * run.accumulate
        smaller = max(microbatch // devices, 1) * step
        raise config.ConfigError(
            f"Run.batch_size={run.batch_size} in Run.accumulate={run.accumulate} parts is not "
            f"divisible by {devices} devices (Mesh.data x Mesh.fsdp). "
            f"Use {smaller} or {smaller + step}"
        )


def _check_causal_rows(experiment: config.Experiment, mesh: jax.sharding.Mesh):
    share, run = experiment.objective.causal_rows, experiment.run
    rows = run.batch_size // run.accumulate // row_shards(mesh)
    if rows % share.denominator:
        count = max(round(share * rows), 1)
        remedy = f"Use {count / rows:g}, which is {count} of {rows}, or more rows"
        raise config.ConfigError(
            f"Objective.causal_share={experiment.objective.causal_share:g} is {share.numerator} of "
            f"{share.denominator} rows, but a device has {rows} rows of a microbatch. "
            + ("Use more rows" if rows == 1 else remedy)
        )


def row_shards(mesh: jax.sharding.Mesh) -> int:
    """Returns the number of parts that the rows of a batch are divided into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def local_row_indices(size: int, mesh: jax.sharding.Mesh) -> np.ndarray:
    """Returns the indices of the rows in a batch that this process's devices hold, ascending.

    The global batch has `size` rows. These are all of them where `tensor` spans the hosts.
    """
    slices = NamedSharding(mesh, BATCH).addressable_devices_indices_map((size,)).values()
    return np.unique(np.concatenate([np.arange(size)[index] for (index,) in slices]))


def shard_batch(rows: np.ndarray, mesh: jax.sharding.Mesh, size: int | None = None) -> jax.Array:
    """Puts this process's rows on its devices, as its part of the global batch [size, L].

    `rows` are those at this process's `local_row_indices`, in that order. `size` None: they are
    all.
    """
    size = len(rows) if size is None else size
    local_indices = local_row_indices(size, mesh)

    def rows_of_device(index: tuple[slice, ...]) -> np.ndarray:
        return rows[np.searchsorted(local_indices, np.arange(size)[index[0]])]

    return jax.make_array_from_callback(
        (size, *rows.shape[1:]), NamedSharding(mesh, BATCH), rows_of_device
    )
