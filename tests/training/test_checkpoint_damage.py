"""Checkpoints that cannot be read: damage is told from a storage that does not answer, and never becomes other numbers."""

import errno
import json
import logging
import pathlib
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from maelm_jax import config
from maelm_jax.training import checkpoint, step

SIZES = (40, 60)


def state_of(number: int, sizes: tuple[int, int] = SIZES) -> step.State:
    kernel = jax.random.normal(jax.random.key(number), sizes)
    return step.State(step=jnp.int32(number), params={"kernel": kernel, "bias": kernel[0]}, opt_state=({"mu": kernel * 2}, ()))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """A workdir with whole checkpoints of steps 1 and 2, and metrics up to step 3."""
    folder = tmp_path_factory.mktemp("saved")
    checkpoints = checkpoint.Checkpoints(str(folder))
    for number in (1, 2):
        checkpoints.save(number, state_of(number))
        checkpoints.wait()
    checkpoints.close()
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {number}, "loss": 1.0}}\n' for number in (1, 2, 3)))
    return folder


@pytest.fixture
def workdir(saved, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(saved, tmp_path / "run"))


def restore(workdir: pathlib.Path, like: step.State | None = None):
    checkpoints = checkpoint.Checkpoints(str(workdir))
    try:
        return checkpoints.restore(state_of(0) if like is None else like)
    finally:
        checkpoints.close()


def content(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip(path: pathlib.Path, bit: int):
    changed = bytearray(path.read_bytes())
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)


def equal(tree, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True))


def test_flipped_bits_never_load_as_other_numbers(saved, tmp_path, monkeypatch):
    """40 bits, each in a copy of its own: every reader refuses it, or reads what was saved."""
    monkeypatch.setattr(checkpoint, "PAUSES", (), raising=False)
    draw = random.Random(0)
    files = sorted(path for path in (saved / "checkpoints" / "2").rglob("*") if path.is_file())
    bits = [draw.randrange(8 * sum(path.stat().st_size for path in files)) for _ in range(40)]
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0).params)
    refused = 0
    for number, bit in enumerate(bits):
        copy = pathlib.Path(shutil.copytree(saved, tmp_path / str(number)))
        for path in files:
            if bit < 8 * path.stat().st_size:
                flip(copy / path.relative_to(saved), bit)
                break
            bit -= 8 * path.stat().st_size
        for read in (lambda: checkpoint.read_params(str(copy), 2), lambda: checkpoint.restore_params(str(copy), like)[1]):  # noqa: B023
            try:
                assert equal(read(), state_of(2).params), f"a bit of {path} was flipped"
            except (config.ConfigError, config.RunError):
                refused += 1
        try:
            found, state = restore(copy)
            assert found in (1, 2) and equal(state, state_of(found)), f"a bit of {path} was flipped"
        except (config.ConfigError, config.RunError):
            refused += 1
    assert refused > 20


def test_a_bit_of_every_file_is_covered(workdir, monkeypatch):
    monkeypatch.setattr(checkpoint, "PAUSES", ())
    paths = [path for path in (workdir / "checkpoints" / "2" / "default").rglob("*") if path.is_file()]
    assert len(paths) > 4
    for path in (*paths, workdir / "checkpoints" / "2" / "checksums.json"):
        for damage in (lambda path: flip(path, 4), lambda path: path.write_bytes(b""), pathlib.Path.unlink):
            if path.name == "checksums.json" and damage is pathlib.Path.unlink:
                continue  # that is a checkpoint as they were before there were checksums
            before = path.read_bytes()
            if damage is not pathlib.Path.unlink and not before:
                continue
            damage(path)
            with pytest.raises(config.ConfigError, match=f"2 is damaged: .*{path.name}"):
                checkpoint.read_params(str(workdir), 2)
            path.write_bytes(before)
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):  # Orbax writes them after the checksums; no number depends on them
        (workdir / "checkpoints" / "2" / name).write_text("garbage")
    assert equal(checkpoint.read_params(str(workdir), 2), state_of(2).params)


