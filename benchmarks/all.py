"""Run the benchmarks of training one after the other and print their results as one table.

The table has the columns measure, figure, target and log. `finetune_vs_transformers.py`, the
benchmark of fine-tuning, is not part of it.

    python benchmarks/all.py --workdir=runs/benchmarks --text='books/*.txt'

Nothing else should run on the machine. WORKDIR/benchmarks.md is the table. WORKDIR/NAME.log is the
output of a command, after a line with the command, the date and the commit. After an interruption,
the same call resumes: a command that has a log is not run again. To measure again, use a new
--workdir. The targets are this project's own (docs/results.md). Without --text, the corpus is the
installed documentation. Without PyTorch (the extra [torch]), the rows that compare with it say
"needs PyTorch".
"""

import argparse
import datetime
import importlib.util
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
import typing

ROOT = pathlib.Path(__file__).resolve().parent.parent
HERE = ROOT / "benchmarks"
sys.path.insert(0, str(ROOT))

from maelm_jax import tables  # noqa: E402


class Measure(typing.NamedTuple):
    """One row of the table. Its figure is what `pattern` finds in the output of a command."""

    name: str
    target: str
    log: str  # name of the command whose output is searched
    pattern: str  # regular expression; its group is the figure


class Plan(typing.NamedTuple):
    """Commands by name, and the rows of the table that read their outputs."""

    commands: dict[str, list[str]]
    measures: list[Measure]


MATMUL_SHARE_TARGETS = {"tiny": "50%", "base": "65%"}
ATTENTION_DROPOUTS = ("0.0", "0.1")
TOKENS_PER_SECOND = r"tokens/s\s+([\d,]+)"
PEAK_MEMORY = r"peak memory\s+(.+)"


def main(argv: list[str]) -> int:
    """Runs the command with these arguments. Returns the exit status."""
    flags = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flags.add_argument("--workdir", required=True, metavar="DIR")
    flags.add_argument("--text", metavar="GLOB", help="text files that rows are made of")
    shapes = ("tiny", "small", "base")
    flags.add_argument("--shapes", nargs="+", choices=shapes, default=shapes)
    args = flags.parse_args(argv)
    folder = pathlib.Path(args.workdir)
    folder.mkdir(parents=True, exist_ok=True)
    commands, measures = plan(args.shapes, args.text, importlib.util.find_spec("torch") is not None)
    commit = commit_of(ROOT)
    outputs = {name: run(name, command, folder, commit) for name, command in commands.items()}
    text = table(commands, measures, outputs)
    (folder / "benchmarks.md").write_text(text)
    print(f"\n{text}\n{folder / 'benchmarks.md'}")
    return 0 if all(outputs.values()) else 1


