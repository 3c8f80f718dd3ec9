"""Which backend computes an attention, and why.

`xla` runs everywhere. `cudnn` are the kernels of attention_cudnn.py, `pallas_tpu` those of
attention_tpu.py. The choice depends on the devices that will run the model. They need not be those
of this machine.
"""

import re
import typing

import jax
import jax.numpy as jnp

from maelm_jax import config
from maelm_jax.model.kernels import attention_cudnn, attention_tpu


class Call(typing.NamedTuple):
    """What the choice of a backend depends on in one call of `attention.attend`."""

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


class Backend(typing.NamedTuple):
    """What computes an attention, for which devices."""

    name: str  # "xla", "cudnn" or "pallas_tpu"
    target: Target


XLA = Backend("xla", Target("cpu", "cpu"))  # it computes the same for every target


def one_device() -> Target:
    """Returns the target of a model that one device of this machine computes alone."""
    return device_target(jax.devices()[0])


def this_machine() -> Target:
    """Returns the target of a model whose arrays XLA may shard over all devices."""
    return one_device()._replace(devices=jax.device_count())


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


def describe_call(
    settings: config.StackSettings, queries: int, keys: int, dropout_rate: float, has_bias: bool
) -> Call:
    """Returns the call of `attention.attend` of a layer of a stack with global attention.

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


def describe_local_call(
    settings: config.StackSettings, slots: int, block: int, dropout_rate: float
) -> Call:
    """Returns the call of a layer with local attention in blocks of `block` of `slots` slots."""
    keys = min(3 * block, slots)  # a block and its two neighbours, or one block alone
    call = describe_call(settings, block, keys, dropout_rate, has_bias=False)
    return call._replace(has_dense_mask=True)


class Choice(typing.NamedTuple):
    """A backend and the reason for it."""

    backend: str
    reason: str


def choose(requested: str, call: Call, target: Target) -> Backend:
    """Returns what computes a call on the devices of `target`. See `choose_backend`."""
    return Backend(choose_backend(requested, call, target).backend, target)


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
    if call.head_size % 8 or call.head_size > attention_cudnn.MOST_VALUES:
        return (
            f"heads have size {call.head_size}, and cuDNN takes multiples of 8 up to "
            f"{attention_cudnn.MOST_VALUES}"
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
