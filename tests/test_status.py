"""What `status` says of a run that trains, that has ended, and of folders that are no run of pretraining."""

import json
import os

import pytest

from maelm_jax import cli, config, gin_files, status
from maelm_jax.training.workdir import Workdir

LINE = {"loss": 2.5, "accuracy": 0.5, "learning_rate": 1e-3, "grad_norm": 1.0, "checkpoint": None}


@pytest.fixture
def workdir(tmp_path):
    """A run of 1,000 steps with lines up to step 250 and a checkpoint of step 200."""
    (tmp_path / "checkpoints" / "200").mkdir(parents=True)
    (tmp_path / "config.gin").write_text(gin_files.render(gin_files.load(["tiny.gin"], ["TRAIN_STEPS=1000"])))
    lines = [{"step": step, **LINE, "tokens_per_second": 4096.0, "step_seconds": 2.0} for step in range(10, 260, 10)]
    lines[9]["eval_loss"] = 2.25  # at step 100, before the lines that are shown
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return Workdir(tmp_path)


def test_a_run_that_trains(workdir):
    with workdir.locked():
        before = sorted(workdir.folder.rglob("*"))
        text = status.describe(workdir)
        assert sorted(workdir.folder.rglob("*")) == before
    assert "step 250 of 1,000 (25.0%)" in text
    assert "750 steps, 0:25:00" in text, "750 steps of two seconds"
    assert "checkpoint: step 200" in text and f"process {os.getpid()} on" in text
    assert ["100", "2.5000", "2.2500", "0.001", "4,096"] in [line.split() for line in text.splitlines()]


def test_a_run_that_nobody_works_on_and_one_that_is_done(workdir):
    workdir.lock_file.write_text("process 1 on a machine since some time\n")  # of a process that was killed
    assert "holder: nobody" in status.describe(workdir)
    (workdir.checkpoints / "1000").mkdir()
    text = status.describe(workdir)
    assert "step 1,000 of 1,000 (100.0%)" in text and "left: nothing" in text


def test_a_run_that_has_just_begun(workdir):
    workdir.metrics_file.unlink()
    (workdir.checkpoints / "200").rmdir()
    text = status.describe(workdir)
    assert "step 0 of 1,000" in text and "checkpoint: none" in text


@pytest.mark.parametrize("argv", [["{}"], ["--workdir={}"]])
def test_the_run_is_named_with_or_without_the_flag(workdir, argv, capsys):
    assert cli.status_of(status.main, [argument.format(workdir) for argument in argv]) == 0
    assert f"{workdir}: step 250" in capsys.readouterr().out


def test_a_fine_tuned_run_is_refused_by_its_name(workdir):
    workdir.settings_file.write_text(gin_files.render(gin_files.load(["finetune/rte.gin"])))
    with pytest.raises(config.ConfigError, match=str(workdir)):
        status.describe(workdir)


def test_a_grid_says_how_many_runs_are_finished_and_in_work(tmp_path):
    runs = [Workdir(tmp_path / "tiny" / task / "b32-lr0.001" / f"seed{seed}") for task in ("rte", "mrpc") for seed in (1, 2)]
    for run in runs:
        run.folder.mkdir(parents=True)
    runs[0].results_file.write_text("{}")
    with runs[2].locked():
        lines = [line.split() for line in status.describe(Workdir(tmp_path)).splitlines()]
    assert ["tiny", "rte", "1", "0", "1"] in lines and ["tiny", "mrpc", "0", "1", "1"] in lines
    with Workdir(tmp_path).locked():  # by a grid of one process
        lines = [line.split() for line in status.describe(Workdir(tmp_path)).splitlines()]
    assert ["tiny", "rte", "1", "1", "0"] in lines and ["tiny", "mrpc", "0", "2", "0"] in lines
