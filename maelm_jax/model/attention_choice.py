"""Which backend computes an attention, and why: by platform, dtype, shape and dropout.

`Model.attention_backend` names a backend, or is "auto". A model is traced for a `Target`: the
devices that will run it, which need not be those of this machine.
"""

import collections.abc
import contextlib
import contextvars
import typing

import jax
import jax.numpy as jnp

from maelm_jax import config
from maelm_jax.model import attention_tpu, attention_triton

MIB = 2**20
# Bytes of VMEM of a TPU core by device kind, from jax/_src/pallas/mosaic/tpu_info.py. A kernel gets
# four fifths of it: the compiler keeps values of other operations there as well.
VMEM = {
    "TPU v4": 16 * MIB,
    "TPU v5 lite": 128 * MIB,
    "TPU v5": 64 * MIB,
    "TPU v6 lite": 128 * MIB,
    "TPU7x": 64 * MIB,
}
KERNEL_SHARE = 0.8
WINDOW_OBSTACLE = "the layers attend within a window, and the kernel compares segments only"


class Call(typing.NamedTuple):
    """What the choice of a backend depends on in one call of `attention`."""

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

    platform: str  # as `platform_of` returns it
    device_kind: str
    devices: int  # over which arrays may be sharded
    tensor: int = 1  # devices over which the heads of a row are divided
    # Whether the model is traced inside `shard_map` over rows. A kernel cannot be partitioned by
    # XLA: without `shard_map`, it runs on one device only.
    sharded_rows: bool = False


class Choice(typing.NamedTuple):
    """A backend and the reason for it."""

    backend: str
    reason: str


_target: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)


def target_of(mesh: jax.sharding.Mesh) -> Target:
    """Returns the target of a model that is traced inside `shard_map` over the rows of a mesh."""
    device = mesh.devices.flat[0]
    return Target(
        platform_of(device), device.device_kind, mesh.devices.size, mesh.shape["tensor"], True
    )


def platform_of(device: typing.Any) -> str:
    """Returns a JAX device's "cpu", "gpu" (CUDA), "tpu", or "rocm": AMD has no fused backend."""
    # JAX calls both kinds of GPUs "gpu". A device that is only compiled for is "cuda" or "rocm".
    if device.platform == "gpu" and "rocm" in device.client.platform_version.lower():
        return "rocm"
    return "gpu" if device.platform == "cuda" else device.platform


def current_target() -> Target:
    """Returns the target that `traced_for` has set, or the devices of this machine."""
    device = jax.devices()[0]
    this_machine = Target(platform_of(device), device.device_kind, jax.device_count())
    return _target.get() or this_machine


def one_device() -> Target:
    """Returns the target of a model that one device of this machine computes alone."""
    return current_target()._replace(devices=1)


@contextlib.contextmanager
def traced_for(target: Target) -> collections.abc.Iterator[None]:
    """Traces models for these devices, as long as the context lasts."""
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)


def choose(requested: str, call: Call, target: Target) -> Choice:
    """Chooses the backend of a call.

    Args:
        requested: `Model.attention_backend`.
        call: Shapes and dtype.
        target: The devices.

    Raises:
        ConfigError: The requested backend cannot compute the call.
    """
    if requested == "auto":
        return _automatic(call, target)
    problem = None if requested == "xla" else _OBSTACLES[requested](call, target)
    if problem:
        raise config.ConfigError(
            f"Model.attention_backend='{requested}' cannot compute this attention: {problem}. "
            "Use 'auto' or 'xla'"
        )
    if _PALLAS_PLATFORMS.get(requested, target.platform) != target.platform:
        return Choice(requested, "as set, in Pallas' interpreter here: slow, as a check")
    return Choice(requested, "as set")


