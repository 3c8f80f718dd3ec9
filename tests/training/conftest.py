"""Workdirs with checkpoints, made once."""

import pathlib
import shutil

import checkpoint_folders
import pytest


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """A workdir with whole checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved")
    checkpoint_folders.write(folder, 1, 2)
    return folder


@pytest.fixture
def workdir(saved, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(saved, tmp_path / "run"))
