"""NVIDIA GPUs, on one host or on several. XLA compiles for them without a GPU.

The compiler reads what it has to know of a GPU from a file in gpu_descriptions/.
"""

import dataclasses
import functools
import os
import pathlib
import re

from maelm_jax import config
from maelm_jax.planning import gpu_cost, hlo
from maelm_jax.planning.target import ENVIRONMENT, GIB, Compute, Target
from maelm_jax.settings import shown

DESCRIPTIONS = pathlib.Path(__file__).parent / "gpu_descriptions"
# Variable with the share of the memory that JAX takes at its start, and JAX's default.
MEMORY_SHARE, DEFAULT_MEMORY_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75
MOST_HOSTS, MOST_GPUS_A_HOST = 512, 8
# The autotuner needs a GPU. Without it, Triton gets the smallest tile for every product.
NO_AUTOTUNING = "--xla_gpu_enable_triton_gemm=false"
COST_MODEL = "--xla_gpu_collect_cost_model_stats=true"  # writes estimated times into the program


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Figures of a GPU model. Those of links are nine tenths of the data sheet."""

    kind: str  # key of flops.PEAK_FLOPS
    description: str  # file in gpu_descriptions/
    nvlink: float  # bytes/s that a GPU sends to others of its host
    network: float  # bytes/s of a GPU's share of its host's network: one adapter a GPU
    cost_model: bool = True  # whether XLA's cost model knows this GPU

    @functools.cached_property
    def text(self) -> str:
        return (DESCRIPTIONS / self.description).read_text()

    @property
    def memory(self) -> float:
        """Bytes."""
        return self._number("device_memory_size")

    @property
    def speed(self) -> gpu_cost.Speed:
        from maelm_jax.training import flops

        return gpu_cost.Speed(flops.PEAK_FLOPS[self.kind], self._number("memory_bandwidth"))

    def _number(self, field: str) -> float:
        return float(re.search(rf"{field}: (\d+)", self.text)[1])


GPUS = {
    "a100": Gpu("A100", "a100.txtpb", nvlink=2.7e11, network=2.25e10, cost_model=False),
    "h100": Gpu("H100", "h100.txtpb", nvlink=4.05e11, network=4.5e10),
    "h200": Gpu("H200", "h200.txtpb", nvlink=4.05e11, network=4.5e10),
}


def memory_share() -> float:
    """Share of a GPU's memory that JAX takes.

    Raises:
        ConfigError: The environment has a value that is no share.
    """
    text = os.environ.get(MEMORY_SHARE, str(DEFAULT_MEMORY_SHARE))
    if not re.fullmatch(r"0?\.\d+|1(\.0*)?", text):
        raise config.ConfigError(
            f"{MEMORY_SHARE}={shown(text)} is no share of the memory. Set a number from 0 to 1, or "
            "unset it"
        )
    return float(text)


@dataclasses.dataclass(frozen=True)
class GpuCluster(Target):
    """Hosts with equal numbers of GPUs."""

    name: str
    gpu: Gpu
    hosts: int
    gpus_a_host: int

    @property
    def count(self) -> int:
        return self.hosts * self.gpus_a_host

    @property
    def chips(self) -> int:
        return self.count

    @property
    def memory(self) -> float:
        return memory_share() * self.gpu.memory

    @property
    def peak_flops(self) -> float:
        return self.gpu.speed.flops * self.count

    @property
    def title(self) -> str:
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
        return (
            f"{self.name}: {self.count} GPUs of {self.gpu.kind} on {hosts}, "
            f"{self.gpu.memory / GIB:.1f} GiB each, of which JAX takes {memory_share():.0%} "
            f"({MEMORY_SHARE})"
        )

    def devices(self) -> list:
        flags = [os.environ.get("XLA_FLAGS", ""), NO_AUTOTUNING]
        if self.gpu.cost_model:
            flags.append(COST_MODEL)
        os.environ |= ENVIRONMENT | {"XLA_FLAGS": " ".join(flags).strip()}
        from jax.experimental import topologies

        try:
            description = topologies.get_topology_desc(
                platform="cuda",
                target_config=self.gpu.text,
                topology=f"1x{self.hosts}x{self.gpus_a_host}",
            )
        except Exception as error:  # jaxlib raises several types of exceptions
            raise config.RunError(
                f"the GPU compiler did not start ({' '.join(str(error).split())[:200]}). Install "
                "it with pip install '.[cuda]'"
            ) from error
        return list(description.devices)

    def compute(self, text: str) -> Compute:
        return gpu_cost.compute(text, self.gpu.speed)

    def sending(self, collectives: list[hlo.Collective]) -> float:
        return sum(one.sent_bytes / self._link(one) for one in collectives)

    def _link(self, collective: hlo.Collective) -> float:
        """Bytes/s that a device sends in a collective. A ring is as fast as its slowest link."""
        hosts = {device // self.gpus_a_host for device in collective.members}
        return self.gpu.network if len(hosts) > 1 else self.gpu.nvlink
