"""What a plan is made for: TPU slices, GPUs and simulated CPU devices, by their names.

A TPU's program is compiled by libtpu, a GPU's by XLA for CUDA. Neither needs the device.
"""

import math
import os
import pathlib
import re
import typing

from maelm_jax import config

GIB = 2**30
DESCRIPTIONS = pathlib.Path(__file__).parent / "gpu_descriptions"
MOST_GPUS_A_HOST = 8
# Variable with the share of a GPU's memory that JAX takes at its start, and JAX's default.
MEMORY_SHARE, DEFAULT_MEMORY_SHARE = "XLA_CLIENT_MEM_FRACTION", "0.75"
OLD_MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # the same; JAX reads it too
ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_MIN_LOG_LEVEL": "4",  # else libtpu leaves logs in /tmp, of up to 1 GB
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any: without it, libtpu warns that it looks for one
    # No device is in use, so several plans may be made at once.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# The autotuner needs a GPU. Without it, Triton gets the smallest tile for every product.
NO_AUTOTUNING = "--xla_gpu_enable_triton_gemm=false"


class Tpu(typing.NamedTuple):
    """Figures of a TPU generation."""

    kind: str  # key of flops.PEAK_FLOPS
    hbm: float  # bytes a chip
    bandwidth: float  # bytes/s of a chip's HBM
    # Hz of the compiler's cycles: peak FLOP/s divided by the FLOPs that the matrix units do in a
    # cycle. docs/tpus.md says how well that fits.
    clock: float
    # Bytes/s of one link in one direction: nine tenths of the data sheet. A chip has two links on
    # each axis of the torus.
    link: float
    cores: int  # devices that the compiler lists for a chip
    slices: str  # shapes of the slices that exist
    cloud: str  # format of the cloud's name of a slice, which counts chips or cores


class Gpu(typing.NamedTuple):
    """Figures of a GPU model: nine tenths of the data sheet. gpu_descriptions/ has its memory."""

    kind: str  # key of flops.PEAK_FLOPS
    nvlink: float  # bytes/s that a GPU sends to others of its host
    network: float  # bytes/s of a GPU's share of its host's network: one adapter a GPU


SQUARES = "2x2 2x4 4x4 4x8 8x8 8x16 16x16"
CUBES = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16"
TPUS = {
    "v4": Tpu("TPU v4", 32 * GIB, 1.2e12, 1.05e9, 4.5e10, 2, CUBES, "v4-{cores}"),
    "v5e": Tpu("TPU v5 lite", 16 * GIB, 8.19e11, 1.5e9, 4.5e10, 1, SQUARES, "v5litepod-{chips}"),
    "v5p": Tpu("TPU v5", 95 * GIB, 2.765e12, 1.75e9, 9e10, 1, CUBES, "v5p-{cores}"),
    "v6e": Tpu("TPU v6 lite", 32 * GIB, 1.64e12, 1.75e9, 9e10, 1, SQUARES, "v6e-{chips}"),
}
GPUS = {
    "a100": Gpu("A100", nvlink=2.7e11, network=2.25e10),
    "h100": Gpu("H100", nvlink=4.05e11, network=4.5e10),
    "h200": Gpu("H200", nvlink=4.05e11, network=4.5e10),
}


class Target(typing.NamedTuple):
    """Devices to plan for. What is not known of simulated CPU devices is None."""

    name: str  # as in --topology
    title: str  # one line that describes the devices
    count: int  # devices that the compiler lists
    chips: int  # accelerators, as clouds charge for them
    kind: str | None = None  # key of flops.PEAK_FLOPS
    memory: float | None = None  # bytes of a device that a program can have
    bandwidth: float | None = None  # bytes/s of a device's memory
    clock: float | None = None  # Hz of the TPU compiler's cycles. None: not a TPU
    link: float | None = None  # bytes/s that a device sends within its slice or host
    network: float | None = None  # bytes/s that a device sends to other hosts
    devices_a_host: int = 1  # of GPUs
    multiprocessors: int | None = None  # of a GPU


def _names_of_slices() -> dict[str, str]:
    """Returns {v5e-16 or the cloud's v5litepod-16: v5e:4x4} of every slice."""
    names = {}
    for kind, tpu in TPUS.items():
        for shape in tpu.slices.split():
            cloud = _cloud_name(tpu, math.prod(map(int, shape.split("x"))))
            names |= dict.fromkeys((cloud, f"{kind}-{cloud.rpartition('-')[2]}"), f"{kind}:{shape}")
    return names


def _cloud_name(tpu: Tpu, chips: int) -> str:
    return tpu.cloud.format(chips=chips, cores=2 * chips)


