"""Invariant 7, second half: every block of commands in the README is marked, and does as marked.

`<!-- run: ci -->` is run by .ci/run, `<!-- install -->` and `<!-- run: slow -->` by the slow test
below, `<!-- dry-run -->` exactly as it stands, `<!-- run: python -->` with the output that its comment
names. Of the pages under docs/ and of --help, programs and settings are checked.
"""

import ast
import importlib
import os
import re
import shlex
import subprocess

import pytest
from testing import ROOT, call

from maelm_jax import gin_files

README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*?) -->\n)?```bash\n(?P<body>.*?)```", re.S)
BLOCKS = [(found["mark"], found["body"]) for found in BLOCK.finditer(README)]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"python (?:-m maelm_jax\.\w+|benchmarks/\w+\.py) --[^`\n]*")  # in a block or in a table
WITH_PLACEHOLDERS = ("...", "$", "DOWNLOADED")
LINE_BREAK, RATE_OF_LOOP = re.compile(r"\\\n *"), re.compile(r"\$\{rates[^}]*\}")
HELP = [importlib.import_module(f"maelm_jax.{path.stem}").__doc__ for path in (ROOT / "maelm_jax").glob("*.py")]
TEXTS = [page.read_text() for page in [*PAGES, *(ROOT / "docs").glob("*/*.md")]]
# What the README says that the first command prints. Another patch version of Python has other documentation to train on,
# and another CPU rounds differently.
EXPECTED = re.compile(r"held-out loss of about ([\d.]+) nats, ([\d.]+)\s+below the\s+unigram cross-entropy of (\d+\.\d+)")
PRINTED = re.compile(r"held-out loss ([\d.]+) nats, ([\d.-]+) below the unigram")
TOLERANCE = 0.05  # nats
COMMANDS = sorted(
    {
        command
        for text in [*TEXTS, *(help_text or "" for help_text in HELP)]
        for command in COMMAND.findall(RATE_OF_LOOP.sub("1e-3", LINE_BREAK.sub("", text)))
        if not any(sign in command for sign in WITH_PLACEHOLDERS)
    }
)


def of(mark):
    return [body for found, body in BLOCKS if found == mark]


def test_every_block_is_marked():
    assert README.count("```bash") == len(BLOCKS) > 3
    for mark, body in BLOCKS:
        assert mark in ("install", "run: ci", "run: slow", "dry-run"), f"unmarked or unknown mark {mark!r}:\n{body}"
    assert len(of("install")) == len(of("run: ci")) == len(of("run: slow")) == len(of("dry-run")) == 1
    assert len(COMMANDS) > 20 and "<!-- run: ci -->" in (ROOT / ".ci" / "run").read_text()


def test_every_installation_brings_the_text_of_tiny_gin():
    script = (ROOT / "launch" / "local.sh").read_text()
    commands = [line for text in (README, script) for line in text.splitlines() if "bin/pip install -q" in line]
    assert len(commands) == 4 and all("install -q -r requirements.txt" in line for line in commands), commands


def test_the_first_answer(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    [block] = re.findall(r"<!-- run: python -->\n```python\n(.*?)```", README, re.S)
    [expected] = re.findall(r"print\(.*\)  # (.*)", block)
    names = {}
    exec(block, names)
    assert capsys.readouterr().out.strip() == expected
    assert names["vectors"].shape == (2, 384)


def test_the_figures_of_the_first_command_agree_with_each_other():
    loss, below, unigram = map(float, EXPECTED.search(README).groups())
    assert unigram - loss == pytest.approx(below, abs=0.011)  # each is rounded


@pytest.mark.parametrize("line", [line for body in of("dry-run") for line in body.splitlines()])
def test_dry_run_blocks(line, tmp_path):
    """They read no data and write nothing. A run with other settings in the workdir is no error."""
    argv = shlex.split(line)
    assert argv[:3] == [".venv/bin/python", "-m", "maelm_jax.train"] and "--dry_run" in argv
    (tmp_path / "config.gin").write_text(gin_files.render(gin_files.load(["small.gin"])))
    done = call("train", *argv[3:], f"--workdir={tmp_path}")
    assert done.status == 0, done.stderr
    for what in ("FLOPs a step", "optimiser's state", "mesh {'data': 1"):
        assert what in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["config.gin"]


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands_name_real_flags_and_settings(command, tmp_path):
    program, *argv = shlex.split(command.replace("python -m ", "").replace("python ", ""), comments=True)
    assert "\\" not in command and all(argument.startswith("--") for argument in argv), argv
    source = ROOT / (program if program.endswith(".py") else f"{program.replace('.', '/')}.py")
    others = source.parent.glob("*.py") if source.parent.name == "benchmarks" else ()  # which share flags
    declared = "".join(path.read_text() for path in (source, ROOT / "maelm_jax" / "cli.py", *others))
    for flag in {argument.partition("=")[0] for argument in argv}:
        assert f'"{flag}"' in declared or flag.startswith(("--gin.", "--beam_")), flag
    files = [a.removeprefix("--gin_file=") for a in argv if a.startswith("--gin_file=")]
    (tmp_path / "config.gin").write_text(gin_files.render(gin_files.load(["tiny.gin"])))
    # A pretrained run's settings come first.
    before = [str(tmp_path / "config.gin"), "finetune/base.gin"] if program == "maelm_jax.finetune" else []
    bindings = [a.removeprefix("--gin.") for a in argv if a.startswith("--gin.")]
    gin_files.load([*before, *files], bindings)


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *PAGES, *(ROOT / "docs").glob("*/*.md")], ids=str)
def test_every_relative_link_resolves(page):
    for target in re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_troubleshooting_names_messages_that_the_package_has():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    table = page.partition("## By the message")[2].partition("## Without")[0]
    messages = [message for row in table.splitlines() if row.startswith("| `") for message in re.findall("`(.*?)`", row.split("|")[1])]
    trees = [ast.parse(path.read_text()) for path in (ROOT / "maelm_jax").rglob("*.py")]
    texts = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    for part in (part.strip() for message in messages for part in message.split("...")):
        assert any(part in text for text in texts), part
    assert len(messages) > 8


def test_every_file_the_readme_names_exists():
    for name in re.findall(r"`((?:configs|maelm_jax|benchmarks|docs)/[\w./-]*)`", README):
        assert (ROOT / name).exists(), name
    configs = re.findall(r"`([\w/]+\.gin)`", README)
    assert len(configs) > 8 and all((ROOT / "configs" / name).is_file() for name in configs)


@pytest.mark.slow
def test_install_and_train_in_a_fresh_clone(tmp_path):
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")], check=True)
    commands = "\n".join(of("install") + of("run: slow"))
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # as a user has it
    done = subprocess.run(["bash", "-euc", commands], cwd=tmp_path / "clone", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loss, below = map(float, PRINTED.search(done.stdout).groups())
    expected = EXPECTED.search(README)
    assert loss == pytest.approx(float(expected[1]), abs=TOLERANCE)
    assert loss + below == pytest.approx(float(expected[3]), abs=TOLERANCE)
    assert (tmp_path / "clone" / "runs" / "tiny" / "loss_curve.png").stat().st_size > 5000
