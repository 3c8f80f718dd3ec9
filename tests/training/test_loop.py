"""When SIGTERM comes late: neither the last step nor what follows it may swallow it."""

import contextlib
import os
import signal

import jax.numpy as jnp
import numpy as np
import pytest

from maelm_jax import config
from maelm_jax.training import checkpoint, loop, metrics


@pytest.mark.parametrize("when", ["never", "evaluating", "saving"])
def test_a_signal_at_the_last_step_is_not_lost(when, tmp_path, monkeypatch):
    term = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    at = lambda place: term() if when == place else None  # noqa: E731

    def evaluate(state):
        if state[0] == 2:
            at("evaluating")
        return state, {}

    step = lambda state, batch: ((state[0] + 1,), {"loss": jnp.float32(1.0), "accuracy": jnp.float32(0.0), "grad_norm": jnp.float32(1.0)})  # noqa: E731
    job = loop.Job(config.Run(train_steps=2, eval_every=1), step, lambda number: None, evaluate, np.ones(2), 1.0, 1.0, 1.0)
    writer, checkpoints = metrics.Writer(str(tmp_path), 0), checkpoint.Checkpoints(str(tmp_path))
    monkeypatch.setattr(checkpoints, "save", lambda step, state: None)
    monkeypatch.setattr(checkpoints, "wait", lambda: at("saving"))
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("after the loop"))
    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, before)
        stack.callback(writer.close)
        stack.callback(checkpoints.close)
        state, status = loop.run(job, (0,), 0, writer, checkpoints)
    assert state == (2,)
    assert (status, heard) == {"never": (0, []), "evaluating": (loop.STOPPED, []), "saving": (0, ["after the loop"])}[when]
