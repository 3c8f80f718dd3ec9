"""The estimate of a GPU's step: each kernel by its own rule, as often as it runs."""

import pytest

from maelm_jax.planning import gpu_cost

SPEED = gpu_cost.Speed(flops=100e12, bandwidth=1e12)
PRODUCT = '"gemm_backend_config":{"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}'
COSTS = {
    "loop": '"reification_cost":[{"exec_time_us":2.5,"name":""},{"exec_time_us":2.0,"name":"sol"}]',
    "triton": '"reification_cost":[{"exec_time_us":6813,"name":""},{"exec_time_us":14.5,"name":"indexing-cost-model"}]',
    "none": '"reification_cost":[]',
}
TEXT = f"""HloModule step
%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}
%fused (p: bf16[4096,1024]) -> bf16[4096,1024] {{
  %p = bf16[4096,1024]{{1,0}} parameter(0)
  ROOT %n = bf16[4096,1024]{{1,0}} negate(%p)
}}
%body (t: (s32[], bf16[4096,1024])) -> (s32[], bf16[4096,1024]) {{
  %t = (s32[], bf16[4096,1024]{{1,0}}) parameter(0)
  %a = bf16[4096,1024]{{1,0}} get-tuple-element(%t), index=1
  %w = bf16[1024,2048]{{1,0}} constant({{...}})
  %g = (bf16[4096,2048]{{1,0}}, s8[4194304]{{0}}) custom-call(%a, %w), custom_call_target="__cublas$lt$matmul", backend_config={{{PRODUCT}}}
  %l = bf16[4096,1024]{{1,0}} fusion(%a), kind=kLoop, calls=%fused, backend_config={{{COSTS["loop"]}}}
  %f = bf16[4096,1024]{{1,0}} fusion(%a), kind=kCustom, calls=%fused, backend_config={{{COSTS["triton"]}}}
}}
ENTRY %main (p: bf16[4096,1024]) -> bf16[4096,1024] {{
  %p.1 = bf16[4096,1024]{{1,0}} parameter(0)
  %while = (s32[], bf16[4096,1024]{{1,0}}) while(%p.1), condition=%c, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
  %r = bf16[4096,1024]{{1,0}} all-reduce(%p.1), channel_id=1, replica_groups={{{{0,1}}}}, to_apply=%add
  %copy = bf16[1024,4096]{{1,0}} copy(%p.1)
  %attention = (bf16[4096,1024]{{1,0}}, u8[100]{{0}}) custom-call(%p.1, %r), custom_call_target="__cudnn$fmhaSoftmax"
  %pallas_call = bf16[4096,1024]{{1,0}} custom-call(%p.1), custom_call_target="__gpu$xla.gpu.triton"
  ROOT %mystery = bf16[4096,1024]{{1,0}} fusion(%p.1), kind=kLoop, calls=%fused, backend_config={{{COSTS["none"]}}}
}}
"""


def test_each_kind_of_kernel_has_its_own_rule_and_counts_as_often_as_it_runs():
    estimate = gpu_cost.compute(TEXT, SPEED)
    groups = {group.kind: (group.launches, pytest.approx(1e6 * group.seconds)) for group in estimate.groups}
    array = 4096 * 1024 * 2 / 1e6  # microseconds at 1 TB/s
    assert groups == {
        gpu_cost.MATRIX_PRODUCT: (3, 3 * 2 * 4096 * 1024 * 2048 / 100e6),
        gpu_cost.FUSION: (6, 3 * (2.5 + 14.5)),
        gpu_cost.FUSION_BYTES: (1, 2 * array),
        gpu_cost.OTHER: (1, 2 * array),
        gpu_cost.CUDNN: (1, 3 * array),
        gpu_cost.PALLAS: (1, 2 * array),
    }
    assert estimate.seconds == pytest.approx(sum(group.seconds for group in estimate.groups))


def test_a_product_that_moves_much_and_computes_little_is_bound_by_memory():
    fast = gpu_cost.Speed(flops=1e18, bandwidth=1e12)
    [product] = [group for group in gpu_cost.compute(TEXT, fast).groups if group.kind == gpu_cost.MATRIX_PRODUCT]
    moved = 2 * (4096 * 1024 + 1024 * 2048 + 4096 * 2048)
    assert product.seconds == pytest.approx(3 * moved / 1e12), "without the workspace"


def test_a_product_of_float32_runs_at_half_the_peak():
    slow = gpu_cost.Speed(flops=1e9, bandwidth=1e12)
    by_type = (gpu_cost.compute(text, slow).groups[0].seconds for text in (TEXT, TEXT.replace("bf16", "f32")))
    assert 2 * next(by_type) == pytest.approx(next(by_type))


def test_of_a_sliced_and_an_updated_array_only_the_slice_and_the_update_count():
    text = """%fused (p: f32[12,100,10]) -> f32[12,100,10] {
  %stack = f32[12,100,10]{2,1,0} parameter(0)
  %weights = f32[12,8,10]{2,1,0} parameter(1)
  %index = s32[] parameter(2)
  %slice = f32[1,8,10]{2,1,0} dynamic-slice(%weights, %index, %index, %index), dynamic_slice_sizes={1,8,10}
  %update = f32[1,100,10]{2,1,0} negate(%slice)
  ROOT %new = f32[12,100,10]{2,1,0} dynamic-update-slice(%stack, %update, %index, %index, %index)
}
ENTRY %main (p: f32[12,100,10]) -> f32[12,100,10] {
  ROOT %f = f32[12,100,10]{2,1,0} fusion(%a, %b, %c), kind=kLoop, calls=%fused
}
"""
    [kernel] = gpu_cost.kernels(text, SPEED)
    assert kernel.kind == gpu_cost.FUSION_BYTES
    assert 1e12 * kernel.seconds == pytest.approx(4 * (8 * 10 + 100 * 10 + 1))
