"""Held-out evaluation: which parameters it reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maelm_jax.model import loss
from maelm_jax.pretraining import evaluation
from maelm_jax.training import step


def test_the_moving_average_is_evaluated_where_there_is_one():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))

    def loss_of(params, rows, numbers, key, train):
        count = jnp.float32(rows.shape[0])
        return loss.Sums(params["encoder"]["norm"]["scale"][0] * count, count, count)

    def params(value: float) -> dict:
        return {"encoder": {"norm": {"scale": jnp.full(1, value)}}}

    heldout = evaluation.HeldoutSet(np.zeros((2, 4, 8), np.int32), unigram=1.0)
    for average, expected in ((None, 3.0), (params(5.0), 5.0)):
        state = step.State(jnp.int32(1), params(3.0), (), average)
        result = evaluation.make_evaluation(loss_of, heldout, state, 0, mesh)(state)
        assert result.values["eval_loss"] == pytest.approx(expected) and result.state is state
