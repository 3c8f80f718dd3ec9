"""What the commands' own tests (tests/test_train.py) cannot bring about."""

import collections

import jax.numpy as jnp
import pytest

from maelm_jax import config
from maelm_jax.training import checkpoint, loop


def test_a_full_disk_is_one_line_and_what_was_whole_stays_whole(tmp_path, monkeypatch):
    state = {"kernel": jnp.arange(1000.0)}
    checkpoints = checkpoint.Checkpoints(str(tmp_path))
    loop.save(checkpoints, 1, state, wait=True)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: collections.namedtuple("Usage", "free")(3999))
    with pytest.raises(config.RunError, match=r"step 2: .*No space left on device.*Whole checkpoints: \[1\]"):
        loop.save(checkpoints, 2, state, wait=True)
    assert checkpoints.steps() == [1]
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: collections.namedtuple("Usage", "free")(4000))
    loop.save(checkpoints, 2, state, wait=True)
    step, restored = checkpoints.restore(state)
    assert step == 2 and (restored["kernel"] == state["kernel"]).all()
    checkpoints.close()
