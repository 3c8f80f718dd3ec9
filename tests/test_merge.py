"""The mean of checkpoints as a workdir that the other commands read."""

import errno
import json
import pathlib
import shutil

import jax
import numpy as np
from testing import ROOT, call, training

from maelm_jax import merge as merge_command
from maelm_jax.training import checkpoint
from maelm_jax.training.workdir import Workdir


def merge(*names: str, workdir: pathlib.Path):
    return call("merge", f"--checkpoints={','.join(names)}", f"--workdir={workdir}")


def params_of(workdir: pathlib.Path, step: int | None = None) -> list[np.ndarray]:
    return jax.tree.leaves(checkpoint.read_params(Workdir(workdir), step))


def test_the_mean_of_two_checkpoints(uninterrupted, tmp_path):
    done = merge(f"{uninterrupted}@60", f"{uninterrupted}@20", workdir=tmp_path / "merged")
    assert done.status == 0, done.stderr
    assert checkpoint.complete_steps(Workdir(tmp_path / "merged")) == [60]
    for newer, older, mean in zip(params_of(uninterrupted, 60), params_of(uninterrupted, 20), params_of(tmp_path / "merged"), strict=True):
        np.testing.assert_allclose(mean, 0.5 * newer + 0.5 * older, rtol=1e-5, atol=1e-7)


def test_the_mean_of_one_checkpoint_is_itself_and_commands_read_it(text, uninterrupted, tmp_path):
    merged = tmp_path / "merged"
    assert merge(f"{uninterrupted}@40", workdir=merged).status == 0
    assert all(map(np.array_equal, params_of(merged), params_of(uninterrupted, 40)))
    for models, step in ((merged, []), (uninterrupted, ["--step=40"])):
        done = call("evaluate", f"--models={models}", *step, f"--output={tmp_path / models.name}.json")
        assert done.status == 0, done.stderr
    theirs, ours = (json.loads((tmp_path / f"{name}.json").read_text())["scores"][0] for name in ("whole", "merged"))
    assert {**ours, "path": None} == {**theirs, "path": None}
    done = call("train", *training(text, tmp_path / "more", f"--gin.Run.continue_from={merged}"))
    assert done.status == 2 and f"Run.init_from={merged}" in done.stderr


def test_a_merge_that_fails_half_way_leaves_nothing_under_its_name(uninterrupted, tmp_path, monkeypatch):
    merged, write_start = tmp_path / "merged", Workdir.write_start

    def fail(*arguments):
        write_start(*arguments)
        assert not merged.exists(), "a process that is killed now would leave half a workdir"
        raise OSError(errno.ENOSPC, "No space left on device", str(merged))

    monkeypatch.setattr(Workdir, "write_start", fail)
    assert merge(f"{uninterrupted}@60", workdir=merged).status == 1
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    done = merge(f"{uninterrupted}@60", workdir=merged)
    assert done.status == 0, done.stderr


def test_a_checkpoint_that_the_run_prunes_before_it_is_read(uninterrupted, tmp_path, monkeypatch):
    """The newest is that of the moment. A step that was named is not replaced by another."""
    run, check = shutil.copytree(uninterrupted, tmp_path / "run"), merge_command.check_alike
    gone = iter((60, 55))

    def prune(found):
        check(found)
        shutil.rmtree(run / "checkpoints" / str(next(gone)))

    monkeypatch.setattr(merge_command, "check_alike", prune)
    done = merge(str(run), workdir=tmp_path / "merged")
    assert done.status == 0 and checkpoint.complete_steps(Workdir(tmp_path / "merged")) == [55], done.stderr
    done = merge(f"{run}@55", f"{run}@50", workdir=tmp_path / "other")
    assert done.status == 2 and "step 55" in done.stderr and done.stderr.count("\n") == 1 and not (tmp_path / "other").exists()


def test_what_cannot_be_averaged_is_refused(uninterrupted, tmp_path):
    wider, other, renumbered = (shutil.copytree(uninterrupted, tmp_path / name) for name in ("wider", "other", "renumbered"))
    with (renumbered / "config.gin").open("a") as settings:
        settings.write("Masking.renumber = True\n")
    record = wider / "config.gin"
    record.write_text(record.read_text().replace("Encoder.feed_forward = 64", "Encoder.feed_forward = 96"))
    (other / "rows.json").unlink()
    (other / "vocabulary" / "vocabulary.sha256").unlink()
    (model,) = (other / "vocabulary").glob("*.model")
    shutil.copy(ROOT / "pretrained" / "sentencepiece.model", model)
    for names, message in (
        ([f"{uninterrupted}@60", f"{wider}@60"], "Encoder.feed_forward: 64 -> 96"),
        ([f"{uninterrupted}@60", f"{renumbered}@60"], "Masking.renumber: False -> True"),
        ([f"{uninterrupted}@60", f"{other}@60"], "has another vocabulary"),
        ([f"{uninterrupted}@60", f"{uninterrupted}@7"], "no checkpoint of step 7"),
        ([str(tmp_path / "nowhere")], "nowhere: no such file or folder"),
    ):
        done = merge(*names, workdir=tmp_path / "merged")
        assert done.status == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "merged").exists()
    done = merge(f"{uninterrupted}@60", workdir=uninterrupted)
    assert done.status == 2 and "--workdir" in done.stderr
