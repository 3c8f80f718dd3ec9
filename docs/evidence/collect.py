r"""Collects what finished pretraining runs logged into one JSON file for draw.py.

    python docs/evidence/collect.py runs/muon-* runs/adamw-* --output=docs/evidence/recipe.json
    python docs/evidence/collect.py --ranks=report/ranks.json --output=docs/evidence/encoders.json

A run in FILE.json has its tokens, those of a step, the median seconds a step, the unigram
cross-entropy of the held-out targets, the held-out losses and effective ranks by step, and those
settings in which the runs of this call differ. With --scores, it also has what maelm_jax.finetune
scored from each of them. With --ranks, FILE.json has the ranks by layer of a report of
maelm_jax.analyze. With --add, the runs that FILE.json already has stay in it as they are.
"""

import argparse
import json
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from maelm_jax import gin_files, storage
from maelm_jax.finetuning import squad
from maelm_jax.training import metrics

OF_THE_MACHINE = ("Corpus.rows_dir", "Run.init_from")  # paths, which are left out of FILE.json


def main(argv: list[str]):
    """Runs the command with these arguments."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("workdirs", nargs="*", metavar="WORKDIR")
    flags.add_argument("--ranks", metavar="ranks.json")
    flags.add_argument(
        "--scores", nargs="*", default=[], metavar="table.json", help="fine-tuning of the runs"
    )
    flags.add_argument("--add", action="store_true", help="keep the runs of FILE.json")
    flags.add_argument("--output", required=True, metavar="FILE.json")
    args = flags.parse_args(argv)
    if bool(args.ranks) == bool(args.workdirs) or (args.ranks and args.scores):
        flags.error("give either WORKDIR ... [--scores ...] or --ranks")
    before = json.loads(pathlib.Path(args.output).read_text()) if args.add else {}
    if args.ranks:
        content = ranks_by_layer(json.loads(pathlib.Path(args.ranks).read_text()))
        content["runs"] = before.get("runs", []) + content["runs"]
    else:
        content = pretraining_runs([pathlib.Path(workdir) for workdir in args.workdirs])
        if args.scores:
            tables = [json.loads(pathlib.Path(path).read_text()) for path in args.scores]
            content = with_scores(content, tables)
        content = before | content
    storage.write(pathlib.Path(args.output), json.dumps(content, indent=1) + "\n")


def pretraining_runs(folders: list[pathlib.Path]) -> dict:
    """What each run logged, and its settings where they differ, by the name of the run."""
    settings = [settings_of(folder) for folder in folders]
    return {
        folder.name: {"settings": differing(own, settings)} | logged(folder)
        for folder, own in zip(folders, settings, strict=True)
    }


def with_scores(runs: dict, tables: list[dict]) -> dict:
    """Adds the scores of each encoder: {task: a score for each seed}, in percent.

    Of a task in several tables, the last one counts.
    """
    scores: dict[str, dict] = {}
    for table in tables:
        for label, reports in table["reports"].items():
            for task, report in reports.items():
                factor = 1 if task in squad.FILES else 100  # SQuAD's are in percent already
                of_seeds = [factor * score for score in report["cells"][0]["scores"]]
                scores.setdefault(label, {})[task] = of_seeds
    return {
        name: runs.get(name, {}) | {"scores": scores.get(name, {})} for name in {**runs, **scores}
    }


def ranks_by_layer(report: dict) -> dict:
    """The ranks of all layers, without [MASK] ("plain") and in masked input, of a report."""
    runs = []
    for run in report["runs"]:
        layers = [
            {"layer": layer["layer"]}
            | {kind: layer[kind].get("rank") for kind in ("plain", "real", "mask", "all")}
            for layer in run["layers"]
        ]
        width, tokens = run["model"]["width"], run["tokens"]
        runs.append({"name": run["name"], "width": width, "tokens": tokens, "layers": layers})
    return {"tau": report["tau"], "runs": runs}


def settings_of(folder: pathlib.Path) -> dict[str, str]:
    """The settings of a run as {name: value in gin's syntax}, without paths of the machine."""
    lines = (folder / "config.gin").read_text().splitlines()
    pairs = (line.split(" = ", 1) for line in lines if " = " in line)
    return {name: value for name, value in pairs if name not in OF_THE_MACHINE}


def differing(own: dict[str, str], of_all: list[dict[str, str]]) -> dict[str, str]:
    """Those of `own` that are not the same in all runs."""
    return {
        name: value
        for name, value in own.items()
        if any(other.get(name) != value for other in of_all)
    }


def logged(folder: pathlib.Path) -> dict:
    """What metrics.jsonl of a finished run holds, as lists of [step, ...]."""
    experiment = gin_files.load([str(folder / "config.gin")], [])
    lines = metrics.read(str(folder))
    steps = experiment.run.train_steps
    if not lines or lines[-1]["step"] < steps:
        sys.exit(f"error: {folder} has not finished its {steps} steps")
    tokens = experiment.run.batch_size * experiment.corpus.sequence_length
    evaluated = [line for line in lines if "eval_loss" in line]
    seconds = [line["step_seconds"] for line in lines if "step_seconds" in line]
    kinds = ("rank_plain_last", "rank_real_last", "rank_all_last")  # earlier runs lack the third
    ranks = [
        (line["step"], *(line[kind] for kind in kinds if kind in line))
        for line in lines
        if "rank_plain_last" in line
    ]
    return {
        "tokens": steps * tokens,
        "tokens_a_step": tokens,
        "seconds_a_step": statistics.median(seconds),
        "unigram": evaluated[-1]["unigram"],
        "losses": [(line["step"], line["eval_loss"]) for line in evaluated],
        "ranks": ranks,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
