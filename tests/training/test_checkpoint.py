"""Checkpoints of a run (invariants 5 and 9): what damage, a full disk, a kill and a lost folder leave behind."""

import collections
import errno
import pathlib
import shutil

import checkpoint_folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maelm_jax import config
from maelm_jax.training import checkpoint
from maelm_jax.training.workdir import Workdir


def newest(workdir: pathlib.Path) -> int:
    restored = checkpoint_folders.restore(workdir)
    assert checkpoint_folders.equal(restored.state, checkpoint_folders.state_of(restored.step))
    return restored.step


def test_a_full_disk_is_named_and_what_was_whole_stays_whole(workdir, monkeypatch):
    state = checkpoint_folders.state_of(3)
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    usage = collections.namedtuple("Usage", "free")
    checkpoints = checkpoint.Checkpoints(Workdir(workdir))
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage(needed - 1))
    with pytest.raises(OSError, match=f"{workdir}/checkpoints") as error:
        checkpoints.save(3, state)
    assert error.value.errno == errno.ENOSPC and newest(workdir) == 2
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage(needed))
    checkpoints.save(3, state)
    checkpoints.close()
    assert newest(workdir) == 3


@pytest.mark.parametrize("reason", ["UNAVAILABLE: gs://b/c: 503", "RESOURCE_EXHAUSTED: Disk quota exceeded"])
def test_a_write_that_fails_is_no_wrong_input(workdir, reason, monkeypatch):
    """TensorStore raises ValueError, which elsewhere means wrong input, with which no run starts again."""

    def fail(*_):
        raise ValueError(reason)

    checkpoints = checkpoint.Checkpoints(Workdir(workdir))
    monkeypatch.setattr(checkpoint.ocp.CheckpointManager, "wait_until_finished", fail)
    with pytest.raises(config.RunError, match=f"{workdir}/checkpoints"):
        checkpoints.wait()


@pytest.mark.parametrize("made_again", [False, True])
def test_a_workdir_that_is_gone_is_named(workdir, made_again):
    checkpoints = checkpoint.Checkpoints(Workdir(workdir))
    workdir.rename(workdir.with_name("renamed"))
    if made_again:
        (workdir / "checkpoints").mkdir(parents=True)
    with pytest.raises(config.RunError, match=str(workdir)):
        checkpoints.save(3, checkpoint_folders.state_of(3))


