"""Multi-head attention: one function, computed by one of three backends.

`xla` is the reference for the others and runs everywhere. `cudnn` is JAX's fused attention for
NVIDIA GPUs. `pallas_tpu` are the kernels of attention_tpu.py. `choose_backend` says which one
computes a call, and why. The choice depends on the devices that will run the model. They need not
be those of this machine: see `trace_for`.

Axis letters: B rows, H heads, T queries, S keys, D width, K size of a head (D / H), G heads of the
bias (H, or 1 for a bias that all heads share).
"""

import collections.abc
import contextlib
import contextvars
import re
import typing

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Key

from maelm_jax import config
from maelm_jax.model import attention_tpu, ops
from maelm_jax.model.attention_tpu import AttentionOutput as AttentionOutput
from maelm_jax.model.ops import save_for_backward
from maelm_jax.model.positions import (
    Mask,
    Rotations,
    divide_into_blocks,
    join_neighbours,
    rotate,
)

CUDNN_MOST_VALUES = 128  # of a head
# What `_append_segments` adds to a head: a multiple of the 16 that a matrix unit sums at once, and
# a size that makes scores of 64 values at least 256 less.
SEGMENT_VALUES, SEGMENT_SIZE = 16, 32


class ScoreTerms(typing.NamedTuple):
    """What changes the scores of attention: positions and segments."""

    bias: Float[Array, "B H T S"] | None = None  # receives a gradient
    mask: Mask | Float[Array, "B 1 T S"] | None = None  # receives none
    # Collects the gradient of `bias` over the layers that share it: see `attention_tpu.attend`.
    carrier: Float[Array, "B H T S"] | None = None
    rotations: Rotations | None = None  # applied to queries and keys
    local: "ScoreTerms | None" = None  # what takes the place of all this in local layers
    block: int | None = None  # in local layers: slots of a block; `mask` is that of all blocks


NO_TERMS = ScoreTerms()


class Call(typing.NamedTuple):
    """What the choice of a backend depends on in one call of `attend`."""

    heads: int
    head_size: int
    queries: int
    keys: int
    dtype: jnp.dtype
    dropout_rate: float  # of the attention weights
    has_bias: bool
    has_dense_mask: bool = False  # the mask is an array, not segments


class Target(typing.NamedTuple):
    """The devices that a model is traced for."""

    platform: str  # "cpu", "gpu" or "tpu"
    device_kind: str
    has_cudnn: bool = False
    devices: int = 1  # over which arrays may be sharded
    tensor: int = 1  # devices over which the heads of a row are divided
    # Whether the model is traced inside `shard_map` over rows. A kernel cannot be partitioned by
    # XLA: without `shard_map`, it runs on one device only.
    sharded_rows: bool = False


