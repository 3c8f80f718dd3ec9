"""Kills train, prepare, finetune and export at random moments and compares their results with a run that was never killed.

    PYTHONPATH=. python tests/random_kills.py --kills=25 --workdir=/tmp/kills                all four commands, 25 kills each
    PYTHONPATH=. python tests/random_kills.py --kills=25 --workdir=/tmp/kills --only=train   one of them

A command is started, killed with SIGKILL after a random time, and started again by the same command line,
until it is done; then it begins anew, until the kills are spent. Every finished result must equal the
undisturbed one, byte for byte. It takes minutes, so the test suite leaves it out.
"""

import argparse
import collections.abc
import dataclasses
import json
import pathlib
import random
import shutil
import subprocess
import sys
import time

import numpy as np
from testing import ROOT, english, environment, metrics, training

from maelm_jax.training.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Case:
    """One command to be killed."""

    name: str
    argv: collections.abc.Callable[[pathlib.Path], list[str]]  # folder -> arguments
    result: collections.abc.Callable[[pathlib.Path], dict]  # folder -> what must be equal


def write_text(folder: pathlib.Path):
    """English that comes with Python, as a corpus and as a task of two classes."""
    folder.mkdir(parents=True, exist_ok=True)
    paragraphs = english()
    (folder / "topics.txt").write_text("\n\n".join(paragraphs))
    (folder / "large").mkdir(exist_ok=True)  # of several parts
    for number in range(5):
        (folder / "large" / f"{number}.txt").write_text("\n\n".join(paragraphs * 15))
    lines = ["text\tlong"]
    for paragraph in paragraphs:
        first = paragraph.split(". ")[0][:200]
        lines.append(f"{first}\t{'yes' if len(first) > 60 else 'no'}")
    (folder / "train.tsv").write_text("\n".join(lines) + "\n")
    (folder / "dev.tsv").write_text("\n".join(lines[:65]) + "\n")


def cases(text: pathlib.Path, pretrained: pathlib.Path) -> list[Case]:
    def train(folder):
        return ["train", *training(text, folder / "run", f"--gin.Corpus.rows_dir={folder / 'rows'}")]

    def prepare(folder):
        more = (f"--gin.TEXT_FILES={text}/large/*.txt", "--gin.Corpus.processes=2")
        return ["prepare", *training(text, folder / "run", f"--gin.Corpus.rows_dir={folder / 'rows'}", *more)]

    def finetune(folder):
        settings = {
            "TRAIN_FILE": text / "train.tsv",
            "DEV_FILE": text / "dev.tsv",
            "CustomTask.columns": "('text',)",
            "CustomTask.label": "long",
            "CustomTask.labels": "('no', 'yes')",
            "Finetune.max_length": 32,
            "EPOCHS": 4,
            "BATCH_SIZE": 16,
            "LEARNING_RATE": 1e-3,
            "Run.checkpoint_every": 5,
        }
        flags = [f"--gin.{name}={value}" for name, value in settings.items()]
        start = [f"--init_from={pretrained}", f"--workdir={folder / 'tuned'}"]
        return ["finetune", "--gin_file=finetune/own.gin", *start, *flags]

    def export(folder):
        shutil.rmtree(folder / "exported", ignore_errors=True)  # killed after it was written
        return ["export", f"--workdir={pretrained}", f"--output={folder / 'exported'}", "--no-verify"]

    return [
        Case("train", train, trained),
        Case("prepare", prepare, lambda folder: files_of(folder / "rows", ("*.model", "*.json", "*/store.json", "*/train/c/*/*"))),
        Case("finetune", finetune, tuned),
        Case("export", export, exported),
    ]


def files_of(folder: pathlib.Path, patterns: tuple[str, ...]) -> dict[str, bytes]:
    found = sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def parameters(workdir: pathlib.Path) -> dict[str, bytes]:
    """The newest checkpoint's parameters."""
    import jax

    from maelm_jax.training import checkpoint

    params = checkpoint.read_params(Workdir(workdir))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(keys): np.asarray(leaf).tobytes() for keys, leaf in leaves}


def trained(folder: pathlib.Path) -> dict:
    names = ("step", "loss", "accuracy", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")
    lines = [tuple(line.get(name) for name in names) for line in metrics(folder / "run")]
    return {"metrics": lines} | parameters(folder / "run")


def tuned(folder: pathlib.Path) -> dict:
    results = json.loads((folder / "tuned" / "results.json").read_text())
    scores = {name: results[name] for name in ("best", "last", "evaluations")}
    return scores | files_of(folder / "tuned", ("predictions*",)) | parameters(folder / "tuned")


def exported(folder: pathlib.Path) -> dict:
    return files_of(folder / "exported", ("*.safetensors", "*.json", "*.md"))


def run(case: Case, folder: pathlib.Path, kill_after: float | None = None) -> bool:
    """Runs the command; whether it came to its end. Raises RuntimeError when it fails by itself."""
    command, *arguments = case.argv(folder)
    line = [sys.executable, "-m", f"maelm_jax.{command}", *map(str, arguments)]
    with open(folder / "log.txt", "ab") as log:
        process = subprocess.Popen(line, cwd=ROOT, env=environment(), stdout=log, stderr=log)
        try:
            status = process.wait(kill_after)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return False
    if status:
        raise RuntimeError(f"{case.name} ended with status {status}: see {folder / 'log.txt'}")
    return True


def fresh(folder: pathlib.Path) -> pathlib.Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def kill(case: Case, folder: pathlib.Path, kills: int, chance: random.Random):
    """Spends `kills` kills on one command and prints a line on them."""
    expected_folder = fresh(folder / f"{case.name}-undisturbed")
    run(case, expected_folder)  # compiles: the next one is as quick as those that are killed
    expected = case.result(expected_folder)
    began = time.perf_counter()
    run(case, fresh(expected_folder))
    seconds = time.perf_counter() - began
    assert expected and case.result(expected_folder) == expected, f"{case.name} does not repeat itself"
    spent = finished = 0
    disturbed = folder / f"{case.name}-killed"
    while spent < kills:
        fresh(disturbed)
        while not run(case, disturbed, chance.uniform(0, 1.3 * seconds) if spent < kills else None):
            spent += 1
        found = case.result(disturbed)
        different = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
        if different:
            raise SystemExit(f"{case.name}: after {spent} kills these differ: {different[:5]} (in {disturbed})")
        finished += 1
    print(f"{case.name:<10}{spent:>4} kills in {finished:>3} runs of {seconds:.0f} s: every result is the same", flush=True)


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--kills", type=int, default=25, help="of each command")
    flags.add_argument("--workdir", type=pathlib.Path, required=True)
    flags.add_argument("--only", help="one of the commands")
    flags.add_argument("--seed", type=int, default=0, help="of the moments")
    args = flags.parse_args()
    folder = args.workdir.resolve()
    text, pretrained = folder / "text", folder / "pretrained"
    write_text(text)
    whole = Case("pretrained", lambda _: ["train", *training(text, pretrained)], dict)
    run(whole, folder)
    for case in cases(text, pretrained):
        if args.only in (None, case.name):
            kill(case, folder, args.kills, random.Random(f"{args.seed} {case.name}"))


if __name__ == "__main__":
    main()
