"""A workdir written by the code of 2026-11-22 resumes with the code of today: same rows, same masks, same bits of the losses.

The fixture is a run of 30 steps, cut after its checkpoint of step 10, with the metrics of the 20 steps that followed.
"""

import json
import pathlib
import shutil

import jax
import pytest

from maelm_jax import cli, train
from maelm_jax.data import workers

FIXTURE = pathlib.Path(__file__).parent / "data" / "workdir_of_2026_11_22"
# Folder of compiled programs, which names the kind of processor, and cores of the machine that wrote the fixture.
MACHINE = ("compiled-5c21df05", 2)
TOLERANCE = 1e-5  # on another machine, where XLA may add in another order


@pytest.mark.usefixtures("one_device", "optimised")  # as the fixture was trained
def test_an_older_workdir_resumes_with_the_losses_it_had(tmp_path, monkeypatch):
    jax.clear_caches()  # of programs that other tests compiled without optimisations
    shutil.copytree(FIXTURE, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    train.main(["--workdir=run"])

    same_machine = (cli.compilation_cache().name, workers.usable_cores()) == MACHINE
    expected = json.loads((FIXTURE / "next_20_steps.json").read_text())
    lines = [json.loads(line) for line in pathlib.Path("run/metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line for line in lines}
    assert sorted(found) == list(range(1, 31)), "the lines before the checkpoint stay"
    assert [line["step"] for line in expected] == list(range(11, 31))
    for line in expected:
        for name, value in line.items():
            assert found[line["step"]][name] == pytest.approx(value, rel=0 if same_machine else TOLERANCE, abs=0), (line["step"], name)
