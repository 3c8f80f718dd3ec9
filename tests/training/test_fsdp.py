"""What the compiled step sends: each byte of the gradient once a step, a layer's parameters inside the loops; and the reading of that text."""

import jax
import numpy as np
import pytest

from maelm_jax import config
from maelm_jax.planning import hlo
from maelm_jax.training import step

LAYERS, DECODER_LAYERS, PARTS = 3, 2, 4


@pytest.fixture(scope="module")
def program():
    """(state, HLO text) of a step on the mesh 2 x 4 x 1 in four parts."""
    model = config.Model(
        layers=LAYERS, decoder_layers=DECODER_LAYERS, width=32, heads=4, feed_forward=64, max_positions=32, dropout=0.0, attention_dropout=0.0
    )
    experiment = config.Experiment(
        config.Vocabulary(size=300), config.Corpus(sequence_length=32), config.Masking(), model, config.Optimizer(), config.Mesh(2, 4, 1),
        config.Run(batch_size=32, accumulate=PARTS),
    )  # fmt: skip
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4, 1), ("data", "fsdp", "tensor"))
    train_step, state, batch = step.abstract(experiment, mesh)
    return state, train_step.lower(state, batch).compile().as_text()


def test_each_byte_of_the_gradient_is_sent_once_a_step(program):
    state, text = program
    whole = sum(4 * leaf.size for leaf in jax.tree.leaves(state.params))
    cut = sum(4 * leaf.size for leaf in jax.tree.leaves(state.params) if "fsdp" in tuple(leaf.sharding.spec))
    sums = [one for one in hlo.collectives(text) if one.kind in ("all-reduce", "reduce-scatter") and one.array_bytes > 256]
    assert all(one.times == 1 for one in sums), "none is inside a loop"
    over_fsdp, over_data = (sum(one.total_bytes for one in sums if one.group in groups) for groups in ((4, 8), (2,)))
    assert over_fsdp == whole + 12, "the gradient and the three sums of the loss"
    assert over_data == cut // 4, "of what fsdp cuts, each device's own part"


def test_a_layer_is_put_together_inside_the_loops_forward_and_backward(program):
    state, text = program
    inside = [one for one in hlo.collectives(text) if one.kind == "all-gather" and "while/body" in one.name]
    for stack, layers in (("encoder", LAYERS), ("decoder", DECODER_LAYERS)):
        leaves = [leaf for leaf in jax.tree.leaves(state.params[stack]["blocks"]) if "fsdp" in tuple(leaf.sharding.spec)]
        one_layer = sum(4 * leaf.size for leaf in leaves) // layers
        for backward in (False, True):
            mine = [one for one in inside if one.times == layers * PARTS and ("transpose" in one.name) == backward]
            assert sum(one.array_bytes for one in mine) == one_layer, (stack, backward)
    assert {one.times for one in inside} == {LAYERS * PARTS, DECODER_LAYERS * PARTS}


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
