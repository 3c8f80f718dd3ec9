"""The stages of device_window.sh, each a command of its own. That script says what they are for.

    python benchmarks/device_window.py ceiling --output=OUT --work=WORK --seconds=40

OUT/results.json has an entry for each stage, written anew after each measurement. An entry is
`complete` when the stage has nothing left to do. What is measured is not measured again, so that a
stage that was stopped goes on. Arms (variants) take turns, twice, in one process. `median` is the
median of both turns, in seconds. A step is not waited for before the next one is started, as in
training. A `problem` says why an arm has no figure.

An encoder trains for ten passes over the text, or as many steps as fit into its --seconds by the
speed of 20 steps (`passes` says how many). It is exported in bfloat16 to OUT/NAME.tar.gz.part-*,
with the run's metrics and settings in `run`.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import typing

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from maelm_jax import config, gin_files

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Every file and name of a setting that the stages use.
ROWS = "BATCH_SIZE"
ROTARY = {
    "Encoder.positions": "rotary",
    "Encoder.relative_buckets": "none",
    "Init.relative_bias": "normal",
    "Decoder.relative_bias": False,
}
NO_DROPOUT = {"Dropout.attention": 0.0}
STEPS = {  # arm: gin files and settings
    "base, 32 rows": (("base.gin",), {ROWS: 32}),
    "base, 64 rows": (("base.gin",), {ROWS: 64}),
    "base, 128 rows": (("base.gin",), {ROWS: 128}),
    "base, 128 rows, no attention dropout": (("base.gin",), {ROWS: 128} | NO_DROPOUT),
    "base, 128 rows, no attention dropout, rotary": (
        ("base.gin",),
        {ROWS: 128} | NO_DROPOUT | ROTARY,
    ),
    "modern_base, 128 rows": (("modern_base.gin",), {ROWS: 128}),
    "base, 32 rows, no attention dropout": (("base.gin",), {ROWS: 32} | NO_DROPOUT),
}
ENCODERS = {"mae_lm": ("babylm.gin",), "mlm": ("babylm.gin", "mlm.gin")}
PEERS_HAVE_NONE = {"Dropout.hidden": 0.0}
TOY = {
    "SEQUENCE_LENGTH": 32,
    "Vocabulary.size": 400,
    "Encoder.layers": 1,
    "Encoder.width": 32,
    "Encoder.heads": 2,
    "Encoder.feed_forward": 64,
    "Encoder.max_positions": 32,
    "Compute.dtype": "float32",
}
TOY_ROWS = 4
TOY_STEPS = ("base, 32 rows", "modern_base, 128 rows")
TOY_TRAINING = {
    ROWS: 8,
    "Corpus.heldout_fraction": 0.1,
    "Optimizer.warmup_steps": 2,
    "Run.eval_rows": 16,
    "Run.checkpoint_every": 10,
}
TOY_TRAIN_STEPS = 20


def run_settings(args: argparse.Namespace, steps: int | None = None) -> dict[str, typing.Any]:
    """Returns the settings of an encoder beside those of its gin files."""
    settings = {"TEXT_FILES": args.text, "Corpus.rows_dir": str(args.work.resolve() / "rows")}
    if steps:
        settings["TRAIN_STEPS"] = steps
    return settings | (TOY | TOY_TRAINING if args.toy else {})


TURNS, TIMED_STEPS = 2, 10
TOY_TIMED_STEPS = 2
TOGETHER = 4  # programs of JAX that are compiled at the same time
LEAST_SECONDS = 15.0  # left, to begin with another arm
OUT_OF_TIME = "out of time"
PASSES = 10  # over the text, at most
LEAST_PASSES = 5  # an encoder that read less is of no use
SPEED_STEPS = 20
# Of an encoder's time: for its start without compilation, and for its export.
START_SECONDS, EXPORT_SECONDS = 30.0, 40.0
GRACE_SECONDS = 20.0  # to save a checkpoint
MARGIN = 0.9  # share of the remaining time that the steps may take
PART = "15m"  # size of a part of an encoder's archive
ATTENTION = (32, 12, 64)  # rows, heads, size of a head
ATTENTION_SLOTS = (440, 384, 512)
PEER_TOKENS = (65536, 16384)  # of a step
COMPILERS = (None, "reduce-overhead", "max-autotune-no-cudagraphs")  # modes of torch.compile

GIN_LOCK = threading.Lock()
Start = typing.Callable[[], typing.Callable[[], typing.Any]]  # a step; returns what waits for it


class Arm(typing.NamedTuple):
    """A step that can be timed."""

    start: Start
    work: dict[str, float]  # of a step: tokens, flops, bytes
    facts: dict[str, typing.Any] = {}  # noqa: RUF012  # of no step: memory


def main():
    """Runs the stage that the command line names."""
    args = parse_flags()
    if args.stage == "peers":  # PyTorch needs memory, too
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # PyTorch's step may be compiled by all cores, and only once (peer_training.py sets otherwise).
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(os.cpu_count()))
    os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "0")
    if args.stage == "is_complete":
        sys.exit(not read_results(args.output).get(args.of, {}).get("complete"))
    began = time.monotonic()
    args.end = began + args.seconds
    if args.stage == "prepare":
        sys.exit(subprocess.run(command_of(args, "prepare", "mae_lm"), cwd=ROOT).returncode)
    if args.stage == "speed":
        measure_speed(args)
    elif args.stage in ENCODERS:
        train_encoder(args, args.stage)
    else:
        measure_arms(args, args.stage, *ARMS[args.stage](args))
    print(f"{args.stage}: {time.monotonic() - began:.0f} s", flush=True)
    sys.stdout.flush()
    os._exit(0)  # a program that is still being compiled would be waited for


# Arms


def measure_arms(args: argparse.Namespace, stage: str, arms: dict, together: int):
    """Measures the arms that have no figure yet, in turns.

    Args:
        args: Flags.
        stage: Name of the entry.
        arms: {name: function that makes the Arm, and compiles it}.
        together: How many are compiled at the same time, before they take their turns.
    """
    entry = read_results(args.output).get(stage, {})
    record = entry.setdefault("arms", {})
    missing = [name for name in arms if "median" not in record.get(name, {})]
    for name in missing:
        record[name] = {"problem": OUT_OF_TIME}
    ready: dict[str, Arm] = {}
    for first in range(0, len(missing), together):
        group = make(args, {name: arms[name] for name in missing[first : first + together]}, record)
        ready |= group
        take_turn(args, stage, entry, group)
    for _ in range(TURNS - 1):
        take_turn(args, stage, entry, ready)
    entry["complete"] = all(one.get("problem") != OUT_OF_TIME for one in record.values())
    write_result(args.output, stage, entry)


def make(args: argparse.Namespace, makers: dict, record: dict) -> dict[str, Arm]:
    """Makes arms at the same time. Returns those that can be measured."""
    if args.end - time.monotonic() < LEAST_SECONDS:
        return {}
    ready = {}
    pool = concurrent.futures.ThreadPoolExecutor(len(makers))
    began = time.monotonic()
    jobs = {name: pool.submit(maker) for name, maker in makers.items()}
    for name, job in jobs.items():
        try:
            ready[name] = job.result(timeout=max(args.end - time.monotonic(), 0.0))
            record[name] = {"ready_after_seconds": round(time.monotonic() - began, 1)}
        except TimeoutError:
            pass  # recorded already
        except Exception as error:  # as out of memory: the other figures still count
            record[name] = {"problem": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    return ready


def take_turn(args: argparse.Namespace, stage: str, entry: dict, arms: dict[str, Arm]):
    """Times each arm once and writes the results."""
    from maelm_jax.training import flops

    for name, arm in arms.items():
        record = entry["arms"][name]
        if time.monotonic() > args.end and "median" in record:
            continue  # its second turn
        try:
            seconds = time_steps(arm.start, TOY_TIMED_STEPS if args.toy else TIMED_STEPS)
        except Exception as error:
            record["problem"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            continue
        record.setdefault("seconds", []).append([round(one, 7) for one in seconds])
        median = statistics.median(itertools.chain(*record["seconds"]))
        record |= arm.facts | {"median": median, "device": device()["device"]}
        record |= {f"{unit}_per_second": amount / median for unit, amount in arm.work.items()}
        if "flops" in arm.work and (peak := flops.peak_flops()):
            record["mfu"] = record["flops_per_second"] / peak
        entry["arms"][name] = record
        write_result(args.output, stage, entry | {"complete": False})
    if not arms:
        write_result(args.output, stage, entry | {"complete": False})


def time_steps(start: Start, steps: int) -> list[float]:
    """Returns the seconds between the ends of steps. A step runs while the next one is started."""
    for _ in range(2):
        start()()
    running, last, seconds = start(), None, []
    for _ in range(steps + 1):
        following = start()
        running()
        now = time.perf_counter()
        if last is not None:
            seconds.append(now - last)
        running, last = following, now
    running()
    return seconds


def jax_arm(function: typing.Callable, work: dict[str, float]) -> Arm:
    """The arm of a function without arguments. It is compiled here."""
    import jax

    def start():
        result = function()
        return lambda: jax.block_until_ready(result)

    start()()
    return Arm(start, work)


def ceiling_arms(args: argparse.Namespace) -> tuple[dict, int]:
    """The largest rates that this device reaches: a product and a copy."""
    import jax
    import jax.numpy as jnp

    size = 256 if args.toy else 8192
    numbers = 2**16 if args.toy else 2**30

    def product() -> Arm:
        left, right = (
            jax.random.normal(jax.random.key(seed), (size, size)).astype(jnp.bfloat16)
            for seed in range(2)
        )
        multiply = jax.jit(jnp.matmul)
        return jax_arm(lambda: multiply(left, right), {"flops": 2.0 * size**3})

    def copy() -> Arm:
        source = jnp.ones(numbers, jnp.float32)
        move = jax.jit(lambda values: values + 1.0)
        return jax_arm(lambda: move(source), {"bytes": 8.0 * numbers})

    return {"bfloat16 product": product, "copy": copy}, 1


def attention_arms(args: argparse.Namespace) -> tuple[dict, int]:
    """Attention alone, forward and backward, of our backends and of libraries."""
    import accelerator
    import jax.numpy as jnp

    rows, heads, head_size = (2, 2, 16) if args.toy else ATTENTION
    xla = functools.partial(accelerator.our_states, "xla")
    cudnn = functools.partial(accelerator.our_states, "cudnn")
    variants = {
        "xla, bias and segments": ("bias, segments", xla),
        "cudnn, bias and segments": ("bias, segments", cudnn),
        "cudnn, segments": ("segments", cudnn),
        "cudnn, boolean mask": ("segments", cudnn_boolean_states),
        "cudnn, nothing": ("", cudnn),
        "xla, segments": ("segments", xla),
        "tokamax, bias and segments": ("bias, segments", tokamax_states),
        "tokamax, segments": ("segments", tokamax_states),
        "FlashAttention, packed": ("segments", packed_flash_states),
    }

    def arm(slots: int, case: str, make_states: typing.Callable) -> Arm:
        shape = accelerator.Shape(rows, slots, heads, head_size)
        inputs = accelerator.make_inputs(case, shape, jnp.bfloat16)
        function = accelerator.differentiated(make_states(inputs, shape), inputs)
        # Two products in the forward pass and five in the backward pass.
        return jax_arm(function, {"flops": 14.0 * rows * heads * head_size * slots**2})

    return {
        f"{slots} slots: {name}": functools.partial(arm, slots, *variant)
        for slots in ((16,) if args.toy else ATTENTION_SLOTS)
        for name, variant in variants.items()
    }, TOGETHER


def cudnn_boolean_states(inputs, shape) -> typing.Callable:
    """Attention of cuDNN, of segments that are given as a boolean mask."""
    import jax

    def states(q, k, v, bias):
        heads = (by_head(x, shape) for x in (q, k, v))
        mask = boolean_mask(inputs)
        result = jax.nn.dot_product_attention(*heads, mask=mask, implementation="cudnn")
        return result.reshape(q.shape)

    return states


def tokamax_states(inputs, shape) -> typing.Callable:
    """Attention of the library tokamax, by its kernel for Hopper."""
    import tokamax

    def states(q, k, v, bias):
        heads = (by_head(x, shape) for x in (q, k, v))
        mask = boolean_mask(inputs)
        result = tokamax.dot_product_attention(*heads, bias, mask, implementation="mosaic")
        return result.reshape(q.shape)

    return states


def packed_flash_states(inputs, shape) -> typing.Callable:
    """FlashAttention (dew-flash-attn) of the two segments of each row, as packed sequences."""
    import dew_flash_attn
    import jax.numpy as jnp

    half = shape.slots // 2
    offsets = jnp.arange(2 * shape.rows + 1, dtype=jnp.int32) * half

    def states(q, k, v, bias):
        packed = (x.reshape(-1, shape.heads, shape.head_size) for x in (q, k, v))
        return dew_flash_attn.flash_mha_varlen(*packed, offsets, half).reshape(q.shape)

    return states


def by_head(x, shape):
    """Splits the heads, which are side by side."""
    return x.reshape(*x.shape[:2], shape.heads, shape.head_size)


def boolean_mask(inputs):
    """Which slots are of one segment, bool [rows, 1, slots, slots]."""
    return inputs.segments[:, None, :, None] == inputs.segments[:, None, None, :]


def step_arms(args: argparse.Namespace) -> tuple[dict, int]:
    """The training step of base by rows, and of its variants."""

    def arm(files: tuple[str, ...], settings: dict) -> Arm:
        toy = TOY | {ROWS: TOY_ROWS} if args.toy else {}
        return our_arm(load(files, settings | toy))

    names = TOY_STEPS if args.toy else STEPS
    return {name: functools.partial(arm, *STEPS[name]) for name in names}, TOGETHER


def load(files: typing.Sequence[str], settings: dict) -> config.Experiment:
    """Loads gin files with settings. Gin has one state for all threads."""
    with GIN_LOCK:
        return gin_files.load(files, [f"{name}={value!r}" for name, value in settings.items()])


def our_arm(experiment: config.Experiment) -> Arm:
    """Our training step. It keeps its state."""
    import jax
    import training_setup

    from maelm_jax.training import flops

    setup = training_setup.set_up(experiment)
    program = setup.train_step.lower(setup.state, setup.batch, setup.learning_rate).compile()
    memory = program.memory_analysis()
    state = setup.state

    def start():
        nonlocal state
        state, metrics = program(state, setup.batch, setup.learning_rate)
        return lambda: jax.block_until_ready(metrics)

    work = {
        "tokens": experiment.run.batch_size * experiment.corpus.sequence_length,
        "flops": sum(flops.flops_terms(experiment, experiment.vocabulary.size).values()),
    }
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return Arm(start, work, {"memory_bytes": used})


def peer_arms(args: argparse.Namespace) -> tuple[dict, int]:
    """Our encoders' steps and those of two models of transformers of the same size."""

    def experiment_of(name: str, tokens: int) -> config.Experiment:
        rows = tokens // load(ENCODERS[name], {}).corpus.sequence_length
        toy = TOY | {ROWS: TOY_ROWS} if args.toy else {}
        return load(ENCODERS[name], {ROWS: rows} | PEERS_HAVE_NONE | toy)

    def ours(name: str, tokens: int) -> Arm:
        return our_arm(experiment_of(name, tokens))

    def hidden(mode: str | None, tokens: int) -> Arm:
        return hidden_arm(experiment_of("mae_lm", tokens), mode)

    def modernbert(mode: str | None, tokens: int) -> Arm:
        return modernbert_arm(experiment_of("mlm", tokens), mode)

    variants = {f"ours, {name}": functools.partial(ours, name) for name in ENCODERS}
    for mode in COMPILERS[:1] if args.toy else COMPILERS:
        compiler = f"torch.compile, {mode or 'default'}"
        variants |= {
            f"RobertaModel that hides masked positions, {compiler}": functools.partial(
                hidden, mode
            ),
            f"ModernBertForMaskedLM, {compiler}": functools.partial(modernbert, mode),
        }
    return {
        f"{tokens} tokens: {name}": functools.partial(make_arm, tokens=tokens)
        for tokens in (PEER_TOKENS[-1:] if args.toy else PEER_TOKENS)
        for name, make_arm in variants.items()
    }, 1


