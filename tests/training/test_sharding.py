"""What a mesh cannot do ends in one line that says what would fit."""

import jax
import jax.numpy as jnp
import pytest
from testing import mesh_of, model_of

from maelm_jax import config
from maelm_jax.model import keys, maelm
from maelm_jax.training import sharding

MODEL = model_of(layers=1, width=40, heads=5, feed_forward=60, decoder_layers=1, max_positions=16)


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
    with pytest.raises(config.RunError, match="/".join(path)):
        sharding.shardings_of(shapes, mesh_of(1, 1, 1))
