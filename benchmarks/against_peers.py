r"""Pretrain encoders for the same CPU time here and with Hugging Face transformers, and score them.

    python benchmarks/against_peers.py --text='data/train-*.txt' --heldout=data/valid.txt \
        --blimp='data/blimp/*.jsonl' --glue=data/glue --cores=0,1 --output=runs/peers
    python benchmarks/peers_table.py --output=runs/peers

The first command takes about 3 hours on two cores (Linux). It can be interrupted: the same call
goes on with what is missing. With --costs_only it only measures what a step takes, and prints that.
The second one draws a table and a figure of what is finished.

Arms (--arms):

bert          BertForMaskedLM in PyTorch, as run_mlm.py trains it
modernbert    ModernBertForMaskedLM in PyTorch, as its authors train it
mpnet         MPNetForMaskedLM in PyTorch, as BERT: relative positions, as in our MAE-LM
bert_recipe   BertForMaskedLM in PyTorch, with our mask rate, optimizer and schedule
modernbert_recipe  ModernBertForMaskedLM in PyTorch, with the same
modernbert_mask    as modernbert, but every selected token becomes [MASK]
modernbert_ours    as modernbert_recipe, with the attention of our layers: full, theta 10,000
mlm           our MLM with recipes/efficient.gin
mlm_modern    the same with ModernBERT's layers (recipes/modern_layers.gin)
mae_lm        our MAE-LM with recipes/efficient.gin
mae_lm_cheap  the same with the cheap decoder (ablations/decoder_masked_only.gin)
mae_lm_modern the same with ModernBERT's layers as well

peer_training.py trains the PyTorch arms, and says how. Ours are the command maelm_jax.train. All
arms read the same rows of 128 tokens in the same order, with the same vocabulary of 8,192 ids. The
learning rates, the batch sizes and the scale of the initial weights of the PyTorch arms are chosen
on the held-out text by short runs. Ours are those of the recipe.

Budget: CPU seconds of the training process and its children, pinned to one core. Imports and
compilation count, evaluation does not. First, the arms take turns in short runs. They give the
seconds before the first step (`startup`) and the seconds of a step. The fastest of the turns
counts, because other work on the machine only ever adds time. The number of steps follows from
them: (--minutes x 60 - startup) / seconds of a step. The CPU seconds that the run then took are
recorded too. On a quiet machine they are the same.

With --steps all arms take that many steps of 16 rows instead: the same tokens for all. CPU seconds
are recorded beside it. With --dtype=bfloat16 ours have Compute.dtype = "bfloat16", and PyTorch
computes under autocast.

Files in --output: inputs/ (rows, their order, tokenizer.json, held-out rows with their masks),
costs/ (a JSON a turn), choices/ (a JSON a short run), SIZE-ARM-sSEED.json (a JSON an arm), runs/
(the last checkpoint of each arm). What has a JSON is not run again. A run that was killed starts
over.
"""

import argparse
import collections.abc
import concurrent.futures
import datetime
import functools
import json
import math
import os
import pathlib
import platform
import queue
import shutil
import subprocess
import sys
import time
import typing

import numpy as np

if typing.TYPE_CHECKING:
    from maelm_jax.data import rows, vocabularies

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LENGTH = 128  # of a row
VOCABULARY_SIZE = 8192
HELDOUT_ROWS = 1024
HELDOUT_RATE = 0.15
CHECKPOINTS = 10  # of a run, at equal distances
OUR_BATCH_SIZE = 16
PEER_BATCH_SIZES = (8, 16)  # that a PyTorch arm tries
WARMUP_SHARE = 0.05  # of the steps, in every arm
LOG_EVERY = 5  # steps between lines of metrics.jsonl, at which CPU time is read
TURNS = 2  # short runs that measure the cost of an arm
TURN_SECONDS = 15.0  # CPU seconds of a turn after its first line
SHORT_RUN_SHARE = 1 / 7.5  # of the budget, for a run that tries a setting
INITIALIZER_RANGES = (0.02, 0.05)  # that are tried; the first is the default of transformers
# The layers and width of a size are those of its config.
CONFIGS = {
    "4x128": "miniature_cpu.gin",
    "6x256": "miniature.gin",
    "12x768": "benchmarks/shapes/base.gin",
}


