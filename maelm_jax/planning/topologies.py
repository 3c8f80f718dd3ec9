"""What a plan is made for: TPU slices, and simulated CPU devices."""

import abc
import dataclasses
import math
import os
import re
import typing

from maelm_jax import config
from maelm_jax.planning import hlo
from maelm_jax.settings import shown

GIB = 2**30
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # A cached program of an accelerator cannot be loaded on a machine without one.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
MOST_CPU_DEVICES = 1024  # XLA starts a thread for each


class Compute(typing.NamedTuple):
    """Estimated time of the kernels of a step on one device."""

    seconds: float
    method: str  # where the figure comes from
    unknown: tuple[str, ...] = ()  # operations that the estimate leaves out


class Topology(abc.ABC):
    """A set of devices to plan for."""

    name: str  # as in --topology
    count: int  # devices that the compiler lists
    chips: int  # accelerators, as clouds charge for them
    memory: float | None = None  # bytes of a device. None: no limit is known

    @property
    @abc.abstractmethod
    def title(self) -> str:
        """One line that describes the devices."""

    @abc.abstractmethod
    def devices(self) -> list:
        """Configures JAX and returns the devices to compile for.

        JAX must not have been imported in this process before.

        Raises:
            RunError: The compiler does not start.
        """

    def compute(self, text: str) -> Compute | None:
        """Estimates the time of a step's kernels from its optimised HLO text, if possible."""
        return None

    def sending(self, collectives: list[hlo.Collective]) -> float | None:
        """Estimates the seconds that a step sends data, without overlap, if possible."""
        return None

    @property
    def peak_flops(self) -> float | None:
        """Peak FLOP/s of all devices."""
        return None


@dataclasses.dataclass(frozen=True)
class CpuDevices(Topology):
    """Simulated CPU devices. They show memory and collectives."""

    name: str
    count: int

    @property
    def chips(self) -> int:
        return self.count

    @property
    def title(self) -> str:
        return f"{self.name}: {self.count} simulated CPU devices"

    def devices(self) -> list:
        os.environ |= ENVIRONMENT
        flag = f"--xla_force_host_platform_device_count={self.count}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
        import jax

        return jax.devices()


@dataclasses.dataclass(frozen=True)
class TpuChip:
    """Figures of a TPU generation."""

    kind: str  # key of flops.PEAK_FLOPS
    hbm: float  # bytes a chip
    # Hz of the compiler's cycles: peak FLOP/s divided by the FLOPs that the matrix units do in a
    # cycle. docs/tpus.md says how well that fits.
    clock: float
    # Bytes/s of one link in one direction: nine tenths of the data sheet. A chip has two links on
    # each axis of the torus.
    link: float
    cores: int  # devices that the compiler lists for a chip
    slices: tuple[str, ...]  # shapes of the slices that exist
    cloud: str  # format of the cloud's name of a slice, which counts chips or cores


SQUARES = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = (
    "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16",
)  # fmt: skip
TPUS = {
    "v4": TpuChip("TPU v4", 32 * GIB, 1.05e9, 4.5e10, 2, CUBES, "v4-{cores}"),
    "v5e": TpuChip("TPU v5 lite", 16 * GIB, 1.5e9, 4.5e10, 1, SQUARES, "v5litepod-{chips}"),
    "v5p": TpuChip("TPU v5", 95 * GIB, 1.75e9, 9e10, 1, CUBES, "v5p-{cores}"),
    "v6e": TpuChip("TPU v6 lite", 32 * GIB, 1.75e9, 9e10, 1, SQUARES, "v6e-{chips}"),
}


@dataclasses.dataclass(frozen=True)
class TpuSlice(Topology):
    """A TPU slice. Its programs are compiled with libtpu."""

    name: str
    chip: TpuChip
    chips: int

    @property
    def count(self) -> int:
        return self.chips * self.chip.cores

    @property
    def memory(self) -> float:
        return self.chip.hbm / self.chip.cores

    @property
    def peak_flops(self) -> float:
        from maelm_jax.training import flops

        return flops.PEAK_FLOPS[self.chip.kind] * self.chips

    @property
    def title(self) -> str:
        cores = ""
        if self.chip.cores > 1:
            cores = f", {self.count} devices (the compiler lists {self.chip.cores} cores a chip)"
        cloud = self.chip.cloud.format(chips=self.chips, cores=2 * self.chips)
        return (
            f"{self.name}: {self.chips} chips of {self.chip.kind}, "
            f"{self.chip.hbm / GIB:.1f} GiB each{cores}; the cloud calls it {cloud}"
        )

    def devices(self) -> list:
        os.environ |= ENVIRONMENT | {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            # No device is in use, so several plans may be made at once.
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
        from jax.experimental import topologies

        try:
            description = topologies.get_topology_desc(platform="tpu", topology_name=self.name)
        except Exception as error:  # jaxlib raises several types of exceptions
            raise config.RunError(
                "the TPU compiler could not be started "
                f"({' '.join(str(error).split())[:200]}); it comes with pip install '.[plan]'"
            ) from error
        return list(description.devices)

    def compute(self, text: str) -> Compute | None:
        estimate = hlo.estimated_cycles(text)
        if estimate is None:
            return None
        seconds = estimate.cycles / self.chip.clock
        return Compute(seconds, "the compiler's estimate", tuple(estimate.unknown))

    def sending(self, collectives: list[hlo.Collective]) -> float:
        return sum(one.sent_bytes for one in collectives) / (2 * self.chip.link)


def parse(name: str) -> Topology:
    """Returns the topology of a name such as "v5e:16x16" or "cpu:8".

    Raises:
        ConfigError: The topology does not exist. The message lists those that do.
    """
    kind, _, shape = name.partition(":")
    count = int(shape) if re.fullmatch(r"[1-9][0-9]{0,5}", shape) else 0
    if kind == "cpu" and 0 < count <= MOST_CPU_DEVICES:
        return CpuDevices(name, count)
    if kind in TPUS and shape in TPUS[kind].slices:
        return TpuSlice(name, TPUS[kind], math.prod(map(int, shape.split("x"))))
    known = "; ".join(f"{kind}: {' '.join(chip.slices)}" for kind, chip in TPUS.items())
    raise config.ConfigError(
        f"--topology={shown(name)[1:-1]}: known are {known}; and cpu:N, N from 1 to "
        f"{MOST_CPU_DEVICES}"
    )
