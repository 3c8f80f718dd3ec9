"""Checkpoints that cannot be read: damage is told from storage that does not answer."""

import errno
import functools
import logging
import pathlib
import random
import shutil

import checkpoint_folders
import jax
import orbax.checkpoint as ocp
import pytest
from etils import epath

from maelm_jax import config
from maelm_jax.training import checkpoint_params, checkpoint_reading, coordination


def test_flipped_bits_never_load_as_other_numbers(saved, tmp_path, monkeypatch):
    """40 bits, each in a copy of its own: every reader refuses it, or reads what was saved."""
    monkeypatch.setattr(checkpoint_reading, "PAUSES", (), raising=False)
    draw = random.Random(0)
    files = sorted(path for path in (saved / "checkpoints" / "2").rglob("*") if path.is_file())
    bits = [draw.randrange(8 * sum(path.stat().st_size for path in files)) for _ in range(40)]
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), checkpoint_folders.state_of(0).params)
    refused = 0
    for number, bit in enumerate(bits):
        copy = pathlib.Path(shutil.copytree(saved, tmp_path / str(number)))
        for path in files:
            if bit < 8 * path.stat().st_size:
                checkpoint_folders.flip(copy / path.relative_to(saved), bit)
                break
            bit -= 8 * path.stat().st_size
        for read in (
            functools.partial(checkpoint_params.read_params, str(copy), 2),
            functools.partial(checkpoint_params.restore_params, str(copy), like),
        ):
            try:
                assert checkpoint_folders.equal(read(), checkpoint_folders.state_of(2).params), f"a bit of {path} was flipped"
            except (config.ConfigError, config.RunError):
                refused += 1
        try:
            found, state = checkpoint_folders.restore(copy)
            assert found in (1, 2) and checkpoint_folders.equal(state, checkpoint_folders.state_of(found)), f"a bit of {path} was flipped"
        except (config.ConfigError, config.RunError):
            refused += 1
    assert refused > 20


def test_a_bit_of_every_file_is_covered(workdir, monkeypatch):
    monkeypatch.setattr(checkpoint_reading, "PAUSES", ())
    paths = [path for path in (workdir / "checkpoints" / "2" / "default").rglob("*") if path.is_file()]
    assert len(paths) > 4
    for path in (*paths, workdir / "checkpoints" / "2" / "checksums.json"):
        for damage in (lambda path: checkpoint_folders.flip(path, 4), lambda path: path.write_bytes(b""), pathlib.Path.unlink):
            if path.name == "checksums.json" and damage is pathlib.Path.unlink:
                continue  # that is a checkpoint as they were before there were checksums
            before = path.read_bytes()
            if damage is not pathlib.Path.unlink and not before:
                continue
            damage(path)
            with pytest.raises(config.ConfigError, match=f"2 is damaged: .*{path.name}"):
                checkpoint_params.read_params(str(workdir), 2)
            path.write_bytes(before)
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):  # Orbax writes them after the checksums; no number depends on them
        (workdir / "checkpoints" / "2" / name).write_text("garbage")
    assert checkpoint_folders.equal(checkpoint_params.read_params(str(workdir), 2), checkpoint_folders.state_of(2).params)


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
    monkeypatch.setattr(checkpoint_reading, "PAUSES", (0, 0), raising=False)
    Storage(monkeypatch, failures=2)
    before = checkpoint_folders.content(workdir)
    assert checkpoint_folders.restore(workdir)[0] == 2
    assert checkpoint_folders.content(workdir) == before


def test_a_storage_that_does_not_answer_ends_the_run_and_changes_nothing(workdir, monkeypatch):
    monkeypatch.setattr(checkpoint_reading, "PAUSES", (0, 0), raising=False)
    Storage(monkeypatch, failures=100)
    before = checkpoint_folders.content(workdir)
    with pytest.raises(config.RunError, match="2 cannot be read: .*Input/output error.* nothing was changed"):
        checkpoint_folders.restore(workdir)
    assert checkpoint_folders.content(workdir) == before


def test_a_file_that_cannot_be_read_is_tried_for_a_minute(workdir, monkeypatch):
    waited = []
    monkeypatch.setattr(checkpoint_reading.time, "sleep", waited.append)

    def unreadable(files, path, algorithm):
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(checkpoint_reading.checksums, "_digest", unreadable)
    with pytest.raises(config.RunError, match="2 cannot be read"):
        checkpoint_params.read_params(str(workdir), 2)
    assert sum(waited) == 60


def test_another_model_is_an_error_of_the_settings(workdir):
    before = checkpoint_folders.content(workdir)
    with pytest.raises(config.ConfigError, match=r"does not fit this model: params/bias has shape \(60,\) there, \(61,\) here"):
        checkpoint_folders.restore(workdir, checkpoint_folders.state_of(0, (40, 61)))
    fewer = checkpoint_folders.state_of(0)._replace(opt_state=())
    with pytest.raises(config.ConfigError, match="it holds opt_state/0/mu, which this model does not have"):
        checkpoint_folders.restore(workdir, fewer)
    assert checkpoint_folders.content(workdir) == before


def test_a_checkpoint_without_checksums_loads_with_a_note(workdir, caplog):
    (workdir / "checkpoints" / "2" / "checksums.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert checkpoint_folders.restore(workdir)[0] == 2
    assert "2 was written before checksums were kept: it is used without being checked" in caplog.text


def test_a_process_with_wrong_input_votes_before_it_ends(monkeypatch, tmp_path):
    """The others wait for its vote, and would wait for ever."""
    votes = []
    monkeypatch.setattr(coordination, "highest", lambda value: votes.append(value) or max(votes))

    def no_package():
        raise config.ConfigError("gs:// needs the package gcsfs")

    with pytest.raises(config.ConfigError, match="^the checkpoint .* cannot be read: gs:// needs the package gcsfs$"):
        checkpoint_reading.read(no_package, epath.Path(tmp_path), collective=True)
    with pytest.raises(config.ConfigError, match="cannot be read: another process failed; its log says why"):
        checkpoint_reading.read(lambda: 1, epath.Path(tmp_path), collective=True)
    assert votes == [checkpoint_reading.Outcome.WRONG_INPUT, checkpoint_reading.Outcome.SUCCESS]
