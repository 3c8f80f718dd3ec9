"""The names of topologies, as --topology takes them."""

import dataclasses
import math
import os
import re

from maelm_jax import config
from maelm_jax.planning.gpus import GPUS, MOST_GPUS_A_HOST, MOST_HOSTS, GpuCluster
from maelm_jax.planning.target import ENVIRONMENT, Target
from maelm_jax.planning.tpus import TPUS, TpuSlice
from maelm_jax.settings import shown

MOST_CPU_DEVICES = 1024  # XLA starts a thread for each


@dataclasses.dataclass(frozen=True)
class CpuDevices(Target):
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


def parse(name: str) -> Target:
    """Returns the devices that a name stands for, as "v5e:16x16", "h100:4x8" or "cpu:8".

    Raises:
        ConfigError: There are no such devices. The message lists those there are.
    """
    kind, _, shape = name.partition(":")
    cpus = int(shape) if re.fullmatch(r"[1-9][0-9]{0,5}", shape) else 0
    if kind == "cpu" and 0 < cpus <= MOST_CPU_DEVICES:
        return CpuDevices(name, cpus)
    if kind in TPUS and shape in TPUS[kind].slices:
        return TpuSlice(name, TPUS[kind], math.prod(map(int, shape.split("x"))))
    if kind in GPUS and (match := re.fullmatch(r"(?:([1-9][0-9]{0,3})x)?([1-9])", shape, re.A)):
        hosts, gpus = int(match[1] or 1), int(match[2])
        if hosts <= MOST_HOSTS and gpus <= MOST_GPUS_A_HOST:
            return GpuCluster(name, GPUS[kind], hosts, gpus)
    slices = "; ".join(f"{kind}: {' '.join(chip.slices)}" for kind, chip in TPUS.items())
    raise config.ConfigError(
        f"--topology={shown(name)[1:-1]} does not exist. Use a TPU slice ({slices}); GPUs of one "
        f"host or of several, as h100:8 or h100:4x8 ({', '.join(GPUS)}; 1 to {MOST_HOSTS} hosts "
        f"x 1 to {MOST_GPUS_A_HOST} GPUs); or cpu:N, N from 1 to {MOST_CPU_DEVICES}"
    )