def parse(name: str) -> Target:
    """Returns the devices that a name stands for, as "v5e:16x16", "h100:4x8" or "cpu:8".

    A slice can have the cloud's name too, as "v5litepod-256" or "v5e-256". Those of v4 and v5p
    count cores, two a chip.

    Raises ConfigError if there are no such devices. The message lists those there are.
    """
    name = _names_of_slices().get(name, name)
    kind, _, shape = name.partition(":")
    if kind in TPUS and shape in TPUS[kind].slices.split():
        return _tpu_slice(name, TPUS[kind], math.prod(map(int, shape.split("x"))))
    gpus = re.fullmatch(rf"(?:([1-9][0-9]{{0,3}})x)?([1-{MOST_GPUS_A_HOST}])", shape)
    if kind in GPUS and gpus:
        return _gpu_cluster(name, kind, int(gpus[1] or 1), int(gpus[2]))
    if kind == "cpu" and re.fullmatch("[1-9][0-9]{0,3}", shape):
        return Target(name, f"{name}: {shape} simulated CPU devices", int(shape), int(shape))
    slices = "; ".join(f"{kind}: {tpu.slices}" for kind, tpu in TPUS.items())
    raise config.ConfigError(
        f"--topology={name} does not exist. Use a TPU slice ({slices}), or its name in the "
        f"cloud, as v5litepod-256 or v5e-256; GPUs of one host or of "
        f"several, as h100:8 or h100:4x8 ({', '.join(GPUS)}; up to {MOST_GPUS_A_HOST} a host); or "
        "simulated CPU devices, as cpu:8"
    )


def _tpu_slice(name: str, tpu: Tpu, chips: int) -> Target:
    count = chips * tpu.cores
    cores = f", {count} devices (the compiler lists {tpu.cores} cores a chip)"
    cloud = _cloud_name(tpu, chips)
    return Target(
        name,
        f"{name}: {chips} chips of {tpu.kind}, {tpu.hbm / GIB:.1f} GiB each"
        f"{cores if tpu.cores > 1 else ''}; the cloud calls it {cloud}",
        count,
        chips,
        tpu.kind,
        memory=tpu.hbm / tpu.cores,
        bandwidth=tpu.bandwidth / tpu.cores,
        clock=tpu.clock,
        link=2 * tpu.link,
        devices_a_host=count,  # links lead to all chips of a slice
    )


def _gpu_cluster(name: str, model: str, hosts: int, gpus: int) -> Target:
    gpu, description = GPUS[model], gpu_description(model)
    whole = float(re.search(r"device_memory_size: (\d+)", description)[1])
    given = os.environ.get(MEMORY_SHARE) or os.environ.get(OLD_MEMORY_SHARE)
    share = float(given or DEFAULT_MEMORY_SHARE)
    count = hosts * gpus
    return Target(
        name,
        f"{name}: {count} GPUs of {gpu.kind} on {hosts} host(s), {whole / GIB:.1f} GiB each, of "
        f"which JAX takes {share:.0%} ({MEMORY_SHARE})",
        count,
        count,
        gpu.kind,
        memory=share * whole,
        bandwidth=float(re.search(r"memory_bandwidth: (\d+)", description)[1]),
        link=gpu.nvlink,
        network=gpu.network,
        devices_a_host=gpus,
        multiprocessors=int(re.search(r"core_count: (\d+)", description)[1]),
    )


def gpu_description(model: str) -> str:
    """Returns what XLA's compiler has to know of a GPU model, as "h100"."""
    return (DESCRIPTIONS / f"{model}.txtpb").read_text()


def start_compiler(target: Target) -> list:
    """Configures JAX for a target and returns the devices to compile for.

    No device may be in use in this process yet. Raises RunError if the compiler does not start.
    """
    model = target.name.partition(":")[0]
    simulated = f"--xla_force_host_platform_device_count={target.count}"
    flag = simulated if model == "cpu" else NO_AUTOTUNING
    os.environ |= ENVIRONMENT | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()}
    import jax
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")  # no variables: JAX may have been imported
    # A cached program of an accelerator cannot be loaded on a machine without one.
    jax.config.update("jax_enable_compilation_cache", False)
    if model == "cpu":
        return jax.devices()
    try:
        if model in TPUS:
            return topologies.get_topology_desc(platform="tpu", topology_name=target.name).devices
        hosts = target.count // target.devices_a_host
        return topologies.get_topology_desc(
            platform="cuda",
            target_config=gpu_description(model),
            topology=f"1x{hosts}x{target.devices_a_host}",
        ).devices
    except RuntimeError as error:
        extra = "plan" if model in TPUS else "cuda"
        reason = " ".join(str(error).split())[:200]
        raise config.RunError(
            f"the compiler for {target.name} does not start ({reason}). "
            f"It comes with pip install '.[{extra}]'"
        ) from error
