r"""Pretrain encoders on the same tokens here and with Hugging Face transformers, on one GPU.

    python benchmarks/peers_on_gpu.py --text='data/train-*.txt' --heldout=data/valid.txt \
        --blimp='data/blimp/*.jsonl' --glue=data/glue --size=6x256 --minutes=3.6 \
        --output=runs/peers_gpu
    python benchmarks/peers_table.py --output=runs/peers_gpu

Arms, inputs and scores are those of against_peers.py, which says more. But a step has 128 rows, and
products are in bfloat16. Short runs choose the learning rates of the PyTorch arms. In these, each
arm gets the GPU alone for some seconds: that is what a step takes. Then every arm trains as many
steps as fit into --minutes of the GPU for all of them together. They share the GPU then, so their
own times do not count. Nor does the start (imports, compilation). The CPU computes the scores.
--arms, --seeds and --cores are not used.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import typing

import against_peers as peers
import numpy as np

ROWS = 128  # of a step
ARMS = ("bert", "modernbert", "mlm_modern", "mae_lm_modern")
RATES = {"bert": (5e-4, 1e-3, 2e-3), "modernbert": (1e-3, 2e-3, 4e-3)}
SHORT_STEPS = 400  # of a run that tries a learning rate
TURN_SECONDS = 3.0  # that a run has the GPU alone
LOG_EVERY = 20  # steps between lines of metrics.jsonl


class Run(typing.NamedTuple):
    """A training in a process of its own."""

    plan: peers.Plan
    process: subprocess.Popen

    @property
    def metrics(self) -> pathlib.Path:
        """The file that gets a line every LOG_EVERY steps."""
        return self.plan.folder / "metrics.jsonl"

    def wait(self):
        """Waits for the end of the training. Raises RuntimeError if it failed."""
        if self.process.wait():
            raise RuntimeError(f"{self.plan.folder.name} failed: see its .log")


def main():
    """Chooses learning rates, times a step of every arm, trains and scores."""
    args = peers.parse_flags()
    args.dtype = "bfloat16"
    peers.write_inputs(args)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the arms share the GPU
    tries = [(arm, rate) for arm in ARMS for rate in RATES.get(arm, (None,))]
    # Ours need no choice, but must not end within their turn.
    short = [start(args, arm, rate, SHORT_STEPS * (1 if rate else 10)) for arm, rate in tries]
    try:
        seconds = dict(zip(tries, take_turns(short), strict=True))
    except BaseException:
        for run in short:  # a stopped process would keep its memory of the GPU
            run.process.kill()
        raise
    losses = dict(zip(tries, map(final_loss, short), strict=True))
    chosen = [min((key for key in tries if key[0] == arm), key=losses.get) for arm in ARMS]
    total = sum(seconds[key] for key in chosen)
    steps = int(args.minutes * 60 / total) // peers.CHECKPOINTS * peers.CHECKPOINTS
    print(
        f"{steps} steps; seconds of a step: {seconds}; losses of short runs: {losses}", flush=True
    )
    save_every = steps // peers.CHECKPOINTS
    runs = [start(args, arm, rate, steps, save_every) for arm, rate in chosen]
    for run in runs:
        run.wait()
    os.environ["JAX_PLATFORMS"] = "cpu"
    cores = np.array_split(np.arange(os.cpu_count()), min(len(runs), os.cpu_count()))
    with concurrent.futures.ThreadPoolExecutor(len(cores)) as pool:
        jobs = [
            pool.submit(score, args, run, seconds[key], cores[number % len(cores)])
            for number, (run, key) in enumerate(zip(runs, chosen, strict=True))
        ]
        for job in jobs:
            job.result()


def start(
    args: argparse.Namespace, arm: str, rate: float | None, steps: int, save_every: int = 10**6
) -> Run:
    """Starts the training of an arm. `rate` is None for ours: the recipe's. Saving takes time."""
    choice = peers.Choice(ROWS, rate, peers.INITIALIZER_RANGES[0] if rate else None)
    folder = args.output / "runs" / f"{args.size}-{arm}-{rate}-{steps}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    plan = peers.Plan(arm, args.size, 0, choice, steps, save_every, folder, LOG_EVERY)
    command = [sys.executable, *peers.training_command(args, plan)]
    with folder.with_name(f"{folder.name}.log").open("w") as log:
        return Run(plan, subprocess.Popen(command, stdout=log, stderr=log, cwd=peers.ROOT))


def take_turns(runs: list[Run]) -> list[float]:
    """Gives the GPU to one run after the other. Returns the seconds of a step of each."""
    waiting = list(runs)
    while waiting:  # until all have compiled their step
        for run in list(waiting):
            if run.process.poll():
                run.wait()
            if run.metrics.exists() and run.metrics.stat().st_size:
                run.process.send_signal(signal.SIGSTOP)
                waiting.remove(run)
        time.sleep(0.01)
    seconds = []
    for run in runs:
        run.process.send_signal(signal.SIGCONT)
        points, end = [], time.monotonic() + TURN_SECONDS
        while time.monotonic() < end or len(points) < 6:
            if run.process.poll() is not None:
                raise RuntimeError(f"{run.plan.folder.name} ended within its turn")
            step = peers.last_step(run.metrics)
            if not points or step > points[-1][0]:
                points.append((step, time.monotonic()))
            time.sleep(0.002)
        run.process.send_signal(signal.SIGSTOP)
        points = points[2:]  # the first line may be older
        seconds.append((points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0]))
    for run in runs:
        run.process.send_signal(signal.SIGCONT)
    return seconds


def final_loss(run: Run) -> float:
    """Waits for a run. Returns PyTorch's loss on held-out rows (0 for ours: nothing is chosen)."""
    run.wait()
    peer = run.plan.folder / "peer.json"
    return json.loads(peer.read_text())["checked_loss"] if peer.exists() else 0.0


def score(args: argparse.Namespace, run: Run, step_seconds: float, cores: np.ndarray):
    """Scores a finished run and writes its JSON."""
    plan = run.plan
    scores = peers.score(args, plan.folder, ",".join(map(str, cores)))
    content = peers.describe(args, plan, peers.Cost(0.0, step_seconds), scores)
    file = args.output / f"{plan.size}-{plan.arm}-s{plan.seed}.json"
    peers.write_json(file, content | {"gpu": gpu_name()})


def gpu_name() -> str:
    """Returns the name of the GPU, as nvidia-smi prints it."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