class Arm(typing.NamedTuple):
    """What is compared."""

    flags: tuple[str, ...] = ()  # of maelm_jax.train
    rates: tuple[float, ...] = ()  # peak learning rates that a PyTorch arm tries, ascending

    @property
    def is_peer(self) -> bool:
        """Whether PyTorch trains it. Ours have the rate of the recipe."""
        return bool(self.rates)


CHEAP_DECODER = "--gin_file=ablations/decoder_masked_only.gin"
# The feed-forward block is as wide as that of the peer.
MODERN_LAYERS = (
    "--gin_file=recipes/modern_layers.gin",
    "--gin.Encoder.feed_forward={feed_forward}",
)
LOW_RATES, HIGH_RATES = (5e-4, 1e-3, 2e-3), (1e-3, 2e-3, 4e-3)
ARMS = {
    "bert": Arm(rates=LOW_RATES),
    "mpnet": Arm(rates=LOW_RATES),
    "modernbert": Arm(rates=HIGH_RATES),
    "bert_recipe": Arm(rates=HIGH_RATES),
    "modernbert_recipe": Arm(rates=HIGH_RATES),
    "modernbert_mask": Arm(rates=HIGH_RATES),
    "modernbert_ours": Arm(rates=HIGH_RATES),
    "mlm": Arm(("--gin_file=mlm.gin",)),
    "mlm_modern": Arm(("--gin_file=mlm.gin", *MODERN_LAYERS)),
    "mae_lm": Arm(),
    "mae_lm_cheap": Arm((CHEAP_DECODER,)),
    "mae_lm_modern": Arm((CHEAP_DECODER, *MODERN_LAYERS)),
}
# PyTorch allocates large tensors anew in each step. These options of glibc's allocator keep the
# memory, in huge pages: steps of BERT take 30% less time. Our command sets its own.
PEER_ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967295"
    ":glibc.malloc.trim_threshold=4294967295"
}
# Compilation counts, as PyTorch's does.
OUR_ENVIRONMENT = {"JAX_ENABLE_COMPILATION_CACHE": "false"}


class Choice(typing.NamedTuple):
    """The settings of an arm that are chosen by short runs. None: those of the recipe."""

    batch_size: int
    learning_rate: float | None = None  # peak
    initializer_range: float | None = None  # standard deviation of the initial weights

    @property
    def name(self) -> str:
        """Its name in choices/, where no setting is None."""
        return f"b{self.batch_size:g}-r{self.learning_rate:g}-i{self.initializer_range:g}"


class Plan(typing.NamedTuple):
    """One run of an arm."""

    arm: str
    size: str
    seed: int
    choice: Choice
    steps: int
    save_every: int
    folder: pathlib.Path
    log_every: int = LOG_EVERY


class Point(typing.NamedTuple):
    """CPU seconds of a process when it had done a number of steps."""

    step: int
    seconds: float


class Cost(typing.NamedTuple):
    """What an arm takes, in CPU seconds."""

    startup_seconds: float  # imports, compilation and all else before the first step
    step_seconds: float

    def steps(self, seconds: float) -> int:
        """Returns the steps that fit, rounded to a multiple of CHECKPOINTS, at least that."""
        steps = (seconds - self.startup_seconds) / self.step_seconds
        return max(round(steps / CHECKPOINTS), 1) * CHECKPOINTS


def main():
    """Runs what is missing."""
    args = parse_flags()
    write_inputs(args)
    variants = [(arm, size) for arm in args.arms for size in batch_sizes(args, arm)]
    for turn in range(TURNS):
        turns = [functools.partial(measure_cost, args, turn, *variant) for variant in variants]
        run_on_cores(args.cores, turns)
    print_costs(args, variants)
    if args.costs_only:
        return
    run_on_cores(args.cores, [functools.partial(choose, args, arm) for arm in args.arms])
    runs = [(arm, seed) for seed in args.seeds for arm in args.arms]
    run_on_cores(args.cores, [functools.partial(train_and_score, args, *run) for run in runs])