def commit_of(root: pathlib.Path) -> str:
    """The commit of a checkout as text, "unknown" outside of git."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def plan(shapes: typing.Sequence[str], text: str | None, with_torch: bool) -> Plan:
    """Lists the commands and the rows of the table.

    Args:
        shapes: Names of the configs in `shapes/` to measure; the last one also in variants.
        text: Glob of the text files, or None for the installed documentation.
        with_torch: Whether PyTorch is installed. If not, its commands are left out.

    Returns:
        The plan. The table shows a row without a command as "not measured".
    """
    commands, measures = {}, []
    for shape in shapes:
        step, file = f"step-{shape}", gin_file(shape)
        commands[step] = ["train_step.py", file, "--steps=6"]
        share = MATMUL_SHARE_TARGETS.get(shape, "")
        measures += [
            Measure(f"{shape}: tokens/s", "", step, TOKENS_PER_SECOND),
            Measure(f"{shape}: share of the matmul rate", share, step, r"share\s+([\d.]+%)"),
            Measure(f"{shape}: peak memory", "", step, PEAK_MEMORY),
        ]
        for rate in ATTENTION_DROPOUTS:
            name, dropout = f"torch-{shape}-{rate}", f"attention dropout {rate}"
            if with_torch:
                settings = [file, f"--gin.Dropout.attention={rate}"]
                steps = 2 if shape == "base" else 3
                commands[name] = ["against_torch.py", *settings, "--rounds=4", f"--steps={steps}"]
            same_step = f"{shape}: against the same step in PyTorch, {dropout}"
            hidden = f"{shape}: against RobertaModel and a mask, {dropout}"
            measures += [
                Measure(same_step, "1.0x", name, r"gathered .*\s([\d.]+x)"),
                Measure(hidden, "1.5x", name, r"hidden .*\s([\d.]+x)"),
            ]
    mlm, remat, dropout = f"mlm-{shape}", f"rematerialised-{shape}", f"attention-dropout-{shape}"
    rows = f"--gin.TEXT_FILES={text}" if text else "--gin.Corpus.sources={'installed_docs': 1.0}"
    commands |= {
        mlm: ["train_step.py", file, "--gin_file=mlm.gin", "--steps=6"],
        remat: ["train_step.py", file, "--gin.Compute.rematerialise=True", "--steps=4"],
        dropout: ["train_step.py", file, "--gin.Dropout.attention=0.1", "--steps=4"],
        "input": ["input.py", "--gin_file=base.gin", "--gin.BATCH_SIZE=256", rows],
        "startup": ["startup.py", gin_file("base"), rows],
    }
    reading = "rows of 512 from the row store to the device, rows/s"
    cold = "base: seconds from the command to the first step, cold cache"
    measures += [
        Measure(f"{shape}: tokens/s of MLM", "", mlm, TOKENS_PER_SECOND),
        Measure(f"{shape}: tokens/s, rematerialised", "", remat, TOKENS_PER_SECOND),
        Measure(f"{shape}: peak memory, rematerialised", "", remat, PEAK_MEMORY),
        Measure(f"{shape}: tokens/s, attention dropout 0.1", "", dropout, TOKENS_PER_SECOND),
        Measure(reading, "9,000", "input", r"([\d,]+) rows/s"),
        Measure(cold, "", "startup", r"cold cache: ([\d.]+)"),
        Measure("the same, warm cache", "20", "startup", r"warm cache: ([\d.]+)"),
    ]
    return Plan(commands, measures)


def gin_file(shape: str) -> str:
    """The flag that names the config of a shape."""
    return f"--gin_file={HERE / 'shapes' / shape}.gin"


def run(name: str, command: list[str], folder: pathlib.Path, commit: str) -> str:
    """Runs a command, or reads its log if the same command succeeded before.

    Returns:
        The output of the command after a line with command, date and commit. Empty if the command
        fails; its output is then in NAME.failed.log.
    """
    log, typed = folder / f"{name}.log", as_typed(command)
    if log.exists() and log.read_text().startswith(f"{typed}; "):
        return log.read_text()
    print(f"{name}: {typed}", flush=True)
    done = subprocess.run(
        [sys.executable, str(HERE / command[0]), *command[1:]], capture_output=True, text=True
    )
    if done.returncode:
        (folder / f"{name}.failed.log").write_text(done.stdout + done.stderr)
        print(
            f"{name}: ended with {done.returncode}; {folder / f'{name}.failed.log'}",
            file=sys.stderr,
        )
        return ""
    log.write_text(f"{typed}; {datetime.date.today()}, commit {commit}\n{done.stdout}")
    return log.read_text()


def as_typed(command: list[str]) -> str:
    """Text of a command as one types it in the root of the repository."""
    return shlex.join(["benchmarks/" + command[0], *command[1:]]).replace(f"{ROOT}/", "")


def table(commands: dict[str, list[str]], measures: list[Measure], outputs: dict[str, str]) -> str:
    """Markdown table of the measures, followed by the command of each log."""
    rows = []
    for measure in measures:
        figure = re.search(measure.pattern, outputs.get(measure.log, ""))
        log = measure.log if measure.log in commands else "needs PyTorch"
        text = figure[1].strip() if figure else "not measured"
        rows.append((measure.name, text, measure.target, log))
    printed = "\n".join(outputs.values())
    device = re.search(r"^device +(.*)", printed, re.MULTILINE)
    dates = sorted(set(re.findall(r"; (\d{4}-\d\d-\d\d, commit \S+)$", printed, re.MULTILINE)))
    machine = device[1] if device else platform.processor()
    parts = [
        f"{machine}, {os.cpu_count()} cores; {'; '.join(dates)}",
        tables.markdown(("measure", "figure", "target", "log"), rows),
        "\n".join(f"- {name}: `{as_typed(command)}`" for name, command in commands.items()),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
