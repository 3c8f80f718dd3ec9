"""Memory and time that are read from a compiled step or from the compiler's refusal."""

import pytest

from maelm_jax.planning import estimate, hlo, targets

GIB = 2**30


@pytest.mark.parametrize(
    "message,needed",
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 30.25G of 15.75G hbm.", 30.25 * GIB),
        ("RESOURCE_EXHAUSTED: HLO temporaries (512.0M) do not fit", 2 * GIB + 512 * 2**20),
        ("RESOURCE_EXHAUSTED: too many requests", None),
        ("INTERNAL: Used 30.25G", None),
    ],
)
def test_the_bytes_that_a_refused_step_needs(message, needed):
    assert estimate.needed_bytes(message, 2 * GIB) == needed


TPU_STEP = """HloModule step
ENTRY %main (p: bf16[8,440,768]) -> bf16[8,440,768] {
  %p = bf16[8,440,768]{2,1,0:T(8,128)(2,1)} parameter(0)
  %c = bf16[8,440,768]{2,1,0:T(8,128)(2,1)} fusion(%p), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"1500000"}
  ROOT %k = (bf16[8,440,768]{2,1,0:T(8,128)(2,1)S(1)}, f32[8,440]{1,0}) custom-call(%c, %p), \
custom_call_target="tpu_custom_call", operand_layout_constraints={bf16[8,440,768]{2,1,0}, bf16[8,440,768]{2,1,0}}
}
"""


@pytest.mark.parametrize("name,clock,bandwidth", [("v5e:2x2", 1.5e9, 8.19e11), ("v4:2x2x1", 1.05e9, 6e11)])
def test_a_tpu_takes_the_compiler_s_cycles_and_the_bytes_of_pallas_kernels(name, clock, bandwidth):
    time = estimate.step_time(TPU_STEP, [], 1e12, targets.parse(name))
    moved = 3 * 2 * 8 * 440 * 768 + 4 * 8 * 440
    assert time.computing == pytest.approx(1.5e6 / clock + moved / bandwidth)


def test_a_gpu_takes_the_roofline_of_the_model_and_the_slowest_link_of_each_collective():
    cluster = targets.parse("h100:2x4")
    collectives = [hlo.Collective("all-gather", 8_000_000, members, 1, "") for members in ((0, 1, 2, 3), (0, 4))]
    time = estimate.step_time("", collectives, 989e12, cluster)
    assert time.computing == pytest.approx(1 / 8)
    assert time.sending == pytest.approx(6e6 / cluster.link + 4e6 / cluster.network)


def test_simulated_devices_have_no_time():
    assert estimate.step_time("", [], 1e12, targets.parse("cpu:8")) is None
