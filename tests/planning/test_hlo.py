"""Collectives and cycles read from the text of a compiled program."""

import pytest

from maelm_jax.planning import hlo


def test_text_of_the_tpu_compiler_is_read():
    """Trip counts from the loop's condition, pieces of one collective that overlap with others once, cycles as often as they are run."""
    text = """HloModule m
%cond (p: (s32[], f32[8])) -> pred[] {
  %n = s32[]{:T(128)} constant(6)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
%async_collective_fusion.1 (p: f32[4]) -> f32[8] {
  %all-gather.1 = f32[8]{0} all-gather(%p), channel_id=3, replica_groups={{0,1},{2,3}}, dimensions={0}, metadata={op_name="while/body/all_gather"}
}
%async_collective_fusion.2 (p: f32[4]) -> f32[8] {
  %all-gather.2 = f32[8]{0} all-gather(%p), channel_id=3, replica_groups={{0,1},{2,3}}, dimensions={0}, metadata={op_name="while/body/all_gather"}
}
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %a = f32[8] fusion(%x), kind=kOutput, calls=%async_collective_fusion.1, backend_config={"estimated_cycles":"100"}
  %b = f32[8] fusion(%x), kind=kOutput, calls=%async_collective_fusion.2, backend_config={"estimated_cycles":"10"}
}
ENTRY %main (p: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body
  %r = bf16[2,2]{1,0} reduce-scatter(%q), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
  %s = (f32[4]{0}, f32[16]{0}) all-gather-start(%q), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}
  %alone = f32[4]{0} all-reduce(%q), channel_id=4, replica_groups={{0},{1}}, to_apply=%add
  %c = f32[8] fusion(%w), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"1"}
}
"""
    found = [(one.kind, one.array_bytes, one.group, one.times) for one in hlo.collectives(text)]
    assert found == [("all-gather", 32, 2, 6), ("reduce-scatter", 32, 4, 1), ("all-gather", 64, 4, 1)]
    assert hlo.collectives(text)[1].sent_bytes == 24
    assert hlo.cycles(text) == (6 * 110 + 1, 0, 0)
    assert hlo.cycles(text.replace('"estimated_cycles":"1"', f'"estimated_cycles":"{2**63 - 1}"')) == (6 * 110, 0, 1)


@pytest.mark.parametrize(
    "groups,members",
    [
        ("{{0,1,2,3},{4,5,6,7}}", (0, 1, 2, 3)),
        ("[2,4]<=[8]", (0, 1, 2, 3)),
        ("[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("mesh['data'=2,'fsdp'=4] {'fsdp'}", (0, 1, 2, 3)),
        ("mesh['data'=2,'fsdp'=4] {'data'}", (0, 4)),
        ("mesh['a'=2,'b'=1,'c'=4], device_ids=([4,2]T(1,0)) {'a'}", (0, 1)),
        ("mesh['a'=2,'b'=4] {'a','b'}", tuple(range(8))),
    ],
)
def test_the_devices_of_a_group_are_read_in_every_notation(groups, members):
    line = f"  %r = f32[8]{{0}} all-reduce-start(%p), channel_id=1, replica_groups={groups}, use_global_device_ids=true, to_apply=%add"
    [found] = hlo.collectives(f"ENTRY %main (p: f32[8]) -> f32[8] {{\n{line}\n}}\n")
    assert (found.kind, found.members, found.group, found.array_bytes) == ("all-reduce", members, len(members), 32)


def test_a_permutation_sends_the_whole_array_to_one_device():
    line = "  %p = (f32[8]{0}, f32[8]{0}) collective-permute-start(%x), channel_id=1, source_target_pairs={{3,11},{11,3}}"
    [permutation] = hlo.collectives(f"ENTRY %main (p: f32[8]) -> f32[8] {{\n{line}\n}}\n")
    assert (permutation.members, permutation.array_bytes, permutation.sent_bytes) == ((3, 11), 32, 32)