def attend(
    q: Float[Array, "B T D"],
    k: Float[Array, "B S D"],
    v: Float[Array, "B S D"],
    *,
    heads: int,
    terms: ScoreTerms = NO_TERMS,
    dropout_rate: float = 0.0,
    dropout_keys: Key[Array, " B"] | None = None,
    backend: str = "auto",
) -> AttentionOutput:
    """Computes dropout(softmax(q k^T / sqrt(K) + bias + mask)) v for each head.

    The heads of q, k and v are side by side. Rotary positions first rotate q and k. `dropout_keys`
    has one key for each row. None: no dropout. `backend` is `Compute.attention_backend`.

    Returns:
        The sums, in the dtype of q, and the carrier of `terms`.
    """
    if terms.rotations is not None:
        q = rotate(q, terms.rotations.queries, heads)
        k = rotate(k, terms.rotations.keys, heads)
    if terms.block is not None:
        settings = {"heads": heads, "dropout_rate": dropout_rate, "backend": backend}
        return _attend_in_blocks(q, k, v, terms, dropout_keys, settings)
    call = Call(
        heads=heads,
        head_size=q.shape[2] // heads,
        queries=q.shape[1],
        keys=k.shape[1],
        dtype=q.dtype,
        dropout_rate=0.0 if dropout_keys is None else dropout_rate,
        has_bias=terms.bias is not None,
        has_dense_mask=isinstance(terms.mask, jax.Array),
    )
    target = current_target()
    chosen = choose_backend(backend, call, target).backend
    if chosen == "pallas_tpu":
        q, k, v = (save_for_backward(x) for x in (q, k, v))
        return attention_tpu.attend(
            q,
            k,
            v,
            terms.bias,
            terms.carrier,
            terms.mask,
            heads=heads,
            dropout_rate=call.dropout_rate,
            dropout_keys=dropout_keys,
            tensor=target.tensor,
            sharded_rows=target.sharded_rows,
            interpret=target.platform != "tpu",
        )
    q_heads, k_heads, v_heads = (x.reshape(*x.shape[:2], heads, -1) for x in (q, k, v))
    if chosen == "cudnn":
        states = _attend_by_cudnn(q_heads, k_heads, v_heads, terms, target)
    else:
        terms = _merge_mask(terms, q.dtype)
        bias = terms.mask if terms.bias is None else terms.bias
        states = _attend_by_xla(q_heads, k_heads, v_heads, bias, dropout_rate, dropout_keys)
    return AttentionOutput(states, terms.carrier)


def _attend_in_blocks(
    q: Float[Array, "B T D"],
    k: Float[Array, "B T D"],
    v: Float[Array, "B T D"],
    terms: ScoreTerms,
    dropout_keys: Key[Array, " B"] | None,
    settings: dict,
) -> AttentionOutput:
    """Computes local attention: each block of slots attends to itself and to its neighbours.

    The slots of a segment are in the order of their positions. Two tokens are therefore at most as
    many slots apart as positions, with or without slots for dropped tokens. `settings` are the
    other arguments of `attend`.
    """

    def rows(blocks):
        return blocks.reshape(-1, *blocks.shape[2:])

    q_blocks, k_blocks, v_blocks = (divide_into_blocks(x, terms.block) for x in (q, k, v))
    if dropout_keys is not None:
        count = q_blocks.shape[1]
        dropout_keys = rows(jax.vmap(lambda key: jax.random.split(key, count))(dropout_keys))
    output = attend(
        rows(q_blocks),
        rows(join_neighbours(k_blocks)),
        rows(join_neighbours(v_blocks)),
        terms=ScoreTerms(mask=terms.mask),
        dropout_keys=dropout_keys,
        **settings,
    )
    return AttentionOutput(output.states.reshape(len(q), -1, q.shape[2])[:, : q.shape[1]], None)


def prepare_terms(
    terms: ScoreTerms, settings: config.StackSettings, queries: int, keys: int, dropout_rate: float
) -> ScoreTerms:
    """Computes once what changes the scores of all layers of a stack.

    The mask becomes a part of the bias, or an array. The fused backends keep a mask that stands
    alone as segments. All arguments but `terms` are those of `describe_call`.
    """
    call = describe_call(settings, queries, keys, dropout_rate, terms.bias is not None)
    choice = choose_backend(settings.compute.attention_backend, call, current_target())
    if choice.backend != "xla" and terms.bias is None:
        return terms
    terms = _merge_mask(terms, call.dtype)
    if choice.backend != "pallas_tpu":
        return terms
    # Without the barrier, XLA adds mask and bias again in each layer, in both passes.
    bias = jax.lax.optimization_barrier(terms.bias)
    return terms._replace(bias=bias, carrier=bias)


def describe_call(
    settings: config.StackSettings, queries: int, keys: int, dropout_rate: float, has_bias: bool
) -> Call:
    """Returns the call of `attend` that a layer of a stack makes, one with global attention.

    In each row, `queries` slots attend to `keys` slots.
    """
    return Call(
        heads=settings.stack.heads,
        head_size=settings.stack.head_size,
        queries=queries,
        keys=keys,
        dtype=jnp.dtype(settings.compute.dtype),
        dropout_rate=dropout_rate,
        has_bias=has_bias,
    )


