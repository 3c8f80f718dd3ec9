"""Parameters that a command reads while a run deletes the checkpoint: all of them as saved, or one line."""

import gc
import pathlib
import shutil

import checkpoint_folders
import jax
import numpy as np
import pytest

from maelm_jax import config
from maelm_jax.training import checkpoint, checkpoint_params, checkpoint_reading

# Orbax's, of a read that is cut off.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def deleted_at(monkeypatch, module, name: str, path: pathlib.Path):
    """Removes `path` when a function of the reader is called."""
    original = getattr(module, name)

    def call(*arguments):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return original(*arguments)

    monkeypatch.setattr(module, name, call)


def test_readers_get_the_moving_average_of_a_run_that_keeps_one(tmp_path):
    state = checkpoint_folders.state_of(1)
    average = jax.tree.map(lambda x: x + 1, state.params)
    checkpoints = checkpoint.Checkpoints(str(tmp_path))
    for number, saved in enumerate((state, state._replace(average=average))):
        checkpoints.save(number, saved)
    checkpoints.close()
    resumed = checkpoint_folders.restore(tmp_path, jax.tree.map(jax.numpy.zeros_like, state._replace(average=average))).state
    jax.tree.map(np.testing.assert_array_equal, resumed, jax.device_get(state._replace(average=average)))
    for number, expected in enumerate((state.params, average)):
        jax.tree.map(np.testing.assert_array_equal, checkpoint_params.read_params(str(tmp_path), number), jax.device_get(expected))
        part = {"bias": state.params["bias"]}
        assert np.array_equal(checkpoint_params.restore_params(str(tmp_path), part, number)["bias"], expected["bias"])


@pytest.mark.parametrize("gone", ["", "default", "default/d", "default/ocdbt.process_0"])
@pytest.mark.parametrize("moment", ["verify", "_saved_shapes", "_restore"])
def test_a_checkpoint_that_is_deleted_while_it_is_read_is_one_line(workdir, monkeypatch, moment, gone):
    monkeypatch.setattr(checkpoint_reading, "PAUSES", ())
    module = checkpoint_reading if moment == "verify" else checkpoint_params
    deleted_at(monkeypatch, module, moment, workdir / "checkpoints" / "2" / gone)
    try:
        params = checkpoint_params.read_params(str(workdir), 2)
    except (config.ConfigError, config.RunError) as error:
        assert "checkpoints/2" in str(error) and "\n" not in str(error)
    else:
        jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(checkpoint_folders.state_of(2))["params"])
    gc.collect()  # here, where the warning is ignored
