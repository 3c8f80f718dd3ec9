"""What the compiled step sends: each byte of the gradient once a step, a layer's parameters inside the loops."""

import jax
import pytest
from testing import experiment_of, mesh_of, model_of

from maelm_jax import config
from maelm_jax.planning import hlo
from maelm_jax.pretraining import objective

LAYERS, DECODER_LAYERS, PARTS = 3, 2, 4


@pytest.fixture(scope="module", autouse=True)
def optimised():
    """Compiles with all optimisations, as users do. tests/conftest.py leaves most of them out."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def program():
    """(state, HLO text) of a step on the mesh 2 x 4 x 1 in four parts."""
    model = model_of(
        layers=LAYERS, decoder_layers=DECODER_LAYERS, width=32, heads=4, feed_forward=64, max_positions=32, dropout=0.0, attention_dropout=0.0
    )
    experiment = experiment_of(
        vocabulary=config.Vocabulary(size=300),
        corpus=config.Corpus(sequence_length=32),
        model=model,
        mesh=config.Mesh(data=2, fsdp=4),
        run=config.Run(batch_size=32, accumulate=PARTS),
    )
    mesh = mesh_of(2, 4, 1)
    abstract = objective.abstract_step(experiment, mesh)
    return abstract.arguments[0], abstract.train_step.lower(*abstract.arguments).compile().as_text()


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
