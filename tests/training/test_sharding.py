"""What a mesh cannot do ends in one line that says what would fit."""

import jax
import jax.numpy as jnp
import pytest
from testing import mesh_of

from maelm_jax import config, gin_files
from maelm_jax.model import keys, maelm
from maelm_jax.pretraining import objective as objectives
from maelm_jax.training import optimizers, sharding, step

MODEL = config.Model(layers=1, width=40, heads=5, feed_forward=60, decoder_layers=1, max_positions=16)


@pytest.mark.parametrize("size", [300, 700])
def test_a_tensor_axis_that_does_not_divide_the_token_table_is_refused(size):
    special = config.SpecialIds.of_size(size)
    shapes = jax.eval_shape(maelm.create(MODEL, size, special)[1], keys.make_key(0))
    sharding.shardings_of(shapes, mesh_of(1, 1, 2))
    with pytest.raises(config.ConfigError) as error:
        sharding.shardings_of(shapes, mesh_of(1, 1, 5))
    rows = maelm.table_rows(size)
    assert f"Mesh.tensor=5 does not divide the {rows} rows or columns of encoder/token_embedding. Set Mesh.tensor to one of" in str(error.value)


@pytest.mark.parametrize("path", [("encoder", "gate"), ("adapter", "kernel")], ids="/".join)
def test_a_parameter_without_a_rule_is_named(path):
    shapes = {path[0]: {path[1]: jax.ShapeDtypeStruct((4, 4), jnp.float32)}, "count": jax.ShapeDtypeStruct((), jnp.int32)}
    with pytest.raises(config.RunError, match=f"the parameter {'/'.join(path)} matches 0 sharding rules. Give it exactly one in RULES of"):
        sharding.shardings_of(shapes, mesh_of(1, 1, 1))


@pytest.mark.parametrize(
    "bindings,setting",
    [
        (["BATCH_SIZE=16_000_000", "SEQUENCE_LENGTH=128"], "Run.batch_size=16000000"),
        (["Model.width=1_000_000", "Model.layers=250"], "Model"),  # 10^15 parameters
    ],
)
def test_what_cannot_be_in_memory_is_refused_before_it_is_compiled(bindings, setting):
    experiment = gin_files.load(["tiny.gin"], [binding.replace("_000", "000") for binding in bindings])
    mesh = mesh_of(1, 1, 1)
    objective = objectives.create(experiment, 4096, config.SpecialIds.of_size(4096))
    shapes = step.state_shapes(objective.init, optimizers.create(experiment.optimizer), mesh)
    with pytest.raises(config.ConfigError, match=f"^{setting}: .* GiB of a device's .* GiB. Use a smaller"):
        sharding.check_memory(experiment, shapes, mesh)
    smaller = gin_files.load(["tiny.gin"])
    objective = objectives.create(smaller, 4096, config.SpecialIds.of_size(4096))
    sharding.check_memory(smaller, step.state_shapes(objective.init, optimizers.create(smaller.optimizer), mesh), mesh)