def batch_sizes(args: argparse.Namespace, arm: str) -> tuple[int, ...]:
    """Returns the rows a step that an arm tries. With --steps, all have the same rows."""
    if args.steps or not ARMS[arm].is_peer:
        return (OUR_BATCH_SIZE,)
    return PEER_BATCH_SIZES


def run_on_cores(cores: list[int], jobs: list[collections.abc.Callable[[int], typing.Any]]):
    """Calls each job with the number of a core that no other job uses meanwhile."""
    free = queue.Queue()
    for core in cores:
        free.put(core)

    def call(job):
        core = free.get()
        try:
            job(core)
        finally:
            free.put(core)

    with concurrent.futures.ThreadPoolExecutor(len(cores)) as pool:
        for future in concurrent.futures.as_completed([pool.submit(call, job) for job in jobs]):
            future.result()


# Inputs


def write_inputs(args: argparse.Namespace):
    """Writes the rows, their order, the vocabulary and the held-out rows with their masks.

    special.json is written last.
    """
    from maelm_jax import gin_files
    from maelm_jax.data import prepare, vocabulary_training
    from maelm_jax.encoders import families, tokenizer

    folder = args.output / "inputs"
    folder.mkdir(parents=True, exist_ok=True)
    names = ("text", "heldout", "minutes", "steps", "dtype")
    settings = {name: getattr(args, name) for name in names}
    record = folder / "settings.json"
    if record.exists() and json.loads(record.read_text()) != settings:
        sys.exit(f"{args.output} was begun with other settings ({record}): give another --output")
    write_json(record, settings)
    seeds = {0, *args.seeds}  # short runs have seed 0
    missing_seeds = [seed for seed in seeds if not order_file(folder, seed).exists()]
    if (folder / "special.json").exists() and not missing_seeds:
        return
    bindings = [f"{name}={value!r}" for name, value in corpus_settings(args).items()]
    experiment = gin_files.load([CONFIGS["4x128"]], bindings)
    vocabulary = vocabulary_training.vocabulary_for(experiment.vocabulary, experiment.corpus)
    (train,) = prepare.prepare(experiment.corpus, vocabulary).split("train").values()
    for seed in missing_seeds:
        write_order(order_file(folder, seed), train, seed)
    ids = train[np.arange(len(train))]
    np.save(folder / "rows.npy", ids.astype(np.uint16))
    tokenizer.write(folder, vocabulary, LENGTH, families.FAMILIES["bert"].pair)
    special = {
        "bos": vocabulary.bos,
        "pad": vocabulary.pad,
        "eos": vocabulary.eos,
        "unk": vocabulary.unk,
        "mask": vocabulary.mask,
        "size": vocabulary.size,
        "rows": len(ids),
        "tokens_per_row": float((ids != vocabulary.pad).mean() * LENGTH),
        **write_heldout(folder / "heldout.npz", args.heldout, vocabulary),
    }
    write_json(folder / "special.json", special)


def order_file(folder: pathlib.Path, seed: int) -> pathlib.Path:
    """Returns the file of the order of the rows."""
    return folder / f"order-{seed}.npy"


def write_order(file: pathlib.Path, train: "rows.Rows", seed: int):
    """Writes the numbers of the rows of 16 epochs, in the order of maelm_jax.train."""
    from maelm_jax.data import batches

    order = batches.Batches({"text": train}, {"text": 1.0}, 1, seed)
    np.save(file, order.locate(np.arange(16 * len(train))).row.astype(np.uint32))