def hidden_arm(experiment: config.Experiment, mode: str | None) -> Arm:
    """MAE-LM as a user of transformers would write it (torch_models.Hidden)."""
    import against_torch
    import torch
    import torch_models
    import training_setup

    device = "cuda" if torch.cuda.is_available() else "cpu"
    setup = training_setup.set_up(experiment)
    masked = against_torch.draw_masks(experiment, setup, against_torch.PATTERNS)
    patterns = [against_torch.as_tensors(inputs, device) for inputs in masked]
    # Its feed-forward block has two matrices, ours with a gate three: as many parameters.
    own = experiment.encoder
    wide = own.feed_forward * own.feed_forward_kernels // 2
    plain = dataclasses.replace(own, feed_forward=wide, feed_forward_gate=False)
    model = dataclasses.replace(experiment.model, encoder=plain)
    size, length = experiment.vocabulary.size, experiment.corpus.sequence_length
    module = torch_models.Hidden(model, size, length, setup.special).to(device)
    start = against_torch.torch_step(module, patterns, experiment, device, mode)
    start()()  # compiles it
    return Arm(start, {"tokens": experiment.run.batch_size * length})


def modernbert_arm(experiment: config.Experiment, mode: str | None) -> Arm:
    """ModernBertForMaskedLM as peer_training.py trains it. Its masks are drawn on the device."""
    import against_torch
    import peer_training
    import torch
    import training_setup

    own, arm = experiment.encoder, "modernbert"
    setup = training_setup.set_up(experiment)
    names = ("bos", "pad", "eos", "unk", "mask")
    special = {name: getattr(setup.special, name) for name in names}
    special["size"] = experiment.vocabulary.size
    flags = argparse.Namespace(
        arm=arm,
        layers=own.layers,
        width=own.width,
        heads=own.heads,
        initializer_range=0.02,
        learning_rate=1e-3,
    )
    ids = torch.from_numpy(setup.ids).long().to(peer_training.DEVICE)
    attention_mask = torch.ones_like(ids)
    module = peer_training.make_model(flags, special, ids.shape[1]).to(peer_training.DEVICE)
    module.train()
    on_gpu = peer_training.DEVICE == "cuda"
    forward = torch.compile(module, mode=mode, dynamic=False) if on_gpu else module
    optimizers = peer_training.make_optimizers(flags, module)

    def start():
        inputs, labels = peer_training.mask_tokens(ids, arm, special)
        with torch.autocast(peer_training.DEVICE, torch.bfloat16, enabled=on_gpu):
            loss = forward(input_ids=inputs, attention_mask=attention_mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return against_torch.end_of_step(peer_training.DEVICE)

    start()()  # compiles it
    return Arm(start, {"tokens": ids.numel()})


ARMS = {
    "ceiling": ceiling_arms,
    "attention": attention_arms,
    "steps": step_arms,
    "peers": peer_arms,
}


# Encoders


def measure_speed(args: argparse.Namespace):
    """Writes WORK/speed-NAME.json: the rows of the text, and the seconds of a training step."""
    from maelm_jax.data import prepare, vocabulary_training

    experiment = load(ENCODERS[args.of], run_settings(args))
    vocabulary = vocabulary_training.vocabulary_for(experiment.vocabulary, experiment.corpus)
    stores = prepare.prepare(experiment.corpus, vocabulary).split("train").values()
    rows = sum(len(store) for store in stores)
    began = time.monotonic()
    arm = our_arm(experiment)
    compile_seconds = time.monotonic() - began
    seconds = time_steps(arm.start, TOY_TIMED_STEPS if args.toy else SPEED_STEPS)
    content = {
        "rows": rows,
        "steps_a_pass": rows / experiment.run.batch_size,
        "compile_seconds": compile_seconds,
        "step_seconds": statistics.median(seconds),
        "tokens_per_second": arm.work["tokens"] / statistics.median(seconds),
        "flops": arm.work["flops"],
    }
    write_json(args.work / f"speed-{args.of}.json", content)


def train_encoder(args: argparse.Namespace, name: str):
    """Trains, exports and packs an encoder. What was stopped on this machine goes on."""
    speed_file, workdir = args.work / f"speed-{name}.json", args.work / name
    begun = args.work / f"steps-{name}.json"
    if not begun.exists():
        run_until(args.end, [*this_script(args, "speed"), f"--of={name}"])
    speed = json.loads(speed_file.read_text())
    steps = json.loads(begun.read_text()) if begun.exists() else choose_steps(args, name, speed)
    entry = speed | device() | {"steps": steps, "passes": steps / speed["steps_a_pass"]}
    if not steps:
        write_result(args.output, name, entry | {"problem": OUT_OF_TIME, "complete": False})
        return
    write_json(begun, steps)
    began = time.monotonic()
    status = run_until(args.end - EXPORT_SECONDS, command_of(args, "train", name, steps))
    written = (workdir / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in written if line.endswith("}")]
    trained = max((line["checkpoint"] for line in lines if line.get("checkpoint")), default=0)
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    entry |= {
        "status": status,
        "trained_steps": trained,
        "train_seconds": time.monotonic() - began,
        "eval_loss": losses[-1] if losses else None,
    }
    write_result(args.output, name, entry | {"complete": False})
    if trained:
        entry |= pack(args, name)
        write_result(args.output, name, entry | {"complete": trained == steps})


def choose_steps(args: argparse.Namespace, name: str, speed: dict) -> int:
    """Returns how many steps an encoder trains, 0 if it is not worth it to begin.

    The second encoder trains as many steps as the first one, so that the two compare.
    """
    seconds = args.end - time.monotonic() - START_SECONDS - EXPORT_SECONDS
    seconds -= speed["compile_seconds"]  # the cache may not have this very program
    fitting = int(MARGIN * seconds / speed["step_seconds"])
    results = read_results(args.output)
    others = [results[other] for other in ENCODERS if other != name and other in results]
    twins = [other["steps"] for other in others if other["complete"]]
    if twins:
        return twins[0] if fitting >= twins[0] else 0
    if args.toy:
        return TOY_TRAIN_STEPS
    steps = min(round(PASSES * speed["steps_a_pass"]), fitting)
    return steps if steps >= LEAST_PASSES * speed["steps_a_pass"] else 0


def pack(args: argparse.Namespace, name: str) -> dict:
    """Exports an encoder and splits the archive of it into OUT/NAME.tar.gz.part-*."""
    exported, workdir = args.work / f"{name}-exported", args.work / name
    shutil.rmtree(exported, ignore_errors=True)
    command = [sys.executable, "-m", "maelm_jax.export", f"--workdir={workdir}"]
    command += [f"--output={exported}", "--dtype=bfloat16", "--no-verify"]
    subprocess.run(command, cwd=ROOT, check=True)
    records = exported / "run"  # config.gin beside config.json would make the folder a workdir
    records.mkdir()
    for file in ("metrics.jsonl", "config.gin", "environment.txt"):
        shutil.copy(workdir / file, records)
    archive = args.work / f"{name}.tar.gz"
    tar = ["tar", "--create", "--use-compress-program=gzip -1", f"--file={archive}"]
    subprocess.run([*tar, f"--directory={exported}", "."], check=True)
    for part in args.output.glob(f"{archive.name}.part-*"):
        part.unlink()
    prefix = args.output / f"{archive.name}.part-"
    subprocess.run(["split", f"--bytes={PART}", str(archive), str(prefix)], check=True)
    return {
        "archive_sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "archive_bytes": archive.stat().st_size,
        "parts": sorted(part.name for part in args.output.glob(f"{prefix.name}*")),
    }


def run_until(end: float, command: list[str]) -> int:
    """Runs a command. At `end` it gets SIGTERM, and SIGKILL if it does not stop then."""
    process = subprocess.Popen(command, cwd=ROOT)
    # `timeout` sends SIGTERM to both. The command saves its state, and this process exports it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        return process.wait(timeout=max(end - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        return process.wait(timeout=GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def command_of(
    args: argparse.Namespace, command: str, name: str, steps: int | None = None
) -> list[str]:
    """Returns the command line of `maelm_jax.COMMAND` for an encoder."""
    return [
        *(sys.executable, "-m", f"maelm_jax.{command}"),
        *(f"--gin_file={file}" for file in ENCODERS[name]),
        *(f"--gin.{key}={value}" for key, value in run_settings(args, steps).items()),
        *([f"--workdir={args.work / name}"] if command == "train" else []),
    ]


