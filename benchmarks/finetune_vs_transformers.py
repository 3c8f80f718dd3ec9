r"""Fine-tune a stock encoder with this project and with the Trainer of transformers, and compare.

Both start from the same weights and train on the same token ids with the same hyper-parameters:
AdamW (no decay of norms and biases), linear warm-up and decay, dropout 0.1, no clipping. The order
of examples, the dropout masks and the new classifier differ, so the comparison is between means
over seeds. This project makes batches of examples of similar length, the Trainer of random ones.
Needs the extra [torch].

    python benchmarks/finetune_vs_transformers.py --encoder=MiniLM --data_dir=glue_data \
        --tasks=mrpc,rte --seeds=5 --workdir=runs/against --output=against.json

The score of a run is that of its last evaluation: the best one would add the luck of the choice.
Finished runs in --workdir are not repeated. The table has, for each task, both means and the 95%
interval of their difference (Welch's t test), in percentage points. FILE.json has every score.
"""

import argparse
import json
import os
import pathlib
import sys
import typing

import numpy as np
import scipy.stats

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads of PyTorch must not spin

from maelm_jax import cli, config, finetune, storage, tables
from maelm_jax.encoders import families
from maelm_jax.finetuning import experiments, predictor, task_data, tasks

OURS, THEIRS = "maelm_jax", "transformers"
CONFIDENCE = 0.95
EVALUATION_ROWS = 64


class Difference(typing.NamedTuple):
    """Difference of two means, and the ends of its interval."""

    mean: float
    low: float
    high: float


class Task(typing.NamedTuple):
    """A task as both programs get it."""

    experiment: config.Experiment
    data: task_data.TaskData


def main(argv: list[str]) -> int:
    """Runs the command with these arguments. Returns the exit status."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--encoder", required=True, help="stock folder of a BERT, RoBERTa, ...")
    flags.add_argument("--data_dir", required=True, help="folder of GLUE's folders")
    flags.add_argument("--tasks", required=True, metavar="TASK[,TASK...]")
    flags.add_argument("--workdir", required=True, help="finished and begun runs")
    flags.add_argument("--output", required=True, metavar="FILE.json", help="settings and scores")
    flags.add_argument("--seeds", type=int, default=5, help="number of seeds, from 1")
    flags.add_argument("--epochs", type=int, default=3)
    flags.add_argument("--learning_rate", type=float, default=5e-5)
    flags.add_argument("--examples", type=int, default=8000, help="most training examples")
    flags.add_argument("--length", type=int, default=128, help="longest input in tokens")
    args = flags.parse_args(argv)
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


def bindings_of(args: argparse.Namespace) -> list[str]:
    """The settings that both programs train with, as gin text."""
    settings = {
        "DATA_DIR": args.data_dir, "EPOCHS": args.epochs, "LEARNING_RATE": args.learning_rate,
        "MAX_LENGTH": args.length, "TRAIN_EXAMPLES": args.examples, "Finetune.evaluations": 1,
        "Optimizer.decay_norms_and_biases": False, "Run.rank_every": 0,
    }  # fmt: skip
    return [f"{name}={value!r}" for name, value in settings.items()]


def load(args: argparse.Namespace, name: str) -> Task:
    """Settings and tokenised data of a task."""
    gin_file = f"finetune/{name}.gin"
    planned = experiments.plan(args.encoder, [gin_file], bindings_of(args)).planned[0]
    experiment = planned.experiment
    data = tasks.load(
        name, experiment.finetune, experiment.corpus, planned.encoder.vocabulary,
        predictor.length_of(experiment), families.closest(experiment.model).pair,
    )  # fmt: skip
    return Task(experiment, data)


def run_ours(args: argparse.Namespace, name: str) -> list[float]:
    """Scores of this project, one a seed, in percent."""
    folder = pathlib.Path(args.workdir) / OURS / name
    bindings = [*bindings_of(args), f"SEEDS={seeds_of(args)}"]
    status = finetune.main([
        f"--gin_file=finetune/{name}.gin", f"--init_from={args.encoder}", f"--workdir={folder}",
        *(f"--gin.{binding}" for binding in bindings),
    ])  # fmt: skip
    if status:
        raise SystemExit(status)
    results = [json.loads(path.read_text()) for path in folder.rglob("results.json")]
    last = {result["seed"]: result["last"][result["main_metric"]] for result in results}
    return [100 * last[seed] for seed in seeds_of(args)]


def run_theirs(args: argparse.Namespace, task: Task, seed: int) -> float:
    """The score of transformers' Trainer, in percent. A finished run is not repeated."""
    folder = pathlib.Path(args.workdir) / THEIRS / task.data.name
    finished = folder / f"seed-{seed}.json"
    if finished.exists():
        return json.loads(finished.read_text())
    score = 100 * trained_score(args.encoder, task, folder, seed)
    storage.write(finished, json.dumps(score))
    return score


