"""Export replaces only what it wrote, tidies up after a kill, and says in one line what it cannot."""

import errno
import fcntl
import json
import os
import pathlib

import pytest

import maelm_jax
from maelm_jax import config, export
from maelm_jax.encoders import export_folder, huggingface


def run(workdir, output, *more) -> int:
    return export.main([f"--workdir={workdir}", f"--output={output}", "--no-verify", *more])


def refused(workdir, output, *more) -> str:
    """The message, which is one line."""
    with pytest.raises(config.ConfigError) as error:
        run(workdir, output, *more)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def workdir(workdirs, tmp_path, monkeypatch) -> pathlib.Path:
    """runs/mpnet in a folder of its own, which is the working directory."""
    (tmp_path / "runs" / "mpnet").mkdir(parents=True)
    for path in workdirs["mpnet"].iterdir():
        (tmp_path / "runs" / "mpnet" / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "mpnet"


@pytest.mark.parametrize(
    "output",
    [
        "runs/mpnet",
        "runs/mpnet/",
        "runs/./mpnet",
        "runs/mpnet/../mpnet",
        "runs",
        "runs/..",
        ".",
        "..",
        "/",
        "link",
        "link/mpnet",
        "above/runs/mpnet",
    ],
)
def test_a_run_and_what_holds_it_are_never_replaced(workdir, tmp_path, output):
    (tmp_path / "link").symlink_to("runs")
    (tmp_path / "above").symlink_to(".")
    for place in (workdir, tmp_path / "runs", tmp_path):  # not even with the marker in it
        (place / export_folder.MARKER).write_text(json.dumps({"files": []}))
    before = sorted(path.name for path in workdir.iterdir())
    assert "holds the run that is exported" in refused("runs/mpnet", output, "--overwrite")
    assert sorted(path.name for path in workdir.iterdir()) == before


def test_another_folder_is_never_replaced(workdir, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    assert "was not written by export" in refused("runs/mpnet", "mine", "--overwrite")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"
    (tmp_path / "file").write_text("x")
    assert "is a file" in refused("runs/mpnet", "file", "--overwrite")
    assert (tmp_path / "file").read_text() == "x"


def test_what_was_added_to_an_export_is_not_lost(workdir, tmp_path):
    assert run("runs/mpnet", "out") == 0
    (tmp_path / "out" / "mine.txt").write_text("x")
    assert "mine.txt" in refused("runs/mpnet", "out", "--overwrite")
    assert (tmp_path / "out" / "mine.txt").exists()


def test_an_export_of_an_earlier_version_is_removed_by_hand_only(workdir, tmp_path):
    assert run("runs/mpnet", "out") == 0
    (tmp_path / "out" / export_folder.MARKER).unlink()
    assert "earlier version" in refused("runs/mpnet", "out", "--overwrite")
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"files": 3}', b'{"files": [[]]}', b"\xff", b"[" * 100_000])
def test_a_marker_that_is_no_marker(workdir, tmp_path, content):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / export_folder.MARKER).write_bytes(content)
    assert "was not written by export" in refused("runs/mpnet", "out", "--overwrite")


def test_an_export_and_an_empty_folder_are_replaced(workdir, tmp_path):
    (tmp_path / "out").mkdir()
    assert run("runs/mpnet", "out") == 0
    assert "--overwrite" in refused("runs/mpnet", "out")
    (tmp_path / "out" / "__pycache__").mkdir()  # what importing maelm.py leaves
    assert run("runs/mpnet", "out/", "--format=pytorch", "--overwrite") == 0
    assert (tmp_path / "out" / "maelm.py").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "runs"]


def test_a_folder_that_python_saved_is_not_replaced(workdir, tmp_path):
    """The message names no flag of a command."""
    encoder = maelm_jax.load_encoder(workdir)
    encoder.save_pretrained(tmp_path / "out")
    (tmp_path / "file").write_text("x")
    for name, message in (("out", "exists. Give another folder"), ("file", r"\S+file is a file; give a folder")):
        with pytest.raises(config.ConfigError, match=f"^folder={tmp_path / name}:? {message}$"):
            encoder.save_pretrained(tmp_path / name)


def test_a_link_stays_a_link(workdir, tmp_path):
    assert run("runs/mpnet", "version-1") == 0
    (tmp_path / "newest").symlink_to("version-1")
    assert run("runs/mpnet", "newest", "--overwrite", "--step=6") == 0
    assert (tmp_path / "newest").is_symlink() and "6.5000" in (tmp_path / "version-1" / "README.md").read_text()


def test_what_a_kill_leaves_is_removed_by_the_next_export(workdir, tmp_path):
    for name in ("out.123.tmp", "out.124.old", "other.9.tmp", "out.mine.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    for name in ("out.123.tmp", "out.124.old", "other.9.tmp"):
        (tmp_path / name / export_folder.MARKER).write_text(json.dumps({"files": []}))
    (tmp_path / "out").mkdir()
    assert run("runs/mpnet", "out", "--overwrite") == 0
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["other.9.tmp", "out", "out.mine.tmp", "runs"], "only those of this output, and only those that export wrote"


def test_a_folder_that_another_export_is_writing_stays(workdir, tmp_path):
    (tmp_path / "out.123.tmp").mkdir()
    with (tmp_path / "out.123.tmp" / export_folder.MARKER).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run("runs/mpnet", "out") == 0
    assert (tmp_path / "out.123.tmp").is_dir()


def test_a_kill_between_the_two_renames_loses_nothing(workdir, tmp_path):
    assert run("runs/mpnet", "out") == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    (tmp_path / "out").rename(tmp_path / "out.77.old")
    assert "exists" in refused("runs/mpnet", "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "runs"]


def test_what_appears_meanwhile_is_kept(workdir, tmp_path, monkeypatch):
    write = huggingface.write

    def slow(*arguments):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").write_text("x")
        return write(*arguments)

    monkeypatch.setattr(huggingface, "write", slow)
    assert "out" in refused("runs/mpnet", "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "runs"]


@pytest.mark.parametrize(
    "output,message",
    [
        ("", "is empty"),
        ("file/out", "is a file"),
        ("file", "is a file"),
        ("a" * 300, "too long"),
        ("out\udcff", "UTF-8"),
        ("loop/out", "symbolic links"),
    ],
)
def test_an_output_that_cannot_be_is_one_line(workdir, tmp_path, output, message):
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    assert message in refused("runs/mpnet", output, "--overwrite")
    assert (tmp_path / "file").read_text() == "x"


def test_a_disk_that_is_read_only_is_one_line(workdir, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "cannot be written to" in refused("runs/mpnet", "out")
    monkeypatch.undo()
    monkeypatch.chdir(workdir.parent.parent)
    failure = OSError(errno.EROFS, os.strerror(errno.EROFS), "out.1.tmp")
    monkeypatch.setattr(huggingface, "write", lambda *_: (_ for _ in ()).throw(failure))
    assert "Read-only file system" in refused("runs/mpnet", "out")


def test_a_full_disk_is_not_a_wrong_input(workdir, monkeypatch):
    failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(huggingface, "write", lambda *_: (_ for _ in ()).throw(failure))
    with pytest.raises(OSError, match="No space"):
        run("runs/mpnet", "out")
