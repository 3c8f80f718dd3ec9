"""The estimate of a TPU's step: the compiler's cycles, and the kernels that it has no estimate for."""

import pytest

from maelm_jax.planning import topologies, tpus

TEXT = """HloModule step
ENTRY %main (p: bf16[8,440,768]) -> bf16[8,440,768] {
  %p = bf16[8,440,768]{2,1,0:T(8,128)(2,1)} parameter(0)
  %c = bf16[8,440,768]{2,1,0:T(8,128)(2,1)} fusion(%p), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"1500000"}
  ROOT %k = (bf16[8,440,768]{2,1,0:T(8,128)(2,1)S(1)}, f32[8,440]{1,0}) custom-call(%c, %p), custom_call_target="tpu_custom_call"
}
"""


@pytest.mark.parametrize("name,clock,bandwidth", [("v5e:2x2", 1.5e9, 8.19e11), ("v4:2x2x1", 1.05e9, 6e11)])
def test_a_pallas_kernel_counts_with_the_bytes_that_it_moves(name, clock, bandwidth):
    compute = topologies.parse(name).compute(TEXT)
    moved = 3 * 2 * 8 * 440 * 768 + 4 * 8 * 440
    assert {group.kind: (group.launches, group.seconds) for group in compute.groups} == {
        tpus.CYCLES: (1, pytest.approx(1.5e6 / clock)),
        tpus.PALLAS: (1, pytest.approx(moved / bandwidth)),
    }
    assert compute.seconds == pytest.approx(sum(group.seconds for group in compute.groups))
    assert compute.method == "the compiler's cycles; Pallas kernels by their bytes, at least"


def test_a_step_without_such_kernels_has_the_cycles_only():
    without = "\n".join(line for line in TEXT.splitlines() if "tpu_custom_call" not in line)
    compute = topologies.parse("v5e:2x2").compute(without)
    assert compute.seconds == pytest.approx(1e-3) and not compute.groups and not compute.unknown
    assert compute.method == "the compiler's cycles"
