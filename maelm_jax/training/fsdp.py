"""Data and fsdp parallelism, said outright (jax.shard_map): when a parameter is put together, and when a gradient is sent.

Left to the compiler, gradients are summed over the devices inside the loops over layers and microbatches: with accumulation every byte is sent
once a microbatch. Here each device adds up the gradient of its own rows, and it is summed over devices once a step. A layer's parameters, cut
over `fsdp`, are put together inside the loop over layers, forward and again backward. What `tensor` cuts stays the compiler's affair.
"""

import collections.abc
import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from maelm_jax.model import layers
from maelm_jax.training import sharding

AXES = ("data", "fsdp")  # that rows are divided over


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scattered(layers.Scattered):
    """A stacked parameter cut over `fsdp`. Its gradient is taken with respect to `offset`, which is 0 and as large as the whole parameter."""

    part: typing.Any  # [N, ...] that this device holds; an array, or the nnx.Param around one
    offset: typing.Any
    axis: int = dataclasses.field(metadata={"static": True})  # that is cut, counted without the layer axis

    def whole(self, dtype: jnp.dtype) -> Array:
        whole = jax.lax.all_gather(self.part.astype(dtype), "fsdp", axis=self.axis, tiled=True)
        return _at(whole, self.offset)


@jax.custom_vjp
def _at(whole, offset):
    """whole + offset at offset 0, which is therefore not read: it only receives the gradient."""
    return whole


_at.defvjp(lambda whole, offset: (whole, None), lambda _, gradient: (None, gradient.astype(jnp.float32)))


def each_device(function: collections.abc.Callable, mesh: jax.sharding.Mesh, params_specs: dict, out_specs) -> collections.abc.Callable:
    """`function(params, key, batch, numbers)` on each device's parts of the parameters and its own rows."""
    rows = PartitionSpec(AXES)
    in_specs = (params_specs, PartitionSpec(), rows, rows)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(AXES), check_vma=False)


def specs(params: dict) -> dict:
    """How `fsdp` alone cuts each parameter."""
    alone = lambda spec: PartitionSpec(*("fsdp" if axis == "fsdp" else None for axis in spec))  # noqa: E731
    return jax.tree_util.tree_map_with_path(lambda keys, _: alone(sharding.spec(sharding.path_of(keys))), params)


def variables(params: dict) -> dict:
    """What gradients are taken with respect to, on one device: whole parameters (put together here, once), or the offsets of a stack's."""

    def leaf(keys, part):
        axis, stacked, spec = _cut(keys)
        if axis is None:
            return part
        if not stacked:
            return jax.lax.all_gather(part, "fsdp", axis=axis, tiled=True)
        shape = [size * (jax.lax.axis_size("fsdp") if number == axis else 1) for number, size in enumerate(part.shape)]
        tensor = PartitionSpec(*("tensor" if name == "tensor" else None for name in spec))
        return jax.lax.with_sharding_constraint(jnp.zeros(shape, part.dtype), tensor)

    return jax.tree_util.tree_map_with_path(leaf, params)


def parameters(variables: dict, params: dict) -> dict:
    """What the model computes with: `params`, put together or `Scattered`, as a function of `variables`."""

    def leaf(keys, variable, part):
        axis, stacked, _ = _cut(keys)
        return Scattered(part, variable, axis - 1) if stacked and axis is not None else variable

    return jax.tree_util.tree_map_with_path(leaf, variables, params)


def reduced(gradient: dict) -> dict:
    """The gradient with respect to `variables` summed over all devices; of each parameter the part that this device holds."""

    def leaf(keys, g):
        axis, _, _ = _cut(keys)
        if axis is None:
            return summed(g)
        return summed(jax.lax.psum_scatter(g, "fsdp", scatter_dimension=axis, tiled=True), ("data",))

    return jax.tree_util.tree_map_with_path(leaf, gradient)


def summed(tree, over: tuple[str, ...] = AXES):
    """The sum over the devices along these axes. One of size 1 is left out: beside a `tensor` axis the compiler refuses a sum over nothing."""
    several = tuple(axis for axis in over if jax.lax.axis_size(axis) > 1)
    return jax.lax.psum(tree, several) if several else tree


def _cut(keys) -> tuple[int | None, bool, PartitionSpec]:
    """(the axis that `fsdp` cuts, or None; whether the parameter belongs to a stack of layers; its rule)."""
    path = sharding.path_of(keys)
    spec = sharding.spec(path)
    axis = tuple(spec).index("fsdp") if "fsdp" in spec and jax.lax.axis_size("fsdp") > 1 else None
    return axis, "/blocks/" in path, spec
