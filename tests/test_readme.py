"""Invariant 7, second half: every block of commands in the README is marked, and what is marked to run or dry-run does.

`<!-- run: ci -->` is run by .ci/run, `<!-- run: slow -->` by the slow test below, `<!-- dry-run -->` with --dry_run, `<!-- shown -->` not at all.
"""

import pathlib
import re
import shlex
import subprocess

import pytest
from testing import call, quick_compilation

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*?) -->\n)?```bash\n(?P<body>.*?)```", re.S)
BLOCKS = [(found["mark"], found["body"]) for found in BLOCK.finditer(README)]


def of(mark):
    return [body for found, body in BLOCKS if found == mark]


def test_every_block_is_marked():
    assert README.count("```bash") == len(BLOCKS) > 4
    for mark, body in BLOCKS:
        assert mark in ("run: ci", "run: slow", "dry-run", "shown"), f"unmarked or unknown mark {mark!r}:\n{body}"
    assert len(of("run: ci")) == len(of("run: slow")) == 1


def test_ci_runs_the_block_it_should():
    script = (ROOT / ".ci" / "run").read_text()
    assert "<!-- run: ci -->" in script


@pytest.mark.parametrize("line", [line for body in of("dry-run") for line in body.splitlines()])
def test_dry_run_blocks(line):
    argv = shlex.split(line)
    assert argv[:3] == [".venv/bin/python", "-m", "maelm_jax.train"]
    with quick_compilation():
        done = call("train", *argv[3:], "--dry_run")
    assert done.status == 0, done.stderr
    assert "FLOPs a step" in done.stdout


@pytest.mark.parametrize("line", [line for body in of("shown") for line in body.splitlines() if "maelm_jax." in line])
def test_shown_commands_name_real_settings(line, tmp_path):
    from maelm_jax import gin_files

    argv = shlex.split(line)
    assert (ROOT / "maelm_jax" / f"{argv[2].removeprefix('maelm_jax.')}.py").exists()
    files = [a.removeprefix("--gin_file=") for a in argv if a.startswith("--gin_file=")]
    (tmp_path / "config.gin").write_text(gin_files.render(gin_files.load(["tiny.gin"])))
    before = [str(tmp_path / "config.gin"), "finetune/base.gin"] if argv[2] == "maelm_jax.finetune" else []  # a pretrained run's settings come first
    gin_files.load([*before, *files], [a.removeprefix("--gin.") for a in argv if a.startswith("--gin.")])


def test_every_file_it_names_exists():
    for name in re.findall(r"\]\(([a-z][\w/]*\.md)\)|`((?:configs|maelm_jax|benchmarks|docs)/[\w./]*)`", README):
        assert (ROOT / (name[0] or name[1])).exists(), name


@pytest.mark.slow
def test_install_and_train_in_a_fresh_clone(tmp_path):
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")], check=True)
    done = subprocess.run(["bash", "-c", of("run: slow")[0]], cwd=tmp_path / "clone", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = re.search(r"held-out loss ([\d.]+) nats, ([\d.-]+) below the unigram", done.stdout)
    assert float(said[2]) >= 0.2
    assert (tmp_path / "clone" / "runs" / "tiny" / "loss_curve.png").stat().st_size > 5000
