"""A stack of layers, whose parameters have a leading axis N.

Axis letters as in layers.py: B rows, T tokens, D width, N layers.
"""

import collections.abc
import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key, UInt32

from maelm_jax import config
from maelm_jax.model import attention, layers, ops
from maelm_jax.model.kernels import attention_cudnn, backends
from maelm_jax.model.layers import Block


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardedParameter:
    """A parameter w of a stack of layers, sharded over the mesh axis `fsdp` (training/fsdp.py).

    w = all_gather(part) + offset, so dL/doffset = dL/dw: `offset` is a zero array of w's shape that
    receives the gradient of the whole parameter.
    """

    # This device's shard [N, ...]: an array, or an nnx.Param that holds one.
    part: typing.Any
    offset: typing.Any
    # The sharded axis, counted without the layer axis.
    axis: int = dataclasses.field(metadata={"static": True})

    def gather(self, dtype: jnp.dtype) -> Array:
        """Returns the whole parameter of one layer, without the layer axis, cast to `dtype`."""
        gathered = jax.lax.all_gather(self.part.astype(dtype), "fsdp", axis=self.axis, tiled=True)
        return _add_offset(gathered, self.offset)


@jax.custom_vjp
def _add_offset(x, offset):
    """Returns `x + offset` for offset 0. Only the gradient of `offset` is used."""
    return x


_add_offset.defvjp(
    lambda x, offset: (x, None), lambda _, gradient: (None, gradient.astype(jnp.float32))
)


def _is_sharded(leaf) -> bool:
    return isinstance(leaf, ShardedParameter)


def _gather_parameters(parameters, dtype: jnp.dtype):
    """Returns the parameters of a layer, all of them whole."""

    def leaf(parameter):
        return parameter.gather(dtype) if _is_sharded(parameter) else parameter

    return jax.tree.map(leaf, parameters, is_leaf=_is_sharded)


def _cast_matrices(parameters, dtype: jnp.dtype):
    """Casts the matrices of all layers, except sharded ones, to the dtype of the computation."""

    def leaf(parameter):
        is_matrix = not _is_sharded(parameter) and parameter.ndim == 3
        return parameter.astype(dtype) if is_matrix else parameter

    return jax.tree.map(leaf, parameters, is_leaf=_is_sharded)


def create(
    settings: config.StackSettings, rngs: nnx.Rngs, attends_to: layers.AttendsTo = "self"
) -> Block:
    """Creates all blocks of a stack as one Block. Every parameter has a leading axis N."""

    def block(key) -> Block:
        return Block(settings, nnx.Rngs(key), attends_to)

    graph = nnx.graphdef(nnx.eval_shape(lambda: block(0)))
    keys = jax.random.split(rngs.params(), settings.stack.layers)
    state = jax.vmap(lambda key: nnx.to_pure_dict(nnx.state(block(key))))(keys)
    return nnx.merge(graph, jax.tree.map(nnx.Param, state))


def should_scan(compute: config.Compute, target: backends.Target) -> bool:
    """Returns whether the layers are one compiled body in a loop (`Compute.scan_layers`).

    An accelerator waits for the copies of a loop: each pass reads a layer's parameters from the
    stacked arrays and writes what it saves and its gradients into others. Compiled one by one, the
    layers of base take 19 to 24% less time by the compilers' estimates, and two (GPU) to four times
    (TPU) the time to compile (docs/results.md).
    """
    if compute.scan_layers is not None:
        return compute.scan_layers
    # The TPU compiler (libtpu 0.0.42) aborts where several layers are divided over `tensor`.
    return target.platform == "cpu" or (target.platform == "tpu" and target.tensor > 1)


def run(
    blocks: Block,
    x: Float[Array, "B T D"],
    terms: attention.ScoreTerms,
    settings: config.StackSettings,
    target: backends.Target | None = None,
    keys: Key[Array, " B"] | None = None,
    cross: layers.CrossAttentionInputs | None = None,
    all_layers: bool = False,
) -> Float[Array, "B T D"] | Float[Array, "N B T D"]:
    """Applies the layers in turn.

    The backward pass keeps each layer's input and the values marked by `save_for_backward`, and
    computes all else again.

    Args:
        blocks: A result of `create`. A `ShardedParameter` is gathered one layer at a time, in the
            forward pass and again in the backward pass.
        x: Normalized states that enter the first layer.
        terms: What changes the scores of self-attention in every layer.
        settings: With `Compute.rematerialise`, only the layers' inputs are kept.
        target: The devices that compute the layers. None: all devices of this machine.
        keys: Keys of dropout, one for each row. None: no dropout. A stack with cross-attention has
            none.
        cross: What cross-attention reads. None: there is no cross-attention.
        all_layers: True returns the states after each layer, not only after the last.

    Returns:
        The normalized states [B, T, D] after the last layer, or [N, B, T, D] with `all_layers`.
    """
    target = target or backends.this_machine()
    graph, parameters = nnx.split(blocks)
    if target.platform == "gpu":  # by layer, the casts are 190 more launches of base (estimated)
        parameters = _cast_matrices(parameters, x.dtype)
    if blocks.attends_to != "cross":
        rate = 0.0 if keys is None else settings.dropout.attention
        slots = x.shape[1]
        terms = attention.prepare_terms(terms, settings, target, slots, slots, rate)
    if cross is not None:
        cross = _prepare_cross_attention(cross, settings, target, x.shape[1])

    def apply_layer(
        layer_terms: attention.ScoreTerms, state: layers.LayerState, layer: _Layer
    ) -> layers.LayerState:
        layer_keys = _fold_layer(keys, layer.number)
        block = nnx.merge(graph, _gather_parameters(layer.parameters, x.dtype))
        return block(state, layer_terms, layer_keys, cross)

    numbers = jnp.arange(settings.stack.layers, dtype=jnp.uint32)
    terms_by_layer = _terms_of_period(terms, settings)
    scanned = should_scan(settings.compute, target)
    in_loop_alone = scanned and len(terms_by_layer) == 1
    apply_by_layer = [
        _checkpoint_layer(
            functools.partial(apply_layer, layer_terms),
            settings.compute.rematerialise,
            in_loop_alone,
            target.platform,
        )
        for layer_terms in terms_by_layer
    ]
    state = layers.LayerState(x, x, terms.carrier)
    return _apply_in_turn(apply_by_layer, state, _Layer(numbers, parameters), scanned, all_layers)


