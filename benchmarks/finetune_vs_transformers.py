r"""Fine-tune a stock encoder with this project and with the Trainer of transformers, and compare.

Both start from the same weights and train on the same batches in the same order, with the same
hyper-parameters: AdamW (no decay of norms and biases), linear warm-up and decay, dropout 0.1, no
clipping. The dropout masks and the new classifier differ, so the comparison is between means over
seeds. Needs requirements-torch.txt.

    python benchmarks/finetune_vs_transformers.py --encoder=MiniLM --data_dir=glue_data \
        --tasks=mrpc,rte --seeds=5 --workdir=runs/against --output=against.json

The score of a run is that of its last evaluation: the best one would add the luck of the choice.
Finished runs in --workdir are not repeated. One that began with --seeds=1 takes no more seeds. The
table has, for each task, both means and the 95% interval of their difference (Welch's t test), in
percentage points. FILE.json has every score.

With --exact nothing differs: there is no dropout, and the Trainer begins with the classifier that
this project drew. The table compares the logits of the dev set after one epoch with seed 1.

With --seconds, both programs fine-tune on SST-2 for one epoch, in processes of their own and in
turns: this project with an empty cache of compiled programs, again with that cache, and the Trainer
with its own batches. The table has the median CPU and wall-clock seconds of the whole processes.
"""

import argparse
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import time
import typing

import numpy as np
import scipy.stats

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads of PyTorch must not spin

import transformers_trainer

from maelm_jax import cli, config, export, finetune, storage, tables
from maelm_jax.encoders.results import Results
from maelm_jax.finetuning import grid

OURS, THEIRS = "maelm_jax", "transformers"
CONFIDENCE = 0.95
WITHOUT_DROPOUT = ("Dropout.hidden=0.0", "Dropout.attention=0.0")


class Agreement(typing.NamedTuple):
    """What two trainings without randomness agree in. Logits are of the dev set."""

    steps: int
    difference: float  # largest, of a logit
    deviation: float  # standard deviation of the logits
    same_labels: float  # share of the examples, in percent


