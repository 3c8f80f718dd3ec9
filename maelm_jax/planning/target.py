"""What a plan is made for: devices with their memory, their compiler and their speed."""

import abc
import typing

from maelm_jax.planning import hlo

GIB = 2**30
# Kind of the kernels written in Pallas. No compiler has an estimate for them.
PALLAS = "Pallas kernels (bytes / bandwidth, at least)"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # A cached program of an accelerator cannot be loaded on a machine without one.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}


class KernelGroup(typing.NamedTuple):
    """The kernels of one kind."""

    kind: str  # and how their time is estimated
    launches: int  # in a step
    seconds: float  # in a step


class Compute(typing.NamedTuple):
    """Estimated time of the kernels of a step on one device."""

    seconds: float
    method: str  # where the figure comes from
    unknown: tuple[str, ...] = ()  # operations that the estimate leaves out
    groups: tuple[KernelGroup, ...] = ()  # the kernels by kind, if the text shows them


class Target(abc.ABC):
    """Devices to plan for."""

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