def _merge_mask(terms: ScoreTerms, dtype: jnp.dtype) -> ScoreTerms:
    """Makes the mask an array, and adds it to the bias if there is one."""
    if terms.mask is None:
        return terms
    mask = terms.mask.as_bias(dtype) if isinstance(terms.mask, Mask) else terms.mask
    if terms.bias is None:
        return terms._replace(mask=mask)
    return terms._replace(bias=mask + terms.bias, mask=None)


def _attend_by_xla(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H K"],
    bias: Float[Array, "B G T S"] | None,
    dropout_rate: float,
    dropout_keys: Key[Array, " B"] | None,
) -> Float[Array, "B T D"]:
    """Computes attention from the scores, which are in memory."""
    q, k, v = (save_for_backward(x.swapaxes(1, 2)) for x in (q, k, v))
    if bias is None:
        bias = jnp.zeros((len(q), 1, q.shape[2], k.shape[2]), q.dtype)
    weights = attention_weights(q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype), k, bias)
    weights = ops.dropout(weights, dropout_rate, dropout_keys)
    y = ops.product("bhts,bhsk->bhtk", weights, v)
    return save_for_backward(y.swapaxes(1, 2).reshape(len(y), y.shape[2], -1))


@jax.custom_vjp
def attention_weights(
    q: Float[Array, "B H T K"], k: Float[Array, "B H S K"], bias: Float[Array, "B G T S"]
) -> Float[Array, "B H T S"]:
    """Computes the softmax of q k^T + bias over the keys. q is already divided by sqrt(K).

    Scores and softmax are computed in float32. The weights have the dtype of q. The backward pass
    casts the gradient of the scores to the dtype of q, so that its matrix products run in that
    dtype. Automatic differentiation would run them in float32.
    """
    return _attention_weights_forward(q, k, bias)[0]


def _attention_weights_forward(q, k, bias):
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k, preferred_element_type=jnp.float32) + bias.astype(
        jnp.float32
    )
    weights = save_for_backward(jax.nn.softmax(scores, axis=-1).astype(q.dtype))
    return weights, (q, k, weights, bias)


def _attention_weights_backward(saved, d_weights):
    q, k, weights, bias = saved
    wide = weights.astype(jnp.float32)
    weighted = wide * d_weights.astype(jnp.float32)
    d_scores = weighted - wide * weighted.sum(axis=-1, keepdims=True)
    d_bias = d_scores if bias.shape[1] == q.shape[1] else d_scores.sum(axis=1, keepdims=True)
    d_scores = d_scores.astype(q.dtype)
    return (
        ops.product("bhts,bhsk->bhtk", d_scores, k),
        ops.product("bhts,bhtk->bhsk", d_scores, q),
        d_bias.astype(bias.dtype),
    )


attention_weights.defvjp(_attention_weights_forward, _attention_weights_backward)


def _attend_by_cudnn(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H K"],
    terms: ScoreTerms,
    target: Target,
) -> Float[Array, "B T D"]:
    """Calls cuDNN's fused attention.

    To cuDNN, a boolean mask is a bias too, and jax 0.10 computes its gradient. Where a mask stands
    alone as segments, they go into the heads instead, if there is room.
    """
    head_size = q.shape[3]
    q, k, v = (save_for_backward(x) for x in (q, k, v))
    mask, bias, is_causal = terms.mask, terms.bias, False
    if bias is not None:
        bias, mask = _merge_mask(terms, q.dtype).bias, None
    elif isinstance(mask, Mask) and head_size + SEGMENT_VALUES <= CUDNN_MOST_VALUES:
        q, k, v = _append_segments(q, k, v, mask)
        mask, is_causal = None, mask.causal
    elif mask is not None:
        mask = mask.as_booleans() if isinstance(mask, Mask) else mask >= 0

    def run(q, k, v, bias, mask):
        return jax.nn.dot_product_attention(
            q, k, v, bias, mask, scale=head_size**-0.5, is_causal=is_causal, implementation="cudnn"
        )

    if target.sharded_rows:
        # XLA cannot partition the call. Inside `shard_map` over all axes it has nothing to do.
        by_head, whole = PartitionSpec(None, None, "tensor"), PartitionSpec()
        bias_spec = whole if bias is None or bias.shape[1] == 1 else PartitionSpec(None, "tensor")
        run = jax.shard_map(
            run,
            in_specs=(by_head, by_head, by_head, bias_spec, whole),
            out_specs=by_head,
            axis_names={"tensor"},
            check_vma=False,
        )
    return run(q, k, v, bias, mask)[..., :head_size].reshape(*q.shape[:2], -1)