def main(argv: list[str]) -> int:
    """Runs the command with these arguments. Returns the exit status."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--encoder", required=True, help="stock folder of a BERT, RoBERTa, ...")
    flags.add_argument("--data_dir", required=True, help="folder of GLUE's folders")
    flags.add_argument("--tasks", default="sst2", metavar="TASK[,TASK...]")
    flags.add_argument("--workdir", required=True, help="finished and begun runs")
    flags.add_argument("--output", metavar="FILE.json", help="settings and scores")
    flags.add_argument("--seeds", type=int, default=5, help="number of seeds, from 1")
    flags.add_argument("--epochs", type=int, default=3)
    flags.add_argument("--batch_size", type=int, default=32)
    flags.add_argument("--learning_rate", type=float, default=5e-5)
    flags.add_argument("--examples", type=int, default=8000, help="most training examples")
    flags.add_argument("--length", type=int, default=128, help="longest input in tokens")
    flags.add_argument("--exact", action="store_true", help="compare logits instead of scores")
    flags.add_argument("--seconds", action="store_true", help="compare CPU seconds on SST-2")
    args = flags.parse_args(argv)
    if args.seconds:
        print(seconds_table(args))
        return 0
    if not args.output:
        raise config.ConfigError("give --output=FILE.json")
    if args.exact:
        args.epochs, args.seeds = 1, 1  # of several epochs, this project exports the best
    check_workdir(args)
    if args.exact:
        agreements = {name: agreement(args, name)._asdict() for name in args.tasks.split(",")}
        content = {"settings": settings_of(args), "agreements": agreements}
        storage.write(pathlib.Path(args.output), json.dumps(content, indent=1) + "\n")
        rows = [(name, *values.values()) for name, values in agreements.items()]
        print(tables.plain(("task", *Agreement._fields), rows))
        return 0
    scores: dict[str, dict[str, list[float]]] = {}
    for name in args.tasks.split(","):
        task = load(args, name)
        scores[name] = {
            OURS: run_ours(args, name),
            THEIRS: [run_theirs(args, task, seed) for seed in seeds_of(args)],
        }
        content = {"settings": settings_of(args), "scores": scores}
        storage.write(pathlib.Path(args.output), json.dumps(content, indent=1) + "\n")
    print(table(scores))
    return 0


def seeds_of(args: argparse.Namespace) -> tuple[int, ...]:
    """The seeds of the runs."""
    return tuple(range(1, args.seeds + 1))


def settings_of(args: argparse.Namespace) -> dict:
    """The settings of the comparison that do not depend on the machine."""
    machine = ("data_dir", "workdir", "output")
    return {name: value for name, value in vars(args).items() if name not in machine} | {
        "encoder": pathlib.Path(args.encoder).name
    }


def check_workdir(args: argparse.Namespace):
    """Raises ConfigError if the workdir has runs of other settings than these. More seeds may come.

    The runs there count as finished, and their settings stand nowhere else.
    """
    settings = {
        name: value for name, value in settings_of(args).items() if name not in ("seeds", "tasks")
    }
    path = pathlib.Path(args.workdir) / "settings.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and json.loads(path.read_text()) != settings:
        raise config.ConfigError(
            f"{args.workdir} has runs of other settings ({path}): give another --workdir"
        )
    storage.write(path, json.dumps(settings, indent=1) + "\n")


def bindings_of(args: argparse.Namespace) -> list[str]:
    """The settings that both programs train with, as gin text."""
    settings = {
        "DATA_DIR": args.data_dir,
        "EPOCHS": args.epochs,
        "LEARNING_RATE": args.learning_rate,
        "BATCH_SIZE": args.batch_size,
        "MAX_LENGTH": args.length,
        "TRAIN_EXAMPLES": args.examples,
        "Finetune.evaluations": 1,
        "Optimizer.decay_norms_and_biases": False,
    }
    return [f"{name}={value!r}" for name, value in settings.items()]


def load(args: argparse.Namespace, name: str) -> transformers_trainer.Task:
    """Settings and tokenised data of a task."""
    bindings = [*bindings_of(args), f"SEEDS={seeds_of(args)}"]
    (planned,) = grid.plan([args.encoder], [f"finetune/{name}.gin"], bindings)
    return transformers_trainer.Task(planned, grid.open_session(planned))


def run_ours(args: argparse.Namespace, name: str) -> list[float]:
    """Scores of this project, one a seed, in percent."""
    folder = pathlib.Path(args.workdir) / OURS / name
    finetuned(args, name, folder, [f"SEEDS={seeds_of(args)}"])
    results = map(Results.read, folder.rglob("results.json"))
    last = {result.seed: result.last[result.main_metric] for result in results}
    return [100 * last[seed] for seed in seeds_of(args)]


def finetuned(args: argparse.Namespace, name: str, folder: pathlib.Path, bindings: list[str]):
    """Fine-tunes with this project. `bindings` come after those of `bindings_of`."""
    status = finetune.main(
        [
            f"--gin_file=finetune/{name}.gin",
            f"--init_from={args.encoder}",
            f"--workdir={folder}",
            *(f"--gin.{binding}" for binding in (*bindings_of(args), *bindings)),
        ]
    )
    if status:
        raise SystemExit(status)


def run_theirs(args: argparse.Namespace, task: transformers_trainer.Task, seed: int) -> float:
    """The score of transformers' Trainer, in percent. A finished run is not repeated."""
    folder = pathlib.Path(args.workdir) / THEIRS / task.planned.task
    finished = folder / f"seed-{seed}.json"
    if finished.exists():
        return json.loads(finished.read_text())
    trainer = transformers_trainer.create(args.encoder, task, folder, seed)
    trainer.train()
    score = 100 * task.score(trainer.predict(task.dev_batches()).predictions)
    storage.write(finished, json.dumps(score))
    return score


