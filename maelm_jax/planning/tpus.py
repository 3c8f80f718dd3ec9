"""TPU slices. Their programs are compiled with libtpu, which also estimates cycles."""

import dataclasses
import os

from maelm_jax import config
from maelm_jax.planning import hlo
from maelm_jax.planning.target import ENVIRONMENT, GIB, PALLAS, Compute, KernelGroup, Target

METHOD = "the compiler's cycles"
METHOD_WITH_PALLAS = f"{METHOD}; Pallas kernels by their bytes, at least"
CYCLES = "compiled operations (the compiler's cycles)"


@dataclasses.dataclass(frozen=True)
class TpuChip:
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
    slices: tuple[str, ...]  # shapes of the slices that exist
    cloud: str  # format of the cloud's name of a slice, which counts chips or cores


SQUARES = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = (
    "2x2x1",
    "2x2x2",
    "2x2x4",
    "2x4x4",
    "4x4x4",
    "4x4x8",
    "4x8x8",
    "8x8x8",
    "8x8x16",
    "8x16x16",
)
TPUS = {
    "v4": TpuChip("TPU v4", 32 * GIB, 1.2e12, 1.05e9, 4.5e10, 2, CUBES, "v4-{cores}"),
    "v5e": TpuChip(
        "TPU v5 lite", 16 * GIB, 8.19e11, 1.5e9, 4.5e10, 1, SQUARES, "v5litepod-{chips}"
    ),
    "v5p": TpuChip("TPU v5", 95 * GIB, 2.765e12, 1.75e9, 9e10, 1, CUBES, "v5p-{cores}"),
    "v6e": TpuChip("TPU v6 lite", 32 * GIB, 1.64e12, 1.75e9, 9e10, 1, SQUARES, "v6e-{chips}"),
}


@dataclasses.dataclass(frozen=True)
class TpuSlice(Target):
    """A TPU slice."""

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
        kernels = self._kernels(text)
        compiled = KernelGroup(CYCLES, estimate.operations, estimate.cycles / self.chip.clock)
        seconds = compiled.seconds + kernels.seconds
        unknown = tuple(estimate.unknown)
        if not kernels.launches:
            return Compute(seconds, METHOD, unknown)
        return Compute(seconds, METHOD_WITH_PALLAS, unknown, (compiled, kernels))

    def _kernels(self, text: str) -> KernelGroup:
        """The kernels written in Pallas, with the bytes that they move.

        benchmarks/kernel_cycles.py has the cycles of their static profiles.
        """
        shapes = hlo.output_shapes(hlo.parse(text))
        calls = [one for one in hlo.executed(text) if hlo.is_pallas(one)]
        moved = sum(call.times * hlo.moved_bytes(call, shapes) for call in calls)
        launches = sum(call.times for call in calls)
        return KernelGroup(PALLAS, launches, moved * self.chip.cores / self.chip.bandwidth)

    def sending(self, collectives: list[hlo.Collective]) -> float:
        return sum(one.sent_bytes for one in collectives) / (2 * self.chip.link)
