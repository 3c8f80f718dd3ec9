"""Workdirs, rows, exports and gin files of earlier versions load, and give the numbers that those versions computed.

make.py makes the folders. docs/api.md states the promise.
"""

import json
import pathlib
import tarfile

import numpy as np
import pytest
from compatibility import make

ARCHIVES = sorted(make.HERE.glob("*.tar.xz"))
TOLERANCE = 1e-4  # relative: another CPU, and another version of JAX, round differently


@pytest.fixture
def folder(request, tmp_path, monkeypatch) -> pathlib.Path:
    """The archive, in the working directory."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return request.param


@pytest.mark.parametrize("kind", make.KINDS)
@pytest.mark.parametrize("folder", ARCHIVES, ids=lambda path: path.name, indirect=True)
def test_a_folder_of_an_earlier_version_gives_its_numbers(folder, kind, one_device):
    expected = json.loads(folder.with_name(folder.name.replace(".tar.xz", ".json")).read_text())[kind]
    measured = make.measure(kind)
    for what, numbers in expected.items():
        if kind == "own.gin":
            assert measured[what] == numbers, what
        else:
            np.testing.assert_allclose(measured[what], numbers, TOLERANCE, TOLERANCE, err_msg=what)


def test_there_is_a_folder_to_load():
    assert ARCHIVES
