"""Run the benchmarks of training one after the other and print their results as one table.

The table has the columns measure, figure, target and log. `prepare.py` and `finetune_seeds.py`, the
benchmarks of preparation and fine-tuning, are not part of it.

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


def main(argv: list[str]) -> int:
    flags = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flags.add_argument("--workdir", required=True, metavar="DIR")
    flags.add_argument("--text", metavar="GLOB", help="text files that rows are made of")
    flags.add_argument(
        "--shapes", nargs="+", choices=("tiny", "small", "base"), default=("tiny", "small", "base")
    )
    args = flags.parse_args(argv)
    folder = pathlib.Path(args.workdir)
    folder.mkdir(parents=True, exist_ok=True)
    commands, measures = plan(args.shapes, args.text, importlib.util.find_spec("torch") is not None)
    commit = (
        subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
        ).stdout.strip()
        or "unknown"
    )
    outputs = {name: run(name, command, folder, commit) for name, command in commands.items()}
    text = table(commands, measures, outputs)
    (folder / "benchmarks.md").write_text(text)
    print(f"\n{text}\n{folder / 'benchmarks.md'}")
    return 0 if all(outputs.values()) else 1


def plan(
    shapes: typing.Sequence[str], text: str | None, with_torch: bool
) -> tuple[dict[str, list[str]], list[Measure]]:
    """Lists the commands and the rows of the table.

    Args:
        shapes: Names of the configs in `shapes/` to measure.
        text: Glob of the text files, or None for the installed documentation.
        with_torch: Whether PyTorch is installed. If not, its commands are left out.

    Returns:
        The commands by name, and the rows. The table shows a row without a command as
        "not measured".
    """
    commands, measures = {}, []
    texts = (
        [f"--gin.TEXT_FILES={text}"] if text else ["--gin.Corpus.sources={'installed_docs': 1.0}"]
    )
    shape_of = lambda shape: f"--gin_file={HERE / 'shapes' / shape}.gin"  # noqa: E731
    for shape in shapes:
        commands[f"step-{shape}"] = ["train_step.py", shape_of(shape), "--steps=6"]
        measures += [
            Measure(f"{shape}: tokens/s", "", f"step-{shape}", r"tokens/s\s+([\d,]+)"),
            Measure(
                f"{shape}: share of the matmul rate",
                {"tiny": "50%", "base": "65%"}.get(shape, ""),
                f"step-{shape}",
                r"share\s+([\d.]+%)",
            ),
            Measure(f"{shape}: peak memory", "", f"step-{shape}", r"peak memory\s+(.+)"),
        ]
        for rate in ("0.0", "0.1"):
            name, at_rate = f"torch-{shape}-{rate}", f"attention dropout {rate}"
            if with_torch:
                settings = [shape_of(shape), f"--gin.Model.attention_dropout={rate}"]
                commands[name] = [
                    "against_torch.py",
                    *settings,
                    "--rounds=4",
                    f"--steps={2 if shape == 'base' else 3}",
                ]
            measures += [
                Measure(
                    f"{shape}: against the same step in PyTorch, {at_rate}",
                    "1.0x",
                    name,
                    r"gathered .*\s([\d.]+x)",
                ),
                Measure(
                    f"{shape}: against RobertaModel and a mask, {at_rate}",
                    "1.5x",
                    name,
                    r"hidden .*\s([\d.]+x)",
                ),
            ]
    last = shapes[-1]
    mlm, rematerialised, dropout = (
        f"mlm-{last}",
        f"rematerialised-{last}",
        f"attention-dropout-{last}",
    )
    commands[mlm] = ["train_step.py", shape_of(last), "--gin_file=mlm.gin", "--steps=6"]
    commands[rematerialised] = [
        "train_step.py",
        shape_of(last),
        "--gin.Model.rematerialise=True",
        "--steps=4",
    ]
    commands[dropout] = [
        "train_step.py",
        shape_of(last),
        "--gin.Model.attention_dropout=0.1",
        "--steps=4",
    ]
    commands["input"] = ["input.py", "--gin_file=base.gin", "--gin.BATCH_SIZE=256", *texts]
    commands["startup"] = ["startup.py", shape_of("base"), *texts]
    measures += [
        Measure(f"{last}: tokens/s of MLM", "", mlm, r"tokens/s\s+([\d,]+)"),
        Measure(f"{last}: tokens/s, rematerialised", "", rematerialised, r"tokens/s\s+([\d,]+)"),
        Measure(f"{last}: peak memory, rematerialised", "", rematerialised, r"peak memory\s+(.+)"),
        Measure(f"{last}: tokens/s, attention dropout 0.1", "", dropout, r"tokens/s\s+([\d,]+)"),
        Measure(
            "rows of 512 from the row store to the device, rows/s",
            "9,000",
            "input",
            r"([\d,]+) rows/s",
        ),
        Measure(
            "base: seconds from the command to the first step, cold cache",
            "",
            "startup",
            r"cold cache: ([\d.]+)",
        ),
        Measure("the same, warm cache", "20", "startup", r"warm cache: ([\d.]+)"),
    ]
    return commands, measures


def run(name: str, command: list[str], folder: pathlib.Path, commit: str) -> str:
    """Runs a command, or reads its log if the same command succeeded before.

    Returns:
        The output of the command after a line with command, date and commit. Empty if the command
        fails; its output is then in NAME.failed.log.
    """
    log, shown = folder / f"{name}.log", said(command)
    if log.exists() and log.read_text().startswith(f"{shown}; "):
        return log.read_text()
    print(f"{name}: {shown}", flush=True)
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
    log.write_text(f"{shown}; {datetime.date.today()}, commit {commit}\n{done.stdout}")
    return log.read_text()


def said(command: list[str]) -> str:
    """Text of a command as one types it in the root of the repository."""
    return shlex.join(["benchmarks/" + command[0], *command[1:]]).replace(f"{ROOT}/", "")


def table(commands: dict[str, list[str]], measures: list[Measure], outputs: dict[str, str]) -> str:
    """Markdown table of the measures, followed by the command of each log."""
    rows = []
    for measure in measures:
        found = re.search(measure.pattern, outputs.get(measure.log, ""))
        log = measure.log if measure.log in commands else "needs PyTorch"
        rows.append(
            (measure.name, found[1].strip() if found else "not measured", measure.target, log)
        )
    printed = "\n".join(outputs.values())
    device = re.search(r"^device +(.*)", printed, re.MULTILINE)
    when = sorted(set(re.findall(r"; (\d{4}-\d\d-\d\d, commit \S+)$", printed, re.MULTILINE)))
    head = (
        f"{device[1] if device else platform.processor()}, {os.cpu_count()} cores; "
        f"{'; '.join(when)}"
    )
    listed = "\n".join(f"- {name}: `{said(command)}`" for name, command in commands.items())
    return f"{head}\n\n{tables.markdown(('measure', 'figure', 'target', 'log'), rows)}\n\n{listed}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