# Results


def this_script(args: argparse.Namespace, stage: str) -> list[str]:
    """Returns the command line of another stage with the same flags."""
    flags = [f"--output={args.output}", f"--work={args.work}", f"--text={args.text}"]
    toy = ["--toy"] if args.toy else []
    seconds = f"--seconds={args.end - time.monotonic()}"
    return [sys.executable, str(pathlib.Path(__file__).resolve()), stage, *flags, *toy, seconds]


def read_results(folder: pathlib.Path) -> dict:
    """Returns {stage: entry} of what was measured so far."""
    path = folder / "results.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_result(folder: pathlib.Path, stage: str, entry: dict):
    """Replaces the entry of a stage."""
    write_json(folder / "results.json", read_results(folder) | {stage: entry})


def write_json(path: pathlib.Path, content: typing.Any):
    """Writes JSON so that a file is whole or not there."""
    import against_peers

    against_peers.write_json(path, content)


@functools.cache
def device() -> dict[str, str]:
    """Returns what figures are measured with."""
    versions = {}
    for package in ("jax", "torch", "transformers", "flax", "optax"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "-"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(command, capture_output=True, text=True).stdout.split("\n")
    except OSError:
        names = [""]
    return {"device": names[0] or "CPU", "date": time.strftime("%Y-%m-%d"), "versions": versions}


def parse_flags() -> argparse.Namespace:
    """Returns the flags of the command line."""
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages = (*ARMS, *ENCODERS, "prepare", "speed", "is_complete")
    flags.add_argument("stage", choices=stages)
    flags.add_argument("--of", choices=(*ARMS, *ENCODERS), help="of speed and is_complete")
    flags.add_argument("--output", type=pathlib.Path, required=True, help="folder of results")
    flags.add_argument("--work", type=pathlib.Path, help="folder of rows and checkpoints")
    flags.add_argument("--text", help="glob of the encoders' text")
    flags.add_argument("--seconds", type=float, default=600.0, help="time of the stage")
    flags.add_argument("--toy", action="store_true", help="small shapes, for a test on CPU")
    args = flags.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
