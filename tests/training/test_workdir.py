"""A run's folder: what a path is, its lock (invariant 10), settings, starts, vocabulary and lost checkpoints."""

import errno
import json
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys

import checkpoint_folders
import pytest
from testing import ROOT, call, metrics, training

from maelm_jax import config, gin_files, storage
from maelm_jax.data import vocabularies
from maelm_jax.pretraining import start
from maelm_jax.training import workdir as workdirs
from maelm_jax.training.workdir import Kind, Workdir

PRETRAINED = gin_files.render(gin_files.load(["tiny.gin"]))
FINETUNED = gin_files.render(gin_files.load(["finetune/rte.gin"]))
# Files by which a folder is known.
FOLDERS = {
    "run": ({"config.gin": PRETRAINED, "config.json": "{}"}, Kind.RUN),
    "tuned": ({"config.gin": FINETUNED, "results.json": "{}"}, Kind.FINETUNED),
    "table": ({"table.json": "{}"}, Kind.TABLE),
    "export": ({"config.json": "{}", "vocabulary.sha256": ""}, Kind.EXPORT),
    "stock": ({"config.json": "{}", "model.safetensors": ""}, Kind.STOCK),
    "published": ({"model.pt": ""}, Kind.PUBLISHED),
    "rows": ({"pile/store.json": "{}"}, Kind.ROWS),
    "store": ({"store.json": "{}"}, Kind.ROWS),
    "empty": ({}, Kind.OTHER),
    "notes": ({"notes.txt": ""}, Kind.OTHER),
}


@pytest.fixture
def folders(tmp_path):
    for name, (files, _) in FOLDERS.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).parent.mkdir(exist_ok=True)
            (tmp_path / name / file).write_text(content)
    return tmp_path


def test_every_kind_of_folder_is_known(folders):
    assert {name: Workdir(folders / name).kind for name in FOLDERS} == {name: kind for name, (_, kind) in FOLDERS.items()}
    assert Workdir(folders / "published" / "model.pt").kind == Kind.PUBLISHED
    assert Workdir(folders / "nowhere").kind == Kind.ABSENT


@pytest.mark.parametrize(
    ("command", "argv", "refused"),
    [
        ("train", ["--gin_file=tiny.gin"], ("tuned", "table", "export", "stock", "published", "rows", "store")),
        ("finetune", ["--gin_file=finetune/rte.gin", "--init_from=nowhere"], ("run", "export", "stock", "published", "rows", "store")),
        ("analyze", ["--runs=nowhere"], ("export", "stock", "published", "rows", "store")),
    ],
)
def test_no_run_is_written_into_a_folder_of_another_kind(folders, command, argv, refused):
    before = checkpoint_folders.content(folders)
    for name in refused:
        done = call(command, *argv, f"--workdir={folders / name}")
        assert done.status == 2 and f"{folders / name} is a " in done.stderr.replace(" an ", " a "), done.stderr
    assert checkpoint_folders.content(folders) == before
    for name in ("gs:/bucket/run", "https://host/run", "file:///run"):
        done = call(command, *argv, f"--workdir={name}")
        assert done.status == 2 and name in done.stderr