class _Layer(typing.NamedTuple):
    """What differs between layers. Those of several layers have a leading axis."""

    number: UInt32[Array, "*N"]
    parameters: typing.Any  # a state of nnx

    def take(self, which: int | slice) -> "_Layer":
        """Returns the layer of a number, or some layers."""
        return jax.tree.map(lambda leaf: leaf[which], self)


def _prepare_cross_attention(
    cross: layers.CrossAttentionInputs,
    settings: config.StackSettings,
    target: backends.Target,
    slots: int,
) -> layers.CrossAttentionInputs:
    """Returns what `slots` queries of cross-attention read, with prepared terms."""
    encoded = cross.states.shape[1]
    terms = attention.prepare_terms(cross.terms, settings, target, slots, encoded, dropout_rate=0.0)
    # XLA sums the gradients of a bias of cross-attention: no carrier goes through the layers.
    return cross._replace(terms=terms._replace(carrier=None))


def _fold_layer(
    keys: Key[Array, " B"] | None, number: UInt32[Array, ""]
) -> Key[Array, " B"] | None:
    """Returns the keys of dropout in one layer."""
    if keys is None:
        return None
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, number)


def _terms_of_period(
    terms: attention.ScoreTerms, settings: config.StackSettings
) -> list[attention.ScoreTerms]:
    """Returns the terms of a global layer and of the local ones up to the next global one."""
    if terms.local is None:
        return [terms]
    local = [terms.local] * (settings.stack.global_every - 1)
    return [terms._replace(local=None), *local]


def _checkpoint_layer(
    body: collections.abc.Callable, saves_nothing: bool, scanned: bool, platform: str
) -> collections.abc.Callable:
    """Returns the body of a layer, whose backward pass computes again what is not saved.

    With `saves_nothing` (`Compute.rematerialise`), only the layer's input is saved. `scanned` says
    that the layer alone is the body of a loop.
    """
    # The TPU compiler itself keeps no large value of a layer that can be computed again. A
    # checkpoint would only make it round each saved value once more.
    if platform == "tpu" and not scanned and not saves_nothing:
        return body
    policy = jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.save_only_these_names(ops.SAVED), attention_cudnn.saves_outputs
    )
    if saves_nothing:
        policy = jax.checkpoint_policies.nothing_saveable
    # Without a loop, XLA merges the recomputation with the forward pass and keeps the values, so
    # nothing is freed. `prevent_cse` forbids that.
    return jax.checkpoint(body, prevent_cse=not scanned, policy=policy)


def _apply_in_turn(
    apply_by_layer: list[collections.abc.Callable],
    state: layers.LayerState,
    stacked: _Layer,
    scanned: bool,
    all_layers: bool,
) -> Float[Array, "B T D"] | Float[Array, "N B T D"]:
    """Applies groups of layers in a loop, which is unrolled without `scanned`.

    `apply_by_layer` are the functions of the layers of a group. The last group may have fewer
    layers than the others.
    """

    def apply_group(state, group):
        states = []
        for apply, layer in zip(apply_by_layer, group, strict=False):  # the last has fewer
            state = apply(state, layer)
            states.append(state.states)
        return state, jnp.stack(states) if all_layers else None

    depth, period = len(stacked.number), len(apply_by_layer)
    whole = depth - depth % period
    # Slices of parameters reshaped to [groups, period, ...] cost 10% more memory on an H100.
    groups = tuple(stacked.take(slice(first, whole, period)) for first in range(period))
    shape = state.states.shape
    state, states = jax.lax.scan(apply_group, state, groups, unroll=not scanned)
    states = states.reshape(whole, *shape) if all_layers else None
    if whole < depth:
        last_group = tuple(stacked.take(number) for number in range(whole, depth))
        state, last = apply_group(state, last_group)
        states = jnp.concatenate([states, last]) if all_layers else None
    return states if all_layers else state.states