def write_heldout(
    file: pathlib.Path, text: str, vocabulary: "vocabularies.Vocabulary"
) -> dict[str, int | float]:
    """Writes held-out rows and their masks. Returns their entries of special.json."""
    from maelm_jax import config
    from maelm_jax.data import packing, sources

    texts = sources.first_texts(config.Corpus(text_files=text), 10**9)
    heldout = packing.pack(texts, vocabulary, LENGTH).astype(np.int32)
    tokens = ~np.isin(heldout, vocabulary.special.never_masked)
    draw = np.random.default_rng(0)
    chosen = np.sort(draw.permutation(len(heldout))[:HELDOUT_ROWS])
    masked = draw_masks(draw, tokens[chosen])
    np.savez(file, ids=heldout[chosen], masked=masked)
    return {
        "heldout_masked": int(masked.sum()),
        "characters_per_token": sum(map(len, texts)) / int(tokens.sum()),
    }


def draw_masks(draw: np.random.Generator, tokens: np.ndarray) -> np.ndarray:
    """Draws HELDOUT_RATE of the tokens of each row.

    Args:
        draw: Source of random numbers.
        tokens: Which slots hold a token that may be masked, bool [rows, length].
    """
    noise = np.where(tokens, draw.random(tokens.shape), np.inf)
    rank = noise.argsort(axis=1).argsort(axis=1)
    counts = np.round(HELDOUT_RATE * tokens.sum(axis=1)).astype(int)
    return tokens & (rank < counts[:, None])


def corpus_settings(args: argparse.Namespace) -> dict[str, typing.Any]:
    """Returns the settings that decide vocabulary and rows."""
    return {
        "TEXT_FILES": args.text,
        "SEQUENCE_LENGTH": LENGTH,
        "Vocabulary.size": VOCABULARY_SIZE,
        "Corpus.heldout_fraction": 0.01,  # of every size: it decides the vocabulary's sample
        "Corpus.rows_dir": str(args.output.resolve() / "inputs" / "rows"),
    }


# Costs


def measure_cost(args: argparse.Namespace, turn: int, arm: str, batch_size: int, core: int):
    """Measures the cost of an arm in a short run."""
    name = f"{args.size}-{arm}-b{batch_size}"
    record = args.output / "costs" / f"{name}-turn{turn}.json"
    if record.exists():
        return
    choice = Choice(batch_size)
    if ARMS[arm].is_peer:
        choice = Choice(batch_size, ARMS[arm].rates[0], INITIALIZER_RANGES[0])
    folder = args.output / "runs" / f"cost-{name}"
    plan = Plan(arm, args.size, 0, choice, 10**6, 10**6, folder)
    points = measure(args, plan, core, most_seconds=TURN_SECONDS)
    shutil.rmtree(folder)
    # The first line is written when `first.step` steps are done, which are no start-up.
    first, last = points[0], points[-1]
    step = (last.seconds - first.seconds) / (last.step - first.step)
    write_json(record, Cost(first.seconds - first.step * step, step)._asdict())


def cost_of(args: argparse.Namespace, arm: str, batch_size: int) -> Cost:
    """Returns the cost of an arm in its fastest turn."""
    files = (args.output / "costs").glob(f"{args.size}-{arm}-b{batch_size}-turn*.json")
    costs = [Cost(**json.loads(file.read_text())) for file in files]
    return Cost(
        min(cost.startup_seconds for cost in costs), min(cost.step_seconds for cost in costs)
    )


def print_costs(args: argparse.Namespace, variants: list[tuple[str, int]]):
    """Prints the cost of each arm and batch size, and its speed beside that of the first one."""
    from maelm_jax import tables

    lines, speeds = [], []
    for arm, rows in variants:
        cost = cost_of(args, arm, rows)
        speeds.append(rows * LENGTH / cost.step_seconds)
        seconds = f"{cost.startup_seconds:.1f}", f"{cost.step_seconds:.3f}"
        lines.append((arm, rows, *seconds, f"{speeds[-1]:.0f}", f"{speeds[-1] / speeds[0]:.2f}"))
    header = ("arm", "rows", "startup, s", "step, s", "tokens/s", f"times {args.arms[0]}")
    print(f"{args.size}, CPU seconds of one core\n{tables.plain(header, lines)}", flush=True)


