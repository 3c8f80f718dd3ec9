"""Workdirs with checkpoints, made once."""

import pathlib
import shutil

import checkpoint_folders
import pytest

from maelm_jax.training import checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """A workdir with whole checkpoints of steps 1 and 2, and metrics up to step 3."""
    folder = tmp_path_factory.mktemp("saved")
    checkpoints = checkpoint.Checkpoints(str(folder))
    for number in (1, 2):
        checkpoints.save(number, checkpoint_folders.state_of(number))
        checkpoints.wait()
    checkpoints.close()
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {number}, "loss": 1.0}}\n' for number in (1, 2, 3)))
    return folder


@pytest.fixture
def workdir(saved, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(saved, tmp_path / "run"))