def _automatic(call: Call, target: Target) -> Choice:
    """Returns the fastest backend that can compute the call."""
    backends = _FUSED.get(target.platform)
    if backends is None:
        return Choice("xla", f"the platform is {target.platform}")
    if call.dtype != jnp.bfloat16:
        names = " and ".join(backends)
        verb = "is" if len(backends) == 1 else "are"
        return Choice("xla", f"the dtype is {call.dtype}, and {names} {verb} for bfloat16")
    if target.devices > 1 and not target.sharded_rows:
        return Choice("xla", f"XLA shards the arrays over {target.devices} devices")
    problems = []
    for backend in backends:
        problem = _OBSTACLES[backend](call, target)
        if problem is None:
            return Choice(backend, "; ".join([f"{call.dtype} on {target.device_kind}", *problems]))
        problems.append(f"{backend} cannot compute it: {problem}")
    return Choice("xla", "; ".join(problems))


def _tpu_obstacle(call: Call, target: Target) -> str | None:
    """Why the TPU kernel cannot compute a call. None: it can."""
    if call.has_dense_mask:
        return WINDOW_OBSTACLE
    group = attention_tpu.heads_per_step(call.head_size)
    if not group:
        return f"heads have size {call.head_size}, and the kernel takes 32, 64 and 128"
    if call.heads % (target.tensor * group):
        return f"{call.heads} heads are not a multiple of {target.tensor * group}"
    if call.queries % 8 or call.keys % 8:
        return f"{call.queries} queries or {call.keys} keys are not a multiple of 8"
    needed = attention_tpu.memory_needed(
        call.queries, call.keys, call.head_size, call.dtype.itemsize, call.has_bias
    )
    limit = KERNEL_SHARE * VMEM.get(target.device_kind, min(VMEM.values()))
    if target.platform == "tpu" and needed > limit:
        return (
            f"{call.queries} queries x {call.keys} keys need {needed / MIB:.0f} MiB of fast "
            f"memory, and a kernel gets {limit / MIB:.0f} MiB"
        )
    return None


def _cudnn_obstacle(call: Call, target: Target) -> str | None:
    """Why cuDNN cannot compute a call. None: it can."""
    if target.platform != "gpu":
        return f"the platform is {target.platform}"
    if call.dropout_rate > 0:
        return (
            f"attention dropout is {call.dropout_rate}, and cuDNN draws other masks; "
            "Model.attention_dropout=0 makes cuDNN possible"
        )
    if call.dtype != jnp.bfloat16:
        return f"the dtype is {call.dtype}, and cuDNN takes bfloat16"
    if call.head_size % 8 or call.head_size > 128:
        return f"heads have size {call.head_size}, and cuDNN takes multiples of 8 up to 128"
    if call.queries % 2 or call.keys % 2:
        return f"{call.queries} queries or {call.keys} keys are not even"
    return None


def _gpu_kernel_obstacle(call: Call, target: Target) -> str | None:
    """Why the GPU kernels written here cannot compute a call. None: they can."""
    if target.platform == "tpu":
        return f"the platform is {target.platform}"
    if call.has_dense_mask:
        return WINDOW_OBSTACLE
    if target.platform == "gpu" and call.dtype != jnp.bfloat16:
        return f"the dtype is {call.dtype}, and the kernels are for bfloat16"
    if call.head_size not in attention_triton.HEAD_SIZES:
        sizes = ", ".join(map(str, attention_triton.HEAD_SIZES))
        return f"heads have size {call.head_size}, and the kernels take {sizes}"
    if call.heads % target.tensor:
        return f"{call.heads} heads are not a multiple of {target.tensor}"
    return None


_OBSTACLES = {
    "cudnn": _cudnn_obstacle,
    "pallas_tpu": _tpu_obstacle,
    "pallas_gpu": _gpu_kernel_obstacle,
}
_PALLAS_PLATFORMS = {"pallas_tpu": "tpu", "pallas_gpu": "gpu"}
_FUSED = {"tpu": ("pallas_tpu",), "gpu": ("cudnn", "pallas_gpu")}  # the fastest first
