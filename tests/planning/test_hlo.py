"""Collectives and cycles read from the text of a compiled program."""

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
    assert hlo.estimated_cycles(text) == (6 * 110 + 1, [])
    assert hlo.estimated_cycles(text.replace('"estimated_cycles":"1"', f'"estimated_cycles":"{2**63 - 1}"')) == (6 * 110, ["c"])
    assert hlo.estimated_cycles(text.replace("estimated", "other")) is None
