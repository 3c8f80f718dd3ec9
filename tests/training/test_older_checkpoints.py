"""Checkpoints with older parameter paths."""

import pathlib

import jax
import numpy as np
import pytest
from flax import traverse_util

from maelm_jax import gin_files
from maelm_jax.model import maelm
from maelm_jax.training import checkpoint_params, older_checkpoints

OLDER = pathlib.Path(__file__).parents[1] / "data" / "workdir_of_2026_11_22" / "run"


@pytest.mark.parametrize(
    "older, current",
    [
        ("blocks/query/kernel", "blocks/attention/query/kernel"),
        ("blocks/attention_norm/scale", "blocks/attention_norm/scale"),
        ("blocks/up/bias", "blocks/feed_forward/up/bias"),
        ("blocks/output_norm/bias", "blocks/feed_forward_norm/bias"),
        ("blocks/cross/out/kernel", "blocks/cross_attention/out/kernel"),
        ("blocks/cross/attention_norm/scale", "blocks/cross_attention_norm/scale"),
    ],
)
@pytest.mark.parametrize("start", ["decoder", "opt_state/1/0/mu/encoder"])
def test_older_paths_become_current_ones_and_current_ones_stay(start, older, current):
    for path in (older, current):
        assert older_checkpoints.current_path(tuple(f"{start}/{path}".split("/"))) == f"{start}/{current}"


def test_parameters_of_an_older_workdir_are_those_of_the_model():
    experiment = gin_files.load([str(OLDER / "config.gin")])
    shapes = maelm.encoder_shapes(experiment.model, experiment.vocabulary.size, pad_id=1)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), {"encoder": shapes})

    restored = traverse_util.flatten_dict(checkpoint_params.restore_params(str(OLDER), like), sep="/")
    read = traverse_util.flatten_dict(checkpoint_params.read_params(str(OLDER), 10), sep="/")
    assert restored.keys() == {path for path in read if path.startswith("encoder/")}
    assert all(np.array_equal(restored[path], read[path]) for path in restored)