def measure(
    args: argparse.Namespace, plan: Plan, core: int, most_seconds: float = math.inf
) -> list[Point]:
    """Runs a training on a core and reads its CPU time at each line of its metrics.jsonl.

    Args:
        args: Flags.
        plan: What is trained, from the start.
        core: The core.
        most_seconds: CPU seconds after the first line, when the training is ended.

    Raises:
        RuntimeError: The training failed.
    """
    shutil.rmtree(plan.folder, ignore_errors=True)
    plan.folder.parent.mkdir(parents=True, exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    environment |= PEER_ENVIRONMENT if ARMS[plan.arm].is_peer else OUR_ENVIRONMENT
    command = ["taskset", "-c", str(core), sys.executable, *training_command(args, plan)]
    log = plan.folder.with_name(f"{plan.folder.name}.log")
    metrics, points, size = plan.folder / "metrics.jsonl", [], 0
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, env=environment)
        while process.poll() is None:
            seconds = cpu_seconds(process.pid)
            if metrics.exists() and metrics.stat().st_size > size:
                size = metrics.stat().st_size
                points.append(Point(last_step(metrics), seconds))
            if len(points) > 1 and seconds - points[0].seconds > most_seconds:
                process.kill()
                process.wait()
                return points
            time.sleep(0.05)
    if process.returncode or not points:
        raise RuntimeError(f"{plan.folder.name} failed: {log}")
    return points


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process and of its children that have ended."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system, of_children, system_of_children = fields[11:15]
    ticks = int(user) + int(system) + int(of_children) + int(system_of_children)
    return ticks / os.sysconf("SC_CLK_TCK")


def last_step(metrics: pathlib.Path) -> int:
    """Returns the step of the last whole line of a metrics.jsonl."""
    with metrics.open("rb") as file:
        file.seek(max(metrics.stat().st_size - 4096, 0))
        return json.loads(file.read().rpartition(b"\n")[0].rpartition(b"\n")[2])["step"]


