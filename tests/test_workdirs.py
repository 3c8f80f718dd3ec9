"""A run that is not there: every command that reads one says so, and names those that are near."""

import pytest

from maelm_jax import analyze, config, embed, export, finetune, train


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A folder with runs/tiny and runs/books, which is the working directory."""
    for name in ("tiny", "books"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.gin").write_text("")
    (tmp_path / "lines.txt").write_text("a line\n")
    (tmp_path / "runs" / "notes").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


COMMANDS = {
    "export": lambda run: export.main([f"--workdir={run}", "--output=out"]),
    "embed": lambda run: embed.main([f"--workdir={run}", "--input=lines.txt", "--output=v.npy"]),
    "analyze": lambda run: analyze.main([f"--runs={run}", "--workdir=report"]),
    "finetune": lambda run: finetune.main(["--gin_file=finetune/rte.gin", f"--init_from={run}"]),
    "init_from": lambda run: train.main(["--gin_file=tiny.gin", f"--gin.Run.init_from={run}", "--workdir=runs/new"]),
    "train": lambda run: train.main([f"--workdir={run}"]),
}


NAMES = {
    "runs/tinny": "did you mean runs/tiny?",
    "runs/qqqqqq": "runs holds the runs books, tiny",
    "runs": "books, tiny",
    "runs/notes": "runs/notes",
    "nowhere/tiny": "nowhere/tiny",
}
CASES = [("train", name) for name in NAMES] + [(command, "runs/tinny") for command in COMMANDS if command != "train"]


@pytest.mark.parametrize("command,run", CASES)
def test_a_run_that_is_not_there(runs, tmp_path, command, run):
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(config.ConfigError) as error:
        COMMANDS[command](run)
    assert NAMES[run] in str(error.value) and run in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before
