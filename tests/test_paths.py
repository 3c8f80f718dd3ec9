"""Paths that a user gives are checked before the work begins, and what is wrong with them is one line."""

import errno
import os

import numpy as np
import pytest

from maelm_jax import config, embed, paths
from maelm_jax.analysis import figures, report


@pytest.mark.parametrize(
    "path,message",
    [
        ("", "is empty"),
        ("file/out", "is a file"),
        ("file/deep/out", "is a file"),
        ("a" * 300, "too long"),
        ("out\udcff", "UTF-8"),
        ("loop/out", "symbolic links"),
        ("nowhere/out", "link to nothing"),
    ],
)
@pytest.mark.parametrize("check", [paths.check_output_file, paths.check_output_folder])
def test_a_path_that_cannot_be_is_one_line(tmp_path, monkeypatch, check, path, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("absent")
    with pytest.raises(config.ConfigError, match=message) as error:
        check("--output", path)
    assert str(error.value).startswith("--output") and "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop", "nowhere"]


def test_a_folder_is_no_file_and_a_file_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(config.ConfigError, match="is a folder"):
        paths.check_output_file("--output", str(tmp_path))
    with pytest.raises(config.ConfigError, match="is a file"):
        paths.check_output_folder("--workdir", str(tmp_path / "file"))
    paths.check_output_file("--output", str(tmp_path / "file"))
    paths.check_output_folder("--workdir", str(tmp_path / "new" / "folder"))
    assert not (tmp_path / "new").exists()


def test_a_read_only_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    for check, path in ((paths.check_output_file, tmp_path / "v.npy"), (paths.check_output_folder, tmp_path)):
        with pytest.raises(config.ConfigError, match="read-only or another user's"):
            check("--output", str(path))


def test_only_what_another_path_would_avoid_is_a_wrong_input():
    with pytest.raises(config.ConfigError, match="Read-only file system"):
        with paths.writing("--output", "x"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), "x")
    with pytest.raises(OSError, match="Read-only"), paths.writing("--output", "x/y"):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "elsewhere")
    with pytest.raises(OSError, match="No space"), paths.writing("--output", "x"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_embed_finds_out_before_it_reads_a_model(tmp_path):
    (tmp_path / "lines.txt").write_text("a line\n")
    (tmp_path / "file").write_text("x")
    argv = ["--gin_file=tiny.gin", "--workdir=nowhere", f"--input={tmp_path / 'lines.txt'}"]
    for output in (tmp_path / "file" / "v.npy", tmp_path / "file" / "deep" / "v.npy"):
        with pytest.raises(config.ConfigError, match="is a file"):
            embed.main([*argv, f"--output={output}"])


def test_embed_and_analyze_end_in_one_line_while_writing(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path / "v.npy"))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(config.ConfigError, match="Read-only file system"):
        embed.save(str(tmp_path / "v.npy"), np.zeros((1, 2), np.float32))
    assert list(tmp_path.iterdir()) == [], "nothing half-written is left"
    monkeypatch.setattr(figures, "draw", refuse)
    with pytest.raises(config.ConfigError, match="Read-only file system"):
        report.write({}, str(tmp_path))
