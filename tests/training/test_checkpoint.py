"""What the commands' own tests (tests/test_train.py) cannot bring about."""

import collections

import jax.numpy as jnp
import pytest

from maelm_jax import config
from maelm_jax.training import checkpoint, loop, step


def test_a_full_disk_is_one_line_and_what_was_whole_stays_whole(tmp_path, monkeypatch):
    state = step.State(step=jnp.int32(1), params={"kernel": jnp.arange(1000.0)}, opt_state=())
    checkpoints = checkpoint.Checkpoints(str(tmp_path))
    loop.save(checkpoints, 1, state, wait=True)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: collections.namedtuple("Usage", "free")(4003))
    with pytest.raises(config.RunError, match=r"step 2: .*No space left on device.*Whole checkpoints: \[1\]"):
        loop.save(checkpoints, 2, state, wait=True)
    assert checkpoints.steps() == [1]
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: collections.namedtuple("Usage", "free")(4004))
    loop.save(checkpoints, 2, state, wait=True)
    number, restored = checkpoints.restore(state)
    assert number == 2 and (restored.params["kernel"] == state.params["kernel"]).all()
    checkpoints.close()
