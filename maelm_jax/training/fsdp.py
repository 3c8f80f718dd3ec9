"""Data and fsdp parallelism with jax.shard_map: when to gather parameters and reduce gradients.

Each device adds up the gradient of its own rows. Gradients are reduced over devices once a step.
The XLA partitioner would reduce them inside the loops over layers and microbatches: with
accumulation, every byte would be sent once a microbatch. The partitioner does tensor parallelism.

`fsdp` shards the parameters. Those of the layers are gathered inside the loop over layers, in the
forward pass and again in the backward pass. For a device,

    w = all_gather(shard) + offset,    offset = 0,    dL/doffset = dL/dw.

A gradient has the shape of its variable. The rows of a device give a gradient for the whole weight
w, and the device holds one shard. So the step differentiates with respect to the offset, which has
the shape of w. `sum_gradient` then adds the gradients of all devices, and leaves each device its
shard of the sum.
"""

import collections.abc
import typing

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from maelm_jax.model import stack
from maelm_jax.training import sharding


def each_device(
    function: collections.abc.Callable, mesh: jax.sharding.Mesh, params_specs: dict, out_specs
) -> collections.abc.Callable:
    """Applies a function to each device's shards: its parts of the parameters and its own rows.

    `function` is called as `function(params, key, batch, row_numbers)`. `params_specs` is the
    result of `specs`. Returns the function of the global arrays, whose results are sharded as
    `out_specs`. A model in it is one for `backends.mesh_target(mesh)`.
    """
    in_specs = (params_specs, PartitionSpec(), sharding.BATCH, sharding.BATCH)

    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(sharding.BATCH_AXES),
        check_vma=False,
    )


def specs(params: dict) -> dict:
    """Returns each parameter's sharding over `fsdp`, without that over `tensor`."""

    def leaf(keys, _):
        spec = sharding.partition_spec(sharding.parameter_path(keys))
        return PartitionSpec(*("fsdp" if axis == "fsdp" else None for axis in spec))

    return jax.tree_util.tree_map_with_path(leaf, params)


def variables_of(params: dict) -> dict:
    """Returns, on one device, the arrays that gradients are taken with respect to.

    These are the offsets of the layers' weights that `fsdp` shards, and all other weights whole.
    The others are gathered here, once.
    """

    def leaf(keys, shard):
        axis, stacked, spec = _layout(keys)
        if axis is None:
            return shard
        if not stacked:
            return jax.lax.all_gather(shard, "fsdp", axis=axis, tiled=True)
        shape = [
            size * (jax.lax.axis_size("fsdp") if number == axis else 1)
            for number, size in enumerate(shard.shape)
        ]
        tensor = PartitionSpec(*("tensor" if name == "tensor" else None for name in spec))
        return jax.lax.with_sharding_constraint(jnp.zeros(shape, shard.dtype), tensor)

    return jax.tree_util.tree_map_with_path(leaf, params)


def weights_of(variables: dict, params: dict) -> dict:
    """Returns the weights of the model, as a function of the variables.

    A weight of the layers that `fsdp` shards is a `stack.ShardedParameter`: the loop over layers
    gathers it.
    """

    def leaf(keys, variable, shard):
        axis, stacked, _ = _layout(keys)
        if stacked and axis is not None:
            return stack.ShardedParameter(shard, variable, axis - 1)
        return variable

    return jax.tree_util.tree_map_with_path(leaf, variables, params)


def sum_gradient(gradient: dict) -> dict:
    """Sums the gradient with respect to the variables over all devices.

    Returns the shard of each parameter that this device holds.
    """

    def leaf(keys, g):
        axis = _layout(keys).axis
        if axis is None:
            return sum_over_devices(g)
        return sum_over_devices(
            jax.lax.psum_scatter(g, "fsdp", scatter_dimension=axis, tiled=True), ("data",)
        )

    return jax.tree_util.tree_map_with_path(leaf, gradient)


def sum_over_devices(tree, over: tuple[str, ...] = sharding.BATCH_AXES):
    """Returns the sum over the devices along the mesh axes `over`."""
    # Beside a `tensor` axis, XLA refuses a sum over axes of size 1.
    axes = tuple(axis for axis in over if jax.lax.axis_size(axis) > 1)
    return jax.lax.psum(tree, axes) if axes else tree


class _Layout(typing.NamedTuple):
    """How a parameter is sharded inside `each_device`."""

    axis: int | None  # the axis sharded over `fsdp`
    stacked: bool  # whether the first axis counts layers
    spec: PartitionSpec


def _layout(keys) -> _Layout:
    path = sharding.parameter_path(keys)
    spec = sharding.partition_spec(path)
    axis = tuple(spec).index("fsdp") if "fsdp" in spec and jax.lax.axis_size("fsdp") > 1 else None
    return _Layout(axis, "/blocks/" in path, spec)