def test_a_workdir_renamed_during_a_write_gets_no_successor_with_a_whole_checkpoint(workdir, monkeypatch, caplog):
    """Orbax and TensorStore make the folders that they write to again. Orbax would log several tracebacks."""
    finish = checkpoint.Checkpoints._write_checksums

    def renamed_meanwhile(self):
        workdir.rename(workdir.with_name("renamed"))
        (workdir / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir(parents=True)
        finish(self)

    monkeypatch.setattr(checkpoint.Checkpoints, "_write_checksums", renamed_meanwhile)
    checkpoints = checkpoint.Checkpoints(Workdir(workdir))
    checkpoints.save(3, checkpoint_folders.state_of(3))
    with pytest.raises(config.RunError, match=str(workdir)):
        checkpoints.wait()
    assert checkpoint.complete_steps(Workdir(workdir)) == [] and newest(workdir.with_name("renamed")) == 2
    assert not any(record.exc_info for record in caplog.records)


def test_the_newest_checkpoints_and_those_asked_for_are_kept(tmp_path):
    checkpoints = checkpoint.Checkpoints(Workdir(tmp_path), keep=2, keep_every=4, keep_at=[1, 3])
    for number in range(1, 8):
        checkpoints.save(number, checkpoint_folders.state_of(number))
        checkpoints.wait()
        assert checkpoints.newest() == number
    checkpoints.close()
    assert checkpoint.all_steps(Workdir(tmp_path)) == [1, 3, 4, 6, 7]


@pytest.mark.parametrize("gone", [[1], [2, 1], [1, 2, 3]])
def test_steps_that_are_pruned_before_they_are_read_are_left_out_and_named(workdir, caplog, gone):
    checkpoint_folders.write(workdir, 3)

    def read(step: int) -> int:
        if step in gone:
            shutil.rmtree(workdir / "checkpoints" / str(step), ignore_errors=True)
        return checkpoint.read_kept(Workdir(workdir), step, step).step

    steps = checkpoint.all_steps(Workdir(workdir))
    if len(gone) == len(steps):
        with pytest.raises(config.ConfigError):
            list(checkpoint.read_each(steps, read))
        return
    assert list(checkpoint.read_each(steps, read)) == [step for step in steps if step not in gone]
    assert all(f"step {step}" in caplog.text for step in gone) and len(caplog.records) == len(gone)


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(workdir, caplog):
    data = checkpoint_folders.largest_file(workdir / "checkpoints" / "2")
    checkpoint_folders.flip(data, 8 * 100)
    damaged = checkpoint_folders.content(workdir / "checkpoints" / "2")
    assert newest(workdir) == 1 and data.name in caplog.text
    assert checkpoint_folders.content(workdir / "checkpoints" / "damaged-2") == damaged
    checkpoint_folders.write(workdir, 2)
    assert newest(workdir) == 2


def test_when_all_are_damaged_nothing_changes(workdir):
    for number in (1, 2):
        shutil.rmtree(workdir / "checkpoints" / str(number) / "default" / "d")
    before = checkpoint_folders.content(workdir)
    with pytest.raises(config.ConfigError, match=f"{workdir}/checkpoints"):
        checkpoint_folders.restore(workdir)
    assert checkpoint_folders.content(workdir) == before


def test_a_failing_disk_changes_nothing(workdir, monkeypatch):
    def unreadable(files, root, names):
        raise OSError(errno.EIO, "Input/output error", f"{root}/x")

    monkeypatch.setattr(checkpoint, "_checksums", unreadable)
    before = checkpoint_folders.content(workdir)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint_folders.restore(workdir)
    assert checkpoint_folders.content(workdir) == before


def test_a_kill_before_the_checksums_leaves_a_checkpoint_that_is_passed_over(workdir, monkeypatch):
    def killed(folder):
        raise KeyboardInterrupt(folder)

    monkeypatch.setattr(checkpoint, "write_checksums", killed)
    checkpoints = checkpoint.Checkpoints(Workdir(workdir))
    checkpoints.save(3, checkpoint_folders.state_of(3))
    with pytest.raises(KeyboardInterrupt, match="3.orbax-checkpoint-tmp"):
        checkpoints.wait()
    assert checkpoints.newest() == 2
    monkeypatch.undo()
    assert newest(workdir) == 2
    checkpoint_folders.write(workdir, 3)
    assert newest(workdir) == 3 and (workdir / "checkpoints" / "3" / "checksums.json").is_file()


def test_damage_of_any_file_is_refused_by_every_reader(workdir):
    paths = [path for path in (workdir / "checkpoints" / "2" / "default").rglob("*") if path.is_file()]
    assert len(paths) > 4
    for path in (*paths, workdir / "checkpoints" / "2" / "checksums.json"):
        before = path.read_bytes()
        for damage in (lambda path: checkpoint_folders.flip(path, 4), lambda path: path.write_bytes(b""), pathlib.Path.unlink):
            if not before and damage is not pathlib.Path.unlink:
                continue
            damage(path)
            with pytest.raises(checkpoint.Damaged, match=f"checkpoints/2.*{path.name}"):
                checkpoint.read_params(Workdir(workdir), 2)
            path.write_bytes(before)
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):  # Orbax writes them after the checksums; no number depends on them
        (workdir / "checkpoints" / "2" / name).write_text("garbage")
    assert checkpoint_folders.equal(checkpoint.read_params(Workdir(workdir), 2), checkpoint_folders.state_of(2).params)


def test_a_copy_out_of_a_bucket_is_verified_by_the_checksums_that_the_bucket_keeps(workdir):
    """Google Cloud Storage keeps the MD5 of an object, so none is read there."""
    import base64
    import hashlib

    class Bucket:
        def info(self, path):
            return {"md5Hash": base64.b64encode(hashlib.md5(pathlib.Path(path).read_bytes()).digest()).decode()}

    folder = workdir / "checkpoints" / "2"
    path = checkpoint_folders.largest_file(folder)
    names = [str(path.relative_to(folder))]
    files, root = checkpoint.storage.file_system(str(folder))
    assert checkpoint._checksums(Bucket(), str(folder), names) == checkpoint._checksums(files, root, names)


def test_another_model_is_wrong_input(workdir):
    before = checkpoint_folders.content(workdir)
    other = checkpoint_folders.state_of(0, (40, 61))
    for like in (other, checkpoint_folders.state_of(0)._replace(params={"other": jnp.ones(3)})):
        with pytest.raises(config.ConfigError, match="checkpoints/2.*params/"):
            checkpoint_folders.restore(workdir, like)
    with pytest.raises(config.ConfigError, match="bias"):
        checkpoint.restore_params(Workdir(workdir), {"bias": other.params["bias"]})
    assert checkpoint_folders.content(workdir) == before


def test_a_part_of_the_parameters_is_restored(workdir):
    bias = checkpoint_folders.state_of(1).params["bias"]
    restored = checkpoint.restore_params(Workdir(workdir), {"bias": jnp.zeros_like(bias)}, step=1)
    assert restored.keys() == {"bias"} and np.array_equal(restored["bias"], bias)
    assert restored["bias"].sharding == bias.sharding


def test_a_step_that_is_not_there_is_wrong_input(workdir):
    with pytest.raises(config.ConfigError, match="7.*1, 2"):
        checkpoint.read_params(Workdir(workdir), 7)
    with pytest.raises(config.ConfigError, match="checkpoints"):
        checkpoint.read_params(Workdir(workdir.parent))
    assert checkpoint_folders.restore(workdir.parent) is None
