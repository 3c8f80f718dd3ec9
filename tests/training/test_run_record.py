"""What a run does to its workdir: nothing before it has read what is there, one block of environment.txt a start, nothing lost in a rollback."""

import pathlib
import re
import shutil
import subprocess

import pytest

from maelm_jax import config, train
from maelm_jax.training import checkpoint_reading, metrics

SETTINGS = {
    "TRAIN_STEPS": 4,
    "BATCH_SIZE": 8,
    "SEQUENCE_LENGTH": 32,
    "Vocabulary.size": 400,
    "Corpus.processes": 1,
    "Corpus.heldout_fraction": 0.1,
    "Model.layers": 1,
    "Model.width": 32,
    "Model.heads": 2,
    "Model.feed_forward": 64,
    "Run.log_every": 1,
    "Run.eval_every": 4,
    "Run.eval_rows": 8,
    "Run.checkpoint_every": 2,
    "Run.rank_every": 0,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> pathlib.Path:
    from pydoc_data import topics

    folder = tmp_path_factory.mktemp("text")
    (folder / "topics.txt").write_text("\n\n".join(" ".join(topic.split()) for topic in topics.topics.values()))
    return folder


def run(text: pathlib.Path, workdir: pathlib.Path, **more) -> int:
    settings = SETTINGS | {"TEXT_FILES": text / "*.txt", "Corpus.rows_dir": text / "rows"} | more
    return train.main(["--gin_file=tiny.gin", f"--workdir={workdir}", *(f"--gin.{name}={value}" for name, value in settings.items())])


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("runs") / "run"
    assert run(text, workdir) == 0
    return workdir


def content(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"}


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "vocabulary"])
def test_a_file_where_a_folder_belongs_is_refused_before_anything_is_changed(text, tmp_path, name):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / name).write_text("text")
    before = content(tmp_path)
    with pytest.raises(config.ConfigError, match=rf"{name} is a file, where a run keeps a folder: move it away"):
        run(text, tmp_path)
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "environment.txt"])
def test_a_folder_where_a_file_belongs_is_refused(text, tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(config.ConfigError, match=rf"{name} is a folder, where a run keeps a file"):
        run(text, tmp_path)


@pytest.mark.parametrize("line", ["{", "[1]", '{"loss": 1.0}', '{"step": "1"}', "[" * 100_000, '{"step": 1.5}', "\x00\x00"])
def test_damaged_metrics_are_named_by_their_line_before_anything_is_changed(text, tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    before = content(tmp_path)
    with pytest.raises(config.ConfigError, match=r"metrics.jsonl: line 2 is damaged \(.*\)\. Remove the line"):
        run(text, tmp_path)
    assert content(tmp_path) == before


def test_a_line_that_a_kill_cut_short_is_no_damage(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    assert metrics.read(str(tmp_path)) == [{"step": 1}]
    metrics.Writer(str(tmp_path), 1).close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_restore_that_fails_leaves_the_workdir_as_it_was(text, finished, monkeypatch):
    def unreadable(folder, part, parts):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoint_reading, "PAUSES", ())
    monkeypatch.setattr(checkpoint_reading.checksums, "verify", unreadable)
    before = content(finished)
    with pytest.raises(config.RunError, match="Input/output error"):
        run(text, finished)
    assert content(finished) == before


def test_each_start_has_a_block_in_environment_txt(text, finished):
    first = (finished / "environment.txt").read_text()
    assert run(text, finished) == 0
    both = (finished / "environment.txt").read_text()
    assert both.startswith(first)
    blocks = [block.splitlines() for block in both.rstrip().split("\n\n")]
    for block in blocks:
        names = [line.split()[0] for line in block]
        assert names[:5] == ["started", "commit", "command", "python", "cores"] and names[5] == "0:"
    assert any(line.startswith("jax==") for line in blocks[0])
    assert blocks[-1][-1] == "packages as in the block above" and not any("==" in line for line in blocks[-1])


def test_packages_that_changed_are_listed_again(tmp_path, finished, monkeypatch):
    from maelm_jax import gin_files
    from maelm_jax.data import vocabularies
    from maelm_jax.training import run_record

    experiment, words = gin_files.load([str(finished / "config.gin")]), vocabularies.load(finished / "vocabulary")
    (tmp_path / "environment.txt").write_text("commit abc\ncommand train\n0: cpu\njax==0.1\n")  # as it was written before
    for _ in range(2):
        run_record.write(tmp_path, experiment, words)
    blocks = (tmp_path / "environment.txt").read_text().split("\n\n")
    assert len(blocks) == 3 and "jax==0.1\n" not in blocks[1] and "\njax==" in blocks[1]
    assert blocks[2].splitlines()[-1] == run_record.UNCHANGED


def test_a_start_without_git_is_recorded_too(tmp_path, finished, monkeypatch):
    """As in a container."""
    from maelm_jax import gin_files
    from maelm_jax.data import vocabularies
    from maelm_jax.training import run_record

    experiment, words = gin_files.load([str(finished / "config.gin")]), vocabularies.load(finished / "vocabulary")
    monkeypatch.setenv("PATH", str(tmp_path))
    run_record.write(tmp_path / "run", experiment, words)
    assert "\ncommit unknown\n" in (tmp_path / "run" / "environment.txt").read_text()


def test_the_commit_is_not_that_of_the_repository_around_a_virtual_environment(tmp_path, monkeypatch):
    from maelm_jax.training import run_record

    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "run_record.py").touch()
    monkeypatch.setattr(run_record, "__file__", str(tmp_path / ".venv" / "run_record.py"))
    assert run_record._commit() == "unknown"
    subprocess.run([*git, "add", "-f", ".venv"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "ours"], check=True)
    assert re.fullmatch("[0-9a-f]{7,}", run_record._commit())


def test_a_rollback_keeps_the_damaged_checkpoint_and_the_metrics_it_cuts(text, finished, tmp_path):
    workdir = pathlib.Path(shutil.copytree(finished, tmp_path / "run"))
    newest = workdir / "checkpoints" / "4"
    data = max(newest.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    changed = bytearray(data.read_bytes())
    changed[len(changed) // 2] ^= 1
    data.write_bytes(changed)
    before = metrics.read(str(workdir))
    assert run(text, workdir) == 0
    assert [line["step"] for line in before] == [1, 2, 3, 4]
    after = metrics.read(str(workdir))
    assert [(line["step"], line["loss"]) for line in after] == [(line["step"], line["loss"]) for line in before]
    assert (workdir / "metrics-before-rollback-4.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()
    assert (workdir / "checkpoints" / "damaged-4" / data.relative_to(newest)).read_bytes() == bytes(changed)