def test_damage_is_kept_and_so_are_the_metrics(workdir, caplog):
    data = max((workdir / "checkpoints" / "2").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    flip(data, 8 * 100)
    damaged, metrics = content(workdir / "checkpoints" / "2"), (workdir / "metrics.jsonl").read_bytes()
    number, state = restore(workdir)
    assert number == 1 and equal(state, state_of(1))
    assert "checkpoint 2 cannot be read, trying the one before" in caplog.text and data.name in caplog.text
    assert content(workdir / "checkpoints" / "damaged-2") == damaged
    assert (workdir / "metrics-before-rollback-2.jsonl").read_bytes() == metrics
    assert restore(workdir)[0] == 1, "and is not tried again"
    assert len(list(workdir.glob("metrics-before*"))) == 1


def test_a_second_rollback_from_the_same_step_keeps_both(workdir):
    for _ in range(2):
        checkpoints = checkpoint.Checkpoints(str(workdir))
        checkpoints.save(2, state_of(2))
        checkpoints.close()
        shutil.rmtree(workdir / "checkpoints" / "2" / "default" / "d")
        assert restore(workdir)[0] == 1
    names = sorted(path.name for path in (workdir / "checkpoints").glob("damaged*"))
    assert names == ["damaged-2", "damaged-2-2"]
    assert sorted(path.name for path in workdir.glob("metrics-*")) == ["metrics-before-rollback-2-2.jsonl", "metrics-before-rollback-2.jsonl"]


def test_when_all_are_damaged_nothing_changes(workdir):
    for number in (1, 2):
        shutil.rmtree(workdir / "checkpoints" / str(number) / "default" / "d")
    before = content(workdir)
    with pytest.raises(config.ConfigError, match=r"no checkpoint under .* is whole; of the newest, 2, default/d/\S+ is missing"):
        restore(workdir)
    assert content(workdir) == before


class Storage:
    """A storage whose reads fail `failures` times with EIO, then answer."""

    def __init__(self, monkeypatch, failures: int):
        self.left, plain = failures, ocp.CheckpointManager.restore

        def answer(manager, *args, **more):
            if self.left:
                self.left -= 1
                raise OSError(errno.EIO, "Input/output error")
            return plain(manager, *args, **more)

        monkeypatch.setattr(ocp.CheckpointManager, "restore", answer)


def test_a_storage_that_answers_late_costs_nothing(workdir, monkeypatch):
    monkeypatch.setattr(checkpoint, "PAUSES", (0, 0), raising=False)
    Storage(monkeypatch, failures=2)
    before = content(workdir)
    assert restore(workdir)[0] == 2
    assert content(workdir) == before


def test_a_storage_that_does_not_answer_ends_the_run_and_changes_nothing(workdir, monkeypatch):
    monkeypatch.setattr(checkpoint, "PAUSES", (0, 0), raising=False)
    Storage(monkeypatch, failures=100)
    before = content(workdir)
    with pytest.raises(config.RunError, match="2 cannot be read: .*Input/output error.* nothing was changed"):
        restore(workdir)
    assert content(workdir) == before


def test_a_file_that_cannot_be_read_is_tried_for_a_minute(workdir, monkeypatch):
    waited = []
    monkeypatch.setattr(checkpoint.time, "sleep", waited.append)

    def unreadable(files, path, algorithm):
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(checkpoint.checksums, "_digest", unreadable)
    with pytest.raises(config.RunError, match="2 cannot be read"):
        checkpoint.read_params(str(workdir), 2)
    assert sum(waited) == 60


def test_another_model_is_an_error_of_the_settings(workdir):
    before = content(workdir)
    with pytest.raises(config.ConfigError, match=r"does not fit this model: params/bias has shape \(60,\) there, \(61,\) here"):
        restore(workdir, state_of(0, (40, 61)))
    fewer = state_of(0)._replace(opt_state=())
    with pytest.raises(config.ConfigError, match="it holds opt_state/0/mu, which this model does not have"):
        restore(workdir, fewer)
    assert content(workdir) == before


def test_a_checkpoint_without_checksums_loads_with_a_note(workdir, caplog):
    (workdir / "checkpoints" / "2" / "checksums.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert restore(workdir)[0] == 2
    assert "2 was written before checksums were kept: it is used without being checked" in caplog.text


def test_a_kill_before_the_checksums_leaves_a_checkpoint_that_is_passed_over(workdir, monkeypatch):
    def killed(folder):
        raise KeyboardInterrupt(folder)

    monkeypatch.setattr(checkpoint.checksums, "write", killed)
    checkpoints = checkpoint.Checkpoints(str(workdir))
    checkpoints.save(3, state_of(3))
    with pytest.raises(KeyboardInterrupt, match="3.orbax-checkpoint-tmp"):
        checkpoints.wait()
    monkeypatch.undo()
    checkpoints = checkpoint.Checkpoints(str(workdir))
    assert checkpoints.restore(state_of(0))[0] == 2
    checkpoints.save(3, state_of(3))
    checkpoints.close()
    assert restore(workdir)[0] == 3 and (workdir / "checkpoints" / "3" / "checksums.json").is_file()
    assert not list(workdir.glob("metrics-before*"))


def test_checksums_written_in_a_bucket_hold_for_a_copy_of_it(workdir):
    """Google Cloud Storage keeps the MD5 of an object; a folder copied out of it is checked by the same sums."""
    path = workdir / "checkpoints" / "2" / "checksums.json"
    entries = json.loads(path.read_text())["files"]
    sums = checkpoint.checksums
    files, root = checkpoint.storage.file_system(str(path.parent))
    entries = {name: {"size": entry["size"], "md5": sums._digest(files, f"{root}/{name}", "md5")} for name, entry in entries.items()}
    path.write_text(json.dumps({"files": entries, "sha256": sums._own_digest(entries)}))
    assert restore(workdir)[0] == 2
    flip(path.parent / max(entries, key=lambda name: entries[name]["size"]), 8)
    assert restore(workdir)[0] == 1
