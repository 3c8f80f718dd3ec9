"""Checkpoints of a run: what a damaged one, a full disk and a kill leave behind."""

import collections
import shutil

import checkpoint_folders
import jax.numpy as jnp
import pytest

from maelm_jax import config
from maelm_jax.training import checkpoint, loop, step


def test_a_full_disk_is_one_line_and_what_was_whole_stays_whole(tmp_path, monkeypatch):
    state = step.State(step=jnp.int32(1), params={"kernel": jnp.arange(1000.0)}, opt_state=())
    checkpoints = checkpoint.Checkpoints(str(tmp_path))
    loop.save(checkpoints, 1, state, wait=True)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: collections.namedtuple("Usage", "free")(4003))
    with pytest.raises(config.RunError, match=r"step 2: .*No space left on device.*Complete checkpoints: \[1\]"):
        loop.save(checkpoints, 2, state, wait=True)
    assert checkpoints.steps() == [1]
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: collections.namedtuple("Usage", "free")(4004))
    loop.save(checkpoints, 2, state, wait=True)
    number, restored = checkpoints.restore(state)
    assert number == 2 and (restored.params["kernel"] == state.params["kernel"]).all()
    checkpoints.close()


def test_a_failed_write_names_the_complete_checkpoint_before_it(tmp_path, monkeypatch):
    def fail(folder: str):
        raise OSError("the storage is gone")

    state = step.State(step=jnp.int32(1), params={"kernel": jnp.ones(3)}, opt_state=())
    checkpoints = checkpoint.Checkpoints(str(tmp_path), keep=1)
    loop.save(checkpoints, 1, state, wait=True)
    monkeypatch.setattr(checkpoint.checksums, "write", fail)
    with pytest.raises(config.RunError, match=r"step 2: .*the storage is gone.*Complete checkpoints: \[1\]"):
        loop.save(checkpoints, 2, state, wait=True)


def test_the_newest_checkpoints_and_those_at_multiples_are_kept(tmp_path):
    checkpoints = checkpoint.Checkpoints(str(tmp_path), keep=2, keep_every=4)
    for number in range(1, 8):
        checkpoints.save(number, step.State(step=jnp.int32(number), params={"kernel": jnp.ones(3)}, opt_state=()))
        checkpoints.wait()
    checkpoints.close()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"4", "6", "7"}


def test_damage_is_kept_and_so_are_the_metrics(workdir, caplog):
    data = max((workdir / "checkpoints" / "2").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    checkpoint_folders.flip(data, 8 * 100)
    damaged, metrics = checkpoint_folders.content(workdir / "checkpoints" / "2"), (workdir / "metrics.jsonl").read_bytes()
    number, state = checkpoint_folders.restore(workdir)
    assert number == 1 and checkpoint_folders.equal(state, checkpoint_folders.state_of(1))
    assert "checkpoint 2 cannot be read, trying the one before" in caplog.text and data.name in caplog.text
    assert checkpoint_folders.content(workdir / "checkpoints" / "damaged-2") == damaged
    assert (workdir / "metrics-before-rollback-2.jsonl").read_bytes() == metrics
    assert checkpoint_folders.restore(workdir)[0] == 1, "and is not tried again"
    assert len(list(workdir.glob("metrics-before*"))) == 1


def test_a_second_rollback_from_the_same_step_keeps_both(workdir):
    for _ in range(2):
        checkpoints = checkpoint.Checkpoints(str(workdir))
        checkpoints.save(2, checkpoint_folders.state_of(2))
        checkpoints.close()
        shutil.rmtree(workdir / "checkpoints" / "2" / "default" / "d")
        assert checkpoint_folders.restore(workdir)[0] == 1
    names = sorted(path.name for path in (workdir / "checkpoints").glob("damaged*"))
    assert names == ["damaged-2", "damaged-2-2"]
    assert sorted(path.name for path in workdir.glob("metrics-*")) == ["metrics-before-rollback-2-2.jsonl", "metrics-before-rollback-2.jsonl"]


def test_when_all_are_damaged_nothing_changes(workdir):
    for number in (1, 2):
        shutil.rmtree(workdir / "checkpoints" / str(number) / "default" / "d")
    before = checkpoint_folders.content(workdir)
    with pytest.raises(config.ConfigError, match=r"every checkpoint in \S+ is damaged \(step 2: default/d/\S+ is missing\)"):
        checkpoint_folders.restore(workdir)
    assert checkpoint_folders.content(workdir) == before


def test_a_kill_before_the_checksums_leaves_a_checkpoint_that_is_passed_over(workdir, monkeypatch):
    def killed(folder):
        raise KeyboardInterrupt(folder)

    monkeypatch.setattr(checkpoint.checksums, "write", killed)
    checkpoints = checkpoint.Checkpoints(str(workdir))
    checkpoints.save(3, checkpoint_folders.state_of(3))
    with pytest.raises(KeyboardInterrupt, match="3.orbax-checkpoint-tmp"):
        checkpoints.wait()
    monkeypatch.undo()
    checkpoints = checkpoint.Checkpoints(str(workdir))
    assert checkpoints.restore(checkpoint_folders.state_of(0))[0] == 2
    checkpoints.save(3, checkpoint_folders.state_of(3))
    checkpoints.close()
    assert checkpoint_folders.restore(workdir)[0] == 3 and (workdir / "checkpoints" / "3" / "checksums.json").is_file()
    assert not list(workdir.glob("metrics-before*"))