HOLDER = """
import sys
from maelm_jax.training.workdir import Workdir
with Workdir(sys.argv[1]).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_of_two_processes_one_holds_the_workdir_until_it_ends(tmp_path, monkeypatch):
    workdir = str(tmp_path / "run")
    argv = [sys.executable, "-c", HOLDER, workdir]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n" and Workdir(workdir).is_running
        monkeypatch.setattr(workdirs, "PATIENCE", 0.0)
        with pytest.raises(config.ConfigError, match=rf"run .*\b{holder.pid}\b"), Workdir(workdir).locked():
            pass
        monkeypatch.setattr(workdirs, "PATIENCE", 120.0)
        holder.stdin.close()
        with Workdir(workdir).locked():
            text = (tmp_path / "run" / "run.lock").read_text()
            assert text.startswith(f"process {os.getpid()} on "), "although the holder before removed its empty folder"
    assert not Workdir(workdir).is_running


def test_a_workdir_that_stays_empty_is_removed_and_others_are_not(tmp_path):
    workdir = tmp_path / "a" / "b"
    with pytest.raises(ZeroDivisionError), Workdir(workdir).locked():
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        with Workdir(workdir).locked():
            (workdir / "config.gin").touch()
        assert [path.name for path in workdir.iterdir()] == ["config.gin"]


def test_a_workdir_that_is_removed_meanwhile_is_no_error(tmp_path):
    with Workdir(tmp_path / "run").locked():
        shutil.rmtree(tmp_path / "run")


def test_a_folder_that_goes_before_its_lock_is_opened_is_made_again(tmp_path, monkeypatch):
    """The holder before removes its empty folder at its end."""
    mkdir, made = pathlib.Path.mkdir, []

    def mkdir_and_lose_the_second(path, *args, **kwargs):
        mkdir(path, *args, **kwargs)
        made.append(path)
        if len(made) == 2:
            path.rmdir()

    monkeypatch.setattr(pathlib.Path, "mkdir", mkdir_and_lose_the_second)
    with Workdir(tmp_path / "run").locked():
        assert (tmp_path / "run" / "run.lock").read_text() and len(made) == 3


def test_a_file_system_without_locks_is_named_and_does_not_stop_a_run(tmp_path, monkeypatch, caplog):
    def flock(file, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(storage.fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING), Workdir(tmp_path).locked():
        pass
    assert "no locks" in caplog.text


def test_other_settings_are_refused_and_free_ones_are_listed(tmp_path):
    experiment = gin_files.load(["tiny.gin"])
    start.check_settings(Workdir(tmp_path), experiment)
    assert Workdir(tmp_path).changes_since_last_start(experiment) == []
    (tmp_path / "config.gin").write_text(gin_files.render(experiment))
    with pytest.raises(config.ConfigError, match="Run.batch_size: 32 -> 16"):
        start.check_settings(Workdir(tmp_path), gin_files.load(["tiny.gin"], ["BATCH_SIZE=16"]))
    free = gin_files.load(["tiny.gin"], ["TRAIN_STEPS=700", "Run.accumulate=2"])
    start.check_settings(Workdir(tmp_path), free)
    (tmp_path / "environment.txt").write_text(f"cores {workdirs.workers.usable_cores()}\n")
    assert Workdir(tmp_path).changes_since_last_start(free) == ["Run.train_steps: 600 -> 700", "Run.accumulate: 1 -> 2"]
    (tmp_path / "environment.txt").write_text("cores 99\n")
    assert "CPU cores: 99 -> " in Workdir(tmp_path).changes_since_last_start(experiment)[0]


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(text, uninterrupted, tmp_path):
    workdir = pathlib.Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    shutil.rmtree(workdir / "checkpoints")
    before = checkpoint_folders.content(workdir)
    for folder in (None, "checkpoints", "checkpoints/5.orbax-checkpoint-tmp"):
        if folder:
            (workdir / folder).mkdir()
        done = call("train", *training(text, workdir))
        assert done.status == 2 and f"{workdir}/checkpoints has no checkpoint any more" in done.stderr
        assert checkpoint_folders.content(workdir) == before
    lines = [line for line in metrics(workdir) if "loss" in line]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(line | {"checkpoint": None}) + "\n" for line in lines))
    start.check_checkpoints(Workdir(workdir))  # it was killed before its first one


def test_a_run_that_was_copied_in_part_does_not_begin_again(text, uninterrupted, tmp_path):
    workdir = pathlib.Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    shutil.rmtree(workdir / "checkpoints")
    (workdir / "metrics.jsonl").unlink()
    before = checkpoint_folders.content(workdir)
    done = call("train", *training(text, workdir))
    assert done.status == 2 and f"{workdir} " in done.stderr
    record = workdir / "config.gin"
    whole = record.read_bytes()
    for content in (b"", b"\n", whole[: len(whole) // 2], whole[: whole.rindex(b"10")]):
        record.write_bytes(content)
        for command, argv in (("evaluate", [f"--models={workdir}"]), ("train", [f"--workdir={workdir}"]), ("train", training(text, workdir))):
            done = call(command, *argv)
            assert done.status == 2 and str(workdir) in done.stderr and done.stderr.count("\n") == 1, (command, done)
    record.write_bytes(whole)
    assert checkpoint_folders.content(workdir) == before


def test_a_run_that_was_killed_before_its_first_step_begins_again(text, uninterrupted, tmp_path, monkeypatch):
    argv = training(text, tmp_path, "--gin.TRAIN_STEPS=2", "--gin.Run.rank_every=0")
    monkeypatch.setattr(workdirs.vocabularies.SentencePieceVocabulary, "save", lambda *_: 1 / 0)  # after config.gin
    assert call("train", *argv).status == 1 and (tmp_path / "config.gin").exists()
    monkeypatch.undo()
    done = call("train", *argv)
    assert done.status == 0, done.stderr


def test_a_vocabulary_that_is_not_the_run_s_is_refused_by_its_readers(text, uninterrupted, tmp_path):
    workdir = pathlib.Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    assert Workdir(workdir).load_vocabulary().size == 400
    content = (workdir / "vocabulary" / "sentencepiece.model").read_bytes()
    piece = content.index(b"the")
    (workdir / "vocabulary" / "sentencepiece.model").write_bytes(content[:piece] + b"thf" + content[piece + 3 :])
    for command, argv in (("evaluate", [f"--models={workdir}"]), ("train", training(text, workdir)), ("analyze", [f"--runs={workdir}"])):
        done = call(command, *argv)
        assert done.status == 2 and f"{workdir}/vocabulary" in done.stderr, (command, done.stderr)


@pytest.mark.parametrize("line", ["{", '{"loss": 1.0}'])
def test_damaged_metrics_are_named_by_their_line_before_anything_is_changed(text, tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    before = checkpoint_folders.content(tmp_path)
    done = call("train", *training(text, tmp_path))
    assert done.status == 2 and "metrics.jsonl: line 2" in done.stderr
    assert checkpoint_folders.content(tmp_path) == before


def test_each_start_has_a_block_in_environment_txt(uninterrupted, tmp_path, monkeypatch):
    experiment, words = gin_files.load([str(uninterrupted / "config.gin")]), vocabularies.load(uninterrupted / "vocabulary")
    Workdir(tmp_path).write_start(experiment, words)
    first = (tmp_path / "environment.txt").read_text()
    Workdir(tmp_path).write_start(experiment, words, 7, ["Run.log_every: 1 -> 2"])
    monkeypatch.setenv("PATH", str(tmp_path))  # without git, as in a container
    monkeypatch.setattr(workdirs.importlib.metadata, "distributions", list)
    Workdir(tmp_path).write_start(experiment, words)
    text = (tmp_path / "environment.txt").read_text()
    blocks = [block.splitlines() for block in text.rstrip().split("\n\n")]
    assert text.startswith(first) and len(blocks) == 3
    for block in blocks:
        assert [line.split()[0] for line in block][:6] == ["started", "commit", "command", "python", "cores", "0:"]
    assert any(line.startswith("jax==") for line in blocks[0])
    assert blocks[1][-2:] == ["after step 7: Run.log_every: 1 -> 2", workdirs.UNCHANGED]
    assert "commit unknown" in blocks[2]


def test_the_commit_is_not_that_of_the_repository_around_a_virtual_environment(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "workdir.py").touch()
    monkeypatch.setattr(workdirs, "__file__", str(tmp_path / ".venv" / "workdir.py"))
    assert workdirs._commit() == "unknown"
    subprocess.run([*git, "add", "-f", ".venv"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "ours"], check=True)
    assert re.fullmatch("[0-9a-f]{7,}", workdirs._commit())