def trained_score(encoder: str, task: Task, folder: pathlib.Path, seed: int) -> float:
    """Trains with transformers' Trainer. Returns the main metric on the dev set."""
    import transformers

    grid, updates = task.experiment.finetune.grid, task.experiment.optimizer
    transformers.set_seed(seed)  # the new classifier is drawn before the Trainer sets its seed
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        encoder, num_labels=task.data.head.classes
    )
    steps = -(-len(task.data.train.ids) // grid.batch_size) * grid.epochs
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(folder), seed=seed, num_train_epochs=grid.epochs, learning_rate=grid.learning_rate,
            per_device_train_batch_size=grid.batch_size, warmup_steps=round(grid.warmup * steps),
            per_device_eval_batch_size=EVALUATION_ROWS, weight_decay=updates.weight_decay,
            adam_beta1=updates.b1, adam_beta2=updates.b2, adam_epsilon=updates.eps,
            max_grad_norm=0.0, save_strategy="no", report_to=[],
            remove_unused_columns=False,
        ),
        data_collator=Collator(task.experiment.model.token_types > 1),
        train_dataset=examples_of(task.data.train),
    )  # fmt: skip
    trainer.train()
    (dev,) = task.data.dev.values()
    logits = trainer.predict(examples_of(dev.features)).predictions
    return dev.score(np.asarray(logits, np.float32))[task.data.main]


def examples_of(features) -> list[dict]:
    """Examples as the Trainer takes them."""
    rows = zip(features.ids, features.context, features.targets, strict=True)
    return [
        {"ids": ids, "second": int(second), "labels": int(label)} for ids, second, label in rows
    ]


class Collator:
    """Pads a batch of examples to its longest. `has_types`: the encoder reads token types."""

    def __init__(self, has_types: bool):
        self.has_types = has_types

    def __call__(self, examples: list[dict]) -> dict:
        import torch

        length = max(len(example["ids"]) for example in examples)
        ids, mask, types = np.zeros((3, len(examples), length), np.int64)
        for row, example in enumerate(examples):
            count, second = len(example["ids"]), example["second"]
            ids[row, :count] = example["ids"]
            mask[row, :count] = 1
            if second:
                types[row, second:count] = 1
        arrays = {"input_ids": ids, "attention_mask": mask}
        if self.has_types:
            arrays["token_type_ids"] = types
        labels = torch.tensor([example["labels"] for example in examples])
        return {name: torch.from_numpy(array) for name, array in arrays.items()} | {
            "labels": labels
        }


def difference(ours: list[float], theirs: list[float]) -> Difference:
    """Difference of the means, ours minus theirs, with the interval of Welch's t test."""
    test = scipy.stats.ttest_ind(ours, theirs, equal_var=False)
    low, high = test.confidence_interval(CONFIDENCE)
    return Difference(float(np.mean(ours) - np.mean(theirs)), float(low), float(high))


def table(scores: dict[str, dict[str, list[float]]]) -> str:
    """The means and differences of each task as text."""
    rows = []
    for name, by_program in scores.items():
        ours, theirs = by_program[OURS], by_program[THEIRS]
        mean, low, high = difference(ours, theirs)
        rows.append((
            name, f"{np.mean(ours):.2f}", f"{np.mean(theirs):.2f}", f"{mean:+.2f}",
            f"{low:+.2f} to {high:+.2f}",
        ))  # fmt: skip
    return tables.plain(("task", OURS, THEIRS, "difference", f"{CONFIDENCE:.0%} interval"), rows)


if __name__ == "__main__":
    cli.run(main, trains=True)