def _append_segments(
    q: Float[Array, "B T H K"], k: Float[Array, "B S H K"], v: Float[Array, "B S H K"], mask: Mask
) -> tuple[Float[Array, "B T H _"], Float[Array, "B S H _"], Float[Array, "B S H _"]]:
    """Appends values to each head that hide the keys of other segments, without an array [T, S].

    They are the binary digits of the segment's number, as SEGMENT_SIZE and its negative. In q k^T
    they add 2 SEGMENT_SIZE^2 less for each digit that differs. The last value makes that 0 for
    equal segments. All of them are exact in bfloat16. The segment of empty slots is 0, so an empty
    query, whose result has no meaning, sees the empty keys.
    """
    digits = SEGMENT_VALUES - 1

    def append(x, segments, last):
        bits = (segments[:, :, None] >> jnp.arange(digits)[None, None]) & 1
        values = (2 * bits - 1) * SEGMENT_SIZE
        values = jnp.pad(values, ((0, 0), (0, 0), (0, 1)), constant_values=last)
        values = jnp.broadcast_to(values[:, :, None], (*x.shape[:3], SEGMENT_VALUES))
        return jnp.concatenate([x, values.astype(x.dtype)], axis=3)

    return (
        append(q, mask.queries, digits * SEGMENT_SIZE),
        append(k, mask.keys, -SEGMENT_SIZE),
        jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, SEGMENT_VALUES))),
    )


def saves_cudnn_outputs(primitive: typing.Any, *_: typing.Any, **__: typing.Any) -> bool:
    """A policy of `jax.checkpoint`: keeps what cuDNN's forward kernel returns.

    The backward kernel needs the softmax statistics, and `jax.nn.dot_product_attention` gives them
    no name that `save_for_backward` could mark. Without this policy, the backward pass runs the
    forward kernel again.
    """
    return primitive.name.startswith("dot_product_attention_fwd")


class Choice(typing.NamedTuple):
    """A backend and the reason for it."""

    backend: str
    reason: str


def choose_backend(requested: str, call: Call, target: Target) -> Choice:
    """Chooses the backend of a call: with "auto" the fused one of the device if it can compute it.

    `requested` is `Compute.attention_backend`.

    Raises:
        ConfigError: The requested backend cannot compute the call.
    """
    fused = {"gpu": "cudnn", "tpu": "pallas_tpu"}.get(target.platform)
    backend = fused if requested == "auto" else requested
    if backend is None:
        return Choice("xla", f"the platform is {target.platform}")
    if backend == "xla":
        return Choice("xla", "as set")
    find_obstacle = _find_cudnn_obstacle if backend == "cudnn" else _find_tpu_obstacle
    obstacle = find_obstacle(call, target)
    if requested == "auto":
        if call.dtype != jnp.bfloat16:
            obstacle = f"the dtype is {call.dtype}, not bfloat16"
        elif target.devices > 1 and not target.sharded_rows:
            obstacle = f"XLA shards the arrays over {target.devices} devices"
        if obstacle:
            return Choice("xla", f"{backend} cannot compute it: {obstacle}")
        return Choice(backend, f"{call.dtype} on {target.device_kind}")
    if obstacle:
        raise config.ConfigError(
            f"Compute.attention_backend='{backend}' cannot compute this attention: {obstacle}. "
            "Use 'auto' or 'xla'"
        )
    if backend == "pallas_tpu" and target.platform != "tpu":
        return Choice(backend, "as set, in Pallas' interpreter: slow")
    return Choice(backend, "as set")