def agreement(args: argparse.Namespace, name: str) -> Agreement:
    """Trains without dropout from the same classifier in both programs, with seed 1."""
    folder = pathlib.Path(args.workdir) / "exact" / name
    no_step = ["LEARNING_RATE=1e-30", f"TRAIN_EXAMPLES={args.batch_size}"]
    for part, bindings in (("start", no_step), ("end", [])):
        finetuned(args, name, folder / part, ["SEEDS=(1,)", *WITHOUT_DROPOUT, *bindings])
        (results,) = (folder / part).rglob("results.json")
        exported = f"{folder / part}-exported"
        shutil.rmtree(exported, ignore_errors=True)
        export.main([f"--workdir={results.parent}", f"--output={exported}", "--no-verify"])
    task = load(args, name)
    batches_of_dev = task.dev_batches()
    theirs = transformers_trainer.create(f"{folder}/start-exported", task, folder, 1, dropout=False)
    theirs.train()
    ours = transformers_trainer.create(f"{folder}/end-exported", task, folder, 1)
    logits = [program.predict(batches_of_dev).predictions for program in (ours, theirs)]
    labels = [values.argmax(axis=1) for values in logits]
    return Agreement(
        len(task.train_batches(1)),
        float(np.abs(logits[0] - logits[1]).max()),
        float(logits[0].std()),
        100 * float((labels[0] == labels[1]).mean()),
    )


def seconds_table(args: argparse.Namespace) -> str:
    """Runs both programs in turns, `--seeds` times each. Returns CPU and wall-clock seconds."""
    folder = pathlib.Path(args.workdir)
    cache = folder / "compiled"
    args.epochs = 1
    settings = [f"--gin.{binding}" for binding in bindings_of(args) if "evaluations" not in binding]
    start = ["--gin_file=finetune/sst2.gin", f"--init_from={args.encoder}"]
    ours = [sys.executable, "-m", "maelm_jax.finetune", *start, *settings]
    program = str(pathlib.Path(__file__).with_name("sst2_trainer.py"))
    values = (args.data_dir, args.examples, args.batch_size, args.learning_rate)
    theirs = [sys.executable, program, args.encoder, *map(str, values)]
    seconds: dict[str, list[tuple[float, float]]] = {}
    for turn in range(args.seeds):
        for used in (cache, folder / f"cold-{turn}", folder / f"warm-{turn}"):
            shutil.rmtree(used, ignore_errors=True)  # a finished run would not train again
        commands = {
            f"{OURS}, empty cache": [*ours, f"--workdir={folder}/cold-{turn}"],
            f"{OURS}, full cache": [*ours, f"--workdir={folder}/warm-{turn}"],
            THEIRS: theirs,
        }
        for name, command in commands.items():
            before, began = cpu_seconds(), time.perf_counter()
            environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
            for variable in ("GLIBC_TUNABLES", "OMP_WAIT_POLICY"):  # set for this process only
                environment.pop(variable, None)
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise config.RunError(f"{name} failed: {done.stderr[-500:]}")
            times = (cpu_seconds() - before, time.perf_counter() - began)
            seconds.setdefault(name, []).append(times)
    rows = [
        (name, *(f"{value:.0f}" for value in np.median(times, axis=0)))
        for name, times in seconds.items()
    ]
    return tables.plain(("program", "CPU seconds", "seconds"), rows)


def cpu_seconds() -> float:
    """CPU seconds of all processes that this one has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def table(scores: dict[str, dict[str, list[float]]]) -> str:
    """The means of each task and their difference, with the interval of Welch's t test."""
    rows = []
    for name, by_program in scores.items():
        ours, theirs = by_program[OURS], by_program[THEIRS]
        test = scipy.stats.ttest_ind(ours, theirs, equal_var=False)
        low, high = test.confidence_interval(CONFIDENCE)
        means = np.mean(ours), np.mean(theirs)
        rows.append(
            (
                name,
                *(f"{mean:.2f}" for mean in means),
                f"{means[0] - means[1]:+.2f}",
                f"{low:+.2f} to {high:+.2f}",
            )
        )
    return tables.plain(("task", OURS, THEIRS, "difference", f"{CONFIDENCE:.0%} interval"), rows)


if __name__ == "__main__":
    cli.run(main, trains=True)