def training_command(args: argparse.Namespace, plan: Plan) -> list[str]:
    """Returns the arguments of Python that train a run."""
    warmup = max(round(WARMUP_SHARE * plan.steps), 1)
    layers, width = plan.size.split("x")
    if ARMS[plan.arm].is_peer:
        return [
            str(ROOT / "benchmarks" / "peer_training.py"),
            f"--arm={plan.arm}",
            f"--inputs={args.output.resolve() / 'inputs'}",
            f"--output={plan.folder.resolve()}",
            f"--layers={layers}",
            f"--width={width}",
            f"--heads={max(4, int(width) // 64)}",  # as in the config
            f"--seed={plan.seed}",
            *(f"--{name}={value}" for name, value in plan.choice._asdict().items()),
            f"--steps={plan.steps}",
            f"--warmup={warmup}",
            f"--dtype={args.dtype}",
            f"--log_every={plan.log_every}",
            f"--save_every={plan.save_every}",
        ]
    settings = corpus_settings(args) | {
        "Compute.dtype": args.dtype,
        "TRAIN_STEPS": plan.steps,
        "BATCH_SIZE": plan.choice.batch_size,
        "SEED": plan.seed,
        "Dropout.hidden": 0.0,  # as the peers have; no config here has attention dropout
        "Optimizer.warmup_steps": warmup,
        "Run.log_every": plan.log_every,
        "Run.rank_every": 0,
        "Run.eval_every": 10**8,
        "Run.eval_rows": OUR_BATCH_SIZE,
        "Run.checkpoint_every": plan.save_every,
        "Run.keep_every": plan.save_every,
    }
    return [
        "-m",
        "maelm_jax.train",
        f"--gin_file={CONFIGS[plan.size]}",
        "--gin_file=recipes/efficient.gin",
        *(flag.format(feed_forward=8 * int(width) // 3 // 8 * 8) for flag in ARMS[plan.arm].flags),
        *(f"--gin.{name}={value}" for name, value in settings.items()),
        f"--workdir={plan.folder.resolve()}",
    ]


# Learning rates, batch sizes, initial weights


def choose(args: argparse.Namespace, arm: str, core: int) -> Choice:
    """Chooses the settings of a PyTorch arm by short runs. Ours has those of the recipe.

    First the batch size, at the middle rate, then the initial weights, then the rate. If the best
    rate is at an end, the next one beyond is tried as well, twice at most.
    """
    if not ARMS[arm].is_peer:
        return Choice(OUR_BATCH_SIZE)
    if args.peers_choice:
        return Choice(OUR_BATCH_SIZE, *args.peers_choice)

    def pick(choices: collections.abc.Iterable[Choice]) -> Choice:
        return min(choices, key=lambda choice: measure_loss(args, arm, choice, core))

    sizes, rates = batch_sizes(args, arm), list(ARMS[arm].rates)
    best = pick(Choice(size, rates[1], INITIALIZER_RANGES[0]) for size in sizes)
    best = pick(best._replace(initializer_range=std) for std in INITIALIZER_RANGES)
    for _ in range(3):
        best = pick(best._replace(learning_rate=rate) for rate in rates)
        if best.learning_rate == rates[0]:
            rates.insert(0, rates[0] / 2)
        elif best.learning_rate == rates[-1]:
            rates.append(rates[-1] * 2)
        else:
            break
    return best


def measure_loss(args: argparse.Namespace, arm: str, choice: Choice, core: int) -> float:
    """Returns the held-out loss of a short run, which is trained if that has not been done."""
    name = f"{args.size}-{arm}-{choice.name}"
    record = args.output / "choices" / f"{name}.json"
    if not record.exists():
        if args.steps:
            steps = round(args.steps * SHORT_RUN_SHARE)
        else:
            seconds = args.minutes * 60 * SHORT_RUN_SHARE
            steps = cost_of(args, arm, choice.batch_size).steps(seconds)
        folder = args.output / "runs" / f"choice-{name}"
        points = measure(args, Plan(arm, args.size, 0, choice, steps, 10**6, folder), core)
        loss = json.loads((folder / "peer.json").read_text())["checked_loss"]
        measured = {"steps": steps, "cpu_seconds": points[-1].seconds, "loss": loss}
        write_json(record, choice._asdict() | measured)
        shutil.rmtree(folder)
    return json.loads(record.read_text())["loss"]


# Runs


def train_and_score(args: argparse.Namespace, arm: str, seed: int, core: int):
    """Trains an arm for the budget, scores its checkpoints and writes the JSON of both."""
    name = f"{args.size}-{arm}-s{seed}"
    record, folder = args.output / f"{name}.json", args.output / "runs" / name
    if record.exists():
        return
    choice = choose(args, arm, core)  # from the short runs, which are finished
    cost = cost_of(args, arm, choice.batch_size)
    steps = args.steps or cost.steps(args.minutes * 60)
    plan = Plan(arm, args.size, seed, choice, steps, steps // CHECKPOINTS, folder)
    measured = folder.with_name(f"{name}-measured.json")
    if not measured.exists():
        print(f"{time.strftime('%H:%M')} {name}: {steps} steps", flush=True)
        points = measure(args, plan, core)
        write_json(measured, {"points": [points[0], *points[20::20], points[-1]]})  # every 20th
    scores = score(args, folder, core)
    points = json.loads(measured.read_text())["points"]
    content = describe(args, plan, cost, scores) | {
        "budget_seconds": None if args.steps else args.minutes * 60,
        "cpu_seconds": points[-1][1],
        "measured": points,
    }
    write_json(record, content)
    for step in (folder / "checkpoints").iterdir():
        if step.name != str(steps):
            shutil.rmtree(step)
    print(f"{time.strftime('%H:%M')} {name}: loss {content['curve'][-1]['loss']:.3f}", flush=True)


def describe(args: argparse.Namespace, plan: Plan, cost: Cost, scores: dict) -> dict:
    """Returns the JSON of a run. `scores` are those of `score`; its losses become a curve."""
    inputs = json.loads((args.output / "inputs" / "special.json").read_text())
    peer = plan.folder / "peer.json"
    curve = [
        {
            "step": int(step),
            "tokens": int(step) * plan.choice.batch_size * inputs["tokens_per_row"],
            "seconds": cost.startup_seconds + int(step) * cost.step_seconds,
            "loss": loss,
            "bits_per_character": loss / math.log(2) / inputs["characters_per_token"],
        }
        for step, loss in scores["losses"].items()
    ]
    return {
        "arm": plan.arm,
        "size": plan.size,
        "seed": plan.seed,
        **plan.choice._asdict(),
        "steps": plan.steps,
        **cost._asdict(),
        "curve": curve,
        **{name: value for name, value in scores.items() if name != "losses"},
        "peer": json.loads(peer.read_text()) if peer.exists() else None,
        "command": [part.replace(f"{ROOT}/", "") for part in training_command(args, plan)],
        "machine": machine(),
    }


def score(args: argparse.Namespace, folder: pathlib.Path, core: int) -> dict:
    """Returns what peer_scoring.py writes about a run."""
    output = folder.with_name(f"{folder.name}-scores.json")
    command = [
        "taskset",
        "-c",
        str(core),
        sys.executable,
        str(ROOT / "benchmarks" / "peer_scoring.py"),
        f"--run={folder}",
        f"--inputs={args.output / 'inputs'}",
        f"--output={output}",
        f"--blimp_pairs={args.blimp_pairs}",
        *([f"--blimp={args.blimp}"] if args.blimp else []),
        *([f"--glue={args.glue}"] if args.glue else []),
    ]
    with folder.with_name(f"{folder.name}-scores.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True)
    return json.loads(output.read_text())


def machine() -> dict[str, str]:
    """Returns what a figure is measured with."""
    cpu = [
        line.split(":", 1)[1].strip()
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "cpu": f"{len(cpu)} x {cpu[0] if cpu else platform.machine()}",
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }


def write_json(path: pathlib.Path, content: dict):
    """Writes JSON so that a file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def parse_flags() -> argparse.Namespace:
    """Returns the flags of the command line."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--text", required=True, help="glob of training text")
    flags.add_argument("--heldout", required=True, help="glob of held-out text")
    flags.add_argument("--blimp", help="glob of files of minimal pairs; default: not scored")
    flags.add_argument("--blimp_pairs", type=int, default=500, help="of each paradigm, at most")
    flags.add_argument("--glue", help="folder of SST-2, CoLA, MRPC, RTE, QQP, MNLI; default: none")
    flags.add_argument("--arms", default=",".join(ARMS), help="default: all")
    flags.add_argument("--seeds", default="0", help="default: 0")
    flags.add_argument("--size", choices=CONFIGS, default="4x128", help="layers x width")
    flags.add_argument("--minutes", type=float, default=30.0, help="CPU time of an arm")
    flags.add_argument("--steps", type=int, help="of every arm, instead of --minutes")
    flags.add_argument(
        "--peers_choice",
        type=float,
        nargs=2,
        metavar=("RATE", "SCALE"),
        help="learning rate and initial weights of the PyTorch arms; default: by short runs",
    )
    flags.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation"
    )
    flags.add_argument("--costs_only", action="store_true", help="measure steps, train nothing")
    flags.add_argument("--cores", default="0", help="cores, each for one arm at a time")
    flags.add_argument("--output", type=pathlib.Path, required=True, help="folder to write")
    args = flags.parse_args()
    args.arms = args.arms.split(",")
    if unknown := set(args.arms) - set(ARMS):
        flags.error(f"--arms: unknown {', '.join(sorted(unknown))}; there are {', '.join(ARMS)}")
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    args.cores = [int(core) for core in args.cores.split(",")]
    return args


if __name__ == "__main__":
    main()