def _find_cudnn_obstacle(call: Call, target: Target) -> str | None:
    """Says why cuDNN cannot compute a call. None: it can."""
    if not target.has_cudnn:
        return f"{target.device_kind} is no NVIDIA GPU of the Ampere generation or a later one"
    if call.dropout_rate > 0:
        return (
            f"attention dropout is {call.dropout_rate}, and cuDNN draws other masks; "
            "Dropout.attention=0 makes cuDNN possible"
        )
    if call.dtype != jnp.bfloat16:
        return f"the dtype is {call.dtype}, not bfloat16"
    if call.head_size % 8 or call.head_size > CUDNN_MOST_VALUES:
        return (
            f"heads have size {call.head_size}, and cuDNN takes multiples of 8 up to "
            f"{CUDNN_MOST_VALUES}"
        )
    if call.queries % 2 or call.keys % 2:
        return f"{call.queries} queries or {call.keys} keys are not even"
    return None


def _find_tpu_obstacle(call: Call, target: Target) -> str | None:
    """Says why the TPU kernels cannot compute a call. None: they can."""
    if call.has_dense_mask:
        return "layers attend within a window, and the kernel compares segments only"
    kernel_heads = attention_tpu.heads_per_step(call.head_size)
    if not kernel_heads:
        return f"heads have size {call.head_size}, and the kernel takes 32, 64 and 128"
    if call.heads % (target.tensor * kernel_heads):
        return f"{call.heads} heads are not a multiple of {target.tensor * kernel_heads}"
    if call.queries % 8 or call.keys % 8:
        return f"{call.queries} queries or {call.keys} keys are not a multiple of 8"
    needed = attention_tpu.memory_needed(
        call.queries, call.keys, call.head_size, call.dtype.itemsize, call.has_bias
    )
    limit = attention_tpu.memory_limit(target.device_kind)
    if target.platform == "tpu" and needed > limit:
        return (
            f"{call.queries} queries x {call.keys} keys need {needed / 2**20:.0f} MiB of fast "
            f"memory, and a kernel gets {limit / 2**20:.0f} MiB"
        )
    return None


_target: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)


def device_target(device: typing.Any) -> Target:
    """Returns the target of a model that one JAX device computes alone."""
    # A GPU that is only compiled for has the platform "cuda" or "rocm" instead of "gpu".
    platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    # cuDNN's attention needs an Ampere GPU (8.0). AMD's capabilities are names like "gfx942".
    capability = getattr(device, "compute_capability", "")
    number = re.fullmatch(r"\d+\.\d+", capability or "")
    return Target(platform, device.device_kind, number is not None and float(capability) >= 8.0)


def mesh_target(mesh: jax.sharding.Mesh) -> Target:
    """Returns the target of a model that is traced inside `shard_map` over the rows of a mesh."""
    target = device_target(mesh.devices.flat[0])
    tensor = mesh.shape["tensor"]
    return target._replace(devices=mesh.devices.size, tensor=tensor, sharded_rows=True)


def current_target() -> Target:
    """Returns the target that `trace_for` has set, or the devices of this machine."""
    return _target.get() or device_target(jax.devices()[0])._replace(devices=jax.device_count())


@contextlib.contextmanager
def trace_for(target: Target) -> collections.abc.Iterator[None]:
    """Traces models for these devices, as long as the context lasts."""
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)


def trace_for_one_device() -> contextlib.AbstractContextManager[None]:
    """Traces models that one device of this machine computes alone."""
    return trace_for(current_target()._replace(devices=1))
